"""A model as numbers: its blocks, their linear layers and norms, and what lies outside of the blocks.

Plain data, so that the arithmetic of the other files runs without torch; `read.py` fills it from transformers' own
model on the meta device.
"""

from dataclasses import dataclass, replace
from typing import Literal

Part = Literal["attention", "mlp", "other"]
PACKED_BYTES = 0.5 + 1 / 16  # of a weight: a 4-bit code, and a block scale of one byte for 16 values
GLOBAL_SCALE_BYTES = 4  # of a layer


@dataclass(frozen=True)
class Linear:
    """One linear layer.

    n, k      out_features, in_features.
    part      the piece of the block it belongs to; last: it writes that piece's result into the residual stream.
    packed    its weight is NVFP4; adapted: it carries LoRA.
    r         rank of the adapter.
    style     "colwise", "rowwise" or "" in the model's tensor-parallel plan.
    whole_a, whole_b   factors that tensor parallelism leaves whole; numbers of values a rank holds.
    """

    name: str
    n: int
    k: int
    bias: bool = False
    part: Part = "other"
    last: bool = False
    packed: bool = True
    adapted: bool = True
    r: int = 16
    style: str = ""

    @property
    def weights(self) -> int:
        return self.n * self.k

    @property
    def adapter_params(self) -> int:
        """Values of lora_A [r, K] and lora_B [N, r]."""
        return self.r * (self.n + self.k) if self.adapted else 0

    def base_bytes(self, width: int) -> float:
        """The frozen weight and its bias; `width` bytes a value where it is not packed."""
        bias = width * self.n if self.bias else 0
        if self.packed:
            return self.weights * PACKED_BYTES + GLOBAL_SCALE_BYTES + bias
        return self.weights * width + bias


@dataclass(frozen=True)
class Norm:
    """A norm over the last `size` values of `rows` rows a token (heads, for norms of queries and keys).

    upcast  it computes in fp32 and so keeps an fp32 copy of its input, as RMSNorm does; LayerNorm keeps the input.
    after   it stands behind its half of the block, not before it.
    """

    name: str
    size: int
    rows: int = 1
    upcast: bool = True
    part: Part = "other"
    after: bool = False


@dataclass(frozen=True)
class Experts:
    """Stacked experts of a mixture: dense in NVFP4 bases too, since transformers keeps them as 3-D tensors.

    params          values of all experts; inner: width of one; active: experts a token visits.
    adapter_params  PEFT's "all-linear" adapts them too: rank 2 r for gate and up together, r for down, each expert.
    """

    params: int
    inner: int
    active: int
    adapter_params: int = 0


@dataclass(frozen=True)
class Block:
    """One transformer block.

    extra_params  values of parameters that are neither linears, norms nor experts.
    known         False where the formulas of block.py only approximate what it keeps.
    """

    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    experts: Experts | None = None
    extra_params: int = 0
    known: bool = True

    def of(self, part: Part) -> list[Linear]:
        return [linear for linear in self.linears if linear.part == part]

    @property
    def adapter_params(self) -> int:
        experts = self.experts.adapter_params if self.experts else 0
        return sum(linear.adapter_params for linear in self.linears) + experts

    @property
    def dense_params(self) -> int:
        """Values outside of linears."""
        experts = self.experts.params if self.experts else 0
        return sum(norm.size for norm in self.norms) + experts + self.extra_params

    def base_bytes(self, width: int) -> float:
        return sum(linear.base_bytes(width) for linear in self.linears) + self.dense_params * width


@dataclass(frozen=True)
class ModelShape:
    """A causal language model.

    blocks        (block, how many of it), in order.
    root_params   values outside of the blocks: embeddings, head where it is not tied, last norm.
    saved_params  values of modules trained in full (a copy beside the frozen one).
    head_saved    one of them is the output layer.
    attention     transformers' name of the implementation it would take.
    notes         what the formulas do not describe of this architecture.
    """

    name: str
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: tuple[tuple[Block, int], ...]
    root_params: int
    saved_params: int = 0
    head_saved: bool = False
    tied: bool = False
    attention: str = "sdpa"
    notes: tuple[str, ...] = ()

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.blocks)

    @property
    def packed_params(self) -> int:
        return sum(n * sum(x.weights for x in block.linears if x.packed) for block, n in self.blocks)

    @property
    def params(self) -> int:
        """Values of the dense original."""
        inside = sum(n * (sum(x.weights + x.n * x.bias for x in b.linears) + b.dense_params) for b, n in self.blocks)
        return inside + self.root_params

    @property
    def adapter_params(self) -> int:
        return sum(count * block.adapter_params for block, count in self.blocks)

    @property
    def trainable_params(self) -> int:
        return self.adapter_params + self.saved_params

    def blocks_bytes(self, width: int) -> float:
        """The frozen base inside of the blocks."""
        return sum(count * block.base_bytes(width) for block, count in self.blocks)

    def base_bytes(self, width: int) -> float:
        """The frozen base: 0.5625 bytes a packed weight, `width` bytes for every other value."""
        return self.blocks_bytes(width) + self.root_params * width

    @property
    def largest_block(self) -> Block:
        return max((block for block, _ in self.blocks), key=lambda block: block.base_bytes(2))


def cut(shape: ModelShape, degree: int) -> ModelShape:
    """One rank's part of the model under tensor parallelism of this degree.

    Column-wise layers keep rows [N/d], row-wise ones columns [K/d]; embeddings, norms and head stay whole. Of the
    factors, the one that meets the cut side is cut with it (parallel/tp_layers.py), so r (n + k) still counts them.
    raises  ValueError where heads or features do not divide, or the model has no plan.
    """
    if degree == 1:
        return shape
    if not any(linear.style for block, _ in shape.blocks for linear in block.linears):
        raise ValueError(f"{shape.name} has no tensor-parallel plan")
    for heads in (shape.heads, shape.kv_heads):
        if heads % degree:
            raise ValueError(f"{heads} heads do not divide over {degree} ranks")
    blocks = tuple((replace(b, linears=tuple(cut_linear(x, degree) for x in b.linears)), n) for b, n in shape.blocks)
    return replace(shape, blocks=blocks, heads=shape.heads // degree, kv_heads=shape.kv_heads // degree)


def cut_linear(linear: Linear, degree: int) -> Linear:
    """A rank's part of one layer."""
    if linear.style == "colwise" and linear.n % degree == 0:
        return replace(linear, n=linear.n // degree)
    if linear.style == "rowwise" and linear.k % degree == 0 and (not linear.packed or linear.k // degree % 16 == 0):
        return replace(linear, k=linear.k // degree)
    if linear.style:
        raise ValueError(f"{linear.name} [{linear.n}, {linear.k}] does not divide over {degree} ranks")
    return linear
