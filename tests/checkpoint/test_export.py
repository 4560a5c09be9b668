"""Exports between the three formats: all pairs byte for byte, and each opened by its owner's library."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.checkpoint.detect import FORMATS, detect, read_config
from halfbyte.checkpoint.export import export_checkpoint
from halfbyte.checkpoint.load import load_model
from halfbyte.checkpoint.quantize import quantize_checkpoint
from halfbyte.checkpoint.shards import Shards
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.dequantize import dequantize
from halfbyte.nvfp4.linear import ActivationQuant
from halfbyte.nvfp4.quantize import quantize

from .conftest import save_dense, tiny_config


def read_parts(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    format = detect(folder, config)
    assert format is not None
    with Shards(folder) as shards:
        return {fqn: format.read(shards, stored) for fqn, stored in format.find(shards, config).items()}


def assert_same_parts(a: Path, b: Path) -> None:
    first, second = read_parts(a), read_parts(b)
    assert first.keys() == second.keys()
    for fqn, parts in first.items():
        assert torch.equal(parts.qdata, second[fqn].qdata)
        assert torch.equal(parts.scale.view(torch.uint8), second[fqn].scale.view(torch.uint8))
        assert torch.equal(parts.global_scale, second[fqn].global_scale)


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_all_pairs_byte_for_byte(tmp_path: Path, folders: dict[str, Path], source: str, target: str) -> None:
    """SCENARIOS n15, n21: our scales are shared in fused groups and round-trip as reciprocals, so nothing may move; and
    writing the format a file came in gives that file's tensors."""
    export_checkpoint(folders[source], tmp_path / "out", format=target)
    assert_same_parts(tmp_path / "out", folders["torchao"])
    with Shards(tmp_path / "out") as shards, Shards(folders[target]) as direct:
        assert set(shards) == set(direct)
        assert all(torch.equal(shards.read(key).float(), direct.read(key).float()) for key in shards)
        assert all(shards.spec(key) == direct.spec(key) for key in shards)
    for name in ("generation_config.json", "config.json"):
        assert (tmp_path / "out" / name).read_text() == (folders[target] / name).read_text()


@pytest.mark.parametrize("format", ["torchao", "compressed-tensors"])
def test_transformers_loads_it_with_our_logits(
    folders: dict[str, Path], format: str, plain_load: Callable[..., Any], tokens: torch.Tensor
) -> None:
    """Both libraries decode to the values that we decode to, so logits are equal bit for bit in bf16."""
    with torch.no_grad():
        assert torch.equal(load_model(folders[format])(tokens).logits, plain_load(folders[format])(tokens).logits)


def test_modelopt_decodes_our_file_to_our_values(folders: dict[str, Path]) -> None:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    with Shards(folders["modelopt"]) as shards:
        for fqn, parts in read_parts(folders["modelopt"]).items():
            tensor = NVFP4QTensor(torch.Size(parts.shape), torch.float32, shards.read(f"{fqn}.weight"))
            decoded = tensor.dequantize(
                scale=shards.read(f"{fqn}.weight_scale"),
                double_scale=shards.read(f"{fqn}.weight_scale_2"),
                block_sizes={-1: 16},
            )
            assert torch.equal(decoded, dequantize(parts, torch.float32)), fqn


def test_compressed_tensors_own_converter_agrees(folders: dict[str, Path]) -> None:
    """compressed-tensors turns our ModelOpt file into tensors equal to our compressed-tensors file."""
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

    converter = ModelOptNvfp4Converter(targets=["re:.*proj$"], ignore=["lm_head"])
    with Shards(folders["modelopt"]) as shards:
        converted = converter.process({key: shards.read(key) for key in shards})
    with Shards(folders["compressed-tensors"]) as shards:
        assert set(shards) == set(converted)
        for key in shards:
            assert torch.equal(shards.read(key).float().reshape(-1), converted[key].float().reshape(-1)), key


