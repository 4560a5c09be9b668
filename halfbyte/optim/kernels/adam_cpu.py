"""Adam's formula on a tile in fp32, block by block, with each block's largest magnitudes.

Formula and rounding follow torch's CPU kernels (lerp and addcmul are fused multiply-adds), so that results equal
step_ref's bit for bit wherever its torch uses the same instructions.
"""

import math

from halfbyte.optim.kernels.codec_cpu import larger
from halfbyte.optim.kernels.codec_cpu_cast import F32, U32, fma, helper


@helper
def prepare_gradient(g, p, out, grad_scale, maximize, l2):
    """A copy of g that is unscaled, flipped, and given an L2 penalty; `out` may be g itself."""
    sign = F32(-1) if maximize else F32(1)
    for i in range(g.size):
        out[i] = sign * (g[i] / grad_scale)
    if l2 != F32(0):
        for i in range(g.size):
            out[i] = out[i] + l2 * p[i]


@helper
def _lerp(m, g, weight):
    """torch's: exact at both ends, so from the nearer one."""
    return fma(weight, g - m, m) if weight < F32(0.5) else fma(weight - F32(1), g - m, g)


@helper
def _adam(p, g, m, v, keep, weight1, beta2, weight2, factor, root, eps):
    """AdamW of a block, in place; the patterns of the largest magnitudes of its new moments are returned.

    keep = 1 - lr * decay; factor and root are `advance`'s; weights are 1 - beta.
    """
    largest_m, largest_v = U32(0), U32(0)
    for i in range(p.size):
        m[i] = _lerp(m[i], g[i], weight1)
        v[i] = fma(weight2 * g[i], g[i], v[i] * beta2)
        p[i] = p[i] * keep + factor * m[i] / (math.sqrt(v[i]) * root + eps)
        largest_m, largest_v = larger(largest_m, m[i]), larger(largest_v, v[i])
    return largest_m, largest_v


@helper
def _amsgrad(p, g, m, v, d, keep, weight1, beta2, weight2, factor, root, eps):
    """The same with d, the largest v so far, in the denominator."""
    largest_m, largest_v, largest_d = U32(0), U32(0), U32(0)
    for i in range(p.size):
        m[i] = _lerp(m[i], g[i], weight1)
        v[i] = fma(weight2 * g[i], g[i], v[i] * beta2)
        # torch.maximum: a NaN on either side wins
        d[i] = v[i] if (v[i] > d[i]) | (v[i] != v[i]) else d[i]
        p[i] = p[i] * keep + factor * m[i] / (math.sqrt(d[i]) * root + eps)
        largest_m, largest_v = larger(largest_m, m[i]), larger(largest_v, v[i])
        largest_d = larger(largest_d, d[i])
    return largest_m, largest_v, largest_d


@helper
def update(p, g, moments, block_size, largest, *scalars):
    """The formula, block by block; largest [K, blocks] is written."""
    for block in range(largest.shape[1]):
        lo, hi = block * block_size, min(p.size, (block + 1) * block_size)
        m, v, d = moments[0][lo:hi], moments[1][lo:hi], moments[moments.shape[0] - 1][lo:hi]
        if moments.shape[0] == 2:
            largest[0, block], largest[1, block] = _adam(p[lo:hi], g[lo:hi], m, v, *scalars)
        else:
            largest[0, block], largest[1, block], largest[2, block] = _amsgrad(p[lo:hi], g[lo:hi], m, v, d, *scalars)
