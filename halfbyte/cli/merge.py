"""`halfbyte merge BASE ADAPTER OUT`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from halfbyte.checkpoint.merge_report import Check, MergeReport

BATCH = 8  # examples per forward pass of the evaluation
WORST = 5  # layers shown without --verbose


def merge(
    base: Annotated[str, typer.Argument(help="An NVFP4 model folder, or a Hub id.")],
    adapter: Annotated[str, typer.Argument(help="A PEFT LoRA adapter's folder.")],
    out: Annotated[str, typer.Argument(help="The folder to write; it appears when it is complete.")],
    to: Annotated[str, typer.Option(help="nvfp4, bf16, fp16 or fp32.")] = "nvfp4",
    format: Annotated[
        str | None, typer.Option(help="torchao, compressed-tensors or modelopt. Default: the base's own.")
    ] = None,
    rounding: Annotated[
        str | None, typer.Option(help="dither or nearest. Default: as the adapter was trained for, else dither.")
    ] = None,
    scales: Annotated[
        str | None, typer.Option(help="keep the base's block scales, or fresh ones. Default: as trained, else keep.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the dither. Default: as trained, else 0.")] = None,
    onto: Annotated[
        str | None, typer.Option(help="The dense original: add the adapter to its weights and quantize those.")
    ] = None,
    min_retained: Annotated[
        float, typer.Option(help="Fail when less than this share of the adapter's change (or gain) survives.")
    ] = 0.85,
    eval: Annotated[
        str | None, typer.Option(help="Held-out data (as in a config's datasets): loss before and after.")
    ] = None,
    eval_sequence_len: Annotated[int, typer.Option(min=1, help="Cut examples of --eval to this many tokens.")] = 1024,
    any_base: Annotated[bool, typer.Option("--any-base", help="Merge onto another base than the adapter's.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Largest file, such as 5GB or 300MB.")] = "5GB",
    verbose: Annotated[bool, typer.Option("--verbose", help="Show every layer, not only the worst.")] = False,
) -> None:
    """Write base and adapter as one model, in bf16 or in NVFP4."""
    from halfbyte.checkpoint.merge import merge_checkpoint
    from halfbyte.checkpoint.merge_report import AdapterLost
    from halfbyte.cli.quantize import progress_bar

    check = loss_check(base, adapter, eval, eval_sequence_len, min_retained) if eval is not None else None
    try:
        with progress_bar("Merging") as progress:
            report = merge_checkpoint(
                base,
                adapter,
                out,
                to=to,
                format=format,
                rounding=rounding,
                scales=scales,
                seed=seed,
                onto=onto,
                min_retained=min_retained,
                any_base=any_base,
                max_shard_size=max_shard_size,
                check=check,
                progress=progress,
            )
    except AdapterLost as error:
        print_report(error.report, f"merge into {out}, refused", verbose=verbose)
        raise
    print_report(report, f"merged into {out}", verbose=verbose)


def print_report(report: "MergeReport", title: str, *, verbose: bool) -> None:
    """The layers that kept least, or every layer; the total; warnings on stderr. halfbyte.json records all layers."""
    from rich.console import Console
    from rich.table import Table

    settings = report.settings
    table = Table("layer", "as", "change / weight", "kept", "noise", title=title)
    layers = report.layers if verbose else report.worst(WORST)
    for layer in layers:
        kept = layer.retention
        numbers = f"{kept.relative_delta:.2%}", f"{kept.kept:.1%}", f"{kept.noise:.2f}"
        table.add_row(layer.name, layer.kind, *numbers)
    total = report.retained
    table.add_section()
    table.add_row(
        "all, by size of change", "", f"{total.relative_delta:.2%}", f"{total.kept:.1%}", f"{total.noise:.2f}"
    )
    console = Console()
    console.print(table)
    if len(layers) < len(report.layers):
        console.print(
            f"the {len(layers)} of {len(report.layers)} layers that kept least; --verbose shows every one",
            highlight=False,
        )
    for name in report.replaced:
        console.print(f"replaced whole: {name}", highlight=False)
    if settings.to == "nvfp4":
        how = f"rounding {settings.rounding}, block scales {settings.scales}, seed {settings.seed}"
        console.print(how, highlight=False)
    for warning in report.warnings:
        Console(stderr=True).print(f"warning: {warning}", highlight=False)


def loss_check(base: str, adapter: str, data: str, sequence_len: int, min_retained: float) -> "Check":
    """A check for `merge_checkpoint`: held-out loss of base, base with adapter, and merged model.

    The data are read now, so that a wrong path is met before the merge. The check raises ValueError when the merged
    model keeps less than `min_retained` of what the adapter gained.
    """
    from rich.console import Console

    from halfbyte.checkpoint.hub import local_folder
    from halfbyte.cli.quiet import quiet_libraries
    from halfbyte.train.preflight import load_tokenizer

    quiet_libraries()
    examples = encoded_examples(data, load_tokenizer(local_folder(base)), sequence_len)

    def check(folder: Path, report: "MergeReport") -> None:
        before, with_adapter = losses_with_and_without(base, adapter, examples)
        after = merged_loss(folder, examples)
        print(f"held-out loss: base {before:.4f}, base with adapter {with_adapter:.4f}, merged {after:.4f}")
        gain = before - with_adapter
        if gain <= 0:
            Console(stderr=True).print(
                f"warning: on {data} the adapter does not better the base, so what the merge keeps of its gain is not "
                "checked. Is this the data, and the base, that it was trained for?",
                highlight=False,
            )
        elif not before - after >= min_retained * gain:  # also when a loss is NaN
            raise ValueError(
                f"The merged model keeps {(before - after) / gain:.1%} of the adapter's gain on {data}, less "
                f"than the {min_retained:.0%} asked for. Nothing was written. Use --rounding dither, --onto the dense "
                "original, --to bf16, or accept it with a lower --min-retained."
            )

    return check


def encoded_examples(path: str, tokenizer: Any, sequence_len: int) -> list[dict[str, list[int]]]:
    """input_ids and labels of each example. ValueError or FileNotFoundError as for training data."""
    from halfbyte.train.config import DatasetConfig
    from halfbyte.train.data import encode_source, read_source
    from halfbyte.train.encode import IGNORED

    source = DatasetConfig(path=path)
    rows = encode_source(source, read_source(source), tokenizer)
    examples = [{key: row[key][:sequence_len] for key in ("input_ids", "labels")} for row in rows]
    examples = [example for example in examples if any(label != IGNORED for label in example["labels"][1:])]
    if not examples:
        raise ValueError(
            f"{path}: no example has a token to predict within {sequence_len} tokens. Raise --eval-sequence-len, or "
            "check that the answers are not empty."
        )
    return sorted(examples, key=lambda example: len(example["input_ids"]))


def losses_with_and_without(base: str, adapter: str, examples: list[dict[str, list[int]]]) -> tuple[float, float]:
    """Held-out loss of the base, and with the adapter, as it was trained: a merge-aware one with its merged weights."""
    from halfbyte.checkpoint.load import load_model
    from halfbyte.lora import load_adapter

    model = load_adapter(load_model(base, **placement()), adapter, any_base=True)  # the merge checks the base
    model.eval()
    with model.disable_adapter():
        before = held_out_loss(model, examples)
    return before, held_out_loss(model, examples)


def merged_loss(folder: Path, examples: list[dict[str, list[int]]]) -> float:
    from halfbyte.checkpoint.detect import detect, read_config
    from halfbyte.checkpoint.load import load_dense_model, load_model

    load = load_model if detect(folder, read_config(folder)) is not None else load_dense_model
    return held_out_loss(load(folder, **placement()), examples)


def placement() -> dict[str, Any]:
    """bf16 on a GPU, fp32 on a CPU, where bf16 is slow."""
    import torch

    gpu = torch.cuda.is_available()
    return {"device": "cuda" if gpu else "cpu", "dtype": torch.bfloat16 if gpu else torch.float32}


def held_out_loss(model: Any, examples: list[dict[str, list[int]]]) -> float:
    """Cross-entropy per predicted token, in nats."""
    import torch

    from halfbyte.train.encode import IGNORED

    total, count = 0.0, 0
    for start in range(0, len(examples), BATCH):
        batch = examples[start : start + BATCH]
        length = max(len(example["input_ids"]) for example in batch)
        ids, labels, mask = (torch.full((len(batch), length), fill) for fill in (0, IGNORED, 0))
        for row, example in enumerate(batch):
            size = len(example["input_ids"])
            ids[row, :size] = torch.tensor(example["input_ids"])
            labels[row, :size] = torch.tensor(example["labels"])
            mask[row, :size] = 1
        ids, labels, mask = (tensor.to(model.device) for tensor in (ids, labels, mask))
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        total, count = total + float(loss), count + int((labels[:, 1:] != IGNORED).sum())
    return total / count
