"""Does a low-bit AdamW train as well as fp32 AdamW? A language model from scratch, same start, same data order.

    python benchmarks/optim_quality.py --out benchmarks/results              # one GPU: about 4 minutes
    python benchmarks/optim_quality.py --preset tiny --device cpu --out /tmp  # a laptop: a smoke run

Every optimizer trains the model of optim_quality_lm.py from the same weights on the same batches, once per seed.
Held-out loss is compared in pairs (same seed), so what the seeds share cancels; the standard error is that of the mean
of the paired differences. `adamw fp32, rerun` is fp32 AdamW again from weights moved by one part in 1e6: how much of a
difference is mere chaos. The largest move of any parameter in each step is recorded in units of that step's lr.

torchao's optimizers run through torchao's own single_param_adam and state classes, but not compiled (its torch.compile
costs minutes here) and with lr and step on the device, so that a CUDA graph can hold them; --check-torchao steps its
public optimizers beside this and compares bit for bit.
"""

from __future__ import annotations

import argparse
import math
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from optim_quality_lm import ModelConfig, Text, TinyLM, load_text
from optim_quality_report import Run, plot, report
from torch import Tensor

Step = Callable[[float], None]  # lr -> one optimizer step on the gradients at hand


@dataclass(frozen=True)
class Settings:
    num_steps: int = 1000
    batch_size: int = 32
    lr: float = 1e-3
    warmup: int = 50
    seeds: tuple[int, ...] = (0, 1, 2)
    eval_every: int = 100
    eval_batches: int = 80
    vocab_size: int = 4096
    text_bytes: int = 40_000_000
    model: ModelConfig = ModelConfig(4096)


PRESETS = {
    "full": Settings(),
    "small": Settings(
        num_steps=400,
        batch_size=16,
        warmup=30,
        seeds=(0, 1),
        eval_every=50,
        eval_batches=40,
        vocab_size=2048,
        text_bytes=8_000_000,
        model=ModelConfig(2048, dim=128, num_layers=3, num_heads=4, context=128),
    ),
    "tiny": Settings(
        num_steps=60,
        batch_size=8,
        warmup=10,
        seeds=(0, 1),
        eval_every=20,
        eval_batches=20,
        vocab_size=1024,
        text_bytes=2_000_000,
        model=ModelConfig(1024, dim=64, num_layers=2, num_heads=2, context=64),
    ),
}


# --- optimizers: each takes parameters whose gradients exist, and returns its Step ----------------


def torch_adamw(params: list[Tensor]) -> Step:
    optimizer = torch.optim.AdamW(params, fused=True)
    return _with_lr(optimizer)


def ours(name: str) -> Callable[[list[Tensor]], Step]:
    def build(params: list[Tensor]) -> Step:
        import halfbyte.optim

        return _with_lr(getattr(halfbyte.optim, name)(params))

    return build


def _with_lr(optimizer: torch.optim.Optimizer) -> Step:
    def step(lr: float) -> None:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()

    return step


def torchaos(name: str) -> Callable[[list[Tensor]], Step]:
    def build(params: list[Tensor]) -> Step:
        import torchao.optim
        from torchao.optim.adam import single_param_adam

        device = params[0].device
        optimizer = getattr(torchao.optim, name)(params)
        group = optimizer.param_groups[0]
        (beta1, beta2), decay, eps = group["betas"], group["weight_decay"], group["eps"]
        lr_tensor, step_tensor = torch.zeros((), device=device), torch.zeros((), device=device)
        states = [(optimizer._new_buffer(p, True), optimizer._new_buffer(p, False)) for p in params]

        @torch.no_grad()
        def body() -> None:
            step_tensor.add_(1)
            for p, (m, v) in zip(params, states, strict=True):
                assert p.grad is not None
                args = (p.detach(), p.grad, step_tensor, m, v, None, lr_tensor, beta1, beta2, decay, eps, True, False)
                single_param_adam(*args)

        replay = None

        def step(lr: float) -> None:
            nonlocal replay
            lr_tensor.fill_(lr)
            if replay is None and device.type == "cuda" and step_tensor.item() >= 2:
                replay = captured(body)
            (replay or body)()

        return step

    return build


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Step]] = {
    "adamw fp32": torch_adamw,
    "adamw fp32, rerun": torch_adamw,
    "halfbyte AdamW8bit": ours("AdamW8bit"),
    "halfbyte AdamW4bit": ours("AdamW4bit"),
    "halfbyte AdamWFp8": ours("AdamWFp8"),
    "torchao AdamW8bit": torchaos("AdamW8bit"),
    "torchao AdamW4bit": torchaos("AdamW4bit"),
    "torchao AdamWFp8": torchaos("AdamWFp8"),
}


