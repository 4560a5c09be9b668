"""The numba kernel gives the reference's codes, bit for bit."""

import pytest
import torch

from halfbyte.lora.snap_adapter import snap_rows
from halfbyte.numerics.hashing import key64, signed
from halfbyte.nvfp4.snap import step_inv
from tests.nvfp4.kernels.parts import random_parts

snap_cpu = pytest.importorskip("halfbyte.nvfp4.kernels.snap_cpu", reason="needs numba")
KEYS = (signed(key64("row", 3, "layer")), signed(key64("column", 3, "layer")))


@pytest.mark.parametrize("keys", [KEYS, None], ids=["dither", "nearest"])
@pytest.mark.parametrize("r", [1, 4, 7])
@pytest.mark.parametrize("n, k", [(1, 16), (130, 272), (3, 512), (0, 32)])
def test_codes_equal_the_reference(n: int, k: int, r: int, keys: tuple[int, int] | None) -> None:
    """272 is a tile and a piece of one; 130 rows are shared by threads; ranks need padding or not. The order of the
    fp64 sum differs from the matmul's, which on these inputs moves no fp32 bit that decides a code."""
    parts = random_parts(n, k)
    generator = torch.Generator().manual_seed(r)
    down, up = torch.randn(r, k, generator=generator), torch.randn(n, r, generator=generator)
    scaling = 0.3 * parts.scale.float().mean().nan_to_num(1.0).item() * parts.global_scale.item()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = snap_cpu.snap_low_rank(parts.qdata, step_inv(parts), down, up, scaling, keys)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found, snap_rows(parts, down, up, scaling, keys))
    if n:
        assert not torch.equal(found, parts.qdata)


def test_half_precision_factors_and_strided_codes() -> None:
    parts = random_parts(20, 64)
    wide = torch.stack((parts.qdata, parts.qdata), dim=-1)[..., 0]
    down, up = torch.randn(4, 64).bfloat16(), torch.randn(20, 4).half()
    found = snap_cpu.snap_low_rank(wide, step_inv(parts), down, up, 1e-3, KEYS)
    assert torch.equal(found, snap_rows(parts, down, up, 1e-3, KEYS))
