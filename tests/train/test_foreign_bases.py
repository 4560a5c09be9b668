"""A base in another tool's format trains, resumes and merges, and comes back in its own format."""

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.checkpoint.detect import detect, read_config
from halfbyte.checkpoint.export import export_checkpoint
from halfbyte.checkpoint.merge import merge_checkpoint
from halfbyte.checkpoint.verify import verify
from halfbyte.train.trainer import train

SHORT = {"max_steps": 4, "save_steps": 2, "lora_modules_to_save": None}


@pytest.fixture(scope="module")
def torchao_run(base, config, tmp_path_factory):
    """(adapter, merged folder) of the run on the base as `halfbyte quantize` wrote it."""
    folder = tmp_path_factory.mktemp("torchao")
    adapter = train(config(folder / "run", **SHORT)).adapter
    merge_checkpoint(base, adapter, folder / "merged", min_retained=0)
    return adapter, folder / "merged"


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_train_resume_merge(format, base, config, torchao_run, tmp_path) -> None:
    """The codes are the same in all three formats, so adapters and merged codes must be, bit for bit."""
    foreign = tmp_path / "base"
    export_checkpoint(base, foreign, format=format)
    settings = SHORT | {"base_model": str(foreign)}
    first = train(config(tmp_path / "run", **settings))
    again = train(
        config(tmp_path / "resumed", **settings, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    )
    expected = load_file(torchao_run[0] / "adapter_model.safetensors")
    for adapter in (first.adapter, again.adapter):
        found = load_file(adapter / "adapter_model.safetensors")
        assert expected.keys() == found.keys() and all(torch.equal(expected[key], found[key]) for key in expected)

    merged = tmp_path / "merged"
    merge_checkpoint(foreign, again.adapter, merged, min_retained=0)
    assert detect(merged, read_config(merged)) == detect(foreign, read_config(foreign))
    verdict = verify(merged, torchao_run[1])
    assert verdict.same, verdict.differences
