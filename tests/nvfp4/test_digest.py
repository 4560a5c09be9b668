"""An NVFP4 weight's digest: fixed, additive over shards in both dimensions, and sensitive to each component."""

import torch

from halfbyte.numerics.hashing import MASK
from halfbyte.nvfp4 import NVFP4Parts
from halfbyte.nvfp4.digest import global_scale_digest, model_digest, shard_digest, weight_digest


def some_parts(n: int = 6, k: int = 96) -> NVFP4Parts:
    qdata = torch.arange(n * k // 2).reshape(n, k // 2).to(torch.uint8)
    scale = (torch.arange(n * k // 16).reshape(n, k // 16) % 127).to(torch.uint8)
    return NVFP4Parts(qdata, scale.view(torch.float8_e4m3fn), torch.tensor(0.125))


def piece(parts: NVFP4Parts, rows: slice, blocks: slice) -> NVFP4Parts:
    columns = slice(blocks.start * 8, blocks.stop * 8)
    return NVFP4Parts(parts.qdata[rows, columns], parts.scale[rows, blocks], parts.global_scale)


def test_golden() -> None:
    """The values stand in files, so they must never change."""
    assert f"{weight_digest(some_parts()):016x}" == "ac8771571b6fa2cc"
    assert (
        model_digest({"b": ((6, 96), 2), "a": ((1, 16), 1)})
        == "57af61f9936807fadba2a9b2bbb2824a5e45784d01e399a5dcc9a0c4b16c801b"
    )


def test_shards_add_up() -> None:
    """Row shards, column shards at any block (three blocks: 24 bytes of codes, 3 of scale), and an empty one."""
    parts = some_parts()
    total = global_scale_digest(parts) + shard_digest(piece(parts, slice(0, 0), slice(0, 6)))
    total += shard_digest(piece(parts, slice(0, 2), slice(0, 6)))
    total += shard_digest(piece(parts, slice(2, 6), slice(0, 3)), row_offset=2, in_features=96)
    total += shard_digest(piece(parts, slice(2, 6), slice(3, 6)), row_offset=2, column_offset=48, in_features=96)
    assert total & MASK == weight_digest(parts)


def test_each_component_counts() -> None:
    parts = some_parts()
    qdata, scale = parts.qdata.clone(), parts.scale.view(torch.uint8).clone()
    qdata[5, 47] ^= 0x80  # the sign of one code; of a zero it is -0
    scale[0, 0] ^= 1
    variants = [
        parts,
        parts._replace(qdata=qdata),
        parts._replace(scale=scale.view(torch.float8_e4m3fn)),
        parts._replace(global_scale=torch.nextafter(parts.global_scale, torch.tensor(1.0))),
        NVFP4Parts(parts.qdata.reshape(3, 96), parts.scale.reshape(3, 12), parts.global_scale),
    ]
    digests = {weight_digest(variant) for variant in variants}
    assert (
        len(digests) == 4
    )  # the reshaped one has the same bytes at the same places; the shape is in the model's digest


def test_misaligned_bytes() -> None:
    parts = some_parts()
    flat = torch.cat((torch.zeros(3, dtype=torch.uint8), parts.qdata.flatten()))
    assert weight_digest(parts._replace(qdata=flat[3:].view(6, 48))) == weight_digest(parts)
