"""The text and the model behind optim_quality.py: a small language model, trained from scratch on Python sources.

Text: every .py file of the standard library and of the installed torch, which any machine that runs this has, cut into
pieces of 8,000 characters; one piece in twenty is held out, chosen by the hash of its text. Whole files were held out
at first: a dozen large ones were 40% of the held-out text, and the loss of a seed moved by up to 7% with the optimizer
in either direction. The report names the bytes and their SHA-256, since another Python or torch version is another
text. Tokens: a byte-level BPE trained on the same text (tokenizers library), so that token frequencies follow Zipf's
law and the rows of the input embedding see sparse gradients, which is what low-bit second moments are worst at. Random
text or a byte vocabulary was not chosen because it has no such rows.

Model: pre-norm GPT, learned positions, input and output embeddings not tied (a tied one gets a dense gradient).
"""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HELD_OUT_ONE_IN = 20
PIECE_CHARS = 8_000


@dataclass(frozen=True)
class Text:
    """train and held_out [num_tokens] int64 token ids; what identifies them."""

    train: Tensor
    held_out: Tensor
    vocab_size: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    dim: int = 320
    num_layers: int = 6
    num_heads: int = 5
    context: int = 256


def python_pieces(limit_bytes: int) -> tuple[list[str], list[str]]:
    """(train, held-out) pieces of sources, at most `limit_bytes` of them."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    torch_dir = Path(torch.__file__).parent
    paths = [p for p in stdlib.rglob("*.py") if "site-packages" not in p.parts and "dist-packages" not in p.parts]
    paths = [(p.relative_to(stdlib.parent), p) for p in paths]
    paths += [(p.relative_to(torch_dir.parent), p) for p in torch_dir.rglob("*.py")]
    # Order by hash, so that a byte limit takes a fair sample of both.
    paths.sort(key=lambda pair: hashlib.sha256(pair[0].as_posix().encode()).digest())
    train, held_out, taken = [], [], 0
    for _, path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        taken += len(text.encode())
        if taken > limit_bytes:
            break
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            part = held_out if zlib.crc32(piece.encode()) % HELD_OUT_ONE_IN == 0 else train
            part.append(piece)
    return train, held_out


def load_text(vocab_size: int, limit_bytes: int, kept: Path | None = None) -> Text:
    """Read, train the BPE on the training part, encode both parts; or what an earlier call left in the file `kept`."""
    if kept is not None and kept.exists():
        return Text(**torch.load(kept))
    text = _encoded_text(vocab_size, limit_bytes)
    if kept is not None:
        torch.save(vars(text), kept)
    return text


def _encoded_text(vocab_size: int, limit_bytes: int) -> Text:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    train, held_out = python_pieces(limit_bytes)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(train[: 1 + len(train) // 4], trainer)
    everything = "".join(train + held_out).encode()

    def encode(pieces: list[str]) -> Tensor:
        ids: list[int] = []
        for encoding in tokenizer.encode_batch(pieces):
            ids += [0, *encoding.ids]
        return torch.tensor(ids)

    return Text(
        encode(train),
        encode(held_out),
        tokenizer.get_vocab_size(),
        len(everything),
        hashlib.sha256(everything).hexdigest()[:16],
    )


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of `weight`; by index_select, whose backward a CUDA graph can hold (nn.Embedding's waits for the GPU)."""
    return weight.index_select(0, ids.flatten()).view(*ids.shape, -1)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = config.dim
        self.num_heads = config.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, dim]
        B, T, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(B, T, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyLM(nn.Module):
    """Next-token loss of token windows; about 10e6 parameters with the defaults and a vocabulary of 4096."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * config.num_layers) ** 0.5 if residual else 0.02)

    def forward(self, window_BT: Tensor) -> Tensor:
        """window_BT [batch, context + 1] token ids -> mean cross entropy in nats, []."""
        inputs, targets = window_BT[:, :-1], window_BT[:, 1:]
        x = embedding(self.tokens.weight, inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())
