"""The moments of a tile: decoded from their codes, and encoded again; what is not finite is set aside."""

from halfbyte.optim.kernels.codec_cpu import EIGHT, FOUR, decode, encode, larger, pack, scale_of, unpack
from halfbyte.optim.kernels.codec_cpu_cast import F32, INF_BITS, U32, bits_of, helper
from halfbyte.optim.kernels.memory_cpu import floats, octets
from halfbyte.optim.kernels.table_cpu import MOMENTS, QUANTIZED


@helper
def _copy(source, target):
    for i in range(target.size):
        target[i] = source[i]


@helper
def _code_of_bad(fmt, signed):
    """state_ops: the zero code of a first moment, the largest code of a second."""
    if signed:
        return 127 if fmt == EIGHT else (7 if fmt == FOUR else 0)
    return 255 if fmt == EIGHT else (15 if fmt == FOUR else 126)


@helper
def _all_finite(largest):
    for k in range(largest.shape[0]):
        for block in range(largest.shape[1]):
            if largest[k, block] >= INF_BITS:
                return False
    return True


@helper
def _set_aside(moments, n, block_size, largest, bad):
    """Mark the elements of which a moment is not finite in `bad` [tile] uint8, and set all their moments to 0, so that
    they have no share in any scale; `largest` is found anew."""
    for i in range(n):
        for k in range(moments.shape[0]):
            if U32(bits_of(moments[k, i]) & INF_BITS) == INF_BITS:
                bad[i] = 1
    for k in range(moments.shape[0]):
        largest[k, :] = U32(0)
        for i in range(n):
            moments[k, i] = F32(0) if bad[i] else moments[k, i]
            largest[k, i // block_size] = larger(largest[k, i // block_size], moments[k, i])


@helper
def read_moments(row, start, n, fmt, block_size, moments, codes):
    """Decode n values of a tile, or copy them where the states are fp32."""
    for k in range(moments.shape[0]):
        address = row[MOMENTS + 2 * k]
        if row[QUANTIZED] == 0:
            _copy(floats(address + 4 * start, n), moments[k][:n])
            continue
        first, num_blocks = start // block_size, (n + block_size - 1) // block_size
        scales = floats(row[MOMENTS + 2 * k + 1] + 4 * first, num_blocks)
        if fmt == FOUR:
            unpack(octets(address + start // 2, (n + 1) // 2), codes[k][:n])
            decode(codes[k][:n], scales, block_size, fmt, k == 0, moments[k][:n])
        else:
            decode(octets(address + start, n), scales, block_size, fmt, k == 0, moments[k][:n])


@helper
def write_moments(row, start, n, fmt, block_size, moments, codes, largest, bad):
    """Encode n values of a tile into memory: moments [K, tile] fp32, exp_avg first, which is the only signed one."""
    if row[QUANTIZED] == 0:
        for k in range(moments.shape[0]):
            _copy(moments[k], floats(row[MOMENTS + 2 * k] + 4 * start, n))
        return
    finite = _all_finite(largest)
    if not finite:
        _set_aside(moments, n, block_size, largest, bad)
    for k in range(moments.shape[0]):
        scales = floats(row[MOMENTS + 2 * k + 1] + 4 * (start // block_size), largest.shape[1])
        for block in range(largest.shape[1]):
            scales[block] = scale_of(largest[k, block], fmt)
        out = codes[k][:n] if fmt == FOUR else octets(row[MOMENTS + 2 * k] + start, n)
        encode(moments[k][:n], scales, block_size, fmt, k == 0, out)
        if not finite:
            for i in range(n):
                out[i] = _code_of_bad(fmt, k == 0) if bad[i] else out[i]
        if fmt == FOUR:
            pack(out, octets(row[MOMENTS + 2 * k] + start // 2, (n + 1) // 2))
    if not finite:
        bad[:] = 0