def test_config_blocks_are_the_owners(folders: dict[str, Path]) -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    scheme.format = "nvfp4-pack-quantized"
    expected = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format="nvfp4-pack-quantized",
        quantization_status="compressed",
    )
    block = read_config(folders["compressed-tensors"])["quantization_config"]
    assert json.loads(QuantizationConfig(**block).model_dump_json()) == json.loads(expected.model_dump_json())
    written = json.loads((folders["modelopt"] / "hf_quant_config.json").read_text())
    assert read_config(folders["modelopt"])["quantization_config"] == {
        **convert_hf_quant_config_format(written),
        "quant_method": "modelopt",
    }


def test_files_of_the_owners_libraries_are_read(tmp_path: Path, dense: Path, tokens: torch.Tensor) -> None:
    """Weights compressed by compressed-tensors' own compressor (its own rounding) and by ModelOpt's NVFP4QTensor, put
    into folders as their exporters name them. ModelOpt decodes in fp32, with the scales multiplied in another order
    (1e-6); compressed-tensors' decompress computes in the weight's bf16, so it agrees to a few of its ULPs."""
    tolerance = {"modelopt": 1e-6, "compressed-tensors": 2**-6}
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    packed: dict[str, torch.Tensor] = {}
    exported: dict[str, torch.Tensor] = {}
    decoded: dict[str, dict[str, torch.Tensor]] = {"compressed-tensors": {}, "modelopt": {}}
    for key, weight in load_file(dense / "model.safetensors").items():
        if not key.endswith("proj.weight"):
            packed[key] = exported[key] = weight
            continue
        fqn = key.removesuffix(".weight")
        tensor, scale, double_scale = NVFP4QTensor.quantize(weight, 16)
        exported |= {key: tensor._quantized_data, f"{key}_scale": scale, f"{key}_scale_2": double_scale}
        decoded["modelopt"][fqn] = tensor.dequantize(
            dtype=torch.float32, scale=scale, double_scale=double_scale, block_sizes={-1: 16}
        )
        global_scale = 1 / double_scale.reshape(1)
        state = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": global_scale}
        compressed = NVFP4PackedCompressor.compress(state, scheme)
        packed |= {f"{fqn}.{name}": value for name, value in compressed.items()}
        decoded["compressed-tensors"][fqn] = NVFP4PackedCompressor.decompress(compressed, scheme)["weight"].float()
    for format, tensors in (("compressed-tensors", packed), ("modelopt", exported)):
        folder = tmp_path / format
        shutil.copytree(dense, folder)
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
        write_quantization(folder, format)
        for fqn, parts in read_parts(folder).items():
            torch.testing.assert_close(
                dequantize(parts, torch.float32), decoded[format][fqn], atol=0, rtol=tolerance[format]
            )
        with torch.no_grad():
            assert torch.isfinite(load_model(folder)(tokens).logits).all()


def write_quantization(folder: Path, format: str) -> None:
    config = read_config(folder)
    if format == "modelopt":  # an older export: declared in its own file alone
        quantization = {"quant_algo": "W4A16_NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
        return
    (folder / "config.json").write_text(json.dumps(FORMATS[format].declare(config, {}, ["lm_head"])))


def test_tied_embeddings(tmp_path: Path) -> None:
    """SCENARIOS n16: one copy, nothing of lm_head in the index, lm_head in the ignore lists."""
    quantize_checkpoint(save_dense(tmp_path / "dense", tiny_config(tie_word_embeddings=True)), tmp_path / "base")
    for format in ("compressed-tensors", "modelopt"):
        export_checkpoint(tmp_path / "base", tmp_path / format, format=format, max_shard_size="8KB")
        assert "lm_head" not in (tmp_path / format / "model.safetensors.index.json").read_text()
        assert read_config(tmp_path / format)["quantization_config"]["ignore"] == ["lm_head"]
        model = load_model(tmp_path / format)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_golden_bytes() -> None:
    """Sixteen known values to fixed bytes (SCENARIOS n21): the E2M1 grid times 2 under a tensor scale of 2^-7, so that
    the block scale is 256 (E4M3 0x78). compressed-tensors stores 2^7 (fp32 43 00 00 00), the others 2^-7 (3C 00 00 00).
    """
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6]) * 2
    parts = quantize(torch.cat([grid, -grid])[None], global_scale=torch.tensor(2.0**-7))
    tensor_scale = {"torchao": "0000003c", "modelopt": "0000003c", "compressed-tensors": "00000043"}
    for name, format in FORMATS.items():
        stored = format.plan("w", "w", parts.shape, None, torch.float32)
        encoded = format.encode(stored, parts)
        found = {component: encoded[key].reshape(-1).view(torch.uint8) for component, key in stored.keys.items()}
        assert bytes(found["qdata"].tolist()).hex() == "1032547698badcfe"
        assert found["scale"][0] == 0x78 and not found["scale"][1:].any()
        assert bytes(found["global_scale"].tolist()).hex() == tensor_scale[name]


