"""A LoRA adapter in PEFT's own files, as factors by layer, for merging without building the model.

Scalings follow PEFT (tuners/lora): alpha / r, or alpha / sqrt(r) with rsLoRA, r and alpha looked up in rank_pattern and
alpha_pattern. What LoRA's W + s B A does not describe (DoRA's magnitudes, trained biases, activated LoRA, ...) is
refused rather than merged wrong.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from halfbyte.checkpoint.detect import read_json
from halfbyte.checkpoint.hub import local_folder
from halfbyte.checkpoint.tensor_file import TensorFile

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LORA_KEYS = {
    "lora_A": (".lora_A.weight", ".lora_embedding_A"),
    "lora_B": (".lora_B.weight", ".lora_embedding_B"),
}
# Settings of LoraConfig under which the layer computes something else than (W + s B A) x, and what they are called.
NOT_MERGEABLE = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "a bias in lora_B",
    "fan_in_fan_out": "a transposed base weight",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "layer replication",
    "target_parameters": "LoRA on bare parameters",
    "trainable_token_indices": "trained token embeddings",
    "megatron_config": "Megatron layers",
}
# Initializations that subtract the adapter's start from the base: on the base as it is, the adapter means nothing.
REBASING = ("pissa", "olora", "loftq", "corda", "lora_ga")


@dataclass(frozen=True)
class Factors:
    """One layer's adapter: delta = scaling * lora_B @ lora_A, transposed for an embedding."""

    lora_A: Tensor
    lora_B: Tensor
    scaling: float
    embedding: bool


class Adapter:
    """An adapter's folder, open for reading.

    layers   names (in the model) of the layers that have factors.
    modules  parameters (in the model) that are replaced whole: modules_to_save, resized embeddings.
    raises   FileNotFoundError; ValueError for what is not LoRA, cannot be merged, or is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.folder = local_folder(path)
        self.config = read_config(self.folder)
        refuse_variants(self.config, self.folder)
        weights = self.folder / WEIGHTS_NAME
        if not weights.exists():
            raise FileNotFoundError(
                f"{weights}: not there. Expected an adapter that PEFT saved as safetensors; save it again with "
                "save_pretrained."
            )
        self._file = TensorFile(weights)
        self._keys: dict[str, dict[str, str]] = {}  # layer -> "lora_A" or "lora_B" -> key
        self.modules: dict[str, str] = {}  # parameter -> key
        try:
            for key in self._file.specs:
                self._sort(key)
            self._check_complete()
        except ValueError:
            self._file.close()
            raise

    def __enter__(self) -> "Adapter":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    @property
    def layers(self) -> list[str]:
        return sorted(self._keys)

    def factors(self, layer: str) -> Factors:
        """The layer's factors; ValueError when their rank is not the config's."""
        keys = self._keys[layer]
        lora_A, lora_B = self._file.read(keys["lora_A"]), self._file.read(keys["lora_B"])
        r, alpha = self._pattern("rank_pattern", layer, "r"), self._pattern("alpha_pattern", layer, "lora_alpha")
        if lora_A.dim() != 2 or lora_B.dim() != 2 or lora_A.shape[0] != r or lora_B.shape[1] != r:
            raise ValueError(
                f"{self._file.path}: {layer} has lora_A {list(lora_A.shape)} and lora_B {list(lora_B.shape)}, but "
                f"{CONFIG_NAME} gives it rank {r}. Config and weights do not belong together; copy the whole folder "
                "again."
            )
        for factor in (lora_A, lora_B):
            if not factor.is_floating_point():
                raise ValueError(
                    f"{self._file.path}: {layer} has factors in {factor.dtype}, expected a floating dtype. Save them "
                    "in fp32 or bf16."
                )
        scaling = alpha / (math.sqrt(r) if self.config.get("use_rslora") else r)
        return Factors(lora_A, lora_B, scaling, keys["lora_A"].endswith("_embedding_A"))

    def module(self, parameter: str) -> Tensor:
        """The new value of a parameter that is replaced whole."""
        return self._file.read(self.modules[parameter])

    def _sort(self, key: str) -> None:
        """Put one key of the file where it belongs."""
        if not key.startswith(PREFIX):
            raise ValueError(
                f"{self._file.path}: {key} does not start with {PREFIX}; expected the keys that PEFT writes. Save it "
                "with PEFT's save_pretrained."
            )
        name = key.removeprefix(PREFIX)
        for factor, suffixes in LORA_KEYS.items():
            for suffix in suffixes:
                if name.endswith(suffix):
                    self._keys.setdefault(name.removesuffix(suffix), {})[factor] = key
                    return
        if "lora_" in name:
            raise ValueError(
                f"{self._file.path}: {key} is part of a LoRA variant that cannot be merged. Serve it unmerged."
            )
        self.modules[name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = key

    def _check_complete(self) -> None:
        for layer, keys in self._keys.items():
            for factor in LORA_KEYS:
                if factor not in keys:
                    raise ValueError(f"{self._file.path}: {layer} has no {factor}. The file is damaged; copy it again.")
        if not self._keys and not self.modules:
            raise ValueError(
                f"{self._file.path}: holds no LoRA factors. Save the adapter again with PEFT's save_pretrained."
            )

    def _pattern(self, patterns: str, layer: str, default: str) -> Any:
        from peft.utils.other import get_pattern_key

        table: Mapping[str, Any] = self.config.get(patterns) or {}
        return table.get(get_pattern_key(list(table), layer), self.config[default])


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json; FileNotFoundError when the folder is no adapter."""
    path = folder / CONFIG_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path}: not there. Expected the folder of a PEFT adapter.")
    return read_json(path)


def refuse_variants(config: Mapping[str, Any], folder: Path) -> None:
    """ValueError for an adapter that is not plain LoRA."""
    where = folder / CONFIG_NAME
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"{where}: peft_type is {config.get('peft_type')}, expected LORA. Give a LoRA adapter, or serve this one "
            "unmerged."
        )
    for field, name in NOT_MERGEABLE.items():
        if config.get(field):
            raise ValueError(
                f"{where}: {field} is set: {name} is not W + s B A and cannot be merged. Serve it unmerged."
            )
    if config.get("bias", "none") != "none":
        raise ValueError(
            f"{where}: bias is {config['bias']!r}, expected 'none': trained biases cannot be merged. Serve it "
            "unmerged, or train without them."
        )
    init = str(config.get("init_lora_weights")).lower()
    if init.startswith(REBASING):
        raise ValueError(
            f"{where}: init_lora_weights is {init!r}, which moved part of the base into the adapter. Convert it first: "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        )
    for field, is_right in (("r", is_rank), ("lora_alpha", is_number)):
        if not is_right(config.get(field)):
            raise ValueError(
                f"{where}: r is {config.get('r')} and lora_alpha {config.get('lora_alpha')}, expected numbers, r >= 1. "
                "Save the adapter again."
            )
    for field, is_right in (("rank_pattern", is_rank), ("alpha_pattern", is_number)):
        table = config.get(field) or {}
        if not isinstance(table, dict) or not all(map(is_right, table.values())):
            raise ValueError(
                f"{where}: {field} is {table}, expected a number by layer name, ranks >= 1. Save the adapter again."
            )


def is_number(value: Any) -> bool:
    """A finite number; JSON as Python reads it also has NaN and Infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_rank(value: Any) -> bool:
    return is_number(value) and isinstance(value, int) and value >= 1
