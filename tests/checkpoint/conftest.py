"""Tiny models on disk, made once: dense, and in NVFP4 as transformers itself writes it through torchao."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 96
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        **changes,
    }
    return LlamaConfig(**settings)


def save_dense(folder: Path, config: Any, dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> Path:
    """A random model of that config, with a generation config of its own, in `folder`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(folder, **kwargs)
    return folder


def make_adapter(folder: Path, base: Any, *, strength: float = 0.02, record: bool = True, **config: Any) -> Any:
    """A trained-looking adapter on `base` (a model), saved by PEFT; returns the PeftModel."""
    from peft import LoraConfig, get_peft_model

    from halfbyte.lora import metadata as lora_metadata
    from halfbyte.nvfp4.convert import nvfp4_modules

    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "task_type": "CAUSAL_LM", **config}
    names = list(nvfp4_modules(base))
    described = lora_metadata.describe(base, names)
    model = get_peft_model(base, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name or "modules_to_save" in name:
                parameter.add_(strength * torch.randn(parameter.shape, generator=generator, dtype=torch.float32))
    model.save_pretrained(folder)
    if record:
        lora_metadata.write(folder, described)
    return model.eval()


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dense(tmp_path_factory.mktemp("models") / "dense", tiny_config())


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory, dense: Path) -> Path:
    """The dense model as transformers and torchao quantize and save it, in shards that part a weight's components."""
    from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(NVFP4WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16, quantization_config=config)
    folder = tmp_path_factory.mktemp("models") / "torchao"
    model.save_pretrained(folder, max_shard_size="4KB")
    return folder


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory, dense: Path) -> Path:
    from halfbyte.checkpoint.quantize import quantize_checkpoint

    folder = tmp_path_factory.mktemp("models") / "ours"
    quantize_checkpoint(dense, folder)
    return folder


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.arange(3 * 11).reshape(3, 11) % VOCAB


@pytest.fixture(scope="session")
def plain_load() -> Callable[..., Any]:
    """transformers' own loader, in a dtype or the config's."""
    from transformers import AutoModelForCausalLM

    def load(folder: Path, **kwargs: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, **kwargs)

    return load


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory, ours: Path) -> Path:
    from halfbyte.checkpoint.load import load_model

    folder = tmp_path_factory.mktemp("adapter") / "a"
    make_adapter(folder, load_model(ours, dtype=torch.float32))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, ours: Path) -> dict[str, Path]:
    """One model in each format, the later two exported from torchao's."""
    from halfbyte.checkpoint.export import export_checkpoint

    root = tmp_path_factory.mktemp("formats")
    folders = {"torchao": ours}
    for format in ("compressed-tensors", "modelopt"):
        report = export_checkpoint(ours, root / format, format=format, max_shard_size="8KB")
        assert (report.num_layers, report.moved_scales, report.rescaled, report.notices) == (14, {}, {}, [])
        folders[format] = root / format
    return folders
