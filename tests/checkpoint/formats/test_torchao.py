"""torchao's own tensors, encoder and files are the oracle, in both directions."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.checkpoint.detect import detect, read_config
from halfbyte.checkpoint.formats.torchao import TorchaoFormat
from halfbyte.checkpoint.shard_writer import ShardWriter
from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.sidecar import write_json
from halfbyte.nvfp4.dequantize import dequantize
from halfbyte.nvfp4.linear import ActivationQuant

FORMAT = TorchaoFormat()
ACTIVATIONS = [None, ActivationQuant(), ActivationQuant(scale=0.0123)]


def torchao_tensor(activation: ActivationQuant | None, swizzled: bool, with_pts: bool, n: int = 40, k: int = 48) -> Any:
    from torchao.prototype.mx_formats.nvfp4_tensor import (
        NVFP4Tensor,
        QuantizeTensorToNVFP4Kwargs,
        per_tensor_amax_to_scale,
    )

    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n), dtype=torch.bfloat16)
    kwargs = None
    if activation is not None:
        kwargs = QuantizeTensorToNVFP4Kwargs(
            use_dynamic_per_tensor_scale=activation.scale is None, use_triton_kernel=True, is_swizzled_scales=True
        )
    tensor = NVFP4Tensor.to_nvfp4(
        weight,
        per_tensor_scale=per_tensor_amax_to_scale(weight.abs().max()) if with_pts else None,
        act_per_tensor_scale=None if activation is None or activation.scale is None else torch.tensor(activation.scale),
        is_swizzled_scales=swizzled,
        act_quant_kwargs=kwargs,
    )
    tensor.use_triton_kernel = activation is not None
    return tensor


def save_as_torchao(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    flat, metadata = flatten_tensor_state_dict(tensors)
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in flat.items()}, folder / "model.safetensors", metadata)


@pytest.mark.parametrize(
    ("activation", "swizzled", "with_pts"), list(itertools.product(ACTIVATIONS, [True, False], [True, False]))
)
def test_reads_and_writes_back(
    tmp_path: Path, activation: ActivationQuant | None, swizzled: bool, with_pts: bool
) -> None:
    """Values equal torchao's dequantize bit for bit; writing what was read gives the same tensors and metadata."""
    tensor = torchao_tensor(activation, swizzled, with_pts)
    save_as_torchao(tmp_path / "a", {"l.0.weight": tensor, "norm.weight": torch.ones(4)})
    with Shards(tmp_path / "a") as shards:
        stored = FORMAT.find(shards, {})["l.0"]
        assert stored.shape == (40, 48)
        found = stored.activation
        if activation is None or activation.scale is None:
            assert found == activation
        else:
            assert found is not None and found.scale == float(torch.tensor(activation.scale))
        parts = FORMAT.read(shards, stored)
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(dequantize(parts, dtype), tensor.dequantize(dtype))
        metadata = FORMAT.file_metadata(["l.0.weight", "norm.weight"], {"l.0": stored})
        assert metadata == {key: value for key, value in shards.metadata.items() if key != "format"}
        (tmp_path / "b").mkdir()
        specs = {stored.keys[c]: stored.specs[c] for c in stored.keys}
        with ShardWriter(tmp_path / "b", specs, metadata=metadata) as writer:
            for key, value in FORMAT.encode(stored, parts).items():
                writer.write(key, value)
        written = load_file(tmp_path / "b" / "model.safetensors")
        assert all(torch.equal(value.float(), shards.read(key).float()) for key, value in written.items())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_new_weight_is_described_as_torchao_does(activation: ActivationQuant | None) -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    tensor = torchao_tensor(activation, True, True)
    flat, metadata = flatten_tensor_state_dict({"l.0.weight": tensor})
    stored = FORMAT.plan("l.0", "l.0", (40, 48), activation, torch.bfloat16)
    assert FORMAT.file_metadata(["l.0.weight"], {"l.0": stored}) == metadata
    assert {stored.keys[c]: (s.dtype, s.shape) for c, s in stored.specs.items()} == {
        key: (value.dtype, tuple(value.shape)) for key, value in flat.items()
    }


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_config_is_what_transformers_writes(activation: ActivationQuant | None) -> None:
    """Static scales come from torchao's observer flow; what is left in its config is that scales are not dynamic."""
    from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig, NVFP4WeightOnlyConfig
    from transformers import TorchAoConfig

    stored = {"l.0": FORMAT.plan("l.0", "l.0", (40, 48), activation, torch.bfloat16)}
    block = FORMAT.declare({"a": 1}, stored, [])["quantization_config"]
    if activation is None:
        expected = TorchAoConfig(NVFP4WeightOnlyConfig())
    else:
        dynamic = activation.scale is None
        expected = TorchAoConfig(NVFP4DynamicActivationNVFP4WeightConfig(use_dynamic_per_tensor_scale=dynamic))
    assert block == json.loads(json.dumps(expected.to_dict()))
    assert FORMAT.declare({}, stored, ["b", "a"])["quantization_config"]["modules_to_not_convert"] == ["a", "b"]


