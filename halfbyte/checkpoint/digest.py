"""A weight's digest a few rows at a time: the digest adds over shards (halfbyte.nvfp4.digest), so memory need not."""

from halfbyte.numerics.hashing import MASK
from halfbyte.nvfp4.digest import global_scale_digest, shard_digest
from halfbyte.nvfp4.format import NVFP4Parts
from halfbyte.nvfp4.quantize import row_chunks

CHUNKS = 16  # of row_chunks at a time: a few million values


def streamed_digest(parts: NVFP4Parts) -> int:
    """`weight_digest(parts)` without temporaries of the weight's size."""
    total = global_scale_digest(parts)
    rows, cols = parts.shape
    chunks = row_chunks(rows, cols)
    for start in range(0, len(chunks), CHUNKS):
        piece = slice(chunks[start].start, chunks[min(start + CHUNKS, len(chunks)) - 1].stop)
        shard = NVFP4Parts(parts.qdata[piece], parts.scale[piece], parts.global_scale)
        total += shard_digest(shard, row_offset=piece.start, in_features=cols)
    return total & MASK
