"""Moving codes on the base's grid, against an oracle that searches the grid in fp64."""

import math

import pytest
import torch

from halfbyte.numerics.dither import OFFSET_BITS
from halfbyte.numerics.e2m1 import E2M1_VALUES
from halfbyte.numerics.packing import pack_nibbles, unpack_nibbles
from halfbyte.nvfp4 import NVFP4Parts
from halfbyte.nvfp4.snap import snap

ONE = 1 << OFFSET_BITS
GRID = sorted(set(E2M1_VALUES))  # fifteen values, one zero


def all_codes(rows: int, scale: float = 1.0) -> NVFP4Parts:
    """[rows, 16]: every code once in each row, one block a row with this scale."""
    codes = torch.arange(16, dtype=torch.uint8).expand(rows, 16)
    block = torch.full((rows, 1), scale).to(torch.float8_e4m3fn)
    return NVFP4Parts(pack_nibbles(codes), block, torch.tensor(2.0**-6))


def by_search(value: float, offset: int) -> float:
    """The grid value that a dithered rounding of a value in code units gives."""
    magnitude = min(abs(value), 6.0)
    below = max(point for point in GRID if point <= magnitude)
    above = min(point for point in GRID if point >= magnitude)
    share = 0.0 if above == below else (magnitude - below) / (above - below)
    return math.copysign(above if share + offset / ONE >= 1 else below, value)


def random_offsets(rows: int) -> torch.Tensor:
    return torch.randint(0, ONE, (rows, 1), dtype=torch.int32, generator=torch.Generator().manual_seed(0))


def test_every_code_and_change_against_a_search() -> None:
    """Steps and scale are powers of two, so fp32 is exact and equality is fair."""
    shifts = torch.arange(-20, 21) * 0.4375
    parts = all_codes(len(shifts), scale=2.0)
    step = 2.0 * 2.0**-6
    offset = random_offsets(len(shifts))
    found = unpack_nibbles(snap(parts, (shifts * step).unsqueeze(-1).expand(-1, 16).contiguous(), offset))
    for row, shift in enumerate(shifts.tolist()):
        for code in range(16):
            wanted = by_search(E2M1_VALUES[code] + shift, offset[row].item())
            assert E2M1_VALUES[found[row, code]] == wanted, (shift, code)


@pytest.mark.parametrize("nearest", [True, False])
@pytest.mark.parametrize("scale", [0.0, 2.0**-9, 1.0, 448.0])
def test_no_change_keeps_every_byte(scale: float, nearest: bool) -> None:
    """-0 and blocks of scale zero included, for the least and the largest offset."""
    parts = all_codes(4, scale)
    offset = torch.tensor([0, ONE // 2, ONE - 1, 1], dtype=torch.int32).unsqueeze(-1)
    found = snap(parts, torch.zeros(4, 16), None if nearest else offset)
    assert torch.equal(found, parts.qdata)


def test_blocks_of_scale_zero_cannot_move() -> None:
    parts = all_codes(1, 0.0)
    assert torch.equal(snap(parts, torch.ones(1, 16), torch.full((1, 1), ONE - 1)), parts.qdata)


def test_huge_changes_saturate() -> None:
    parts = all_codes(2, 2.0**-9)
    delta = torch.tensor([[3e38], [-3e38]]).expand(2, 16).contiguous()
    found = unpack_nibbles(snap(parts._replace(global_scale=torch.tensor(2.0**-126)), delta, random_offsets(2)))
    assert (found[0] == 7).all() and (found[1] == 15).all()


def test_the_share_that_moves_is_the_share_of_the_step() -> None:
    """A change of 1/8 of the gap moves one code in eight of 4,096 (deviation 0.0052, bound 5), so it survives."""
    rows = 4096
    parts = all_codes(rows)
    found = unpack_nibbles(snap(parts, torch.full((rows, 16), 2.0**-6 / 16), random_offsets(rows)))
    moved = (found[:, 2] == 3).float().mean()  # code 2 is 1.0, code 3 is 1.5
    assert abs(moved - 1 / 8) < 5 * (1 / 8 * 7 / 8 / rows) ** 0.5