def test_folder_of_transformers(theirs: Path, plain_load: Callable[..., Any]) -> None:
    """Components of one weight lie in different shards here (SCENARIOS n17)."""
    config = read_config(theirs)
    format = detect(theirs, config)
    assert format is not None and format.name == "torchao"
    with Shards(theirs) as shards:
        found = format.find(shards, config)
        assert len(found) == 14
        apart = [w for w in found.values() if len({shards.path_of(key) for key in w.keys.values()}) > 1]
        assert apart, "the shards were meant to part some weight's components"
        model = plain_load(theirs)
        for fqn, stored in found.items():
            weight = model.get_parameter(stored.weight_name)
            assert torch.equal(dequantize(format.read(shards, stored), torch.bfloat16), weight.dequantize()), fqn


def test_rewritten_folder_loads_bit_equal(
    tmp_path: Path, theirs: Path, plain_load: Callable[..., Any], tokens: torch.Tensor
) -> None:
    """What we write from the same parts, plain transformers loads with the logits of the file torchao wrote itself."""
    config = read_config(theirs)
    with Shards(theirs) as shards:
        found = FORMAT.find(shards, config)
        names = json.loads(shards.metadata["tensor_names"])
        planned = {
            fqn: FORMAT.plan(fqn, w.model_fqn, w.shape, w.activation, torch.bfloat16) for fqn, w in found.items()
        }
        metadata = FORMAT.file_metadata(names, planned)
        assert metadata == {key: value for key, value in shards.metadata.items() if key != "format"}
        with ShardWriter(tmp_path, {key: shards.spec(key) for key in shards}, metadata=metadata) as writer:
            encoded = set()
            for fqn, stored in planned.items():
                for key, value in FORMAT.encode(stored, FORMAT.read(shards, found[fqn])).items():
                    writer.write(key, value)
                    encoded.add(key)
            for key in set(shards) - encoded:
                writer.write(key, shards.read(key))
    write_json(tmp_path / "config.json", FORMAT.declare(config, planned, []))
    assert (tmp_path / "config.json").read_text() == (theirs / "config.json").read_text()
    with torch.no_grad():
        assert torch.equal(plain_load(tmp_path)(tokens).logits, plain_load(theirs)(tokens).logits)


# Damage: each changes one thing in a good folder; the message must name the key (or the weight) and what was expected.


def damaged(folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], Any]) -> Shards:
    tensor = torchao_tensor(None, False, True)
    save_as_torchao(folder, {"l.0.weight": tensor, "norm.weight": torch.ones(4)})
    path = folder / "model.safetensors"
    with Shards(folder) as shards:
        tensors, metadata = {key: shards.read(key) for key in shards}, dict(shards.metadata)
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    return Shards(folder)


def set_byte(tensors: dict[str, torch.Tensor], byte: int) -> None:
    tensors["l.0._weight_scale"].view(torch.uint8)[3, 1] = byte


