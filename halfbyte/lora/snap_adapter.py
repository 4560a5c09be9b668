"""One operator for the merged codes on the base's own scales: what a merge-aware step computes and a merge writes.

    qdata' = snap(base, fp32((scaling * B) @ A), offsets)

On a CPU it goes a few rows at a time, so that the change in full size never exists; on a GPU one kernel does it all.
The product is in fp64: products of fp32 factors are exact there and the sum's error is 2^-53, so another order of the
terms reaches an fp32 bit about once in 10^8 elements, and a code far more rarely. CPU, GPU and every sharding agree.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from halfbyte.numerics.dither import low_word, offsets
from halfbyte.numerics.hashing import GOLDEN, indexed_keys, key64, signed
from halfbyte.nvfp4.format import BLOCK_SIZE, NVFP4Parts, row_chunks
from halfbyte.nvfp4.kernels.available import has_numba, has_triton
from halfbyte.nvfp4.snap import snap, step_inv


def snap_adapter(
    parts: NVFP4Parts,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    *,
    name: str,
    seed: int,
    dither: bool,
    row_offset: int = 0,
    column_offset: int = 0,
) -> Tensor:
    """Codes uint8 [N, K/2] of parts + scaling * lora_B @ lora_A. Checks nothing, and never waits for a GPU.

    row_offset, column_offset   where a shard begins in the whole weight, so that it is rounded as the whole would be;
                                the column a multiple of 16.
    """
    row_key = signed(key64("row", seed, name) + row_offset * GOLDEN)
    block_key = signed(key64("block", seed, name) + column_offset // BLOCK_SIZE * GOLDEN)
    scale = parts.scale.view(torch.uint8)
    return lora_snap(parts.qdata, scale, parts.global_scale, lora_A, lora_B, scaling, dither, row_key, block_key)


@torch.library.custom_op("halfbyte::lora_snap", mutates_args=())
def lora_snap(
    qdata: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    dither: bool,
    row_key: int,
    block_key: int,
) -> Tensor:
    """Merged codes.

    qdata uint8 [N, K/2], scale uint8 [N, K/16], global_scale fp32 []   the base.
    lora_A [r, K], lora_B [N, r]   any float dtype.
    dither                         False rounds to nearest; the keys are then not used.
    row_key, block_key             64 bits each, of seed and name (numerics/dither.py).
    """
    parts = NVFP4Parts(qdata, scale.view(torch.float8_e4m3fn), global_scale)
    keys = (row_key, block_key) if dither else None
    if qdata.device.type != "cpu" or not has_numba():
        return snap_rows(parts, lora_A, lora_B, scaling, keys)
    from halfbyte.nvfp4.kernels.snap_cpu import snap_low_rank

    return snap_low_rank(qdata, step_inv(parts), lora_A, lora_B, scaling, keys)


@lora_snap.register_kernel("cuda")
def _(
    qdata: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    dither: bool,
    row_key: int,
    block_key: int,
) -> Tensor:
    keys = (row_key, block_key) if dither else None
    if not has_triton():
        parts = NVFP4Parts(qdata, scale.view(torch.float8_e4m3fn), global_scale)
        return snap_rows(parts, lora_A, lora_B, scaling, keys)
    from halfbyte.nvfp4.kernels.snap_triton import snap_low_rank

    return snap_low_rank(qdata, scale, global_scale, lora_A, lora_B, scaling, keys)


@lora_snap.register_fake
def _(
    qdata: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    dither: bool,
    row_key: int,
    block_key: int,
) -> Tensor:
    return torch.empty_like(qdata, memory_format=torch.contiguous_format)


def snap_rows(
    parts: NVFP4Parts, lora_A: Tensor, lora_B: Tensor, scaling: float, keys: tuple[int, int] | None
) -> Tensor:
    """`lora_snap` in plain PyTorch, on any device."""
    device = parts.qdata.device
    qdata = torch.empty_like(parts.qdata, memory_format=torch.contiguous_format)
    blocks = None if keys is None else low_word(indexed_keys(keys[1], 0, parts.scale.shape[1], device))
    for rows, delta in delta_chunks(lora_A, lora_B, scaling):
        offset = None
        if keys is not None and blocks is not None:
            offset = offsets(low_word(indexed_keys(keys[0], rows.start, len(delta), device)), blocks)
        qdata[rows] = snap(NVFP4Parts(parts.qdata[rows], parts.scale[rows], parts.global_scale), delta, offset)
    return qdata


def delta_chunks(lora_A: Tensor, lora_B: Tensor, scaling: float) -> Iterator[tuple[slice, Tensor]]:
    """(rows, (scaling * B[rows]) @ A as fp32 [n, K]) over all rows, about a quarter of a million values at a time."""
    with torch.autocast(lora_A.device.type, enabled=False):
        factor_A = lora_A.detach().double()
        for rows in row_chunks(lora_B.shape[0], lora_A.shape[1]):
            yield rows, ((lora_B[rows].detach().double() * scaling) @ factor_A).float()
