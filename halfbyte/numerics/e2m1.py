"""E2M1, the 4-bit float of NVFP4: sign, two exponent bits, one mantissa bit; sixteen codes, no NaN, no infinity.

The code of a magnitude m is its place on a line that bends twice, at 2 and at 4, where the step doubles:
`place(m) = min(2m, m + 2, m/2 + 4)`, and a grid value's place is exactly its code. The line is concave, so rounding
each of the three pieces and taking the smallest is the rounding to the nearest code, and torch's round-half-even gives
ties to the even code, as torchao does. Rejected: torchao's route over the bits of the float (ten integer operations),
and a search in the seven midpoints.
"""

import torch
from torch import Tensor

E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = E2M1_MAGNITUDES + tuple(-value for value in E2M1_MAGNITUDES)  # by code; code 8 is -0.0
SIGN_BIT = 8


def encode(x: Tensor) -> Tensor:
    """Nearest codes, ties to the even one, saturating at +-6; a negative that rounds to zero becomes -0 (code 8).

    x        fp32, any shape, no NaN.
    returns  uint8 codes, same shape.
    """
    magnitude = x.abs()
    # Rounding comes before the additions: m + 2 in fp32 would lose the last bits of m and with them the side of a tie.
    code = torch.minimum((magnitude * 2).round_(), magnitude.round().add_(2))
    code = torch.minimum(code, magnitude.mul_(0.5).round_().add_(4)).clamp_(max=7)
    return code.to(torch.uint8) | torch.signbit(x).to(torch.uint8).mul_(SIGN_BIT)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of uint8 codes, same shape; exact in bf16, fp16 and fp32."""
    table = torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)
    return table[codes.to(torch.int32)]
