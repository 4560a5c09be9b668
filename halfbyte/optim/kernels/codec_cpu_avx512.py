"""The words in which codec_cpu_lookup and codec_cpu_guess are written: 64 values at a time, in AVX-512 VBMI.

LLVM vectorizes loops by itself, but finds neither a look-up in a table that lies in registers (`permute` of 64 bytes)
nor the packing that makes it pay, so two inner loops name their instructions. They are built of the functions here,
which take an llvmlite builder and give back LLVM values:

quarters  four registers of sixteen 32-bit values, 64 in their natural order.
bytes     one register of 64 bytes, in packed order: packing and unpacking work within 128-bit lanes, so the sixteen
          groups of four lie as in a transposed 4 x 4 matrix. `transposed` goes from one order to the other and back.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

INT32, INT64 = ir.IntType(32), ir.IntType(64)
BYTES = ir.VectorType(ir.IntType(8), 64)
WORDS = ir.VectorType(ir.IntType(16), 32)
INTS = ir.VectorType(INT32, 16)
FLOATS = ir.VectorType(ir.FloatType(), 16)
TRANSPOSE = [4 * column + row for row in range(4) for column in range(4)]

Vector = Any  # an LLVM value of one of the types above


def planes_of(table: np.ndarray) -> np.ndarray:
    """[up to 256] fp32 -> [4, 16, 128 or 256] uint8: the table's lowest bytes, then the next, ...; 0 beyond its end."""
    entries = next(n for n in (16, 128, 256) if table.size <= n)
    padded = np.zeros(entries, np.float32)
    padded[: table.size] = table
    return padded.view(np.uint8).reshape(entries, 4).T


def constant(kind: Any, value: int) -> Vector:
    """`value` in every place."""
    return ir.Constant(kind, [value] * kind.count)


def call(builder: Any, name: str, result: Any, *args: Vector) -> Vector:
    """An intrinsic of LLVM."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), args)


def _at(builder: Any, pointer: Any, offset: int, kind: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [ir.Constant(INT64, offset)]), kind.as_pointer())


def load(builder: Any, pointer: Any, offset: int, kind: Any) -> Vector:
    """From void* and an offset in bytes, of any alignment."""
    return builder.load(_at(builder, pointer, offset, kind), align=1)


def store(builder: Any, value: Vector, pointer: Any, offset: int = 0) -> None:
    builder.store(value, _at(builder, pointer, offset, value.type), align=1)


def rearranged(builder: Any, a: Vector, b: Vector, order: Sequence[int]) -> Vector:
    """Places `order` of a and b, one behind the other."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(order)), list(order)))


def transposed(builder: Any, x: Vector) -> Vector:
    """Bytes from their natural to the packed order, and back."""
    groups = builder.bitcast(x, INTS)
    return builder.bitcast(rearranged(builder, groups, groups, TRANSPOSE), BYTES)


def everywhere(builder: Any, x: Any) -> Vector:
    """A float in sixteen places."""
    first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), x, ir.Constant(INT32, 0))
    return rearranged(builder, first, first, [0] * 16)


def packed(builder: Any, quarters: Sequence[Vector]) -> tuple[Vector, Vector]:
    """Quarters to 16 bits, as unsigned numbers: what is below 0 or above 65,535 ends there."""
    name = "llvm.x86.avx512.packusdw.512"
    return tuple(call(builder, name, WORDS, quarters[i], quarters[i + 1]) for i in (0, 2))


def packed_bytes(builder: Any, words: Sequence[Vector]) -> Vector:
    """Words below 256 to bytes."""
    return call(builder, "llvm.x86.avx512.packuswb.512", BYTES, *words)


def signs(builder: Any, quarters: Sequence[Vector]) -> Vector:
    """Bytes that are below, at or above 0 as the quarters' integers are."""
    words = [call(builder, "llvm.x86.avx512.packssdw.512", WORDS, quarters[i], quarters[i + 1]) for i in (0, 2)]
    return call(builder, "llvm.x86.avx512.packsswb.512", BYTES, *words)


def unpacked(builder: Any, low: Vector, high: Vector) -> tuple[Vector, Vector]:
    """Numbers of twice the width, made of a low and a high half each: the first two quarters' worth, the second."""
    count, kind = low.type.count, ir.VectorType(ir.IntType(2 * low.type.element.width), low.type.count // 2)
    lane = count // 4

    def half(start: int) -> Vector:
        order = [at + i for at in range(start, count, lane) for i in range(lane // 2)]
        return builder.bitcast(rearranged(builder, low, high, [i + j for i in order for j in (0, count)]), kind)

    return half(0), half(lane // 2)


def quarters_of(builder: Any, planes: Sequence[Vector]) -> list[Vector]:
    """32-bit numbers made of four bytes each, the lowest first."""
    low, high = unpacked(builder, *planes[:2]), unpacked(builder, *planes[2:])
    return [quarter for i in (0, 1) for quarter in unpacked(builder, low[i], high[i])]


def looked_up(builder: Any, tables: np.ndarray, index: Vector) -> list[Vector]:
    """A byte of each table for every byte of `index`: tables [T, 16, 128 or 256] uint8, index below that length.

    They become constants of the kernel, which lie aligned; loads across two cache lines would take twice as long.
    """

    def part(table: np.ndarray) -> Vector:
        return ir.Constant(BYTES, [int(entry) for entry in table])

    def of_128(table: np.ndarray) -> Vector:
        name = "llvm.x86.avx512.vpermi2var.qi.512"  # (first half of a table, indices, second half)
        return call(builder, name, BYTES, part(table[:64]), index, part(table[64:128]))

    if tables.shape[1] == 16:
        name = "llvm.x86.avx512.pshuf.b.512"
        return [call(builder, name, BYTES, part(np.tile(table, 4)), index) for table in tables]
    if tables.shape[1] == 128:
        return [of_128(table) for table in tables]
    is_upper = builder.icmp_signed("<", index, constant(BYTES, 0))
    return [builder.select(is_upper, of_128(table[128:]), of_128(table)) for table in tables]