# --- one run --------------------------------------------------------------------------------------


def captured(body: Callable[[], None]) -> Callable[[], None]:
    """`body` as a CUDA graph, not run by this call. It must have run before, so that nothing is still lazy."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def lr_at(settings: Settings, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    share = (step - settings.warmup) / max(1, settings.num_steps - settings.warmup)
    return settings.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


class Windows:
    """Random windows of the training tokens, [batch, context + 1], the same for every run of a seed."""

    def __init__(self, tokens: Tensor, num_batches: int, batch_size: int, context: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(1000 + seed)
        high = tokens.numel() - context - 1
        self.starts = torch.randint(high, (num_batches, batch_size), generator=generator).to(tokens.device)
        self.tokens, self.offsets = tokens, torch.arange(context + 1, device=tokens.device)

    def fill(self, window_BT: Tensor, index: int) -> None:
        window_BT.copy_(self.tokens[self.starts[index, :, None] + self.offsets])


class Trainee:
    """A model with its forward and backward, as one CUDA graph where there is CUDA; gradients stay at their address."""

    def __init__(self, settings: Settings, seed: int, nudge: float, device: torch.device) -> None:
        torch.manual_seed(seed)
        self.model = TinyLM(settings.model).to(device)
        self.params = list(self.model.parameters())
        with torch.no_grad():
            for p in self.params:
                p.mul_(1 + nudge)
        self.window = torch.zeros(settings.batch_size, settings.model.context + 1, dtype=torch.long, device=device)
        self.loss = torch.zeros((), device=device)
        self.device = device
        self._forward_backward: Callable[[], None] | None = None

    def loss_of(self, window_BT: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            return self.model(window_BT)

    def _body(self) -> None:
        for p in self.params:
            p.grad = None
        loss = self.loss_of(self.window)
        loss.backward()
        self.loss.copy_(loss.detach())

    def forward_backward(self) -> None:
        if self.device.type != "cuda":
            return self._body()
        if self._forward_backward is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._body()
            torch.cuda.current_stream().wait_stream(stream)
            try:
                self._forward_backward = captured(self._body)
            except RuntimeError as error:  # some torch's backward of an embedding synchronizes
                print(f"no CUDA graph, runs are slower: {error}", flush=True)
                torch.cuda.synchronize()
                self._forward_backward = self._body
        return self._forward_backward()


class Held:
    """Mean loss over fixed held-out windows, one after another in the file."""

    def __init__(self, settings: Settings, tokens: Tensor) -> None:
        span = settings.model.context
        num = min(settings.eval_batches * settings.batch_size, (tokens.numel() - 1) // span)
        num -= num % settings.batch_size
        starts = torch.arange(num, device=tokens.device)[:, None] * span
        self.windows = tokens[starts + torch.arange(span + 1, device=tokens.device)].split(settings.batch_size)

    @torch.no_grad()
    def loss(self, trainee: Trainee) -> float:
        total = torch.zeros((), device=trainee.device, dtype=torch.float64)
        for window_BT in self.windows:
            total += trainee.loss_of(window_BT).double()
        return total.item() / len(self.windows)


@torch.no_grad()
def largest_move(params: list[Tensor], before: list[Tensor]) -> Tensor:
    torch._foreach_sub_(before, params)
    return torch.stack(torch._foreach_norm(before, torch.inf)).amax()


def train(name: str, seed: int, settings: Settings, train_tokens: Tensor, held: Held) -> Run:
    device = train_tokens.device
    trainee = Trainee(settings, seed, 1e-6 if name.endswith("rerun") else 0.0, device)
    windows = Windows(train_tokens, settings.num_steps, settings.batch_size, settings.model.context, seed)
    before = [torch.empty_like(p) for p in trainee.params]
    moves = torch.zeros(settings.num_steps, device=device)
    losses = torch.zeros(settings.num_steps, device=device)
    held_out, step_fn, start = {}, None, time.perf_counter()
    for step in range(settings.num_steps):
        windows.fill(trainee.window, step)
        trainee.forward_backward()
        losses[step] = trainee.loss
        with torch.no_grad():
            torch._foreach_copy_(before, trainee.params)
        step_fn = step_fn or OPTIMIZERS[name](trainee.params)
        lr = lr_at(settings, step)
        step_fn(lr)
        moves[step] = largest_move(trainee.params, before) / lr
        if (step + 1) % settings.eval_every == 0 or step + 1 == settings.num_steps:
            held_out[step + 1] = held.loss(trainee)
    print(
        f"{name:24} seed {seed}: held-out {held_out[settings.num_steps]:.4f}, "
        f"largest move {moves.max().item():.2f} lr, {time.perf_counter() - start:.1f} s",
        flush=True,
    )
    return Run(name, seed, held_out, losses.tolist(), moves.tolist())


# --- torchao, checked -----------------------------------------------------------------------------


def check_torchao(device: torch.device) -> str:
    """torchao's public optimizers, eager, against how they are driven here: parameters after 5 steps, bit for bit."""
    import torchao.optim

    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        torch.manual_seed(0)
        mine = [torch.randn(64, 256, device=device), torch.randn(100, device=device)]
        theirs = [p.clone() for p in mine]
        step, optimizer = torchaos(name)(mine), getattr(torchao.optim, name)(theirs)
        for i in range(5):
            for p, q in zip(mine, theirs, strict=True):
                p.grad = torch.randn_like(p) if p.grad is None else p.grad.normal_()
                q.grad = p.grad.clone()
            step(1e-3 / (i + 1))
            optimizer.param_groups[0]["lr"].fill_(1e-3 / (i + 1))
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
        for p, q in zip(mine, theirs, strict=True):
            worst = (p - q).abs().max().item()
            if worst > 0:
                return f"{name} differs by {worst:.1e} from torchao's own step"
    return "bit-equal to torchao's own steps, eager"


