"""One decoder block as stages: attention, then the MLP, each behind a norm.

M tokens, c bytes an activation, H the width of the residual stream. Kept for backward are, under autograd's own rules:

    norm          RMSNorm: an fp32 copy of its input (4 M H); LayerNorm: its input. Their result is kept once for all
                  the adapted layers that read it.
    q, k, v       after the rotation, by the attention kernel. With a mask or "eager", k and v are repeated for
                  all heads.
    attention     its result (which is also the input of the last layer) and 4 bytes a row and head. "eager" also keeps
                  the probabilities, [heads, T, T] a sequence, in fp32 and in c. Each block
                  makes a copy of a mask, in c bytes.
    MLP           gate, act(gate), up and their product: 4 M I; without a gate, the input and the result of act: 2 M I.

A frozen layer without an adapter reads no input in backward, so what only it would read is not kept.
"""

from dataclasses import replace

from halfbyte.plan.linear import keeps_input, linear_stage
from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import Block, ModelShape, Part
from halfbyte.plan.stage import Stage

FLASH = ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2", "flex_attention")


def block_stages(block: Block, shape: ModelShape, s: Settings, *, first: bool = False) -> list[Stage]:
    """The block's stages in forward order; each carries the residual stream's gradient in backward.

    first  the first norm's input is not kept here: no gradient flows into the block, or a checkpoint keeps it.
    """
    stages = [
        *norm_stages(block, s, "attention", after=False),
        input_stage(block, shape, s, "attention"),
        *attention_stages(block, shape, s),
        *norm_stages(block, s, "attention", after=True),
        *norm_stages(block, s, "mlp", after=False),
        input_stage(block, shape, s, "mlp"),
        *mlp_stages(block, s),
        *norm_stages(block, s, "mlp", after=True),
        *other_stages(block, s),
    ]
    residual = s.width * s.tokens * shape.hidden
    stream = residual if s.width == 2 else 0  # in fp32 it is what the norm keeps
    stages = [Stage(x.name, x.kept, x.forward + stream, x.backward + residual, x.grads) for x in stages]
    if first and stages and block.norms:
        unread = (4 if block.norms[0].upcast else s.width) * s.tokens * shape.hidden
        stages[0] = replace(stages[0], kept=max(0, stages[0].kept - unread))
    return stages


def norm_stages(block: Block, s: Settings, part: Part, *, after: bool) -> list[Stage]:
    """The norms before (and inside) one half of the block, or those behind it.

    backward  RMSNorm in fp32: the gradient, what comes of it by both factors, the square's and the sum, 5 values of 4
              bytes each.
    """
    stages = []
    for norm in block.norms:
        if norm.part == part and norm.after == after:
            values = s.tokens * norm.size * norm.rows
            kept = (4 if norm.upcast else s.width) * values
            temporary = 20 if norm.upcast else 2 * s.width
            stages.append(Stage(norm.name, kept, (8 if norm.upcast else s.width) * values, temporary * values))
    return stages


def input_stage(block: Block, shape: ModelShape, s: Settings, part: Part) -> Stage:
    """What a half of the block reads: kept once, where an adapted layer or an expert reads it in backward."""
    read = any(keeps_input(x, s) for x in block.of(part) if not x.last) or (part == "mlp" and block.experts is not None)
    return Stage("input", s.width * s.tokens * shape.hidden if read else 0)


