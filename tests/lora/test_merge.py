"""The merged weight: zero changes nothing, dither keeps the change on average, and shards agree with the whole."""

import pytest
import torch
from torch import Tensor

from halfbyte.lora import merged_parts, retention
from halfbyte.nvfp4 import NVFP4Parts, dequantize, quantize
from halfbyte.nvfp4.digest import weight_digest

MODES = [(rounding, scales) for rounding in ("dither", "nearest") for scales in ("keep", "fresh")]
N, K, R = 96, 160, 4


def base_of(kind: str) -> NVFP4Parts:
    """Bases of this quantizer, of a better one, and of none at all: any codes (-0 included) on any scales."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 0.05
    if kind == "random codes":
        generator = torch.Generator().manual_seed(1)
        qdata = torch.randint(0, 256, (N, K // 2), generator=generator, dtype=torch.uint8)
        scale = torch.randint(0, 0x7F, (N, K // 16), generator=generator, dtype=torch.uint8)
        return NVFP4Parts(qdata, scale.view(torch.float8_e4m3fn), torch.tensor(1e-4))
    return quantize(weight, scales=kind)


def factors(size: float = 0.02) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(R, K, generator=generator) * size, torch.randn(N, R, generator=generator) * size


def same(a: NVFP4Parts, b: NVFP4Parts) -> bool:
    return weight_digest(a) == weight_digest(b)


@pytest.mark.parametrize("rounding, scales", MODES)
@pytest.mark.parametrize("kind", ["max", "four-over-six", "random codes"])
def test_a_zero_adapter_gives_the_base_bytes(kind: str, rounding: str, scales: str) -> None:
    """Scenario n19: also for bases whose requantization would change a third of the codes."""
    base = base_of(kind)
    lora_A, lora_B = factors()
    merged = merged_parts(base, lora_A, lora_B * 0, 2.0, name="w", rounding=rounding, scales=scales)
    assert same(merged, base)


@pytest.mark.parametrize("kind", ["max", "four-over-six", "random codes"])
def test_rows_without_a_change_keep_their_bytes(kind: str) -> None:
    base = base_of(kind)
    lora_A, lora_B = factors()
    lora_B[10:40] = 0
    merged = merged_parts(base, lora_A, lora_B, 2.0, name="w")
    assert torch.equal(merged.qdata[10:40], base.qdata[10:40])
    assert not torch.equal(merged.qdata, base.qdata) and torch.equal(
        merged.scale.view(torch.uint8), base.scale.view(torch.uint8)
    )


def test_dither_against_fp64() -> None:
    """Every merged code is one of the two neighbours of the wanted value on the base's grid."""
    base = base_of("max")
    lora_A, lora_B = factors()
    merged = merged_parts(base, lora_A, lora_B, 2.0, name="w")
    step = (base.scale.double() * base.global_scale.double()).repeat_interleave(16, dim=1)
    wanted = (dequantize(base).double() + 2.0 * lora_B.double() @ lora_A.double()) / step
    found = dequantize(merged).double() / step
    grid = torch.tensor(sorted({0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6}), dtype=torch.float64)
    clipped = wanted.clamp(-6, 6)
    below = grid[(torch.searchsorted(grid, clipped + 1e-6) - 1).clamp(0, 14)]
    above = grid[torch.searchsorted(grid, clipped - 1e-6).clamp(0, 14)]
    near_below, near_above = (found - below).abs() < 1e-5, (found - above).abs() < 1e-5
    assert (near_below | near_above).all() and near_above.any() and near_below.any()


def test_a_small_change_survives_dither_and_not_nearest() -> None:
    """Scenario n7. At 0.5% of the weight nearest rounding keeps next to nothing. Dither keeps what does not saturate:
    one value in 16 is at 6, half of those would grow, so about 3% is lost; the estimate's deviation is 2% here."""
    weight = torch.randn(1024, 512, generator=torch.Generator().manual_seed(0)) * 0.05
    base = quantize(weight)
    generator = torch.Generator().manual_seed(1)
    lora_A = torch.randn(8, 512, generator=generator) * 0.01
    lora_B = torch.randn(1024, 8, generator=generator) * 0.005
    dithered = retention(base, merged_parts(base, lora_A, lora_B, 2.0, name="w"), lora_A, lora_B, 2.0)
    nearest = retention(
        base, merged_parts(base, lora_A, lora_B, 2.0, name="w", rounding="nearest"), lora_A, lora_B, 2.0
    )
    assert 0.004 < dithered.relative_delta < 0.008
    assert dithered.kept > 0.88 and nearest.kept < 0.05


