"""`halfbyte plan`: a config.json is enough, the choice can be pasted, mistakes are one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfbyte.cli.main import main
from halfbyte.train.config import build_config
from tests.train import tiny

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_405B))
    return tmp_path / "config.json"


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(arg) for arg in args])
    return int(left.value.code or 0)


def test_a_machine_one_does_not_have(config: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """405B on 64 GPUs from its config alone, by file and by folder; the lines for the YAML are a valid config."""
    monkeypatch.setenv("COLUMNS", "80")
    for path in (config, config.parent):
        assert run("plan", path, "--gpus", 64, "--gpu-memory", "80GB") == 0
        text = capsys.readouterr().out
        assert "406e9 parameters, 402e9 of them in 4 bits" in text and "HSDP, 8 x 8" in text
        assert max(map(len, text.splitlines()[:40])) <= 120 and "…" not in text
    pasted = text.partition("In the training config:")[2].partition("and start it with:")
    values = yaml.safe_load(pasted[0])
    made = build_config({"base_model": "b", "datasets": ["d.jsonl"], "output_dir": "o", **values})
    assert made.fsdp and made.gradient_checkpointing and made.dp_replicate_size == 8
    assert " ".join(pasted[2].split()) == "torchrun --nnodes 8 --nproc-per-node 8 -m halfbyte train run.yaml"


def test_json_holds_what_the_table_shows(config: Path, capsys: Any) -> None:
    assert run("plan", config, "--gpus", 8, "--gpu-memory", "141GB", "lora_r=64", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    one_layer = 64 * (2 * (16384 + 16384) + 2 * (16384 + 1024) + 3 * (16384 + 53248))
    assert found["params"] == 405_853_388_800 and found["trainable_params"] == 126 * one_layer
    ddp = next(row for row in found["options"] if row["engine"] == "DDP 8")
    assert ddp["base"] == pytest.approx(234.34e9, rel=1e-3) and not ddp["fits"]
    assert any(row["fits"] for row in found["options"])


def test_a_training_config_is_planned_as_it_stands(tmp_path: Path, capsys: Any) -> None:
    base = tiny.save_base(tmp_path / "base")
    run_yaml = tmp_path / "run.yaml"
    run_yaml.write_text(f"base_model: {base}\ndatasets: [d.jsonl]\noutput_dir: o\nlora_r: 8\noptimizer: adamw8bit\n")
    assert run("plan", run_yaml, "sequence_len=64", "--gpu-memory", "24GB") == 0
    text = capsys.readouterr().out
    assert "1 x 64 tokens, bf16, adamw8bit" in text and "Take one process" in text
    assert run("plan", run_yaml, "--cpu") == 0
    assert "the process" in capsys.readouterr().out


def test_overrides_are_in_the_line_that_starts_the_run(config: Path, tmp_path: Path, capsys: Any) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(f"base_model: {config}\ndatasets: [data.jsonl]\noutput_dir: run\n")
    assert run("plan", own, "max_steps=5", "--gpus", "64", "--gpu-memory", "80GB") == 0
    text = capsys.readouterr().out
    assert f"-m halfbyte train {own} max_steps=5" in text
    assert "GB on each GPU of 80.0 GB" in text and "batch:" in text


def test_a_cpu_is_called_one(config: Path, capsys: Any) -> None:
    assert run("plan", config, "--cpu") == 0
    text = capsys.readouterr().out
    assert "GB on the CPU of" in text and "GPU" not in text.partition("on the CPU of")[2].partition("Disk")[0]


def test_of_a_hub_id_the_config_alone_is_fetched(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import huggingface_hub

    asked = []

    def download(repo: str, file: str, revision: str | None = None) -> str:
        asked.append((repo, file, revision))
        return str(config)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("weights were asked for"))
    assert run("plan", "some/model@v1", "--gpus", 64, "--gpu-memory", "80GB") == 0
    assert asked == [("some/model", "config.json", "v1")] and "406e9" in capsys.readouterr().out
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: (_ for _ in ()).throw(OSError("offline")))
    for offline, said in (False, "could not be asked for its config.json (offline)"), (True, "the Hub is switched off"):
        monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda offline=offline: offline)
        assert run("plan", "some/model") == 2
        assert said in capsys.readouterr().err


def test_nothing_fits(config: Path, capsys: Any) -> None:
    assert run("plan", config, "--gpus", 2, "--gpu-memory", "24GB") == 0
    assert "Nothing fits. With micro_batch_size 1" in capsys.readouterr().out
    assert run("plan", config) == 0
    assert "give --gpu-memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lora_rank=8"], "unknown key 'lora_rank'; did you mean 'lora_r'?"),
        (["lora_r=0"], "lora_r is 0"),
        (["--gpu-memory", "big"], "no size"),
        (["--gpu-memory", "24"], "a plain number is bytes. Say 24GB."),
        (["--cpu", "--gpus", "2"], "leave out --gpus"),
    ],
)
def test_bad_input(config: Path, arguments: list[str], message: str, capsys: Any) -> None:
    assert run("plan", config, *arguments) == 2
    assert message in capsys.readouterr().err


def test_no_such_model_and_no_language_model(tmp_path: Path, capsys: Any) -> None:
    assert run("plan", tmp_path / "nowhere") == 2
    assert "no such file or folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert run("plan", tmp_path) == 2
    assert "cannot build a causal language model" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert run("plan", tmp_path) == 2
    assert "can be packed in 4 bits" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"num_attention_heads": 0}, {"hidden_size": "big"}, {"hidden_size": 65}])
def test_a_config_with_impossible_numbers(tmp_path: Path, wrong: dict[str, Any], capsys: Any) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **wrong}))
    assert run("plan", tmp_path) == 2
    assert "does not understand its config.json" in capsys.readouterr().err


def test_blocks_whose_layers_are_not_found_are_estimated(tmp_path: Path, capsys: Any) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "is_decoder": True, **small}))
    assert run("plan", tmp_path, "--gpu-memory", "24GB", "lora_target_modules=[query]") == 0
    assert "BertLayer: what it keeps for backward is an estimate" in " ".join(capsys.readouterr().out.split())