# --- the whole ------------------------------------------------------------------------------------


def git_commit() -> str:
    """Of the checkout; "unknown" where there is none (say so with --commit)."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def environment(device: torch.device, text: Text, settings: Settings, commit: str) -> list[str]:
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    num_params = sum(p.numel() for p in TinyLM(settings.model).parameters())
    return [
        f"{machine}; Python {platform.python_version()}, torch {torch.__version__}; commit {commit}.",
        f"Model: {num_params / 1e6:.1f}e6 parameters, fp32 (bf16 autocast on a GPU); {settings}.",
        f"Text: {text.size_bytes / 1e6:.1f} MB of Python sources, SHA-256 {text.sha256}...; "
        f"{text.train.numel()} tokens to train on, {text.held_out.numel()} held out.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", help="names of optimizers; default all")
    parser.add_argument("--seeds", type=int, nargs="*")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--check-torchao", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--stem", default=f"{time.strftime('%Y-%m-%d')}-optim-quality", help="name of the result files")
    parser.add_argument("--commit", default=git_commit(), help="named in the report")
    args = parser.parse_args()

    settings, device = PRESETS[args.preset], torch.device(args.device)
    settings = replace(settings, seeds=tuple(args.seeds or settings.seeds), num_steps=args.steps or settings.num_steps)
    text = load_text(settings.vocab_size, settings.text_bytes)
    notes = environment(device, text, settings, args.commit)
    print("\n".join(notes), flush=True)
    if args.check_torchao:
        notes.append(f"torchao: {check_torchao(device)}.")
        print(notes[-1], flush=True)
    train_tokens, held = text.train.to(device), Held(settings, text.held_out.to(device))
    names = args.only or list(OPTIMIZERS)
    runs = [train(name, seed, settings, train_tokens, held) for seed in settings.seeds for name in names]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.stem}.md").write_text(report(runs, notes, args.stem))
    plot(runs, args.out / f"{args.stem}.png")
    print((args.out / f"{args.stem}.md").read_text())


if __name__ == "__main__":
    main()
