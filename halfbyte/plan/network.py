"""Bytes that a rank sends in one optimizer step, by the counts of ring algorithms.

Over n ranks an all-reduce of S bytes sends 2 (n - 1) / n S, an all-gather or reduce-scatter (n - 1) / n S.

DDP, ZeRO-1, 2   the gradients once a step (ZeRO: reduced, and the stepped parameters gathered; the same count)
FSDP2, ZeRO-3    base and adapters gathered in forward and in backward of every micro-batch, gradients reduced
HSDP             the same inside a group, and the gradients' shards all-reduced between the groups
TP               a sum over the layer's ranks for each row-wise result in forward (once more where checkpointing repeats
                 it), for the input's gradient of each column-wise layer in backward, and for whole factors' gradients
"""

from halfbyte.plan.engine import SHARDS_BASE, Engine
from halfbyte.plan.memory import trained_bytes
from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import ModelShape, cut


def network_bytes(shape: ModelShape, s: Settings, engine: Engine) -> float:
    """Bytes one rank sends in an optimizer step."""
    own = cut(shape, engine.tensor)
    trained = trained_bytes(own, s)
    sent = s.gradient_accumulation_steps * tensor_bytes(own, s, engine.tensor)
    if engine.kind in SHARDS_BASE:
        gathers = 2 if engine.reshard else 1
        gathered = gathers * one_way(own.base_bytes(s.width) + trained, engine.shards)
        sent += s.gradient_accumulation_steps * (gathered + one_way(trained, engine.shards))
        return sent + all_reduce(trained / engine.shards, engine.replicas)
    return sent + all_reduce(trained, engine.data)


def one_way(size: float, ranks: int) -> float:
    return (ranks - 1) / ranks * size


def all_reduce(size: float, ranks: int) -> float:
    return 2 * one_way(size, ranks)


def tensor_bytes(shape: ModelShape, s: Settings, degree: int) -> float:
    """Of one micro-batch under tensor parallelism (parallel/tp_lora.py): results and input gradients, and the gradient
    of the factor that every rank holds whole."""
    if degree == 1:
        return 0
    forward = backward = factors = 0.0
    for block, count in shape.blocks:
        for x in block.linears:
            forward += count * x.n if x.style == "rowwise" else 0
            backward += count * x.k if x.style == "colwise" else 0
            whole = {"rowwise": x.n, "colwise": x.k}.get(x.style, 0)
            factors += count * 4 * x.r * whole if x.adapted else 0
    passes = 2 if s.gradient_checkpointing else 1
    return all_reduce(s.width * s.tokens * (passes * forward + backward) + factors, degree)