# ---- unequal groups, reciprocals that do not return, activations


def test_unequal_groups_are_refused_or_rescaled(tmp_path: Path, theirs: Path) -> None:
    """SCENARIOS n15: torchao gives each linear its own tensor scale."""
    with pytest.raises(ValueError, match=r"layers\.0\.\S+: serving engines fuse it .* differ \(.*--fuse rescale"):
        export_checkpoint(theirs, tmp_path / "out", format="modelopt")
    assert not any(tmp_path.iterdir())
    report = export_checkpoint(theirs, tmp_path / "out", format="modelopt", fuse="rescale")
    before, after = read_parts(theirs), read_parts(tmp_path / "out")
    assert 0 < len(report.rescaled) < 14
    for fqn, parts in before.items():
        assert torch.equal(parts.qdata, after[fqn].qdata)
        old, new = dequantize(parts, torch.float32), dequantize(after[fqn], torch.float32)
        expected = report.rescaled.get(fqn, 0.0)
        assert float((new - old).norm() / old.norm()) == pytest.approx(expected, rel=1e-3, abs=1e-7)
        assert expected < 0.05  # half an E4M3 step is 1/16 of the scale at most
    for layer in range(2):
        scales = {after[f"model.layers.{layer}.self_attn.{leaf}_proj"].global_scale.item() for leaf in "qkv"}
        assert len(scales) == 1


def test_scales_whose_reciprocal_does_not_return_are_reported(tmp_path: Path, ours: Path) -> None:
    """A foreign scale moves by an ULP in compressed-tensors; codes and block scales stay."""
    base = tmp_path / "base"
    shutil.copytree(ours, base)
    with Shards(base) as shards:
        metadata = dict(shards.metadata)
    tensors = load_file(base / "model.safetensors")
    value = torch.tensor(1.1e-4)
    while 1 / (1 / value) == value:
        value = torch.nextafter(value, torch.tensor(1.0))
    key = "model.layers.0.mlp.down_proj._weight_per_tensor_scale"
    save_file({**tensors, key: value}, base / "model.safetensors", metadata)
    report = export_checkpoint(base, tmp_path / "out", format="compressed-tensors")
    assert list(report.moved_scales) == ["model.layers.0.mlp.down_proj"]
    assert 0 < abs(report.moved_scales["model.layers.0.mlp.down_proj"]) < 2**-22
    after = read_parts(tmp_path / "out")["model.layers.0.mlp.down_proj"]
    assert after.global_scale == 1 / (1 / value)
    export_checkpoint(tmp_path / "out", tmp_path / "again", format="compressed-tensors")
    with Shards(tmp_path / "out") as first, Shards(tmp_path / "again") as second:
        assert all(torch.equal(first.read(key).float(), second.read(key).float()) for key in first)


