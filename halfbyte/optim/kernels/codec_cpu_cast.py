"""Scalar casts for the numba kernels: bits of a float, and bfloat16 / float16 / E4M3 to and from float32.

Numba has no 16- and 8-bit floats, so such tensors are seen as uint16 or uint8 and cast here by integer arithmetic.
Every function is branch-free and works on 32-bit values only, so that LLVM vectorizes the loops that call it: numba
widens `uint32 + uint32` to 64 bits, hence the np.uint32(...) around every operation. Casts round to nearest even, as
torch's do; a NaN stays a NaN. Rejected: LLVM's own half type, which needs a support library on CPUs without F16C.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit, types

# Of a function that only kernels call: no entry from Python is compiled, 1/0 is infinity, and references to arrays are
# not counted (memory_cpu says why). The stubs of numba do not know the options.
HELPER: dict[str, Any] = {"_nrt": False, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
KERNEL: dict[str, Any] = {"_nrt": False, "error_model": "numpy", "cache": True, "nogil": True}  # called from Python
helper: Any = njit(**HELPER)
intrinsic: Any = extending.intrinsic

U32 = np.uint32
F32 = np.float32
INF_BITS = U32(0x7F800000)
ABS_MASK = U32(0x7FFFFFFF)

HALF_MIN_NORMAL = U32(113 << 23)  # 2^-14
HALF_OVERFLOW = U32(0x477FF000)  # 65520: rounds to infinity
E4M3_MIN_NORMAL = U32(121 << 23)  # 2^-6


@intrinsic
def bits_of(typing_context: Any, x: Any) -> Any:
    """float32 -> its uint32 pattern."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def float_of(typing_context: Any, x: Any) -> Any:
    """uint32 pattern -> float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once; float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@helper
def bf16_to_float(h):
    return float_of(U32(U32(h) << U32(16)))


@helper
def float_to_bf16(x):
    u = bits_of(x)
    rounded = U32(U32(u + U32(U32(u >> U32(16)) & U32(1))) + U32(0x7FFF)) >> U32(16)
    quiet_nan = U32(u >> U32(16)) | U32(64)
    return np.uint16(quiet_nan if U32(u & ABS_MASK) > INF_BITS else rounded)


@helper
def half_to_float(h):
    """float16 pattern -> float32. A subnormal is a multiple of 2^-24, so it is counted rather than shifted."""
    u = U32(h)
    magnitude = U32(u & U32(0x7FFF))
    normal = U32(U32(magnitude << U32(13)) + U32(112 << 23))
    special = U32(U32(magnitude << U32(13)) | INF_BITS)
    tiny = bits_of(F32(np.int32(magnitude)) * F32(2.0**-24))
    body = tiny if magnitude < U32(0x400) else (special if magnitude >= U32(0x7C00) else normal)
    return float_of(U32(body | U32(U32(u & U32(0x8000)) << U32(16))))


@helper
def float_to_half(x):
    """float32 -> float16 pattern. Adding 0.5 to a value below 2^-14 leaves its multiple of 2^-24 in the low bits."""
    u = bits_of(x)
    magnitude = U32(u & ABS_MASK)
    lowest = U32(U32(magnitude >> U32(13)) & U32(1))
    normal = U32(U32(U32(magnitude - U32(112 << 23)) + U32(U32(0xFFF) + lowest)) >> U32(13))
    tiny = U32(bits_of(float_of(magnitude) + F32(0.5)) - U32(0x3F000000))
    special = U32(0x7E00) if magnitude > INF_BITS else U32(0x7C00)
    body = special if magnitude >= HALF_OVERFLOW else (tiny if magnitude < HALF_MIN_NORMAL else normal)
    return np.uint16(U32(body | U32(U32(u >> U32(16)) & U32(0x8000))))


@helper
def e4m3_to_float(code):
    """E4M3 pattern (not NaN) -> float32. A subnormal is read as 2^-6 (1 + m/8) and loses the 2^-6 again."""
    u = U32(code)
    magnitude = U32(u & U32(0x7F))
    subnormal = magnitude < U32(8)
    exponent = U32(121 << 23) if subnormal else U32(120 << 23)
    value = float_of(U32(U32(magnitude << U32(20)) + exponent)) - (F32(2.0**-6) if subnormal else F32(0.0))
    return float_of(U32(bits_of(value) | U32(U32(u & U32(0x80)) << U32(24))))


@helper
def float_to_e4m3(y):
    """float32, finite -> E4M3 pattern as uint32; beyond 448 saturates."""
    u = bits_of(y)
    magnitude = U32(u & ABS_MASK)
    lowest = U32(U32(magnitude >> U32(20)) & U32(1))
    normal = U32(U32(U32(magnitude - U32(120 << 23)) + U32(U32(0x7FFFF) + lowest)) >> U32(20))
    tiny = U32(bits_of(float_of(magnitude) + F32(2.0**14)) - U32(0x46800000))  # multiples of 2^-9
    body = tiny if magnitude < E4M3_MIN_NORMAL else normal
    body = U32(126) if body > U32(126) else body
    return U32(body | U32(U32(u >> U32(24)) & U32(0x80)))
