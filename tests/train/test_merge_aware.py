"""Merge-aware runs end to end: train, stop, resume, merge, load with plain transformers; it is what was trained."""

import errno
import shutil

import pytest
import torch
from safetensors.torch import load_file

from halfbyte import load_model
from halfbyte.checkpoint.merge import merge_checkpoint
from halfbyte.lora import load_adapter, merged_digest
from halfbyte.lora import metadata as md
from halfbyte.lora.merge_aware import merge_aware_layers
from halfbyte.train.trainer import train

SHORT = {"max_steps": 4, "lora_modules_to_save": None, "merge_aware": True}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("run") / "uninterrupted"
    train(config(output_dir, **SHORT, save_steps=1, merge_aware_start_step=0.5))
    return output_dir


def test_the_metadata_says_how(uninterrupted) -> None:
    recorded = md.read(uninterrupted / "adapter")
    assert recorded.mode == "merge-aware" and recorded.start_step == 2
    assert recorded.quantizer == md.Quantizer("dither", "keep", 42, "float32")
    assert md.read(uninterrupted / "checkpoint-1").merged_digest != recorded.merged_digest


def test_a_resumed_run_is_the_same_bits(uninterrupted, config, tmp_path) -> None:
    """Resumed before the start step, at half the run, so that the switch itself is crossed after the resume."""
    source = str(uninterrupted / "checkpoint-1")
    settings = SHORT | {"merge_aware_start_step": 0.5}
    resumed = train(config(tmp_path / "out", **settings, resume_from_checkpoint=source))
    expected = load_file(uninterrupted / "adapter" / "adapter_model.safetensors")
    found = load_file(resumed.adapter / "adapter_model.safetensors")
    assert expected.keys() == found.keys() and all(torch.equal(expected[key], found[key]) for key in expected)


def test_resuming_with_another_setting_is_refused(uninterrupted, config, tmp_path) -> None:
    with pytest.raises(ValueError, match="merge_aware"):
        train(config(tmp_path / "out", **SHORT, resume_from_checkpoint=str(uninterrupted / "checkpoint-1")))


def test_a_start_step_that_is_never_reached_is_refused(config, tmp_path) -> None:
    """Else it trains plain LoRA and calls it merge-aware; by steps when the config is read, by epochs at the start."""
    with pytest.raises(ValueError, match="merge_aware_start_step is 4, but the run takes 4 steps"):
        config(tmp_path / "a", **SHORT, merge_aware_start_step=4)
    epochs = SHORT | {"max_steps": None, "num_epochs": 1}
    with pytest.raises(ValueError, match="merge_aware_start_step is 9, but the run takes 5 steps"):
        train(config(tmp_path / "b", **epochs, merge_aware_start_step=9))
    assert not (tmp_path / "b" / "config.yaml").exists()


def test_the_start_step_matters(uninterrupted, config, tmp_path) -> None:
    from_start = train(config(tmp_path / "a", **SHORT)).adapter
    never = train(config(tmp_path / "b", **SHORT, merge_aware_start_step=1.0)).adapter
    plain = train(config(tmp_path / "c", **SHORT | {"merge_aware": False})).adapter
    files = [load_file(folder / "adapter_model.safetensors") for folder in (from_start, never, plain)]
    late = load_file(uninterrupted / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(files[1][key], files[2][key]) for key in files[1])
    for key in late:
        assert not torch.equal(late[key], files[0][key]) and not torch.equal(late[key], files[2][key])


def test_the_merged_file_is_what_was_trained(uninterrupted, base, tmp_path) -> None:
    """By digest, and by logits in plain transformers with torchao, against the adapter's own evaluation forward."""
    pytest.importorskip("torchao")
    from transformers import AutoModelForCausalLM

    adapter = uninterrupted / "adapter"
    merge_checkpoint(base, adapter, tmp_path / "merged", min_retained=0.0)
    trained = load_adapter(load_model(base), adapter).eval()
    recorded = md.read(adapter)
    assert len(merge_aware_layers(trained)) == len(recorded.targets)
    assert merged_digest(trained) == recorded.merged_digest
    tokens = torch.arange(1, 13).unsqueeze(0)
    ours = load_model(tmp_path / "merged")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    with torch.no_grad():
        expected = trained(tokens).logits
        assert torch.equal(ours(tokens).logits, expected) and torch.equal(theirs(tokens).logits, expected)


@pytest.mark.parametrize("fails", ["while training's end is written", "while a finished run is published again"])
def test_an_older_adapter_stays_until_the_new_one_is_complete(
    fails, uninterrupted, config, tmp_path, monkeypatch
) -> None:
    """Written first, then exchanged: a full disk at the end of a run costs no adapter that was there."""
    out = tmp_path / "out"
    shutil.copytree(uninterrupted, out)
    before = {path.name: path.read_bytes() for path in (out / "adapter").iterdir()}
    settings = SHORT | {"merge_aware_start_step": 0.5, "save_steps": 1}
    if "training" in fails:
        settings["max_steps"] = SHORT["max_steps"] + 1

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("halfbyte.train.trainer.model_card" if "training" in fails else "shutil.copyfile", full)
    with pytest.raises((OSError, ValueError), match="disk is full"):
        train(config(out, **settings, resume_from_checkpoint=True))
    assert {path.name: path.read_bytes() for path in (out / "adapter").iterdir()} == before
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


def test_unusable_settings_are_one_sentence(config, tmp_path) -> None:
    with pytest.raises(ValueError, match="merge_aware_start_step is 2.5: a fraction is at most 1.0"):
        config(tmp_path, merge_aware=True, merge_aware_start_step=2.5)
    with pytest.raises(ValueError, match="merge_aware_rounding"):
        config(tmp_path, merge_aware=True, merge_aware_rounding="up")
    with pytest.raises(ValueError, match="merge-aware LoRA needs a LoRA layer over an NVFP4 weight"):
        train(config(tmp_path / "out", **SHORT, lora_target_modules=["lm_head"]))
