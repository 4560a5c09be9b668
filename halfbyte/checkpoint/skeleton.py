"""The model a checkpoint is for, without its weights, and which of its parameters each key of the checkpoint becomes.

transformers renames and fuses keys while it loads (conversion_mapping.py: prefixes of multimodal models, experts
stacked to 3-D, qkv fused). A 4-bit weight cannot be fused with another, so such a layer must be known before anything
is loaded. We ask transformers' own mapping rather than keep a list of architectures.
"""

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Target(NamedTuple):
    """Where a checkpoint's key goes.

    name   the model's parameter or buffer; the checkpoint's own name when the model has none such.
    fused  True when transformers computes that parameter from several keys.
    known  False when the model has no such parameter.
    """

    name: str
    fused: bool
    known: bool


class Skeleton:
    """A causal language model with its parameters on the meta device and its buffers real.

    The buffers are computed by the model's own constructor on the CPU: non-persistent ones, such as a rotary
    embedding's inv_freq, are in no file and must not stay on meta.
    """

    def __init__(
        self, config: "PreTrainedConfig", where: Path, *, dtype: torch.dtype | None = None, buffers: bool = True
    ):
        """
        config   transformers' config; its quantization_config is dropped.
        where    the folder or file it came from, for messages.
        dtype    None takes the config's.
        buffers  False leaves the buffers on meta too, for one who only asks for shapes: experts of many gigabytes are
                 then not even touched, and a model of 126 layers takes a third of the time.
        raises   ValueError when transformers cannot build a causal language model from it.
        """
        from accelerate import init_empty_weights
        from transformers import AutoModelForCausalLM
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
        from transformers.modeling_utils import set_zero3_state

        self.config = copy.deepcopy(config)
        if hasattr(self.config, "quantization_config"):
            del self.config.quantization_config
        self.dtype: torch.dtype = dtype or getattr(self.config, "dtype", None) or torch.float32
        try:
            # A live ZeRO-3 config would make transformers partition the empty parameters; the engine does that later.
            empty = init_empty_weights(include_buffers=False) if buffers else torch.device("meta")
            with empty, set_zero3_state():
                self.model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{where}: transformers cannot build a causal language model from it ({error}). Give such a model, or "
                "update transformers."
            ) from error
        self.mapping: list[Any] = get_model_conversion_mapping(self.model)
        self._renamings = [entry for entry in self.mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in self.mapping if isinstance(entry, WeightConverter)]
        self._state = self.model.state_dict()
        self._targets: dict[str, Target] = {}
        self._named_modules = dict(self.model.named_modules())

    @classmethod
    def from_folder(cls, folder: Path, *, dtype: torch.dtype | None = None) -> "Skeleton":
        """The model of a folder's config.json."""
        return cls(load_config(folder), folder, dtype=dtype)

    def target(self, key: str) -> Target:
        """The parameter that a key becomes, by transformers' own rules."""
        if key not in self._targets:
            self._targets[key] = self._find_target(key)
        return self._targets[key]

    def _find_target(self, key: str) -> Target:
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._state)
        if name not in self._state and key in self._state:
            name, pattern = rename_source_key(key, [], [], prefix, self._state)
        return Target(name, pattern is not None, name in self._state)

    def ignores(self, name: str) -> bool:
        """True for a key that the architecture leaves unread on purpose, such as a draft head or a vision tower."""
        patterns = self.model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Parameters of the model that none of these keys makes, in the model's order."""
        made = {self.target(key).name for key in keys}
        for pair in self.model.all_tied_weights_keys.items():
            made |= set(pair) if made & set(pair) else set()
        computed = [pattern for converter in self._converters for pattern in converter.target_patterns]
        optional = self.model._keys_to_ignore_on_load_missing or ()
        return [
            name
            for name, _ in self.model.named_parameters(remove_duplicate=False)
            if name not in made
            and not any(pattern in name for pattern in computed)
            and not any(re.search(pattern, name) for pattern in optional)
        ]

    def check_complete(self, keys: Iterable[str], where: Path) -> None:
        """ValueError when the model of the config needs a parameter that none of these keys makes, or when one of them
        is none of its tensors and cannot be left out."""
        keys = list(keys)
        targets = {key: self.target(key) for key in keys}
        strange = [key for key, target in targets.items() if not target.fused and not target.known]
        complain("the model needs, but no file holds", self.missing(keys), where)
        complain(
            "the files hold, but the model of the config does not know",
            [key for key in strange if not self.can_do_without(key)],
            where,
        )

    def can_do_without(self, key: str) -> bool:
        """True for a key that makes no parameter and can be none that the model lacks.

        False for the weight or bias of a module that the model has, and for a layer beyond those that it has: there the
        config is wrong, and leaving the tensor out would change what the model computes.
        """
        target = self.target(key)
        if target.fused or target.known:
            return False
        if self.ignores(target.name):
            return True
        parent, _, leaf = target.name.rpartition(".")
        nearest = parent
        while nearest and nearest not in self._named_modules:
            nearest = nearest.rpartition(".")[0]
        if nearest == parent and leaf in ("weight", "bias"):
            return False
        return not isinstance(self._named_modules[nearest], nn.ModuleList)

    def linears(self, keys: Iterable[str]) -> dict[str, str]:
        """Key of the checkpoint -> fqn of the model's linear layer, for those that are a linear's weight, unfused."""
        found = {}
        for key in keys:
            target = self.target(key)
            if target.fused or not target.known or not target.name.endswith(".weight"):
                continue
            fqn = target.name.removesuffix(".weight")
            if isinstance(self.model.get_submodule(fqn), nn.Linear):
                found[key] = fqn
        return found

    @property
    def all_linears(self) -> list[str]:
        """fqns of the model's linear layers, in its order."""
        return [fqn for fqn, module in self.model.named_modules() if isinstance(module, nn.Linear)]

    @property
    def output_embeddings(self) -> str | None:
        """fqn of the layer that makes logits, commonly "lm_head"."""
        head = self.model.get_output_embeddings()
        return next((fqn for fqn, module in self.model.named_modules() if module is head), None) if head else None

    @property
    def tied(self) -> set[str]:
        """Parameters that share another's tensor."""
        pairs = self.model.all_tied_weights_keys
        return set(pairs) | set(pairs.values())


def complain(what: str, names: Iterable[str], where: Path) -> None:
    """ValueError with the first of the names, unless there are none."""
    names = sorted(names)
    if names:
        others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise ValueError(
            f"{where}: {what} {names[0]}{others}. Config and weights do not belong together; take both from one "
            "checkpoint."
        )


def load_config(folder: Path) -> "PreTrainedConfig":
    """transformers' config of a folder; ValueError for one that it does not know."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise ValueError(
            f"{folder}: transformers does not understand its config.json ({error}). Mend that file, or update "
            "transformers."
        ) from error
