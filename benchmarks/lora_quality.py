"""How good is the merged 4-bit file? Held-out loss of plain and merge-aware LoRA, merged in every way.

    halfbyte quantize DENSE BASE && python examples/docstrings.py DATA
    python benchmarks/lora_quality.py --base BASE --dense DENSE --data DATA --device cuda \
        --lr 2e-4 1e-3 --steps 100 400 --seeds 0 1 2 --out results.jsonl

DENSE is what the base was quantized from (a folder or a GGUF file). For each learning rate, length and seed (of the
adapter, the data's order and the dither) one plain adapter and one merge-aware adapter for each rounding are trained;
each is evaluated unmerged and merged. "Merged" is the forward with W', whose bytes are the file's. Rank 16 on all
linear layers, batches of 8, fp32, AdamW, cosine with 5% warm-up. One JSON line a run, and a table at the end.

--thresholds also trains with other dithers: low-discrepancy along rows or columns, and the hash drawn anew each step
for the first fifth of the run. Several runs' JSON lines make one table with --report.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte import load_model
from halfbyte.checkpoint.source import open_source
from halfbyte.lora import make_merge_aware, retention, set_merge_aware
from halfbyte.lora.merge_aware import merge_aware_layers
from halfbyte.lora.merge_aware_layer import MergeAwareLinear, components_of
from halfbyte.lora.retention import total
from halfbyte.numerics.dither import OFFSET_BITS, block_keys, offsets, row_keys
from halfbyte.nvfp4 import ActivationQuant, NVFP4Linear, NVFP4Parts, nvfp4_modules, quantize
from halfbyte.nvfp4.snap import snap
from halfbyte.train.encode import chat_encoder

BATCH, LONGEST, GOLDEN_RATIO = 8, 128, (math.sqrt(5) - 1) / 2
ONE = 1 << OFFSET_BITS
ROUNDINGS = {"dither": ("dither", "keep"), "nearest": ("nearest", "fresh")}


class Data:
    """Encoded questions and answers: `train` in a seed's order, `heldout` as it is."""

    def __init__(self, folder: Path, base: Path, device: str) -> None:
        from transformers import AutoTokenizer

        encode = chat_encoder(AutoTokenizer.from_pretrained(base))
        self.train, self.heldout = (
            [encode(m) for m in read(folder / f"{name}.jsonl")] for name in ("train", "heldout")
        )
        self.device = device

    def batches(self, seed: int, steps: int, width: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """(input_ids, labels), epoch after epoch, each in an order of its own."""
        generator, order = torch.Generator().manual_seed(seed), []
        for _ in range(steps):
            if len(order) < BATCH:
                order = torch.randperm(len(self.train), generator=generator).tolist()
            yield self.collate([self.train[order.pop()] for _ in range(BATCH)], width)

    def collate(self, rows: list[dict[str, list[int]]], width: int | None = None) -> tuple[Tensor, Tensor]:
        """Padded on the right, to the longest row or to a width."""
        width = width or min(LONGEST, max(len(row["input_ids"]) for row in rows))
        ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
        for i, row in enumerate(rows):
            ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"][:width])
            labels[i, : len(row["labels"])] = torch.tensor(row["labels"][:width])
        return ids.to(self.device), labels.to(self.device)


def read(path: Path) -> list[Any]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


@torch.no_grad()
def heldout_loss(model: nn.Module, data: Data) -> float:
    """Mean over the labelled tokens."""
    model.eval()
    loss, tokens = 0.0, 0
    for start in range(0, len(data.heldout), BATCH):
        ids, labels = data.collate(data.heldout[start : start + BATCH])
        counted = int((labels[:, 1:] != -100).sum())
        loss += model(input_ids=ids, labels=labels, use_cache=False).loss.item() * counted
        tokens += counted
    return loss / tokens


def train(
    model: nn.Module, data: Data, lr: float, steps: int, seed: int, before: Callable[[int], None] | None, graph: bool
) -> dict[str, Any]:
    """Train the adapter; seconds a step without the first tenth, peak GPU memory, the loss of each tenth of the run.

    before  told each step's number.
    graph   replay a CUDA graph: this model's kernels are too small for the host to keep up with.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    rate = torch.tensor(lr, device=data.device) if graph else lr
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, capturable=graph)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * s / steps))
    )
    model.train()
    losses: list[Tensor] = []
    if data.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    take = Captured(model, optimizer, data) if graph else partial(eager_step, model, optimizer)
    start = time.perf_counter()
    for step, (ids, labels) in enumerate(data.batches(seed, steps, LONGEST if graph else None)):
        if step == steps // 10:
            synchronize(data.device)
            start = time.perf_counter()
        if before is not None:
            before(step)
        losses.append(take(ids, labels))
        schedule.step()
    synchronize(data.device)
    found: dict[str, Any] = {"seconds a step": (time.perf_counter() - start) / (steps - steps // 10)}
    if data.device.startswith("cuda"):
        found["peak bytes"] = torch.cuda.max_memory_allocated()
    return found | {"curve": [tenth.mean().item() for tenth in torch.stack(losses).chunk(10)]}


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor) -> Tensor:
    """One step; its loss."""
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Captured:
    """One step as a CUDA graph; the adapter is untouched by the capture."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> None:
        self.ids, self.labels = data.collate(data.train[:BATCH], LONGEST)
        rate = optimizer.param_groups[0]["lr"]
        wanted = rate.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            rate.zero_()  # steps of size zero: they make the optimizer's states, which a captured step would zero again
            for _ in range(2):
                eager_step(model, optimizer, self.ids, self.labels)
            for state in optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
            rate.copy_(wanted)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = model(input_ids=self.ids, labels=self.labels, use_cache=False).loss
            self.loss.backward()
            optimizer.step()

    def __call__(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.ids.copy_(ids)
        self.labels.copy_(labels)
        self.graph.replay()
        return self.loss.detach().clone()


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class OtherThresholds(MergeAwareLinear):
    """A merge-aware layer with offsets from elsewhere; only here, to see whether they do better."""

    offset: Tensor

    def kept_components(self, lora_A: Tensor, lora_B: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        delta = ((lora_B.detach().double() * scaling) @ lora_A.detach().double()).float()
        _, scale, global_scale = components_of(self.frozen())
        return snap(self.frozen().parts(), delta, self.offset), scale, global_scale

    def draw(self, other: Callable[[NVFP4Parts, str, int], Tensor], seed: int) -> None:
        """Fill in the offsets of a seed; in place, so that a captured step sees them."""
        drawn = other(self.frozen().parts(), self.recipe.name, seed).to(torch.int32)
        self.offset = self.offset.copy_(drawn) if hasattr(self, "offset") else drawn


def hashed(parts: NVFP4Parts, name: str, seed: int) -> Tensor:
    """The package's own offsets, [N, K/16]."""
    (n, blocks), device = parts.scale.shape, parts.qdata.device
    return offsets(row_keys(seed, name, 0, n, device), block_keys(seed, name, 0, blocks, device))


def along_rows(parts: NVFP4Parts, name: str, seed: int) -> Tensor:
    """Each block column's offsets step through [0, 1) by the golden ratio from a hashed start."""
    first = hashed(parts, name, seed)[:1]
    return (first + golden_steps(parts.shape[0], first.device).unsqueeze(-1)) % ONE


def along_columns(parts: NVFP4Parts, name: str, seed: int) -> Tensor:
    """Each row's offsets step through [0, 1) by the golden ratio from a hashed start."""
    first = hashed(parts, name, seed)[:, :1]
    return (first + golden_steps(parts.scale.shape[1], first.device)) % ONE


def golden_steps(count: int, device: torch.device) -> Tensor:
    """int32 [count], multiples of the golden ratio modulo 1, in offsets' units."""
    return ((torch.arange(count, device=device).double() * GOLDEN_RATIO).frac() * ONE).int()


OTHER_THRESHOLDS = {"along rows": along_rows, "along columns": along_columns, "redrawn": hashed}


class Run:
    """One setting: learning rate, steps, seed."""

    def __init__(self, args: argparse.Namespace, data: Data, lr: float, steps: int, seed: int) -> None:
        self.args, self.data, self.lr, self.steps, self.seed = args, data, lr, steps, seed

    def adapter(self) -> Any:
        """The base with a fresh adapter."""
        from peft import LoraConfig, get_peft_model

        model = load_model(self.args.base, dtype=torch.float32, device=self.args.device)
        if self.args.dynamic:
            for layer in nvfp4_modules(model).values():
                layer.activation = ActivationQuant()
        torch.manual_seed(self.seed)
        return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))

    def train(
        self, model: nn.Module, before: Callable[[int], None] | None = None, graph: bool = False
    ) -> dict[str, Any]:
        return train(model, self.data, self.lr, self.steps, self.seed, before, graph)

    def merged_losses(self, model: Any) -> dict[str, Any]:
        """Held-out losses of an adapter, unmerged and merged in each way, and what of its change was kept."""
        found: dict[str, Any] = {}
        for name, (rounding, scales) in ROUNDINGS.items():
            make_merge_aware(model, rounding=rounding, scales=scales, seed=self.seed, cache=True)
            found[f"merged, {name}"] = heldout_loss(model, self.data)
            kept = total(self.retentions(model))
            found[f"kept, {name}"], found[f"noise, {name}"] = kept.kept, kept.noise
        set_merge_aware(model, False)
        found["unmerged"] = heldout_loss(model, self.data)
        return found

    def retentions(self, model: Any) -> Iterator[Any]:
        for layer in merge_aware_layers(model).values():
            yield retention(layer.frozen().parts(), layer.merged_weight(), *layer.factors("default"))

    def plain(self) -> dict[str, Any]:
        model = self.adapter()
        trained = self.train(model, graph=self.args.graph)
        found = self.merged_losses(model) | trained
        if self.args.dense:
            found["merged, onto the dense original"] = self.onto_dense(model)
        return found

    def onto_dense(self, model: Any) -> float:
        """Original + change, quantized on the base's tensor scales; no adapter."""
        source = open_source(self.args.dense)
        for name, layer in merge_aware_layers(model).items():
            lora_A, lora_B, scaling = layer.factors("default")
            weight = source.read(f"{name}.weight").to(lora_A.device, torch.float32)
            merged = weight + scaling * (lora_B.detach().double() @ lora_A.detach().double()).float()
            base: NVFP4Linear = layer.frozen()
            parts = quantize(merged, global_scale=base.parts().global_scale, name=name)
            with torch.no_grad():
                base.qdata.copy_(parts.qdata)
                base.scale.copy_(parts.scale.view(torch.uint8))
        source.close()
        with model.disable_adapter():
            return heldout_loss(model, self.data)

    def merge_aware(self, name: str) -> dict[str, Any]:
        rounding, scales = ROUNDINGS[name]
        graph = self.args.graph
        cache = not (self.args.recompute or graph)
        model = make_merge_aware(self.adapter(), rounding=rounding, scales=scales, seed=self.seed, cache=cache)
        if graph:  # else fresh scales look whether anything changed, and wait for the GPU
            for layer in merge_aware_layers(model).values():
                layer.recipe = layer.recipe._replace(changed=True)
        found = self.train(model, graph=graph)
        found["merged"] = heldout_loss(model, self.data)
        set_merge_aware(model, False)
        return found | {"unmerged": heldout_loss(model, self.data)}

    def other_thresholds(self, name: str) -> dict[str, Any]:
        model = make_merge_aware(self.adapter(), seed=self.seed, cache=True)
        layers = list(merge_aware_layers(model).values())
        for layer in layers:
            layer.__class__ = OtherThresholds
            layer.draw(OTHER_THRESHOLDS[name], self.seed)

        def redraw(step: int) -> None:
            if name == "redrawn" and step <= self.steps // 5:
                for layer in layers:
                    layer.draw(hashed, self.seed + (1000 + step if step < self.steps // 5 else 0))

        found = self.train(model, redraw)
        return found | {"merged": heldout_loss(model, self.data)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--dense", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lr", type=float, nargs="+", default=[2e-4, 1e-3])
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--adapters", nargs="*", choices=["plain", *ROUNDINGS], default=["plain", *ROUNDINGS])
    parser.add_argument("--thresholds", nargs="*", choices=list(OTHER_THRESHOLDS), default=[])
    parser.add_argument("--dynamic", action="store_true", help="quantize the layers' inputs too")
    parser.add_argument("--recompute", action="store_true", help="compute W' in each forward and backward")
    parser.add_argument(
        "--graph", action="store_true", help="train with a CUDA graph, but not --thresholds; recomputes W'"
    )
    parser.add_argument("--out", type=Path, default=Path("lora_quality.jsonl"))
    parser.add_argument("--report", type=Path, nargs="*", help="train nothing: the table of these JSON lines")
    args = parser.parse_args()
    if args.report:
        return table([json.loads(line) for path in args.report for line in path.read_text().splitlines()])
    if args.base is None or args.data is None:
        parser.error("--base and --data are needed")
    data = Data(args.data, args.base, args.device)
    base_loss = heldout_loss(load_model(args.base, dtype=torch.float32, device=args.device), data)
    print(f"base loss {base_loss:.4f}, torch {torch.__version__}, {args.device}", flush=True)
    rows = []
    for lr in args.lr:
        for steps in args.steps:
            for seed in args.seeds:
                run = Run(args, data, lr, steps, seed)
                kinds = {"plain": run.plain} if "plain" in args.adapters else {}
                merge_aware = [name for name in ROUNDINGS if name in args.adapters]
                kinds |= {f"merge-aware, {name}": partial(run.merge_aware, name) for name in merge_aware}
                kinds |= {f"merge-aware, {name}": partial(run.other_thresholds, name) for name in args.thresholds}
                for kind, measure in kinds.items():
                    rows.append({"lr": lr, "steps": steps, "seed": seed, "kind": kind, "base": base_loss} | measure())
                    with args.out.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
                    print(json.dumps(rows[-1]), flush=True)
    table(rows)


def table(rows: list[dict[str, Any]]) -> None:
    """For each setting: losses by seed, and the share of plain LoRA's unmerged gain, in pairs of one seed."""
    print("\n| lr | steps | adapter | evaluated | loss, mean (by seed) | gain |\n|---|---|---|---|---|---|")
    for lr, steps in dict.fromkeys((row["lr"], row["steps"]) for row in rows):
        here = [row for row in rows if (row["lr"], row["steps"]) == (lr, steps)]
        best = {row["seed"]: row["unmerged"] for row in here if row["kind"] == "plain"}
        for kind in dict.fromkeys(row["kind"] for row in here):
            of_kind = sorted((row for row in here if row["kind"] == kind), key=lambda row: row["seed"])
            for what in [key for key in of_kind[0] if key.startswith(("merged", "unmerged"))]:
                losses = ", ".join(f"{row[what]:.3f}" for row in of_kind)
                shares = [
                    (row["base"] - row[what]) / (row["base"] - best[row["seed"]])
                    for row in of_kind
                    if row["seed"] in best
                ]
                share = f"{mean(shares):.1%}" if shares else ""
                losses = f"{mean([row[what] for row in of_kind]):.3f} ({losses})"
                print(f"| {lr:g} | {steps} | {kind} | {what} | {losses} | {share} |")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
