"""Meshes of ranks: which of them hold the same, which hold parts."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICATE, SHARD = "replicate", "shard"
DATA, TENSOR = "dp", "tp"


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


def tensor_mesh(device_type: str, degree: int) -> DeviceMesh:
    """A mesh ("dp", "tp") for layers cut over `degree` neighbouring ranks, and data parallel over such groups.

    raises  ValueError when the number of ranks is no multiple of the degree.
    """
    check_degree(degree, dist.get_world_size())
    return init_device_mesh(device_type, (dist.get_world_size() // degree, degree), mesh_dim_names=(DATA, TENSOR))


def check_degree(degree: int, ranks: int) -> None:
    """ValueError unless the ranks can form groups of the degree."""
    if ranks % degree:
        raise ValueError(
            f"the tensor-parallel degree is {degree}, but the launch has {ranks} processes, expected a multiple of "
            f"{degree}; start that many, for instance with torchrun --nproc-per-node {degree}, or lower the degree"
        )


def check_replicas(replicas: int, ranks: int) -> None:
    """ValueError unless the ranks can form that many groups."""
    if ranks % replicas:
        raise ValueError(
            f"dp_replicate_size is {replicas}, but the launch has {ranks} processes, expected a multiple of "
            f"{replicas}; start that many, or choose a divisor of {ranks}"
        )


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """This rank's device of a mesh."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
