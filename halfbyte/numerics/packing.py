"""Two 4-bit codes in a byte: the even column in the low nibble, the odd one in the high nibble (torchao's order)."""

import torch
from torch import Tensor


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes of 0 to 15, uint8 [..., K] with K even -> bytes, uint8 [..., K/2]."""
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise ValueError(
            f"4-bit codes must be uint8 with an even last dim, got {codes.dtype} {list(codes.shape)}; cast them, or "
            "pad the last dim"
        )
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes, uint8 [..., K/2] -> codes of 0 to 15, uint8 [..., K]."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed 4-bit codes must be uint8, got {packed.dtype}; pass what pack_nibbles returned")
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)
