"""Memory by address, for the numba kernels: arrays that numba does not own, and pointers.

The kernels are compiled without numba's reference counts (`_nrt` in codec_cpu_cast): a count is an atomic operation,
which waits for all that is under way, and a slice of an array would take two. So a kernel may slice arrays but neither
make nor return them; these here are views of memory that others keep alive.
"""

from typing import Any

from numba import types
from numba.np import arrayobj

from halfbyte.optim.kernels.codec_cpu_cast import intrinsic

LINE = 64
"""Bytes of a cache line."""


def _array_at(dtype: Any) -> Any:
    """`array(address, n)`: n values at an int64 address."""
    size = dtype.bitwidth // 8

    @intrinsic
    def array(typing_context: Any, address: Any, n: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            view = arrayobj.make_array(signature.return_type)(context, builder)
            data = builder.inttoptr(args[0], context.get_data_type(dtype).as_pointer())
            stride = context.get_constant(types.intp, size)
            arrayobj.populate_array(view, data=data, shape=[args[1]], strides=[stride], itemsize=stride, meminfo=None)
            return view._getvalue()

        return types.Array(dtype, 1, "C")(types.int64, types.int64), codegen

    return array


floats, halves, octets = _array_at(types.float32), _array_at(types.uint16), _array_at(types.uint8)


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """int64 address -> void*."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen
