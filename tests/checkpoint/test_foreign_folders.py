"""Folders as hubs have them: extras that no parameter is made of, FP8 beside NVFP4, experts, values that cannot be.

What is kept is compared byte for byte; what would be wrong is refused, by its name.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.checkpoint.detect import read_config
from halfbyte.checkpoint.export import export_checkpoint
from halfbyte.checkpoint.inspect import inspect_path
from halfbyte.checkpoint.load import load_model
from halfbyte.checkpoint.merge import merge_checkpoint
from halfbyte.checkpoint.quantize import quantize_checkpoint
from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.verify import verify
from halfbyte.nvfp4.convert import nvfp4_modules

from .conftest import make_adapter, save_dense, tiny_config

Tensors = dict[str, torch.Tensor]
KEYED = ("compressed-tensors", "modelopt")
LAYER = "model.layers.1.mlp.down_proj"
CACHE = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.25)}
UNKNOWN = {
    "model.layers.0.self_attn.rotary_emb.table": torch.arange(5),
    "statistics.seen": torch.tensor([1, 2, 3], dtype=torch.uint8),
}


def edited(source: Path, out: Path, change: Callable[[Tensors], Any]) -> Path:
    """A copy of a folder, in one file, with other tensors."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("model*"))
    with Shards(source) as shards:
        tensors, metadata = {key: shards.read(key) for key in shards}, dict(shards.metadata)
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata)
    return out


def assert_same_tensors(keys: Any, first: Path, second: Path) -> None:
    with Shards(first) as one, Shards(second) as two:
        for key in keys:
            assert one.spec(key) == two.spec(key), key
            x, y = (shards.read(key).reshape(-1).view(torch.uint8) for shards in (one, two))
            assert torch.equal(x, y), key


@pytest.fixture(scope="module")
def with_extras(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("extras")
    return {
        format: edited(folders[format], root / format, lambda tensors: tensors.update(CACHE | UNKNOWN))
        for format in KEYED
    }


def test_extras_are_not_used_and_are_said(
    with_extras: dict[str, Path], folders: dict[str, Path], tokens: torch.Tensor
) -> None:
    message = r"1 scales for serving engines, not used; 2 tensors that the model .* does not know, .*statistics\.seen"
    with pytest.warns(UserWarning, match=message):
        model = load_model(with_extras["modelopt"])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, load_model(folders["modelopt"])(tokens).logits)
    assert (
        "1 scales for serving engines, 2 that the model" in inspect_path(with_extras["modelopt"]).facts["other tensors"]
    )


@pytest.mark.parametrize("target", ["torchao", *KEYED])
@pytest.mark.parametrize("source", KEYED)
def test_extras_are_written_back(tmp_path: Path, with_extras: dict[str, Path], source: str, target: str) -> None:
    """By an export into each format, and through torchao's, which has no place for scales of a kv cache."""
    report = export_checkpoint(with_extras[source], tmp_path / "out", format=target, max_shard_size="8KB")
    keys = UNKNOWN if target == "torchao" else CACHE | UNKNOWN
    assert_same_tensors(keys, with_extras[source], tmp_path / "out")
    assert [notice for notice in report.notices if "no place here" in notice] == (
        ["1 scales for serving engines have no place here and are left out (" + next(iter(CACHE)) + ", ...)."]
        if target == "torchao"
        else []
    )
    verdict = verify(with_extras[source], tmp_path / "out")
    assert verdict.same and list(verdict.notes) == (list(CACHE) if target == "torchao" else [])
    if target == "modelopt":
        quantization = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
        assert quantization["kv_cache_quant_algo"] == "FP8"


@pytest.mark.parametrize("to", ["nvfp4", "bf16"])
def test_extras_survive_a_merge(tmp_path: Path, with_extras: dict[str, Path], adapter: Path, to: str) -> None:
    merge_checkpoint(with_extras["modelopt"], adapter, tmp_path / "out", to=to)
    assert_same_tensors(CACHE | UNKNOWN if to == "nvfp4" else UNKNOWN, with_extras["modelopt"], tmp_path / "out")


def test_another_cache_scale_is_another_model(tmp_path: Path, with_extras: dict[str, Path]) -> None:
    other = edited(with_extras["modelopt"], tmp_path / "m", lambda t: t[next(iter(CACHE))].mul_(2))
    assert list(verify(with_extras["modelopt"], other).differences) == list(CACHE)


def test_a_cache_in_nvfp4_stays_said(tmp_path: Path, with_extras: dict[str, Path]) -> None:
    base = tmp_path / "base"
    shutil.copytree(with_extras["modelopt"], base)
    content = json.loads((base / "hf_quant_config.json").read_text())
    content["quantization"]["kv_cache_quant_algo"] = "NVFP4"
    (base / "hf_quant_config.json").write_text(json.dumps(content))
    export_checkpoint(base, tmp_path / "same", format="modelopt")
    assert "NVFP4" in (tmp_path / "same" / "hf_quant_config.json").read_text().partition("kv_cache_quant_algo")[2][:12]
    report = export_checkpoint(base, tmp_path / "other", format="compressed-tensors")
    assert "the kv cache in NVFP4 cannot be said in this format." in report.notices


@pytest.mark.parametrize("pattern", [LAYER, "model.layers.1.*"])
def test_codes_of_a_layer_that_the_config_leaves_out(tmp_path: Path, folders: dict[str, Path], pattern: str) -> None:
    """What the file holds is read, and said: an engine that goes by the config would look for a dense weight."""
    for format in KEYED:
        base = tmp_path / format
        shutil.copytree(folders[format], base)
        config = read_config(base)
        regular = f"re:{pattern.replace('*', '.*down_proj')}"
        config["quantization_config"]["ignore"] = ["lm_head", pattern if format == "modelopt" else regular]
        (base / "config.json").write_text(json.dumps(config))
        (base / "hf_quant_config.json").unlink(missing_ok=True)
        with pytest.warns(UserWarning, match=r"layers that the config leaves out hold NVFP4 codes.*model\.layers\.1"):
            assert len(nvfp4_modules(load_model(base))) == 14
        assert any("the config leaves it out" in warning for warning in inspect_path(base).warnings)
        export_checkpoint(base, tmp_path / f"{format}-out", format="modelopt")
        assert read_config(tmp_path / f"{format}-out")["quantization_config"]["ignore"] == ["lm_head"]


def test_tokenizer_and_templates_come_along(tmp_path: Path, folders: dict[str, Path], adapter: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(folders["modelopt"], base)
    carried = ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt", "preprocessor_config.json")
    for name in carried:
        (base / name).write_text(name)
    export_checkpoint(base, tmp_path / "out", format="compressed-tensors")
    merge_checkpoint(base, adapter, tmp_path / "merged", format="torchao")
    for name in (*carried, "generation_config.json"):
        for out in ("out", "merged"):
            assert (tmp_path / out / name).read_bytes() == (base / name).read_bytes(), name
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


# ---- W4A4 and W4A16


def w4a4(folders: dict[str, Path], out: Path, algorithm: str) -> Path:
    """A ModelOpt folder with a calibrated scale of 2^-9 and a bit in every layer."""

    def add(tensors: Tensors) -> None:
        layers = [key.removesuffix("_scale_2") for key in tensors if key.endswith("weight_scale_2")]
        for key in layers:
            tensors[key.replace(".weight", ".input_scale")] = torch.tensor(2.0**-9 + 2.0**-32)

    folder = edited(folders["modelopt"], out, add)
    quantization = {"quant_algo": algorithm, "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    config = read_config(folder)
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def input_scales(folder: Path) -> list[str]:
    with Shards(folder) as shards:
        return [key for key in shards if key.endswith("input_scale")]


def test_calibrated_input_scales_survive_a_merge(tmp_path: Path, folders: dict[str, Path]) -> None:
    base = w4a4(folders, tmp_path / "base", "NVFP4")
    model = load_model(base, dtype=torch.float32)
    assert {layer.activation.scale for layer in nvfp4_modules(model).values()} == {2.0**-9 + 2.0**-32}
    make_adapter(tmp_path / "adapter", model)
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "out")
    assert len(input_scales(base)) == 14
    assert_same_tensors(input_scales(base), base, tmp_path / "out")


def test_input_scales_that_the_config_does_not_use(tmp_path: Path, folders: dict[str, Path], adapter: Path) -> None:
    """W4A16 by its config: computed weight-only, and the scales are kept."""
    base = w4a4(folders, tmp_path / "base", "W4A16_NVFP4")
    with pytest.warns(UserWarning, match="14 scales for serving engines, not used"):
        model = load_model(base)
    assert {layer.activation for layer in nvfp4_modules(model).values()} == {None}
    merge_checkpoint(base, adapter, tmp_path / "out")
    assert_same_tensors(input_scales(base), base, tmp_path / "out")


def test_a_layer_of_its_own_algorithm(tmp_path: Path, folders: dict[str, Path]) -> None:
    """MIXED_PRECISION names each layer's; W4A16 there means weight-only whatever scales the file holds."""
    base = w4a4(folders, tmp_path / "base", "MIXED_PRECISION")
    content = json.loads((base / "hf_quant_config.json").read_text())
    content["quantization"]["quantized_layers"] = {LAYER: {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    (base / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="1 scales for serving engines, not used"):
        layers = nvfp4_modules(load_model(base))
    assert [name for name, layer in layers.items() if layer.activation is None] == [LAYER]


# ---- FP8 and other dtypes


def as_fp8(tensors: Tensors, **changes: torch.Tensor) -> None:
    """Turn a layer of a ModelOpt folder into FP8 with a scale a row."""
    for leaf in ("weight", "weight_scale", "weight_scale_2"):
        tensors.pop(f"{LAYER}.{leaf}")
    codes = torch.randn(64, 80, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    tensors[f"{LAYER}.weight"] = codes
    tensors[f"{LAYER}.weight_scale"] = torch.linspace(0.01, 0.02, 64)[:, None]
    tensors |= {f"{LAYER}.{leaf}": value for leaf, value in changes.items()}


def test_fp8_rows(tmp_path: Path, folders: dict[str, Path]) -> None:
    """A scale a row is applied to its row; verify reads FP8 and its dense export as the same."""
    base = edited(folders["modelopt"], tmp_path / "base", as_fp8)
    with pytest.warns(UserWarning, match="1 FP8 layers, decoded to dense"):
        weight = load_model(base, dtype=torch.float32).get_submodule(LAYER).weight
    with Shards(base) as shards:
        expected = shards.read(f"{LAYER}.weight").double() * shards.read(f"{LAYER}.weight_scale").double()
    torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=0)
    export_checkpoint(base, tmp_path / "out", format="modelopt")
    assert verify(base, tmp_path / "out").same
    changed = edited(base, tmp_path / "other", lambda t: t[f"{LAYER}.weight_scale"][3].mul_(2))
    assert "80 of 5120 values" in verify(base, changed).differences[f"{LAYER}.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: as_fp8(t, weight_scale=torch.ones(2, 2)), r"is FP8, but .*weight_scale is \[2, 2\]"),
        (lambda t: as_fp8(t, weight=torch.zeros(64, 80, dtype=torch.int8)), "is int8 .*expected NVFP4 codes of the"),
        (lambda t: as_fp8(t, weight=torch.zeros(64, 80).to(torch.float8_e5m2)), "is float8_e5m2 .*expected NVFP4"),
        (lambda t: t.update({"experts.gate_up_proj": torch.zeros(2, 4, 8, dtype=torch.uint8)}), "stacked into one"),
        (
            lambda t: t.update({f"{LAYER}.weight_packed": torch.zeros(4, 8, dtype=torch.uint8)}),
            "how compressed-tensors",
        ),
        (lambda t: t.update({f"{LAYER}._weight_qdata": torch.zeros(4, 8, dtype=torch.uint8)}), "how torchao keeps"),
        (lambda t: t.update({f"{LAYER}.weight_zero_point": torch.zeros(4)}), "belongs to an asymmetric quantizer"),
        (lambda t: t.update({f"{LAYER}.weight": torch.zeros(2, 4, 8, dtype=torch.uint8)}), r"3-D tensor are not"),
    ],
)
def test_what_is_not_read(tmp_path: Path, folders: dict[str, Path], change: Any, message: str) -> None:
    base = edited(folders["modelopt"], tmp_path / "base", change)
    for refused in (load_model, lambda folder: export_checkpoint(folder, tmp_path / "out", format="modelopt")):
        with pytest.raises(ValueError, match=message):
            refused(base)


def test_dense_by_the_older_word(tmp_path: Path, folders: dict[str, Path]) -> None:
    """compressed-tensors used to write a sparsity_config that says "dense"."""
    base = tmp_path / "base"
    shutil.copytree(folders["compressed-tensors"], base)
    config = read_config(base)
    config["quantization_config"]["sparsity_config"] = {"format": "dense", "global_sparsity": 0.1}
    (base / "config.json").write_text(json.dumps(config))
    load_model(base)
    config["quantization_config"]["sparsity_config"] = {"format": "sparse-24-bitmask"}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="sparsity_config is set"):
        load_model(base)


# ---- experts


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral as hubs have it, NVFP4 in every expert: one Llama MLP's codes under each expert's name."""
    from transformers import AutoConfig

    from .test_load import SMALL

    root = tmp_path_factory.mktemp("experts")
    config = AutoConfig.for_model("mixtral", **SMALL, num_local_experts=2)
    quantize_checkpoint(save_dense(root / "dense", config), root / "torchao")
    export_checkpoint(root / "torchao", root / "attention", format="modelopt")

    def pack(tensors: Tensors) -> None:
        for name in expert_names():
            n, k = tensors[f"{name}.weight"].shape
            generator = torch.Generator().manual_seed(len(tensors))
            tensors[f"{name}.weight"] = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
            tensors[f"{name}.weight_scale"] = torch.ones(n, k // 16).to(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale_2"] = torch.tensor(2.0**-8)

    return edited(root / "attention", root / "experts", pack)


def expert_names() -> Iterator[str]:
    for layer in range(2):
        for expert in range(2):
            for leaf in ("w1", "w2", "w3"):
                yield f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{leaf}"


def test_experts_are_exported_one_by_one(tmp_path: Path, experts: Path) -> None:
    """SCENARIOS n25: transformers stacks them, so load_model refuses; serving engines read them, so no export, no
    comparison and no inspection may lose one."""
    report = export_checkpoint(experts, tmp_path / "ct", format="compressed-tensors")
    assert report.num_layers == 8 + 12 and any("12 NVFP4 layers, the first" in notice for notice in report.notices)
    export_checkpoint(tmp_path / "ct", tmp_path / "back", format="modelopt")
    with Shards(experts) as shards:
        keys = list(shards)
    assert_same_tensors(keys, experts, tmp_path / "back")
    assert read_config(tmp_path / "ct")["quantization_config"]["ignore"] == ["lm_head"]
    verdict = verify(experts, tmp_path / "ct")
    assert verdict.same and verdict.num_compared == len([key for key in keys if not key.endswith(("scale", "_2"))])
    assert inspect_path(experts).facts["digest"] == inspect_path(tmp_path / "ct").facts["digest"]
    last = list(expert_names())[-1]
    other = edited(experts, tmp_path / "other", lambda t: t[f"{last}.weight"][0, 0].add_(1))
    assert list(verify(other, tmp_path / "ct").differences) == [last]
    assert inspect_path(experts).facts["digest"] != inspect_path(other).facts["digest"]
    with pytest.raises(ValueError, match=r"experts\.\d\.w\d is NVFP4, but transformers fuses it with others"):
        load_model(experts)


# ---- tied embeddings, completeness, values


def test_a_second_copy_of_tied_embeddings_is_left_out(tmp_path: Path) -> None:
    """SCENARIOS n16."""
    quantize_checkpoint(save_dense(tmp_path / "dense", tiny_config(tie_word_embeddings=True)), tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "once", format="modelopt")
    twice = edited(
        tmp_path / "once",
        tmp_path / "twice",
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    report = export_checkpoint(twice, tmp_path / "out", format="compressed-tensors")
    assert report.notices == ["lm_head.weight is tied to the embeddings: its second copy is left out."]
    with Shards(tmp_path / "out") as shards:
        assert "lm_head.weight" not in shards
    assert read_config(tmp_path / "out")["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.update(num_hidden_layers=3), r"needs, but no file holds model\.layers\.2\..*more"),
        (lambda config: config.update(attention_bias=True), r"needs, but no file holds .*k_proj\.bias"),
        (lambda config: config.update(num_hidden_layers=1), r"does not know model\.layers\.1\..*more"),
    ],
)
def test_config_and_weights_do_not_belong_together(
    tmp_path: Path, folders: dict[str, Path], dense: Path, adapter: Path, change: Any, message: str
) -> None:
    for name, source in {**folders, "dense": dense}.items():
        base = tmp_path / name
        shutil.copytree(source, base)
        config = read_config(base)
        change(config)
        (base / "config.json").write_text(json.dumps(config))
    for name in folders:
        with pytest.raises(ValueError, match=message):
            merge_checkpoint(tmp_path / name, adapter, tmp_path / "out")
        assert any("do not belong together" in warning for warning in inspect_path(tmp_path / name).warnings)
    with pytest.raises(ValueError, match=message):
        export_checkpoint(tmp_path / "torchao", tmp_path / "out", format="modelopt")
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(tmp_path / "dense", tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("key", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_value_that_is_no_number(
    tmp_path: Path, folders: dict[str, Path], dense: Path, adapter: Path, key: str, value: float
) -> None:
    """One NaN in a norm makes every answer NaN: nothing is written with it, and loading says so."""

    def spoil(tensors: Tensors) -> None:
        tensors[key].view(-1)[-1] = value

    message = rf"{key} holds 1 NaN or infinite values"
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(edited(dense, tmp_path / "dense", spoil), tmp_path / "out")
    base = edited(folders["modelopt"], tmp_path / "base", spoil)
    for to in ("nvfp4", "bf16"):
        with pytest.raises(ValueError, match=message):
            merge_checkpoint(base, adapter, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()
    with pytest.warns(UserWarning, match=rf"{key}: 1 of its \d+ values are NaN or infinite"):
        load_model(base)
    assert any(warning.startswith(f"{key}: 1 NaN") for warning in inspect_path(base).warnings)
    assert verify(base, base).same


def test_a_tensor_scale_stored_upside_down(tmp_path: Path, folders: dict[str, Path], adapter: Path) -> None:
    """Taken for its reciprocal a scale of 1e-4 becomes 1e4; every verb that reads it says what it sees."""

    def turn(tensors: Tensors) -> None:
        for key in tensors:
            if key.endswith("weight_scale_2"):
                tensors[key] = 1 / tensors[key]

    base = edited(folders["modelopt"], tmp_path / "base", turn)
    message = r"its largest weight is .*e\+0\d; is the tensor scale stored upside down\? \(and 13 more\)"
    with pytest.warns(UserWarning, match=message):
        load_model(base)
    report = export_checkpoint(base, tmp_path / "out", format="compressed-tensors")
    assert any("upside down" in notice for notice in report.notices)
    assert any("upside down" in warning for warning in inspect_path(base).warnings)
    merged = merge_checkpoint(base, adapter, tmp_path / "merged", min_retained=-1, any_base=True)
    assert any("upside down" in warning for warning in merged.warnings)
