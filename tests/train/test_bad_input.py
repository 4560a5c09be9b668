"""Whatever a user can get wrong is one sentence: found, expected, what to do. On the command line, with exit code 2."""

import json
import shutil

import pytest
import torch

from halfbyte.checkpoint.output import only_writer
from halfbyte.cli.main import main
from halfbyte.train.config import dump_config
from halfbyte.train.preflight import check_output_dir
from halfbyte.train.trainer import train
from tests.train import tiny


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model": "no/such/folder"}, "no/such/folder: no such file or folder"),
        ({"base_model": "someone/some-model"}, "someone/some-model: .*Hub (could not be asked|is switched off)"),
        ({"datasets": ["missing.jsonl"]}, "missing.jsonl: no such data file"),
        ({"sequence_len": 512}, "sequence_len is 512, but the model's limit is 256"),
        ({"lora_target_modules": ["q_proj", "w_proj"]}, "'w_proj' matches no linear layer; the model has down_proj"),
        ({"lora_target_modules": ".*w_proj"}, r"'\.\*w_proj' matches no linear layer"),
        ({"lora_target_modules": []}, "matches no linear layer"),
        ({"lora_target_modules": "[("}, r"'\[\(' is no regular expression"),
        ({"lora_modules_to_save": ["head"]}, "'head' matches no module"),
        ({"lora_modules_to_save": ["q_proj"]}, "matches .*q_proj, whose 4-bit weights cannot be trained in full"),
        ({"lora_modules_to_save": ["mlp"]}, "matches .*mlp, whose 4-bit weights cannot be trained in full"),
        ({"report_to": ["paper"]}, "report_to: 'paper' cannot be used"),
        ({"device": "cuda"}, "device is cuda, but"),
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation 'flash_attention_2'"),
    ],
)
def test_refused_before_training(change, message, config, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train(config(tmp_path / "out", **change))
    assert not (tmp_path / "out" / "config.yaml").exists()


def test_a_dense_base_is_refused_with_the_command_that_helps(config, base, tmp_path) -> None:
    with pytest.raises(ValueError, match="has no NVFP4 weight.*halfbyte quantize"):
        train(config(tmp_path / "out", base_model=str(base) + "-dense"))


def test_output_dir_not_empty(config, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="output_dir is not empty.*resume_from_checkpoint"):
        train(config(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_report_begun_before_the_run_is_no_run(tmp_path) -> None:
    (tmp_path / "report.html").write_text("<p>nothing yet</p>")
    check_output_dir(tmp_path, resuming=False)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_output_dir_not_writable(name, config, tmp_path) -> None:
    """A file stands where the folder should be: the one refusal that also meets root."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="output_dir"):
        train(config(tmp_path / name))


def test_two_runs_in_one_folder(config, tmp_path) -> None:
    output_dir = tmp_path / "run"
    output_dir.mkdir(exist_ok=True)
    with only_writer(output_dir), pytest.raises(RuntimeError, match="another run is writing this folder"):
        train(config(output_dir))
    assert not any(output_dir.iterdir())


def test_resume_without_a_checkpoint(config, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        train(config(tmp_path / "out", resume_from_checkpoint=True))


def test_a_run_that_diverges_ends_and_keeps_its_good_checkpoint(config, tmp_path, monkeypatch) -> None:
    """An infinite learning rate after step 2 makes the loss NaN; metrics.jsonl stays JSON."""
    real = torch.optim.AdamW.step

    def explode(self, closure=None):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        for group in self.param_groups:
            group["lr"] = 1e-2 if self.num_steps <= 2 else float("inf")
        return real(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", explode)
    with pytest.raises(ValueError, match="training loss is nan at step 4.*lower learning_rate"):
        train(config(tmp_path / "out", save_steps=2, save_total_limit=1))
    assert (tmp_path / "out" / "checkpoint-2").exists() and not (tmp_path / "out" / "checkpoint-4").exists()

    def refuse(text):
        raise AssertionError(text)

    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse)["loss"] for line in lines][-1] is None


def test_tokenizer_missing_or_without_padding(config, base, tmp_path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(base, bare)
    for path in bare.glob("*token*"):
        path.unlink()
    with pytest.raises(ValueError, match="no tokenizer that transformers can read"):
        train(config(tmp_path / "out", base_model=str(bare)))


def test_the_command_line_says_it_in_one_line(config, tmp_path, capsys) -> None:
    """From YAML file to exit code: a wrong override, a wrong column, and no traceback anywhere."""
    rows = tiny.write_lines(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}])
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config(tmp_path / "out", datasets=[str(rows)])))
    for override, message in (("lora_rank=3", "did you mean 'lora_r'"), ("lora_r=3", "found columns question, answer")):
        with pytest.raises(SystemExit) as leaving:
            main(["train", str(path), override])
        error = capsys.readouterr().err
        assert leaving.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
        assert message in error and "Traceback" not in error


def test_the_keys_are_listed_by_the_command(capsys) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["train", "--keys"])
    assert not leaving.value.code
    assert "learning_rate (0.0002): Peak learning rate." in capsys.readouterr().out


def test_a_base_without_limit_takes_any_length(base, tmp_path) -> None:
    from halfbyte.train.preflight import check_sequence_len

    config = json.loads((base / "config.json").read_text())
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_sequence_len(tmp_path, 10**6)
