"""Who holds what: one process, DDP, FSDP2, ZeRO-1, 2, 3, tensor parallelism, and products of them.

N ranks share the data, d of them (the shard group) share what is sharded, t share each layer.

            base          adapters            gradients   states   gathered and buffers
one         1             1                   1           1
DDP         1             1                   1           1        the gradients once more, in buckets
FSDP2       1/d           1/d                 1/d         1/d      root; two blocks; a block's gradients, twice
ZeRO-1      1             1 + fp32 copy 1/d   1           1/d      one bucket of gradients
ZeRO-2      1             1 + fp32 copy 1/d   1/d         1/d      one bucket of gradients
ZeRO-3      1/d           1/d + fp32 1/d      1/d         1/d      root, one layer, prefetched layers, one bucket
TP          1/t of each layer (shape.cut), and DDP between the groups

DeepSpeed's buffers are those of its defaults (reduce_bucket_size 5e8 values, stage3_prefetch_bucket_size 5e7): a bucket
is allocated whole, also where it is many times what is trained; both can be set lower in its config.
"""

from dataclasses import dataclass
from typing import Literal

from halfbyte.plan.shape import Block, ModelShape

Kind = Literal["one", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
REDUCE_BUCKET = 500_000_000  # values, in bf16
PREFETCH_BUCKET = 50_000_000  # values, packed ones a byte each
NAMES = {"one": "one process", "ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
SHARDS_BASE = ("fsdp2", "zero3")
SHARDS_GRADIENTS = ("fsdp2", "zero2", "zero3")
SHARDS_STATES = ("fsdp2", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Engine:
    """`kind` over `data` ranks, each of them `tensor` GPUs.

    replicas  copies of the sharded model among the data ranks (HSDP).
    reshard   FSDP2 frees a block's weights after its forward; False keeps the whole base gathered.
    """

    kind: Kind = "one"
    data: int = 1
    tensor: int = 1
    replicas: int = 1
    reshard: bool = True

    @property
    def ranks(self) -> int:
        return self.data * self.tensor

    @property
    def shards(self) -> int:
        """d: ranks that share what is sharded."""
        return self.data // self.replicas

    @property
    def state_shards(self) -> int:
        """Ranks that share the optimizer states."""
        return self.shards if self.kind in SHARDS_STATES else 1

    @property
    def name(self) -> str:
        if self.replicas > 1:
            return f"HSDP, {self.replicas} x {self.shards}"
        data = f"{NAMES[self.kind]} {self.data}" if self.data > 1 else ""
        tensor = f"TP {self.tensor}" if self.tensor > 1 else ""
        return " x ".join(part for part in (tensor, data) if part) or NAMES["one"]

    def base_bytes(self, shape: ModelShape, width: int) -> float:
        """The base that rests on a rank."""
        return shape.base_bytes(width) / (self.shards if self.kind in SHARDS_BASE else 1)

    def gathered_bytes(self, shape: ModelShape, width: int, trained: float, *, checkpointing: bool) -> float:
        """What a rank holds beside its own for a while.

        trained        bytes of what is trained, on one rank without sharding.
        checkpointing  moves the peak of backward (see `fsdp2_gathered`).
        """
        root = shape.root_params * width
        if self.kind == "fsdp2":
            if not self.reshard:
                return shape.base_bytes(width) + trained
            return root + self.fsdp2_gathered(shape.largest_block, width, sent=checkpointing)
        bucket = 2 * REDUCE_BUCKET
        if self.kind == "zero3":
            layer = max(x.base_bytes(width) for x in shape.largest_block.linears)
            return root + layer + PREFETCH_BUCKET + bucket
        if self.kind in ("zero1", "zero2"):
            return bucket
        return trained if self.data > 1 else 0

    def fsdp2_gathered(self, block: Block, width: int, *, sent: bool) -> float:
        """FSDP2, in the backward of a block: the block, and the one before it on its way.

        Its gradients are whole until they are scattered; a rank's share of them is counted as its gradients.
        sent  the buffer with the gradients of the block behind it, which is kept until the next one is sent. Without
              checkpointing the peak is in the last block, where backward begins, before anything was sent.
        """
        factors = 4 * block.adapter_params
        buffers = factors * (1 - 1 / self.shards) + (factors if sent else 0)
        return 2 * (block.base_bytes(width) + factors) + buffers

    def adapter_bytes(self, params: float) -> float:
        """Trainable parameters; ZeRO keeps an fp32 master copy of a rank's partition."""
        own = params / (self.shards if self.kind in SHARDS_BASE else 1)
        return own + (params / self.shards if self.kind.startswith("zero") else 0)

    def state_bytes(self, states: float) -> float:
        return states / self.state_shards

    def gradient_bytes(self, grads: float) -> float:
        return grads / (self.shards if self.kind in SHARDS_GRADIENTS else 1)
