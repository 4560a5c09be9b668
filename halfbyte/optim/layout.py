"""How a quantized state lies in a state dict: the same for every mesh, so that a checkpoint can be cut anew.

In memory a block's scale belongs to `block_size` consecutive values of the flattened local shard. In a state dict the
codes have the parameter's shape and a scale is repeated for every *granule*, a run of at most 64 values along the last
dimension, which no shard cuts apart (4/64 byte a value and moment). Codes and scales are then ordinary tensors that
shard as their parameter does: DTensors for a DTensor parameter, of shapes that depend on the whole parameter alone.

    view      the parameter's shape if its last dimension is whole granules, else [rows, all the rest]
    granule   gcd(last dimension of the view, block size, 64); 1 for 1-D parameters of up to 2^20 values, which engines
              cut anywhere, and gcd(block size, 64) for longer ones (flat partitions of ZeRO)
    codes     8 bits: the parameter's shape; 4 bits: the view with half the last dimension, or (that being odd, or the
              parameter 1-D and short) the parameter's shape with one code a byte
    scales    the view with ceil(last / granule) values in the last dimension

Reading back: a block whose granules agree keeps its codes, bit for bit; one that another mesh has cut differently is
dequantized and quantized once. Sharding along the last dimension in pieces that are not whole granules cannot be
written so; there the state is gathered and written replicated (a collective, so call `state_dict` on every rank).

Rejected: saving fp32 moments (4 times the bytes, and quantizing again changes codes), and blocks laid row by row
(a LoRA factor with r = 16 would carry a scale for every 16 values in memory too).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.optim.formats import StateFormat
from halfbyte.optim.sharding import is_dtensor, local_region, own_slice, replicated, to_dtensor
from halfbyte.optim.state_ops import decode_table, dequantize, pack, quantize, unpack

LONG = 2**20


class Layout(NamedTuple):
    """Shapes of one moment in a state dict, see the file's docstring."""

    view: tuple[int, ...]
    granule: int
    codes: tuple[int, ...]
    scales: tuple[int, ...]
    packed: bool


