"""What one linear layer keeps, and what it needs while it runs, for M rows.

c is the width of an activation in bytes, W = c N K a decoded weight. Inputs are not counted here: several layers read
the same one, so the block does (block.py). Results are counted where they are kept.
"""

from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import Linear
from halfbyte.plan.stage import Stage

CHUNK_VALUES = 1 << 20  # nvfp4/dequantize.py decodes at most about this many values at a time on a CPU
DECODE_BYTES = 6.25  # of a value on the way: indices 2 and pairs in fp32 4, or pairs 4, scales 0.5 and the result


def linear_stage(linear: Linear, s: Settings, *, kept: float = 0, before: float = 0, waiting: float = 0) -> Stage:
    """The stage of a layer.

    kept     bytes of its input that stay because of it, where no other layer's stage counts them.
    before   results of neighbours that wait for it while it runs forward.
    waiting  gradients of neighbours that wait while it runs backward.
    Its result is counted by whatever reads it in backward; while the layer runs, it is there. The gradient of a last
    layer's result is the residual stream's, which the block counts.
    """
    kept_own, forward, backward = adapter_bytes(linear, s)
    result = s.width * s.tokens * linear.n
    return Stage(
        linear.name,
        kept + kept_own,
        before + result + max(workspace(linear, s)[1], forward),
        waiting + (0 if linear.last else result) + max(product_backward(linear, s), backward),
        gradients(linear),
    )


def product_backward(linear: Linear, s: Settings) -> float:
    """What the product with the frozen weight needs in backward: dx, and the weight decoded.

    The fused function has part of dx (and with dropout the dropped input) when it decodes; merge-aware and frozen
    layers decode first. After PEFT's branch, dx of the branch waits, and the copy it kept is gone.
    """
    decoded, decoding = workspace(linear, s)
    grad_in = s.width * s.tokens * linear.k
    if linear.adapted and not is_fused(linear, s):
        return max(decoding + grad_in, 2 * grad_in + decoded) - copied(linear, s)
    if linear.adapted and s.forward == "fused":
        return grad_in * (2 if s.lora_dropout else 1) + decoding
    return max(decoding, grad_in + decoded)


def copied(linear: Linear, s: Settings) -> float:
    """The copy of x that PEFT's forward makes and keeps: in fp32 as the factors, under autocast in the base's dtype."""
    if s.width == 4:
        return 0
    return (s.width if s.autocast else 4) * s.tokens * linear.k


def gradients(linear: Linear) -> float:
    """Factors are fp32, and so are their gradients."""
    return 4 * linear.adapter_params


def is_fused(linear: Linear, s: Settings) -> bool:
    """lora/fused.py serves layers over NVFP4 weights; PEFT's forward serves the rest."""
    return linear.packed and s.forward != "peft"


def keeps_input(linear: Linear, s: Settings) -> bool:
    """Whether backward reads the layer's input as it came: gradients of the factors need it, a frozen weight does not.

    PEFT's forward with fp32 factors and another dtype reads a copy of its own instead (`adapter_bytes`).
    """
    return linear.adapted and (is_fused(linear, s) or s.width == 4)


def workspace(linear: Linear, s: Settings) -> tuple[float, float]:
    """(a decoded weight, most bytes while it is made); nothing for a dense layer.

    c N K. On a CPU tables of indices and the fp32 pairs exist on the way, for all of a small weight or for a chunk.
    Merge-aware on a GPU adds the packed W', half a byte a weight.
    """
    if not linear.packed:
        return 0, 0
    decoded = s.width * linear.weights
    if s.device != "cpu":
        codes = 0.5 * linear.weights if s.forward == "merge-aware" and linear.adapted else 0
        return decoded + codes, decoded + codes
    small = linear.weights <= CHUNK_VALUES  # then the pairs are the result, or are cast to it
    return decoded, DECODE_BYTES * linear.weights if small else decoded + DECODE_BYTES * CHUNK_VALUES


def adapter_bytes(linear: Linear, s: Settings) -> tuple[float, float, float]:
    """(kept, forward, backward beside the result's gradient, the input's included) of the adapter's branch.

    fused        keeps t = x A^T [M, r]; the branch is added into the product's own memory.
    merge-aware  keeps nothing: W' is computed again.
    PEFT's       fp32 factors make it compute in fp32: it keeps x once more (4 M K), and where the dtype is another, the
                 result and the branch, scaled and not, exist in fp32 side by side (4 M N each). Under autocast the
                 products are cast back, and the copy it keeps is as wide as the activations.
    dropout      a mask of one byte a value, and the dropped input (backward: gradient) while it is used.
    """
    if not linear.adapted:
        return 0, 0, 0
    m, k, n, c = s.tokens, linear.k, linear.n, s.width
    mask = m * k if s.lora_dropout else 0
    if is_fused(linear, s):
        t = 0 if s.forward == "merge-aware" else c * m * linear.r
        dropped = c * m * k if mask else 0
        return t + mask, dropped, 3 * dropped
    branch = c if c == 4 or s.autocast else 4
    kept = copied(linear, s) + branch * m * linear.r + (mask + branch * m * k if mask else 0)
    cast = c if branch != c else 0  # the gradient back to the base's dtype
    wide = 3 if cast and s.device == "cpu" else 2  # a CPU also makes an fp32 copy of the base's result
    return kept, wide * branch * m * n, max((2 * branch + cast) * m * n, branch * m * k + cast * m * n)
