"""A rank reads its own part of the base from the file: these bytes, and no others of the packed layers.

What it then holds must be what cutting the whole base gives, in every format; and an adapter, fresh, loaded, or added
later, must be the one of a whole base.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from halfbyte.checkpoint.export import export_checkpoint
from halfbyte.checkpoint.load import load_model
from halfbyte.checkpoint.load_part import load_part
from halfbyte.checkpoint.quantize import quantize_checkpoint
from halfbyte.checkpoint.shards import Shards
from halfbyte.nvfp4.layout import TILE_ROWS
from halfbyte.parallel.gather import gather_trainable, save_adapter
from halfbyte.parallel.tensor_parallel import tensor_parallel
from tests.dist import run
from tests.parallel.models import PROJECTIONS, trainable
from tests.parallel.test_tensor_parallel import mesh_of_all
from tests.parallel.training import error
from tests.train import tiny

TOKENS = torch.arange(24)[None] * 7 % 320


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """256 wide, 4 kv heads, biases; the second layer's up and down projections dense, lm_head its own."""
    folder = tmp_path_factory.mktemp("bases")
    dense = tiny.save_dense(
        folder / "dense",
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    )
    quantize_checkpoint(
        dense, folder / "torchao", exclude=["model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"]
    )
    for name in ("compressed-tensors", "modelopt"):
        export_checkpoint(folder / "torchao", folder / name, format=name, fuse="rescale")
    return {path.name: path for path in folder.iterdir() if path.name != "dense"}


@contextmanager
def counted_reads() -> Iterator[list[tuple[int, int]]]:
    """(position, bytes) of every read from a file."""
    reads, real = [], os.preadv

    def count(fd: int, buffers: Any, position: int) -> int:
        done = real(fd, buffers, position)
        reads.append((position, done))
        return done

    os.preadv = count
    try:
        yield reads
    finally:
        os.preadv = real


def bytes_of_keys(folder: str, reads: list[tuple[int, int]]) -> dict[str, int]:
    """Bytes read of each key of a folder with one file."""
    with Shards(folder) as shards:
        (file,) = shards._files.values()
        spans = {key: (file._offsets[key], file._offsets[key] + file.specs[key].size_bytes) for key in file.specs}
    return {
        key: sum(max(0, min(stop, at + size) - max(start, at)) for at, size in reads)
        for key, (start, stop) in spans.items()
    }


def load_and_compare(folder: str) -> tuple[bool, dict[str, int], float]:
    """Whether the parts are those of the cut whole base; bytes read of each key; error of the logits."""
    mesh = mesh_of_all()
    with counted_reads() as reads:
        model = load_part(folder, mesh)
    counts = bytes_of_keys(folder, reads)
    tensor_parallel(model, mesh)
    expected = tensor_parallel(load_model(folder), mesh)
    ours, theirs = dict(model.named_parameters()), dict(expected.named_parameters())
    equal = list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    equal &= [str(m) for m in model.modules()] == [str(m) for m in expected.modules()]
    logits = model(input_ids=TOKENS).logits
    return equal, counts, error({"": logits}, {"": load_model(folder)(input_ids=TOKENS).logits})


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["torchao", "compressed-tensors", "modelopt"])
def test_a_rank_reads_its_bytes_and_no_others(name: str, ranks: int, bases) -> None:
    """Packed and dense layers of the plan: 1/d of the bytes; swizzled scales: whole tiles of 128 rows."""
    found = run(ranks, load_and_compare, str(bases[name]))
    with Shards(bases[name]) as shards:
        specs = {key: shards.spec(key) for key in shards}
    for equal, counts, logits in found:
        assert equal and logits < 1e-5
        for key, spec in specs.items():
            share = ranks if any(projection in key for projection in PROJECTIONS) and len(spec.shape) == 2 else 1
            share = 1 if "global" in key or "weight_scale_2" in key else share
            if name == "torchao" and key.endswith("_weight_scale"):
                rows = spec.shape[0] // 32 * TILE_ROWS
                column_wise = not ("o_proj" in key or "down_proj" in key)
                share = min(ranks, rows // TILE_ROWS) if column_wise else share
            if "bias" in key and not ("o_proj" in key or "down_proj" in key):
                share = ranks
            assert counts[key] == spec.size_bytes // share, key


def adapters(folder: str, out: str) -> tuple[float, float, float]:
    """Errors of an adapter that is fresh, loaded from files, and added later, from those of a whole base."""
    mesh, config = mesh_of_all(), peft.LoraConfig(r=4, target_modules=PROJECTIONS)

    def fresh(base: Any) -> Any:
        torch.manual_seed(7)
        return peft.get_peft_model(base, config)

    model, whole = tensor_parallel(fresh(load_part(folder, mesh)), mesh), fresh(load_model(folder))
    first = error(gather_trainable(model), trainable(whole))
    save_adapter(model, out)
    loaded = peft.PeftModel.from_pretrained(load_part(folder, mesh), out, is_trainable=True)
    second = error(gather_trainable(tensor_parallel(loaded, mesh)), trainable(whole))
    for one in (model, whole):
        torch.manual_seed(11)
        one.add_adapter("later", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        one.set_adapter("later")
    tensor_parallel(model, mesh)
    third = error(gather_trainable(model), trainable(whole))
    logits: list[Tensor] = [one.eval()(input_ids=TOKENS).logits for one in (model, whole)]
    return first, second, third + error({"": logits[0]}, {"": logits[1]})


def test_fresh_loaded_and_later_adapters_are_those_of_a_whole_base(bases, tmp_path) -> None:
    for first, second, third in run(2, adapters, str(bases["torchao"]), str(tmp_path / "out")):
        assert first == 0 and second == 0 and third < 1e-5


def gathered_head(folder: str) -> tuple[float, float, list[int]]:
    """lm_head cut by rows and joined: errors of logits and of an adapter's gradient; the shape that a rank holds."""
    mesh = mesh_of_all()
    whole = load_model(folder)
    plan = {**whole.config.base_model_tp_plan, "lm_head": "colwise_gather_output"}
    gradients = []
    for base in (load_part(folder, mesh, plan=plan), whole):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(base, config)
        if base is not whole:
            tensor_parallel(model, mesh, plan=plan)
            held = list(base.lm_head.weight.shape)
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None and "lora_A" in n})
    same = {n: g for n, g in gradients[0].items() if g.shape == gradients[1][n].shape}
    logits = [m(input_ids=TOKENS).logits for m in (base, whole)]
    return error({"": logits[0]}, {"": logits[1]}), error(same, {n: gradients[1][n] for n in same}), held


def test_lm_head_is_cut_and_joined_if_the_plan_says_so(bases) -> None:
    for logits, gradients, held in run(2, gathered_head, str(bases["torchao"])):
        assert logits < 1e-5 and gradients < 1e-5 and held == [160, 256]


def refused_unread(folder: str) -> tuple[str, list[int]]:
    with counted_reads() as reads:
        try:
            load_part(folder, mesh_of_all(), plan={"layers.*.self_attn.q_proj": "sequence_parallel"})
        except ValueError as refused:
            return str(refused), [size for _, size in reads]
    return "", []


def test_refused_before_any_weight_is_read(bases) -> None:
    """Of a tensor scale the reader of a format may want the value; weights are larger."""
    for text, sizes in run(2, refused_unread, str(bases["torchao"])):
        assert "q_proj: the plan says sequence_parallel" in text and sum(sizes) == 0
