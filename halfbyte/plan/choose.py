"""Every engine with and without gradient checkpointing, which of them fit, and which one to take.

Engines are tried in the order of what they send: gradients alone (one process, DDP), the base inside a host (HSDP), the
base over all (FSDP2, ZeRO-3), a sum for every layer (TP). Taken is the first that can run at all: without checkpointing
if the micro-batch that was asked for fits so, else with it (a third more arithmetic), else with the largest smaller
power of two and as many more accumulation steps. ZeRO-1 and 2 are shown and never taken: they share the optimizer
states, which for an adapter are less than their buffers.
"""

from dataclasses import dataclass, replace

from halfbyte.plan.engine import Engine
from halfbyte.plan.memory import Memory, plan_memory
from halfbyte.plan.network import network_bytes
from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import ModelShape, cut

MARGIN = 1.05  # the planner's error on recorded runs is below 5% (docs/planning.md)
CUDA_CONTEXT = 600_000_000  # kernels and driver, outside of what torch counts
HOST = 8  # GPUs that share one, where the number is not known
LARGEST_BATCH = 1024
RANKS_TRIED = (2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Option:
    """One engine with one choice of checkpointing.

    fits           whether the peak, with a margin, is below the memory; None where that is not known.
    largest_batch  the largest micro-batch (a power of two) that fits; 0 for none, None where memory is not known.
    """

    engine: Engine
    settings: Settings
    memory: Memory
    network: float
    fits: bool | None
    largest_batch: int | None


def engines(shape: ModelShape, gpus: int) -> list[Engine]:
    """Every engine and product for a number of GPUs, in the order in which they are taken."""
    if gpus == 1:
        return [Engine()]
    found = [Engine("ddp", gpus)]
    if gpus > HOST and gpus % HOST == 0:
        found.append(Engine("fsdp2", gpus, replicas=gpus // HOST))
    found += [Engine("fsdp2", gpus), Engine("zero3", gpus)]
    for degree in (2, 4, 8):
        if gpus % degree == 0 and can_cut(shape, degree):
            data = gpus // degree
            found.append(Engine("ddp" if data > 1 else "one", data, degree))
    return [*found, Engine("zero1", gpus), Engine("zero2", gpus)]


def can_cut(shape: ModelShape, degree: int) -> bool:
    """Whether tensor parallelism of this degree divides the model."""
    try:
        cut(shape, degree)
    except ValueError:
        return False
    return True


def fits(memory: Memory, settings: Settings, available: float) -> bool:
    """Whether a plan fits, with the margin."""
    context = CUDA_CONTEXT if settings.device == "cuda" else 0
    return memory.peak * MARGIN + context <= available


def option(shape: ModelShape, settings: Settings, engine: Engine, available: float | None) -> Option:
    """One row of the table."""
    memory = plan_memory(shape, settings, engine)
    sent = network_bytes(shape, settings, engine)
    if available is None:
        return Option(engine, settings, memory, sent, None, None)
    batch = largest_batch(shape, settings, engine, available)
    return Option(engine, settings, memory, sent, fits(memory, settings, available), batch)


def largest_batch(shape: ModelShape, settings: Settings, engine: Engine, available: float) -> int:
    """The largest power of two of examples a forward pass that fits; 0 for none."""
    batch, found = 1, 0
    while batch <= LARGEST_BATCH:
        tried = replace(settings, micro_batch_size=batch)
        if not fits(plan_memory(shape, tried, engine), tried, available):
            break
        batch, found = 2 * batch, batch
    return found


def options(shape: ModelShape, settings: Settings, gpus: int, available: float | None) -> list[Option]:
    """The table: every engine, without and with checkpointing."""
    return [
        option(shape, replace(settings, gradient_checkpointing=checkpointing), engine, available)
        for engine in engines(shape, gpus)
        for checkpointing in (False, True)
    ]


def choose(found: list[Option]) -> Option | None:
    """The option to take, perhaps with a smaller micro-batch; None where nothing fits."""
    for engine in dict.fromkeys(each.engine for each in found if each.engine.kind not in ("zero1", "zero2")):
        own = [each for each in found if each.engine == engine]
        asked = next((each for each in own if each.fits), None)
        if asked is not None:
            return asked
        largest = max(own, key=lambda each: each.largest_batch or 0)
        if largest.largest_batch:
            return with_batch(largest, largest.largest_batch)
    return None


def with_batch(each: Option, size: int) -> Option:
    """The same examples a step in smaller micro-batches; one step may take a few more, never fewer."""
    s = each.settings
    steps = -(-s.gradient_accumulation_steps * s.micro_batch_size // size)
    return replace(each, settings=replace(s, micro_batch_size=size, gradient_accumulation_steps=steps))


def remedy(shape: ModelShape, settings: Settings, gpus: int, available: float) -> str:
    """What to change when nothing fits: the least it could need here, and the number of GPUs where it would fit."""
    least = replace(settings, micro_batch_size=1, gradient_checkpointing=True, optimizer="adamw4bit")
    here = min(plan_memory(shape, least, engine).peak for engine in engines(shape, gpus))
    text = (
        f"With micro_batch_size 1, gradient_checkpointing and adamw4bit the least is {here / 1e9:.1f} GB; "
        "lower sequence_len or lora_r"
    )
    if settings.device == "cpu":
        return f"{text}, or take a smaller model."
    for ranks in RANKS_TRIED:
        if ranks > gpus:
            engine = Engine("fsdp2", ranks)
            if fits(plan_memory(shape, least, engine), least, available):
                return f"{text}, or take {ranks} such GPUs with fsdp: true."
    return f"{text}, or take larger GPUs."