def test_nearest_fresh_is_the_plain_way() -> None:
    """What other tools compute: decode, add in fp32, round to the base's dtype, quantize on the base's tensor scale."""
    base = base_of("max")
    lora_A, lora_B = factors()
    merged = merged_parts(base, lora_A, lora_B, 2.0, name="w", rounding="nearest", scales="fresh", dtype=torch.bfloat16)
    delta = (2.0 * (lora_B.double() @ lora_A.double())).float()
    assert same(merged, quantize((dequantize(base) + delta).bfloat16(), global_scale=base.global_scale))


@pytest.mark.parametrize("rounding, scales", MODES)
def test_shards_agree_with_the_whole(rounding: str, scales: str) -> None:
    base = base_of("max")
    lora_A, lora_B = factors()
    whole = merged_parts(base, lora_A, lora_B, 2.0, name="w", seed=5, rounding=rounding, scales=scales)
    piece = NVFP4Parts(base.qdata[32:64, 16:64], base.scale[32:64, 2:8], base.global_scale)
    shard = merged_parts(
        piece,
        lora_A[:, 32:128],
        lora_B[32:64],
        2.0,
        name="w",
        seed=5,
        rounding=rounding,
        scales=scales,
        row_offset=32,
        column_offset=32,
    )
    assert torch.equal(shard.qdata, whole.qdata[32:64, 16:64])
    assert torch.equal(shard.scale.view(torch.uint8), whole.scale[32:64, 2:8].view(torch.uint8))


def test_settings_around_it_do_not_matter() -> None:
    """Autocast, TF32, gradients and the factors' strides change no bit; names and seeds do."""
    base = base_of("max")
    lora_A, lora_B = factors()
    expected = merged_parts(base, lora_A, lora_B, 2.0, name="w")
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            transposed = lora_A.T.contiguous().T.requires_grad_()
            found = merged_parts(base, transposed, lora_B.requires_grad_(), 2.0, name="w")
    finally:
        torch.set_float32_matmul_precision(precision)
    assert same(found, expected) and not found.qdata.requires_grad
    assert not same(merged_parts(base, lora_A, lora_B, 2.0, name="v"), expected)
    assert not same(merged_parts(base, lora_A, lora_B, 2.0, name="w", seed=1), expected)


def test_golden_codes() -> None:
    """The merged bytes are the format: integers only go in, so the digest must never change."""
    qdata = (torch.arange(32 * 32).reshape(32, 32) * 37 % 256).to(torch.uint8)
    scale = torch.full((32, 4), 1.0).to(torch.float8_e4m3fn)
    lora_A = (torch.arange(2 * 64).reshape(2, 64) % 7 - 3).float()
    lora_B = (torch.arange(32 * 2).reshape(32, 2) % 5 - 2).float()
    merged = merged_parts(NVFP4Parts(qdata, scale, torch.tensor(1.0)), lora_A, lora_B, 0.125, name="w", seed=3)
    assert f"{weight_digest(merged):016x}" == "29d600c1f3086fd5"


def test_refused() -> None:
    base = base_of("max")
    lora_A, lora_B = factors()
    with pytest.raises(ValueError, match="rounding is 'up'"):
        merged_parts(base, lora_A, lora_B, 1.0, name="w", rounding="up")
    with pytest.raises(ValueError, match="scales is 'new'"):
        merged_parts(base, lora_A, lora_B, 1.0, name="w", scales="new")
    with pytest.raises(ValueError, match=r"mlp.up: lora_A \[4, 80\].*base weight \[96, 160\]"):
        merged_parts(base, lora_A[:, :80], lora_B, 1.0, name="mlp.up")
    lora_B[3, 1] = float("nan")
    with pytest.raises(ValueError, match="mlp.up: the adapter holds NaN"):
        merged_parts(base, lora_A, lora_B, 1.0, name="mlp.up")
