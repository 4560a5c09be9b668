"""Content digests of a whole model, by name, to compare what ranks hold."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.numerics.digest import digest_words
from halfbyte.numerics.hashing import MASK
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.digest import weight_digest
from halfbyte.nvfp4.linear import COMPONENTS
from halfbyte.parallel.describe import named_tensors

ROW_WORDS = 4096  # a dense tensor is digested as rows of 32 KiB, so that temporaries stay small


def content_digests(model: nn.Module) -> dict[str, str]:
    """16 hex digits for each NVFP4 weight and for every other parameter and buffer, tied ones once per name."""
    layers = nvfp4_modules(model)
    components = {f"{fqn}.{name}" for fqn in layers for name in COMPONENTS}
    digests = {fqn: weight_digest(layer.parts()) for fqn, layer in layers.items()}
    digests |= {name: tensor_digest(t) for name, t in named_tensors(model).items() if name not in components}
    return {name: f"{digest:016x}" for name, digest in digests.items()}


def tensor_digest(tensor: Tensor) -> int:
    """64-bit digest of the bytes of any tensor in row-major order; the same on every device."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:  # a slice of a larger buffer may begin anywhere
        raw = raw.clone()
    num_rows, num_rest = divmod(raw.numel(), 8 * ROW_WORDS)
    body = raw[: raw.numel() - num_rest].view(torch.int64).view(num_rows, ROW_WORDS)
    rest = torch.zeros(8 * ROW_WORDS, dtype=torch.uint8, device=raw.device)
    rest[:num_rest] = raw[raw.numel() - num_rest :]
    rest_digest = digest_words(rest.view(torch.int64).view(1, ROW_WORDS), component=0, row_offset=num_rows)
    return (digest_words(body, component=0, width=ROW_WORDS) + rest_digest) & MASK


def row_digest(tensor: Tensor, *, row_offset: int = 0) -> int:
    """64-bit digest that adds up (modulo 2^64) over pieces cut along the first dimension.

    row_offset  where the piece begins in the whole tensor.
    """
    if tensor.numel() == 0:
        return 0
    rows = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1).contiguous().view(torch.uint8)
    if rows.shape[1] % 8 or rows.storage_offset() % 8:
        padded = torch.zeros(rows.shape[0], -(-rows.shape[1] // 8) * 8, dtype=torch.uint8, device=rows.device)
        padded[:, : rows.shape[1]] = rows
        rows = padded
    return digest_words(rows.view(torch.int64), component=0, row_offset=row_offset)


def digest_sums(payloads: Iterable[dict[str, Any]]) -> dict[int, dict[str, int]]:
    """Sums of `shards` digests per name over the ranks of each `copy` of the model."""
    sums: dict[int, dict[str, int]] = {}
    for payload in payloads:
        copy = sums.setdefault(payload["copy"], {})
        for name, digest in payload["shards"].items():
            copy[name] = (copy.get(name, 0) + digest) & MASK
    return sums