def test_static_activation_scales_travel(tmp_path: Path, folders: dict[str, Path]) -> None:
    """W4A4 with calibrated inputs: compressed-tensors' reciprocal, ModelOpt's scale, torchao's attribute."""
    base = tmp_path / "base"
    shutil.copytree(folders["modelopt"], base)
    (base / "model.safetensors.index.json").unlink()
    with Shards(folders["modelopt"]) as shards:
        tensors = {key: shards.read(key) for key in shards}
    for fqn in read_parts(folders["modelopt"]):
        tensors[f"{fqn}.input_scale"] = torch.tensor(2.0**-9)
    for path in base.glob("model-*.safetensors"):
        path.unlink()
    save_file(tensors, base / "model.safetensors")
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (base / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    wanted = {ActivationQuant(scale=2.0**-9)}
    for format in FORMATS:
        report = export_checkpoint(base, tmp_path / format, format=format)
        assert {layer.activation for layer in nvfp4_modules(load_model(tmp_path / format)).values()} == wanted
        assert bool(report.notices) == (format == "torchao")
        export_checkpoint(tmp_path / format, tmp_path / f"{format} w4a16", format="modelopt", activations="none")
        assert json.loads((tmp_path / f"{format} w4a16" / "hf_quant_config.json").read_text())["quantization"][
            "quant_algo"
        ] == ("W4A16_NVFP4")
    with Shards(tmp_path / "compressed-tensors") as shards:
        assert shards.read("model.layers.0.mlp.up_proj.input_global_scale").tolist() == [512.0]


def test_dynamic_activations_cannot_be_said(tmp_path: Path, dense: Path) -> None:
    quantize_checkpoint(dense, tmp_path / "base", activations="dynamic")
    with pytest.raises(ValueError, match=r"scaled on the fly.*--activations none"):
        export_checkpoint(tmp_path / "base", tmp_path / "out", format="modelopt")
    export_checkpoint(tmp_path / "base", tmp_path / "out", format="modelopt", activations="none")


def train_steps(folder: Path, tokens: torch.Tensor) -> list[float]:
    """Losses of three AdamW steps of an ordinary LoRA on the base."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(load_model(folder, dtype=torch.float32), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_does_not_see_the_format(folders: dict[str, Path], tokens: torch.Tensor) -> None:
    """The components in memory are the same bytes, so losses are equal bit for bit; and they fall."""
    losses = {format: train_steps(folder, tokens) for format, folder in folders.items()}
    assert losses["torchao"] == losses["compressed-tensors"] == losses["modelopt"]
    assert losses["torchao"][-1] < losses["torchao"][0]


# ---- mixed folders


def test_fp8_layers_and_cache_scales(tmp_path: Path, folders: dict[str, Path], tokens: torch.Tensor) -> None:
    """An FP8 layer loads dense with a notice; kv-cache scales are no parameters and travel on."""
    base = tmp_path / "base"
    shutil.copytree(folders["modelopt"], base)
    with Shards(base) as shards:
        tensors = {key: shards.read(key) for key in shards}
    for path in base.glob("model*"):
        path.unlink()
    fqn = "model.layers.1.mlp.down_proj"
    parts = read_parts(folders["modelopt"])[fqn]
    wide = dequantize(parts, torch.float32)
    scale = wide.abs().max() / 448
    for leaf in ("weight", "weight_scale", "weight_scale_2"):
        tensors.pop(f"{fqn}.{leaf}")
    codes = (wide / scale).to(torch.float8_e4m3fn)
    tensors |= {f"{fqn}.weight": codes, f"{fqn}.weight_scale": scale, f"{fqn}.input_scale": torch.tensor(0.5)}
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.25)
    save_file(tensors, base / "model.safetensors")
    quantization = {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"]}
    (base / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    with pytest.warns(UserWarning, match="1 FP8 layers, decoded to dense; 2 scales for serving engines, not used"):
        model = load_model(base)
    assert fqn not in nvfp4_modules(model) and len(nvfp4_modules(model)) == 13
    assert torch.equal(model.get_submodule(fqn).weight, (codes.float() * scale).bfloat16())
    report = export_checkpoint(base, tmp_path / "out", format="compressed-tensors")
    assert any("FP8 layers are written dense" in notice for notice in report.notices)
    assert read_config(tmp_path / "out")["quantization_config"]["ignore"] == ["lm_head", fqn]
    with Shards(tmp_path / "out") as shards:
        assert shards.read("model.layers.0.self_attn.k_proj.k_scale") == 0.25
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, load_model(tmp_path / "out")(tokens).logits)
    tensors.pop(f"{fqn}.weight_scale")
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj\.weight is FP8, but .*weight_scale is in no file"):
        load_model(base)