def attention_stages(block: Block, shape: ModelShape, s: Settings) -> list[Stage]:
    """q, k, v (or one layer for all three), the rotation, the attention itself, and the layer behind it.

    One layer for all three: its whole result stays, since v is a part of it.
    """
    linears = block.of("attention")
    if not linears:
        return []
    inward, last = [x for x in linears if not x.last], [x for x in linears if x.last]
    m, c = s.tokens, s.width
    queries, keys = c * m * shape.heads * shape.head_dim, c * m * shape.kv_heads * shape.head_dim
    repeated = shape.attention == "eager" or (s.masked and shape.attention not in FLASH)
    used_keys = queries if repeated else keys  # width of k and of v as the kernel reads them
    whole = queries + keys if len(inward) == 1 else 0
    grouped = 2 * (queries - used_keys)  # gradients of k and v for all heads, before they are summed by groups
    stages = []
    for i, linear in enumerate(inward):
        results = [c * m * x.n for x in inward[:i]]
        waiting = sum(results) + (c * m * linear.k if i + 1 < len(inward) else 0)
        stages.append(linear_stage(linear, s, before=sum(results), waiting=waiting))
    rotation = 3 * queries  # two products and their sum
    stages.append(Stage("rotation", 0, rotation + 2 * keys, rotation + queries + 2 * keys))
    kept = queries + 2 * used_keys + whole + queries + attention_bytes(shape, s)
    backward = queries + queries + 2 * used_keys + grouped + eager_backward(shape, s)
    stages.append(Stage("attention", kept, 0, backward))
    return stages + [linear_stage(x, s) for x in last]


def attention_bytes(shape: ModelShape, s: Settings) -> float:
    """What the attention keeps beside q, k, v and its result."""
    scores = s.micro_batch_size * s.sequence_len**2
    if shape.attention == "eager":
        return shape.heads * scores * (4 if s.width == 4 else 4 + s.width)
    mask = scores * s.width if s.masked and shape.attention not in FLASH else 0
    return 4 * s.tokens * shape.heads + mask


def eager_backward(shape: ModelShape, s: Settings) -> float:
    """Gradients of the probabilities, before and after softmax."""
    return shape.heads * s.micro_batch_size * s.sequence_len**2 * (4 + s.width) if shape.attention == "eager" else 0


def mlp_stages(block: Block, s: Settings) -> list[Stage]:
    """Gate, activation, up, product, down; or up, activation, down. `one` is M I."""
    linears = block.of("mlp")
    inward, last = [x for x in linears if not x.last], [x for x in linears if x.last]
    stages = expert_stages(block, s)
    if not inward or not last:
        return stages + [linear_stage(x, s, kept=s.width * s.tokens * x.n) for x in linears]
    one = s.width * s.tokens * last[0].k
    kept = one if any(keeps_input(x, s) for x in last) else 0
    if sum(x.n for x in inward) < 2 * last[0].k:
        stages += [linear_stage(x, s) for x in inward]
        stages.append(Stage("act", one, one, 2 * one))
    elif len(inward) == 1:
        stages += [linear_stage(x, s) for x in inward]
        stages.append(Stage("act", 2 * one, one, 4 * one))
        stages.append(Stage("product", one, one, 3 * one))
    else:
        shared = s.width * s.tokens * inward[0].k  # the gradient of the common input, from the layer before in backward
        stages.append(linear_stage(inward[0], s, waiting=shared))
        stages.append(Stage("act", one, one, 2 * one + shared))
        stages += [linear_stage(x, s, before=one, waiting=one) for x in inward[1:]]
        stages.append(Stage("product", 2 * one, one, 3 * one))
    return stages + [linear_stage(x, s, kept=kept) for x in last]


def expert_stages(block: Block, s: Settings) -> list[Stage]:
    """A mixture's experts, an estimate: a token passes `active` of them.

    Kept a visit: gate, act(gate), up; backward: the gradients of these and of the product. PEFT adapts stacked weights
    by adding the change to all of them: a copy of the experts is kept, and its gradient exists in backward.
    """
    experts = block.experts
    if experts is None:
        return []
    one = s.width * s.tokens * experts.active * experts.inner
    copy = s.width * experts.params if experts.adapter_params else 0
    return [Stage("experts", 3 * one + copy, one + copy, 4 * one + 2 * copy, 4 * experts.adapter_params)]


def other_stages(block: Block, s: Settings) -> list[Stage]:
    """Layers that are neither attention nor MLP: their results are taken to be kept, and their inputs where adapted."""
    return [
        linear_stage(x, s, kept=s.width * s.tokens * (x.n + (x.k if keeps_input(x, s) else 0)))
        for x in block.of("other")
    ]
