"""Meshes of ranks: which of them hold the same, which hold parts."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICATE, SHARD = "replicate", "shard"


def data_mesh(device_type: str, *, replicate: int = 1, shard: int | None = None) -> DeviceMesh:
    """A mesh for sharded data parallel: ("shard",), or ("replicate", "shard") for HSDP.

    device_type  "cuda" or "cpu".
    replicate    groups of ranks that each hold the whole model.
    shard        ranks that share a copy; None takes what is left.
    raises       ValueError when replicate x shard is not the number of ranks.
    """
    ranks = dist.get_world_size()
    shard = shard or ranks // replicate
    if replicate * shard != ranks:
        raise ValueError(
            f"the mesh is replicate {replicate} x shard {shard}, which needs {replicate * shard} ranks, but {ranks} "
            "were started. Start that many processes, or choose factors of the number of ranks."
        )
    if replicate == 1:
        return init_device_mesh(device_type, (shard,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device_type, (replicate, shard), mesh_dim_names=(REPLICATE, SHARD))


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """This rank's device of a mesh."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
