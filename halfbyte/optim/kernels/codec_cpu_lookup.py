"""Look a byte up in a table of 256 floats, for every byte of a tile: half of the work of reading 8-bit moments.

`table[codes[i]]` vectorizes to a gather, which takes Zen 4 about one cycle a value (0.34 ns). AVX-512 VBMI permutes 64
bytes at a time through a table of 128 bytes in registers: a table of 256 floats is four planes of 256 bytes, each takes
two permutes and a blend, and the four results are woven together, 0.13 ns a value. LLVM does not find that by itself,
so the instruction is named here, where the machine has it; elsewhere the gather stays.
"""

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import config, types

from halfbyte.optim.kernels.codec_cpu_cast import helper, intrinsic, pointer

WIDTH = 64  # bytes of a permute
BYTES = ir.VectorType(ir.IntType(8), WIDTH)
FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
INT64 = ir.IntType(64)


def has_permutes() -> bool:
    """Whether the host has AVX-512 VBMI and numba compiles for the host."""
    if getattr(config, "CPU_NAME", None) or getattr(config, "CPU_FEATURES", None):  # numba was told another CPU
        return False
    try:
        return bool(llvm.get_host_cpu_features().get("avx512vbmi"))
    except RuntimeError:  # LLVM cannot tell on some platforms
        return False


def planes_of(table: np.ndarray) -> np.ndarray:
    """[up to 256] fp32 -> [4, 256] uint8: the table's lowest bytes, then the next, ...; missing entries are 0."""
    padded = np.zeros(256, np.float32)
    padded[: table.size] = table
    return np.ascontiguousarray(padded.view(np.uint8).reshape(256, 4).T)


def _weave(builder: Any, a: Any, b: Any, element: Any) -> Any:
    """a0 b0 a1 b1 ... of two vectors of 64, as 64 elements of twice the width."""
    order = [i + offset for i in range(WIDTH) for offset in (0, WIDTH)]
    mask = ir.Constant(ir.VectorType(ir.IntType(32), 2 * WIDTH), order)
    return builder.bitcast(builder.shuffle_vector(a, b, mask), ir.VectorType(element, WIDTH))


@intrinsic
def _look_up_64(typing_context: Any, planes: Any, codes: Any, out: Any) -> Any:
    """void* of planes [4, 256] uint8, codes [64] uint8 and out [64] fp32, which is written."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = "llvm.x86.avx512.vpermi2var.qi.512"  # (low half of a table, indices, high half); 7 bits of each index
        permute = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(BYTES, [BYTES, BYTES, BYTES]), name
        )
        tables, source, target = (builder.ptrtoint(arg, INT64) for arg in args)

        def load(address: Any, offset: int = 0) -> Any:
            address = builder.add(address, ir.Constant(INT64, offset))
            return builder.load(builder.inttoptr(address, BYTES.as_pointer()), align=1)

        codes_64 = load(source)
        is_upper = builder.icmp_signed("<", codes_64, ir.Constant(BYTES, [0] * WIDTH))
        planes_64 = []
        for start in range(0, 1024, 256):
            quarter = [load(tables, start + WIDTH * i) for i in range(4)]
            lower = builder.call(permute, [quarter[0], codes_64, quarter[1]])
            upper = builder.call(permute, [quarter[2], codes_64, quarter[3]])
            planes_64.append(builder.select(is_upper, upper, lower))
        halves = [_weave(builder, planes_64[i], planes_64[i + 1], ir.IntType(16)) for i in (0, 2)]
        values = builder.bitcast(_weave(builder, halves[0], halves[1], ir.IntType(32)), FLOATS)
        builder.store(values, builder.inttoptr(target, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.voidptr, types.voidptr, types.voidptr), codegen


if has_permutes():

    @helper
    def look_up(codes, table, planes, x):
        """x[i] = table[codes[i]]: codes [n] uint8 -> x [n] fp32, written; planes = planes_of(table)."""
        whole = x.size // 64
        for i in range(whole):
            _look_up_64(
                pointer(np.int64(planes.ctypes.data)),
                pointer(np.int64(codes.ctypes.data) + 64 * i),
                pointer(np.int64(x.ctypes.data) + 256 * i),
            )
        for i in range(64 * whole, x.size):
            x[i] = table[codes[i]]

else:

    @helper
    def look_up(codes, table, planes, x):
        """x[i] = table[codes[i]]: codes [n] uint8 -> x [n] fp32, written."""
        for i in range(x.size):
            x[i] = table[codes[i]]