def layout_of(shape: tuple[int, ...], fmt: StateFormat) -> Layout:
    """The layout of a parameter of this whole shape."""
    shape = tuple(shape) or (1,)
    view: tuple[int, ...] = shape
    most = math.gcd(fmt.block_size, 64)
    if len(shape) == 1:
        granule = 1 if shape[0] <= LONG else most
    elif shape[-1] % most == 0:
        granule = most
    else:
        view = (shape[0], math.prod(shape[1:]))
        granule = math.gcd(view[-1], most)
    packed = fmt.bits == 4 and view[-1] % 2 == 0 and (len(shape) > 1 or shape[0] > LONG)
    codes = (*view[:-1], view[-1] // 2) if packed else shape
    return Layout(view, granule, codes, (*view[:-1], -(-view[-1] // granule)), packed)


def shards_align(param: Any, layout: Layout) -> bool:
    """Whether the parameter's shards are whole granules (and bytes), so that codes and scales shard as it does."""
    if not is_dtensor(param):
        return True
    unit = math.lcm(layout.granule, 2 if layout.packed else 1)
    last_dim, pieces = len(layout.view) - 1, 1
    for placement, size in zip(param.placements, param.device_mesh.shape, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is None:  # Replicate
            continue
        if len(layout.view) != param.dim() and dim > 0:
            return False
        pieces *= size if dim == last_dim else 1
    return pieces == 1 or unit == 1 or layout.view[-1] % (pieces * unit) == 0


def export_moment(param: Any, codes: Tensor, scale: Tensor, fmt: StateFormat, *, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a state dict from the local ones; DTensors if the parameter is one.

    codes shares memory with the state where it can (8 bits); scales is new.
    """
    whole = tuple(param.shape)
    layout = layout_of(whole, fmt)
    if not shards_align(param, layout):
        shape, _ = local_region(param)
        values = dequantize(codes, scale, fmt, math.prod(shape), signed=signed).view(shape)
        gathered = to_dtensor(values, param, whole).full_tensor().reshape(-1)  # type: ignore[attr-defined]
        codes, scale = quantize(gathered, fmt, signed=signed)
        pieces = _spread(codes, scale, whole, layout, fmt)
        return replicated(pieces[0], param), replicated(pieces[1], param)
    shape, _ = local_region(param)
    file_codes, file_scales = _spread(codes, scale, shape, layout, fmt)
    if not is_dtensor(param):
        return file_codes, file_scales
    return to_dtensor(file_codes, param, layout.codes), to_dtensor(file_scales, param, layout.scales)


def _local_view(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The view of a local shard of this shape."""
    shape = tuple(shape) or (1,)
    if len(shape) == len(layout.view):
        return shape
    return (shape[0], layout.view[1])


def _spread(
    codes: Tensor, scale: Tensor, shape: tuple[int, ...], layout: Layout, fmt: StateFormat
) -> tuple[Tensor, Tensor]:
    """Flat codes and block scales -> the shapes of the layout, for a shard of this shape."""
    view = _local_view(shape, layout)
    if layout.packed:
        codes = codes.view(*view[:-1], view[-1] // 2)
    else:
        codes = (unpack(codes, math.prod(view)) if fmt.bits == 4 else codes).view(shape or (1,))
    per_row = -(-view[-1] // layout.granule)
    num_granules = math.prod(view[:-1]) * per_row
    scales = scale.repeat_interleave(fmt.block_size // layout.granule)[:num_granules]
    return codes, scales.view(*view[:-1], per_row)


def import_moment(
    param: Any, codes: Tensor, scales: Tensor, saved: StateFormat, fmt: StateFormat, *, signed: bool
) -> tuple[Tensor, Tensor, bool]:
    """Local (codes, scale) from a state dict's, which may be whole plain tensors, or DTensors as `export_moment` makes.

    saved    the format in the state dict; fmt is the one wanted.
    returns  codes, scale, and whether all codes are the saved ones.
    raises   ValueError when a shape is not what the parameter's shape asks for.
    """
    layout = layout_of(tuple(param.shape), saved)
    for name, tensor, expected in (("codes", codes, layout.codes), ("scales", scales, layout.scales)):
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"{saved.name} {name} of shape {list(tensor.shape)} do not fit a parameter of shape "
                f"{list(param.shape)}, which takes {list(expected)}. Is this the state of another model? Load one "
                "saved from this model."
            )
    shape, _ = local_region(param)
    if is_dtensor(param) and shards_align(param, layout) and (is_dtensor(codes) or layout.view == tuple(param.shape)):
        codes, scales = _own_piece(codes, param), _own_piece(scales, param)
        return _gather_blocks(codes, scales, shape, layout, saved, fmt, signed=signed)
    codes, scales = _whole(codes), _whole(scales)
    if not is_dtensor(param):
        return _gather_blocks(codes, scales, shape, layout, saved, fmt, signed=signed)
    values = whole_values(param, codes, scales, saved, signed=signed)
    return *quantize(own_slice(values, param).reshape(-1), fmt, signed=signed), False


def whole_values(param: Any, codes: Tensor, scales: Tensor, saved: StateFormat, *, signed: bool) -> Tensor:
    """fp32 values of the whole parameter, in its shape, from a state dict's codes and scales."""
    layout = layout_of(tuple(param.shape), saved)
    values = _values(_whole(codes), _whole(scales), tuple(param.shape), layout, saved, signed=signed)
    return values.view(param.shape)


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def _own_piece(tensor: Any, param: Any) -> Tensor:
    """The local piece of a file tensor that shards as the parameter does."""
    if not is_dtensor(tensor):
        return own_slice(tensor, param)
    if tensor.placements != param.placements:
        tensor = tensor.redistribute(param.device_mesh, param.placements)
    return tensor.to_local()


def _flat_codes(codes: Tensor, view: tuple[int, ...], layout: Layout, fmt: StateFormat) -> Tensor:
    """One code a byte, flat."""
    return unpack(codes.reshape(-1), math.prod(view)) if layout.packed else codes.reshape(-1)


def _values(
    codes: Tensor, scales: Tensor, shape: tuple[int, ...], layout: Layout, fmt: StateFormat, *, signed: bool
) -> Tensor:
    """Flat fp32 values of a shard of this shape."""
    view = _local_view(shape, layout)
    flat = _flat_codes(codes, view, layout, fmt)
    values = decode_table(fmt.name, signed, flat.device).index_select(0, flat.int()).view(view)
    spread = scales.reshape(*view[:-1], -1).repeat_interleave(layout.granule, dim=-1)[..., : view[-1]]
    return (values * spread).reshape(-1)


def _gather_blocks(
    codes: Tensor,
    scales: Tensor,
    shape: tuple[int, ...],
    layout: Layout,
    saved: StateFormat,
    fmt: StateFormat,
    *,
    signed: bool,
) -> tuple[Tensor, Tensor, bool]:
    """Flat codes and block scales of a shard from pieces in the file's shapes."""
    numel = math.prod(shape)
    if saved.name != fmt.name or fmt.block_size % layout.granule:
        values = _values(codes, scales, shape, layout, saved, signed=signed)
        return *quantize(values, fmt, signed=signed), numel == 0
    flat = _flat_codes(codes, _local_view(shape, layout), layout, saved)
    per_block = fmt.block_size // layout.granule
    granules = scales.reshape(-1)
    missing = fmt.num_blocks(numel) * per_block - granules.numel()
    if missing:
        granules = torch.cat([granules, granules[-1:].expand(missing)])
    granules = granules.view(-1, per_block)
    agree = (granules == granules[:, :1]).all(1)
    scale, exact = granules[:, 0].contiguous(), bool(agree.all())
    if not exact:
        values = _values(codes, scales, shape, layout, saved, signed=signed)
        new, new_scale = quantize(values, fmt, signed=signed)
        new = unpack(new, numel) if fmt.bits == 4 else new
        flat = torch.where(agree.repeat_interleave(fmt.block_size)[:numel], flat, new)
        scale = torch.where(agree, scale, new_scale)
    return (pack(flat) if fmt.bits == 4 else flat.clone()), scale, exact