def edit_json(metadata: dict[str, str], change: Callable[[Any], Any]) -> None:
    content = json.loads(metadata["l.0.weight"])
    change(content)
    metadata["l.0.weight"] = json.dumps(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: t.pop("l.0._weight_qdata"), r"lists l\.0\.weight, but its codes .* are in no file"),
        (lambda t, m: t.pop("l.0._weight_per_tensor_scale"), r"l\.0\._weight_per_tensor_scale is in no file"),
        (lambda t, m: t.update({"l.0._weight_qdata": torch.zeros(40, 23, dtype=torch.uint8)}), r"uint8 \[40, 23\]"),
        (lambda t, m: t.update({"l.0._weight_qdata": torch.zeros(40, 24)}), r"float32 \[40, 24\], expected uint8"),
        (lambda t, m: t.update({"l.0._weight_qdata": torch.zeros(2, 40, 24, dtype=torch.uint8)}), "stacked"),
        (
            lambda t, m: t.update({"l.0._weight_scale": t["l.0._weight_scale"][:39]}),
            r"_weight_scale is float8_e4m3fn \[39, 3\], expected float8_e4m3fn \[40, 3\]",
        ),
        (lambda t, m: t.update({"l.0._weight_scale": t["l.0._weight_scale"].float()}), "float32 .*expected float8"),
        (lambda t, m: set_byte(t, 0x7F), r"model\.safetensors: l\.0\._weight_scale.* row 3, block 1 .*0x7F.*finite"),
        (lambda t, m: set_byte(t, 0xFF), "0xFF"),
        (lambda t, m: t["l.0._weight_per_tensor_scale"].fill_(float("nan")), "is nan, expected a finite"),
        (lambda t, m: t["l.0._weight_per_tensor_scale"].fill_(-1.0), r"is -1\.0, expected"),
        (lambda t, m: m.pop("tensor_names"), "metadata has no readable list tensor_names"),
        (lambda t, m: m.update(tensor_names="{"), "tensor_names"),
        (lambda t, m: m.pop("l.0.weight"), r"lists l\.0\.weight, but its own entry is missing"),
        (lambda t, m: m.update(tensor_names='["norm.weight"]'), "_weight_qdata is there, but .* does not list"),
        (lambda t, m: edit_json(m, lambda c: c.update(_type="Int4Tensor")), "Int4Tensor, expected NVFP4Tensor"),
        (lambda t, m: edit_json(m, lambda c: c.pop("_data")), "_data"),
        (lambda t, m: edit_json(m, lambda c: c.update(_tensor_data_names=["zero_point"])), "zero_point"),
        (lambda t, m: edit_json(m, lambda c: c["_data"].update(is_swizzled_scales=True)), r"expected .* \[32, 16\]"),
        (lambda t, m: edit_json(m, lambda c: c["_data"].update(act_quant_kwargs=3)), "act_quant_kwargs"),
    ],
)
def test_damage(tmp_path: Path, change: Any, message: str) -> None:
    with damaged(tmp_path / "m", change) as shards, pytest.raises(ValueError, match=message):
        for stored in FORMAT.find(shards, {}).values():
            FORMAT.read(shards, stored)


def test_detect(tmp_path: Path, theirs: Path, dense: Path) -> None:
    assert detect(dense, read_config(dense)) is None
    with pytest.raises(ValueError, match=r"quantized by gptq, expected"):
        detect(tmp_path, {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(ValueError, match="no quant_method"):
        detect(tmp_path, {"quantization_config": {"bits": 4}})
    both = {"quantization_config": {"quant_method": "torchao"}, "compression_config": {"quant_method": "x"}}
    with pytest.raises(ValueError, match=r"two claims.*quantization_config says torchao, .*compression_config says x"):
        detect(tmp_path, both)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"two claims.*config says torchao, the file hf_quant_config\.json says modelopt"
    ):
        detect(tmp_path, read_config(theirs))
    with pytest.raises(FileNotFoundError, match=r"config\.json: not there"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        read_config(tmp_path)


def test_stored_weight_is_frozen() -> None:
    stored = FORMAT.plan("l.0", "l.0", (40, 48), None, torch.bfloat16)
    assert stored.size_bytes == 4 + 40 * 24 + 512
    with pytest.raises(dataclasses.FrozenInstanceError):
        stored.fqn = "x"  # type: ignore[misc]


def test_golden_file(tmp_path: Path) -> None:
    """Sixteen known values to fixed bytes (SCENARIOS n21): 0..7 and -0..-7 as codes, even column in the low nibble.

    The row is the E2M1 grid times 2, amax 12; with a tensor scale of 2^-7 (fp32 bytes 00 00 00 3C) the block scale
    is 12 / 6 * 2^7 = 256, E4M3 byte 0x78. In the file: tensor scale, the swizzled tile of 512 bytes, codes.
    """
    from halfbyte.nvfp4.quantize import quantize

    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6]) * 2
    parts = quantize(torch.cat([grid, -grid])[None], global_scale=torch.tensor(2.0**-7))
    stored = FORMAT.plan("w", "w", parts.shape, None, torch.float32)
    with ShardWriter(tmp_path, {stored.keys[c]: stored.specs[c] for c in stored.keys}) as writer:
        for key, value in FORMAT.encode(stored, parts).items():
            writer.write(key, value)
    data = (tmp_path / "model.safetensors").read_bytes()[-(4 + 512 + 8) :]
    golden = bytes.fromhex("0000003c") + bytes([0x78]) + bytes(511) + bytes.fromhex("1032547698badcfe")
    assert data == golden
