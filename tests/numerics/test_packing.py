"""Nibbles: the even column lies low, all 256 bytes round-trip, and torchao packs alike."""

import pytest
import torch

from halfbyte.numerics.packing import pack_nibbles, unpack_nibbles


def test_even_column_is_the_low_nibble() -> None:
    assert pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]


def test_every_byte_comes_back() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(2, 4, 32)
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)


def test_torchao_packs_alike() -> None:
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    codes = torch.randint(0, 16, (5, 48), dtype=torch.uint8)
    assert torch.equal(pack_nibbles(codes), kernels.pack_uint4(codes))


def test_empty_and_refused_shapes() -> None:
    assert pack_nibbles(torch.empty(0, 16, dtype=torch.uint8)).shape == (0, 8)
    with pytest.raises(ValueError, match="even last dim"):
        pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        unpack_nibbles(torch.zeros(2, 4, dtype=torch.int32))
