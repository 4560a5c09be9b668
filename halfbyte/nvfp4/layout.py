"""The swizzled order in which tensor cores (and so torchao's files) want block scales.

[N, K/16] is padded with zeros to multiples of (128, 4) and cut into tiles of 128 x 4, tiles row-major; in a tile, row
32a + b and column c go to byte 16b + 4a + c (NVIDIA cuBLAS docs, "block scaling factors layout"). We swizzle only at
the border: a module's scale is always row-major, so no flag changes what a tensor means. The four
columns of a tile's row stay together, so words of four bytes are moved.
"""

import torch
from torch import Tensor

TILE_ROWS, TILE_COLS = 128, 4


def swizzled_shape(rows: int, cols: int) -> tuple[int, int]:
    """Shape in which torchao keeps the swizzled form of scales [rows, cols]: 32 rows of 16 bytes a tile."""
    return -(-rows // TILE_ROWS) * 32, -(-cols // TILE_COLS) * 16


def swizzle(scale: Tensor) -> Tensor:
    """Row-major block scales [N, K/16] (one byte each) -> the padded tiles, shape `swizzled_shape(N, K/16)`."""
    rows, cols = scale.shape
    tile_rows, tile_cols = -(-rows // TILE_ROWS), -(-cols // TILE_COLS)
    padded = torch.zeros(tile_rows * TILE_ROWS, tile_cols * TILE_COLS, dtype=torch.uint8, device=scale.device)
    padded[:rows, :cols] = scale.view(torch.uint8)
    words = padded.view(torch.int32).view(tile_rows, 4, 32, tile_cols)  # tile row, a, b, tile column; c is in the word
    return words.permute(0, 3, 2, 1).contiguous().view(torch.uint8).view(swizzled_shape(rows, cols)).view(scale.dtype)


def unswizzle(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """The padded tiles (any shape with the right number of bytes) -> row-major [rows, cols], contiguous."""
    tile_rows, tile_cols = -(-rows // TILE_ROWS), -(-cols // TILE_COLS)
    expected = tile_rows * tile_cols * TILE_ROWS * TILE_COLS
    if swizzled.numel() != expected:
        raise ValueError(
            f"swizzled block scales of a [{rows}, {cols}] grid take {expected} bytes, got {swizzled.numel()} "
            f"in {list(swizzled.shape)}; pass the rows and columns that were swizzled"
        )
    flat = swizzled.contiguous().view(torch.uint8).view(-1)
    if flat.storage_offset() % 4:  # a slice of a buffer may begin anywhere
        flat = flat.clone()
    words = flat.view(torch.int32).view(tile_rows, tile_cols, 32, 4)
    full = words.permute(0, 3, 2, 1).contiguous().view(torch.uint8).view(tile_rows * TILE_ROWS, tile_cols * TILE_COLS)
    return full[:rows, :cols].contiguous().view(swizzled.dtype)
