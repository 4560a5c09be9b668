"""A folder as if it held one rank's part of its weights: formats read it as any other, and only the part's bytes.

Rows lie together in a file. Columns do not: a read per row. Swizzled block scales lie in tiles of 128 rows and 64
columns of the weight, which are read whole where the part touches them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.tensor_file import TensorSpec
from halfbyte.nvfp4.layout import TILE_COLS, TILE_ROWS, swizzle, swizzled_shape, unswizzle

TILE_BYTES = TILE_ROWS * TILE_COLS


class Cut(NamedTuple):
    """How a tensor is cut.

    dim    0: into rows; 1: into columns.
    grid   of block scales that are swizzled, their [rows, columns]; None for a tensor that lies as it is.
    """

    dim: int
    grid: tuple[int, int] | None = None


class PartShards(Shards):
    """`Shards`, with some tensors cut into `count` equal parts of which it holds number `index`."""

    def __init__(self, whole: Shards, cuts: Mapping[str, Cut], index: int, count: int):
        self.__dict__.update(whole.__dict__)  # the same open files
        self._cuts, self._index, self._count = cuts, index, count

    def spec(self, key: str) -> TensorSpec:
        spec, cut = super().spec(key), self._cuts.get(key)
        if cut is None:
            return spec
        shape = list(cut.grid or spec.shape)
        shape[cut.dim] //= self._count
        return TensorSpec(spec.dtype, swizzled_shape(*shape) if cut.grid else tuple(shape))

    def read(self, key: str) -> Tensor:
        cut = self._cuts.get(key)
        if cut is None:
            return super().read(key)
        if cut.grid:
            return self._read_tiles(key, cut.dim, cut.grid)
        start, stop = self._range(super().spec(key).shape[cut.dim])
        return super().read_columns(key, start, stop) if cut.dim else super().read_rows(key, start, stop)

    def _range(self, size: int) -> tuple[int, int]:
        share = size // self._count
        return self._index * share, (self._index + 1) * share

    def _read_tiles(self, key: str, dim: int, grid: tuple[int, int]) -> Tensor:
        """The part's scales, in tiles of their own."""
        ranges = [(0, size) for size in grid]
        ranges[dim] = self._range(grid[dim])
        (top, bottom), (left, right) = ranges
        first_row, first_col = top // TILE_ROWS, left // TILE_COLS
        rows, cols = -(-bottom // TILE_ROWS) - first_row, -(-right // TILE_COLS) - first_col
        tiles, width = torch.empty(rows, cols * TILE_BYTES, dtype=torch.uint8), -(-grid[1] // TILE_COLS)
        for row in range(rows):
            self.read_into(key, ((first_row + row) * width + first_col) * TILE_BYTES, tiles[row])
        plain = unswizzle(tiles, rows * TILE_ROWS, cols * TILE_COLS)
        top, left = top - first_row * TILE_ROWS, left - first_col * TILE_COLS
        height, breadth = ranges[0][1] - ranges[0][0], ranges[1][1] - ranges[1][0]
        return swizzle(plain[top : top + height, left : left + breadth]).view(super().spec(key).dtype)
