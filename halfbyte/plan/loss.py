"""The end of the forward pass: last norm, output layer, loss. With a large vocabulary this is the peak.

M tokens, V words, c bytes an activation.

logits      The model's own loss. Forward: logits (c M V), their fp32 copy and log-softmax (4 M V each). Kept is the
            log-softmax. Backward adds its gradient and the one behind it, so 12 bytes a logit at once.
fused-head  TRL's, which `halfbyte train` runs: tiles of at most 4096 tokens x 32768 words, made again in backward; the
            hidden states and, in backward, their gradient in fp32. On a GPU only tokens with a label are scored; how
            many that are is the data's, so all are counted. On a CPU the tile passes eight more of its size in fp32.
"""

from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import ModelShape
from halfbyte.plan.stage import Stage

TILE_TOKENS, TILE_WORDS = 4096, 32768  # trl/kernels/chunked_logprob.py, TRL 1.16
CPU_TILES = 7.25  # scaled logits, z, log p, p, gradient, target and difference in fp32, and a mask of bytes


def loss_stages(shape: ModelShape, s: Settings) -> list[Stage]:
    """Last norm, output layer, loss."""
    hidden = s.tokens * shape.hidden
    norm = Stage("last norm", 4 * hidden, 4 * hidden, 20 * hidden)
    return [norm, *full(shape, s)] if s.loss == "logits" else [norm, tiled(shape, s)]


def full(shape: ModelShape, s: Settings) -> list[Stage]:
    """The model's own loss. An output layer that is trained keeps its input and gets a gradient."""
    c, hidden, logits = s.width, s.tokens * shape.hidden, s.tokens * shape.vocab
    weight = c * shape.vocab * shape.hidden if shape.head_saved else 0
    head = Stage("head", c * hidden if weight else 0, c * logits, c * logits + c * hidden, weight)
    return [head, Stage("loss", 4 * logits, (4 + (c if c == 2 else 0)) * logits, 8 * logits)]


def tiled(shape: ModelShape, s: Settings) -> Stage:
    """TRL's output layer and loss in one; the gradient of an output layer that is trained is summed in fp32."""
    c, hidden, rows = s.width, s.tokens * shape.hidden, min(s.tokens, TILE_TOKENS)
    weight = shape.vocab * shape.hidden if shape.head_saved else 0
    tile: float = c * rows * TILE_WORDS
    if s.device == "cpu":
        tile += 4 * CPU_TILES * rows * min(shape.vocab, TILE_WORDS)
    kept = c * hidden if s.device == "cpu" else 2 * c * hidden
    return Stage("loss", kept, tile, tile + (4 + (0 if s.device == "cpu" else 2 * c)) * hidden + 4 * weight, c * weight)
