"""A plan on the screen: the parts of one rank's memory, every engine, what to take."""

from typing import TYPE_CHECKING

from halfbyte.plan.choose import Option
from halfbyte.plan.disk import Disk
from halfbyte.plan.memory import Memory
from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import ModelShape

if TYPE_CHECKING:
    from rich.table import Table

LEGEND = "ckpt: gradient checkpointing; sent: by a rank in a step"
BATCH_LEGEND = "; batch: the largest micro-batch that fits"


def headline(shape: ModelShape, s: Settings) -> str:
    """The model and the run, in a line."""
    return (
        f"{shape.name}: {count(shape.params)} parameters, {count(shape.packed_params)} of them in 4 bits, "
        f"{count(shape.trainable_params)} trained; {s.micro_batch_size} x {s.sequence_len} tokens, "
        f"{'bf16' if s.bf16 else 'fp32'}, {s.optimizer}"
    )


def count(number: float) -> str:
    """1234567 as 1.23e6, always with an exponent that is a multiple of three."""
    for exponent in (12, 9, 6, 3):
        if number >= 10**exponent:
            return f"{number / 10**exponent:.3g}e{exponent}"
    return f"{number:.0f}"


def gigabytes(size: float) -> str:
    """GB (1e9 bytes), to three digits and at least two decimals below 10."""
    return f"{size / 1e9:,.2f}" if size < 1e10 else f"{size / 1e9:,.1f}"


def parts_table(memory: Memory, title: str, *, host: bool) -> "Table":
    """The parts of one rank's memory, and the peak."""
    from rich.table import Table

    table = Table("", "GB", title=title)
    table.columns[1].justify = "right"
    rows = {
        "base": memory.base,
        "adapters": memory.adapters,
        "optimizer states": memory.optimizer,
        "gradients": memory.gradients,
        "activations, loss, one decoded weight": memory.activations,
        "gathered by the engine": memory.gathered,
        "the process" if host else "libraries": memory.libraries,
    }
    for name, size in rows.items():
        if size:
            table.add_row(name, gigabytes(size))
    table.add_section()
    table.add_row(f"peak ({memory.where})", gigabytes(memory.peak))
    return table


def options_table(options: list[Option], available: float | None, *, host: bool) -> "Table":
    """Every engine, without and with checkpointing; narrow enough for 80 columns."""
    from rich import box
    from rich.table import Table

    title = "GB on the CPU" if host else "GB on each GPU"
    title += f" of {gigabytes(available)} GB" if available is not None else ""
    legend = LEGEND + (BATCH_LEGEND if available is not None else "")
    names = ["engine", "ckpt", "at rest", "gathered", "activ.", "peak", "sent"]
    if available is not None:
        names += ["fits", "batch"]
    table = Table(title=title, caption=legend, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=True)
    for each in options:
        memory = each.memory
        sizes = (memory.at_rest, memory.gathered, memory.activations, memory.peak, each.network)
        row = [each.engine.name, "on" if each.settings.gradient_checkpointing else "off", *map(gigabytes, sizes)]
        if available is not None:
            row += ["yes" if each.fits else "no", str(each.largest_batch or "none")]
        table.add_row(*row)
    return table


def disk_line(disk: Disk) -> str:
    return (
        f"Disk, GB: base {gigabytes(disk.base)}, adapter {gigabytes(disk.adapter)}, each checkpoint "
        f"{gigabytes(disk.checkpoint)} (one more than save_total_limit while it is written), merged "
        f"{gigabytes(disk.base)} in NVFP4 or {gigabytes(disk.merged_bf16)} in bf16"
    )


def yaml_lines(option: Option) -> list[str]:
    """What to put into the training config."""
    s, engine = option.settings, option.engine
    lines = [
        f"micro_batch_size: {s.micro_batch_size}",
        f"gradient_accumulation_steps: {s.gradient_accumulation_steps}",
        f"gradient_checkpointing: {str(s.gradient_checkpointing).lower()}",
        f"sequence_len: {s.sequence_len}",
        f"optimizer: {s.optimizer}",
    ]
    if engine.kind == "fsdp2":
        lines.append("fsdp: true")
        lines += [f"dp_replicate_size: {engine.replicas}"] if engine.replicas > 1 else []
    if engine.kind.startswith("zero"):
        lines.append(f"deepspeed: {engine.kind}.json  # zero_optimization: {{stage: {engine.kind[-1]}}}")
    if engine.tensor > 1:
        lines.append(f"tensor_parallel_size: {engine.tensor}")
    return lines


def launch_line(ranks: int, host: int, run: str = "run.yaml") -> str:
    """How to start that many processes of a run: its config, and what is overridden."""
    if ranks == 1:
        return f"halfbyte train {run}"
    nodes = f"--nnodes {ranks // host} " if ranks > host else ""
    return f"torchrun {nodes}--nproc-per-node {min(ranks, host)} -m halfbyte train {run}"
