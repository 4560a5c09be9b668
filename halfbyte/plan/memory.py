"""Memory of one rank: what lies still, and the most that a step adds to it."""

from dataclasses import dataclass, replace

from halfbyte.plan.block import block_stages
from halfbyte.plan.engine import SHARDS_GRADIENTS, Engine
from halfbyte.plan.linear import is_fused
from halfbyte.plan.loss import loss_stages
from halfbyte.plan.optimizer import Rule, rule_of
from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import Block, ModelShape, cut
from halfbyte.plan.stage import Stage, checkpointed, peak, total_grads, total_kept

CUDA_LIBRARIES = 64 * 2**20  # cuBLAS keeps 32 MiB a thread that multiplies (Hopper): forward's and backward's
CPU_PROCESS = 785_000_000  # resident after the imports of `halfbyte train`, Linux, torch 2.13: measured


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    base, adapters, optimizer   at rest.
    gradients    of what is trained, when all are there.
    activations  the most that a step adds: activations and their gradients, temporaries, one decoded weight, loss.
    gathered     parts of the base that the engine holds whole for a while, and its buffers.
    libraries    what is there before any tensor: on a GPU what torch counts of cuBLAS, on a CPU the process itself.
    peak         everything at the worst moment (not the sum of the above: they are not all there at once).
    where        that moment.
    """

    base: float
    adapters: float
    optimizer: float
    gradients: float
    activations: float
    gathered: float
    libraries: float
    peak: float
    where: str = ""

    @property
    def at_rest(self) -> float:
        return self.base + self.adapters + self.optimizer


def plan_memory(shape: ModelShape, s: Settings, engine: Engine) -> Memory:
    """Memory of one rank of an engine. ValueError where the model cannot be cut so."""
    shape = cut(shape, engine.tensor)
    rule, values, trained = rule_of(s.optimizer), shape.trainable_params, trained_bytes(shape, s)
    base = engine.base_bytes(shape, s.width) + kept_codes(shape, s)
    gathered = engine.gathered_bytes(shape, s.width, trained, checkpointing=s.gradient_checkpointing)
    adapters = engine.adapter_bytes(trained)
    optimizer = engine.state_bytes(rule.state * values)
    gradients = engine.gradient_bytes(trained)
    libraries = CUDA_LIBRARIES if s.device == "cuda" else CPU_PROCESS
    rest = base + adapters + optimizer + libraries

    stages = step_stages(shape, s)
    if engine.kind in SHARDS_GRADIENTS:  # a gradient is given away as soon as it is there
        stages = [replace(stage, grads=stage.grads / engine.shards) for stage in stages]
    tape = peak(stages)
    accumulated = gradients if s.gradient_accumulation_steps > 1 else 0
    during = rest + gathered + accumulated + tape.size_bytes
    stepping = rest + gradients + step_bytes(shape, s, rule, values / engine.state_shards)
    return Memory(
        base=base,
        adapters=adapters,
        optimizer=optimizer,
        gradients=gradients,
        activations=peak([replace(stage, grads=0) for stage in stages]).size_bytes,
        gathered=gathered,
        libraries=libraries,
        peak=max(during, stepping),
        where=f"{tape.stage}, {tape.phase}" if during >= stepping else "optimizer step",
    )


def trained_bytes(shape: ModelShape, s: Settings) -> float:
    """Parameters that are trained, and as much for their gradients: fp32 factors, full modules in the base's dtype."""
    return 4 * shape.adapter_params + s.width * shape.saved_params


def kept_codes(shape: ModelShape, s: Settings) -> float:
    """The packed W' that merge-aware layers keep on a CPU from one step to the next: half a byte a weight, and a copy
    of the factors it was made from."""
    if s.forward != "merge-aware" or s.device != "cpu":
        return 0
    layers = [(x, n) for block, n in shape.blocks for x in block.linears if x.packed and x.adapted]
    return sum(n * (0.5 * x.weights + 4 * x.adapter_params) for x, n in layers)


def step_bytes(shape: ModelShape, s: Settings, rule: Rule, values: float) -> float:
    """What the optimizer allocates while it steps: for all values on a GPU, for the largest tensor on a CPU."""
    if s.device == "cuda":
        return rule.step_gpu * values
    largest = max((x.r * max(x.n, x.k) for block, _ in shape.blocks for x in block.linears if x.adapted), default=0)
    return rule.step_cpu * max(largest, shape.saved_params)


def step_stages(shape: ModelShape, s: Settings) -> list[Stage]:
    """The whole forward pass.

    Of a run of equal blocks the first and the last stand for themselves, and of those between only what they keep and
    leave counts: through the run both change evenly, so that no block between can be the peak.
    """
    boundary = s.width * s.tokens * shape.hidden
    stages = [Stage("embedding", mask_bytes(shape, s), boundary, boundary)]
    for place, (block, count) in enumerate(shape.blocks):
        own = a_block(block, shape, s)
        first = own if place or s.gradient_checkpointing else block_stages(block, shape, s, first=True)
        stages += first
        if count > 2:  # when their gradients are there, what they kept is gone
            stages.append(Stage("more blocks", grads=(count - 2) * total_grads(own)))
            stages.append(Stage("more blocks", (count - 2) * total_kept(own)))
        stages += own if count > 1 else []
    return [*stages, *loss_stages(shape, s)]


def mask_bytes(shape: ModelShape, s: Settings) -> float:
    """The mask that all blocks share: booleans, or, for "eager" attention, which always takes one, numbers to add."""
    scores = s.micro_batch_size * s.sequence_len**2
    if shape.attention == "eager":
        return s.width * scores
    return scores if s.masked else 0


def a_block(block: Block, shape: ModelShape, s: Settings) -> list[Stage]:
    """One block: its stages, or the one that checkpointing makes of them."""
    if not s.gradient_checkpointing:
        return block_stages(block, shape, s)
    boundary = s.width * s.tokens * shape.hidden
    own = block_stages(block, shape, s, first=shares_input(block, s))
    return [checkpointed("a block", own, boundary, boundary + unread(block, shape, s))]


def shares_input(block: Block, s: Settings) -> bool:
    """Whether the first norm keeps the very tensor that a checkpoint keeps: in fp32, or where it makes no copy."""
    return s.width == 4 or not (block.norms and block.norms[0].upcast)


def unread(block: Block, shape: ModelShape, s: Settings) -> float:
    """PEFT's last layer casts the gradient to fp32 and scales it before it reads what must be computed again."""
    if not block.linears:
        return 0
    last = block.linears[-1]
    in_fp32 = last.adapted and not is_fused(last, s) and s.width == 2 and not s.autocast
    return 8 * s.tokens * shape.hidden if in_fp32 else 0
