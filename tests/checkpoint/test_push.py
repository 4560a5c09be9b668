"""To the Hub and back: the real client, in a process of its own, against a Hub on this machine; and every refusal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from halfbyte import load_model
from halfbyte.checkpoint.card import model_card
from halfbyte.checkpoint.push import files_to_send, push_folder
from halfbyte.cli.main import main
from halfbyte.lora import save_adapter
from tests.checkpoint.hub_stand_in import StandIn
from tests.train import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.save_base(tmp_path_factory.mktemp("push") / "base")


@pytest.fixture(scope="module")
def adapter(base) -> Path:
    """As a run leaves it: in a folder with metrics, beside things that are nobody's business."""
    run = base.parent / "run"
    model = get_peft_model(load_model(base, dtype="float32"), LoraConfig(r=4, target_modules="all-linear"))
    save_adapter(model, run / "adapter")
    (run / "adapter" / "optimizer.pt").write_bytes(b"states")
    (run / "adapter" / "trainer_state.json").write_text("{}")
    (run / "adapter" / ".secret.json").write_text("{}")
    rows = [{"step": 0, "eval_loss": 4.25}, {"step": 8, "loss": 3.0}, {"step": 8, "eval_loss": 2.875}]
    tiny.write_lines(run / "metrics.jsonl", rows)
    return run / "adapter"


def halfbyte(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a fresh process, so that the client reads its settings from this environment."""
    command = [sys.executable, "-m", "halfbyte", *map(str, arguments)]
    settings = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_stand_in",
        "HF_HUB_DISABLE_XET": "1",
        **environment,
    }
    return subprocess.run(command, capture_output=True, text=True, env=settings)


def test_there_and_back(base, adapter, tmp_path) -> None:
    """Pushed in one commit, with a card; then merged by their ids, from a cache that had neither."""
    with StandIn() as hub:
        places = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
        done = halfbyte("push", adapter, "me/adapter", "--private", "--base-model", "me/base", **places)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"pushed: {hub.address}/me/adapter/commit/")
        assert halfbyte("push", base, "me/base", "--message", "first", **places).returncode == 0
        assert [made["name"] for made in hub.created] == ["adapter", "base"]
        assert hub.commits == ["Adapter made by halfbyte", "first"]
        sent = hub.files["me/adapter"]
        assert sorted(sent) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
        assert sent["adapter_model.safetensors"] == (adapter / "adapter_model.safetensors").read_bytes()
        assert b"base_model: me/base" in sent["README.md"]
        done = halfbyte("merge", "me/base", "me/adapter", tmp_path / "merged", **places)
        assert done.returncode == 0, done.stderr
    pushed, merged = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged"))
    assert pushed.keys() == merged.keys()
    assert all(pushed[key].equal(merged[key]) for key in pushed)  # a fresh adapter changes nothing


@pytest.mark.parametrize(
    ("refuse", "environment", "expected"),
    [
        (None, {"HF_HUB_OFFLINE": "1"}, "the Hub is switched off (HF_HUB_OFFLINE=1). Unset it, and push again."),
        (401, {}, "Log in with `hf auth login`, or set HF_TOKEN."),
        (403, {}, "Use a token that may write, or another owner."),
    ],
)
def test_a_push_that_cannot_be_is_one_sentence(refuse, environment, expected, adapter, tmp_path) -> None:
    with StandIn(refuse=refuse) as hub:
        done = halfbyte("push", adapter, "me/adapter", HF_ENDPOINT=hub.address, HF_HOME=str(tmp_path), **environment)
        assert done.returncode == 2 and not hub.files
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert f"{adapter} could not be sent to me/adapter: " in line and expected in line


def test_a_model_that_is_not_here_offline_is_one_sentence(tmp_path) -> None:
    done = halfbyte("inspect", "someone/model@v1", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode == 2
    assert (
        "someone/model@v1: no such folder here, no copy in the Hub's cache, and the Hub is switched off" in done.stderr
    )


def test_what_is_no_model_or_no_name_is_refused_before_anything_is_sent(adapter, tmp_path) -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> None:
            raise AssertionError(name)

    for folder, name, expected in [
        (adapter, "just-a-name", "expected owner/name"),
        (adapter, "me/x@main", "expected owner/name"),
        (adapter.parent, "me/x", "Give its folder `adapter`"),
        (tmp_path, "me/x", "neither an adapter .* nor a model"),
    ]:
        with pytest.raises(ValueError, match=expected):
            push_folder(folder, name, api=Untouchable())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no weights"):
        files_to_send(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        files_to_send(tmp_path / "none")


def test_the_card_has_the_figures_and_nothing_made_up(base, adapter, tmp_path) -> None:
    card = model_card(adapter)
    head = card.split("---")[1]
    assert "library_name: peft" in head and "base_model" not in head  # a local folder is no base on the Hub
    assert "| held-out loss (nats per token), before and after | 4.2500, 2.8750 |" in card
    assert "| rank, alpha | 4, 8 |" in card and "| optimizer steps | 8 |" in card
    (adapter.parent / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    assert "loss" not in model_card(adapter)
    (tmp_path / "metrics.jsonl").rename(adapter.parent / "metrics.jsonl")
    record = {"halfbyte_version": "0.1.0", "made_by": "merge", "to": "nvfp4", "rounding": "dither"}
    (tmp_path / "halfbyte.json").write_text(json.dumps({**record, "block_scales": "keep", "retained": 0.957}))
    card = model_card(tmp_path)
    assert "| kept of the adapter's change | 95.7% |" in card and "| rounding | dither, block scales keep |" in card
    assert "| mean relative error of the 4-bit weights | 0.0" in model_card(base)


def test_what_would_be_sent_can_be_looked_at(adapter, capsys) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["push", str(adapter), "me/adapter", "--show"])
    shown = capsys.readouterr().out
    assert not leaving.value.code and "adapter_model.safetensors" in shown and "optimizer.pt" not in shown
    assert "# LoRA adapter on an NVFP4 base" in shown
