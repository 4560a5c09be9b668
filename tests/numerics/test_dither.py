"""The offsets: fixed for ever, uniform, independent, and the same for every sharding."""

import pytest
import torch

from halfbyte.numerics.dither import OFFSET_BITS, block_keys, offsets, row_keys

ROWS, BLOCKS = 2500, 4000  # 1e7 offsets
GOLDEN = [
    188384,
    454153,
    553989,
    709642,
    938710,
    128632,
    727450,
    718702,
    267096,
    751737,
    374665,
    958105,
    801335,
    981185,
    903791,
    390549,
]


def grid(seed: int, name: str, rows: int = ROWS, blocks: int = BLOCKS) -> torch.Tensor:
    return offsets(row_keys(seed, name, 0, rows), block_keys(seed, name, 0, blocks))


def test_sixteen_values_are_fixed() -> None:
    """The values are the format: one that changes makes every merge-aware adapter another model."""
    found = [grid(0, "model.layers.0.mlp.up_proj", 2, 4), grid(7, "model.layers.0.mlp.up_proj", 1, 4)]
    found.append(offsets(row_keys(0, "lm_head", 49151, 1), block_keys(0, "lm_head", 572, 4)))
    assert [value for tensor in found for value in tensor.flatten().tolist()] == GOLDEN


@pytest.fixture(scope="module")
def ten_million() -> torch.Tensor:
    """As fractions in [0, 1)."""
    return grid(0, "layer") * 2.0**-OFFSET_BITS


def test_uniform(ten_million: torch.Tensor) -> None:
    """Chi-square over 1000 bins has mean 999 and deviation 45; the bound is 5 deviations. Fixed data, no flakes."""
    assert ten_million.min() >= 0 and ten_million.max() < 1
    counts = torch.histc(ten_million, 1000, 0, 1).double()
    expected = ROWS * BLOCKS / 1000
    assert abs(((counts - expected) ** 2 / expected).sum().item() - 999) < 5 * 45


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (0, 2), (0, 16), (16, 0), (2, 3)])
def test_neighbours_are_independent(ten_million: torch.Tensor, shift: tuple[int, int]) -> None:
    """Pairs fall into 32 x 32 bins evenly (chi-square, mean 1023, deviation 45), so not only correlation is absent."""
    down, right = shift
    first, second = ten_million[down:, right:], ten_million[: ROWS - down, : BLOCKS - right]
    cell = (first * 32).int() * 32 + (second * 32).int()
    counts = torch.bincount(cell.flatten(), minlength=1024).double()
    expected = first.numel() / 1024
    assert abs(((counts - expected) ** 2 / expected).sum().item() - 1023) < 5 * 45.3


@pytest.mark.parametrize("other", [(1, "layer"), (0, "layer2"), (0, "layes")])
def test_other_seeds_and_names_are_independent(ten_million: torch.Tensor, other: tuple[int, str]) -> None:
    """Correlation of independent uniforms over 1e7 pairs has deviation 3.2e-4; the bound is 5."""
    pair = torch.stack((ten_million.flatten(), grid(*other).flatten() * 2.0**-OFFSET_BITS))
    assert torch.corrcoef(pair)[0, 1].abs() < 5 * 3.2e-4


def test_row_and_block_means_are_those_of_independent_values(ten_million: torch.Tensor) -> None:
    """Means of independent uniforms have variance 1/(12 n); a weak row or block key would widen them. The ratio's
    deviation is sqrt(2 / lines); the bound is 5."""
    for dim, lines in ((0, BLOCKS), (1, ROWS)):
        ratio = ten_million.double().mean(dim).var().item() * 12 * ten_million.shape[dim]
        assert abs(ratio - 1) < 5 * (2 / lines) ** 0.5


def test_a_piece_has_the_offsets_of_the_whole() -> None:
    whole = grid(3, "w", 40, 64)
    piece = offsets(row_keys(3, "w", 17, 9), block_keys(3, "w", 32, 16))
    assert torch.equal(piece, whole[17:26, 32:48])
