"""Which rank holds what: data parallel, and what each engine must be told about a frozen NVFP4 base."""

from halfbyte.parallel.agree import agree, together
from halfbyte.parallel.ddp import ddp
from halfbyte.parallel.deepspeed import prepare_for_deepspeed
from halfbyte.parallel.fsdp2 import fsdp2, shard_new_adapter
from halfbyte.parallel.gather import gather_trainable, save_adapter
from halfbyte.parallel.mesh import data_mesh
from halfbyte.parallel.sharded_checkpoint import load_sharded, save_sharded
from halfbyte.parallel.synchronize import SyncReport, synchronize
from halfbyte.parallel.tensor_parallel import tensor_parallel

__all__ = [
    "SyncReport",
    "agree",
    "data_mesh",
    "ddp",
    "fsdp2",
    "gather_trainable",
    "load_sharded",
    "prepare_for_deepspeed",
    "save_adapter",
    "save_sharded",
    "shard_new_adapter",
    "synchronize",
    "tensor_parallel",
    "together",
]
