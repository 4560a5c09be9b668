"""An adapter's folder: PEFT's own files, plus the `halfbyte` key that says which base and which rounding it is for.

PEFT's `save_pretrained` and `from_pretrained` work as ever; these two write and check the key around them, and load a
merge-aware adapter as merge-aware.
"""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from halfbyte.lora import metadata
from halfbyte.lora.merge_aware import make_merge_aware, merge_aware_layers, merged_digest, quantizer_of
from halfbyte.lora.names import adapted_layers
from halfbyte.lora.staged import staged_files

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

CARD_NAME, WEIGHTS_NAME = "README.md", "adapter_model.safetensors"
OVERRIDES = "halfbyte_overrides"  # attribute of a PeftModel whose adapter was attached against its record


def describe_adapter(model: nn.Module, *, start_step: int = 0) -> metadata.AdapterMetadata:
    """Metadata of the adapter on a model, as it is trained now: its NVFP4 targets, plain or merge-aware; for the
    latter its rounding and the digest of the merged weights, which the merged file must have.

    start_step  the optimizer step from which on training was merge-aware.
    """
    targets = adapted_layers(model)
    if not merge_aware_layers(model):
        return metadata.describe(model, targets)
    described = metadata.describe(
        model, targets, mode="merge-aware", quantizer=quantizer_of(model), start_step=start_step
    )
    return dataclasses.replace(described, merged_digest=merged_digest(model))


def save_adapter(peft_model: "PeftModel", folder: str | os.PathLike[str], *, start_step: int = 0) -> None:
    """PEFT's files, with the metadata in adapter_config.json. The adapter "default" lies in the folder itself.

    What `load_adapter(any_base=True)` overrode for this model is written too. Other files in the folder stay.

    raises  OSError when it cannot be written; an older adapter in the folder is then as it was.
    """
    write_adapter(peft_model, folder, describe_adapter(peft_model, start_step=start_step))


def write_adapter(
    peft_model: "PeftModel", folder: str | os.PathLike[str], described: metadata.AdapterMetadata, **kwargs: Any
) -> None:
    """`save_adapter` of an adapter that has been described already; kwargs go to PEFT's `save_pretrained`.

    No moment leaves a config without its key: it would load as a plain adapter's, and merge to other bytes.
    """
    card = Path(folder) / CARD_NAME
    with staged_files(folder, last=metadata.CONFIG_NAME) as partial:
        if card.is_file():  # PEFT goes on with the text that is there
            shutil.copyfile(card, partial / CARD_NAME)
        peft_model.save_pretrained(str(partial), **kwargs)
        metadata.write(partial, dataclasses.replace(described, overrides=overrides_of(peft_model)))


def overrides_of(model: nn.Module) -> tuple[str, ...]:
    """What was overridden, on purpose, when the model's adapter was attached; a line each."""
    return getattr(model, OVERRIDES, ())


def load_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    any_base: bool = False,
    cache: bool | None = None,
    **kwargs: Any,
) -> "PeftModel":
    """Attach a saved adapter to its base; a merge-aware one computes with its merged weight again.

    model     with NVFP4 layers, e.g. from `halfbyte.load_model`.
    any_base  attach although the base, or the quantizer's version, is another than the one it was trained on;
              `save_adapter` records that.
    cache     as in `make_merge_aware`; kwargs go to PEFT (is_trainable=True, adapter_name=...).
    raises    ValueError naming what differs from the base it was trained on, or what is damaged; FileNotFoundError for
              no adapter.
    """
    from peft import PeftModel

    recorded = metadata.read(folder)
    overrides = recorded.overrides if recorded is not None else ()
    if recorded is not None:
        present = metadata.present_targets(recorded, model)
        if not any_base:
            metadata.check_version(recorded)
            metadata.check_targets(recorded, present)
        elif found := metadata.differences(recorded, present):
            overrides += (
                f"any_base: trained on base {recorded.base_digest[:16]}, attached to another, in which {len(found)} of "
                f"{len(recorded.targets)} layers differ",
            )
        if changed := metadata.other_quantizer(recorded):  # only with any_base
            overrides += (f"any_base: {changed}",)
    check_weights(Path(folder) / WEIGHTS_NAME)
    peft_model = PeftModel.from_pretrained(model, str(folder), **{"config": peft_config(folder), **kwargs})
    setattr(peft_model, OVERRIDES, overrides)
    if recorded is None or recorded.mode != "merge-aware":
        return peft_model
    quantizer = recorded.quantizer
    make_merge_aware(
        peft_model,
        rounding=quantizer.rounding,
        scales=quantizer.scales,
        seed=quantizer.seed,
        dtype=metadata.torch_dtype(quantizer.dtype),
        cache=cache,
    )
    return peft_model


def check_weights(path: Path) -> None:
    """ValueError for a safetensors file that is cut, or holds NaN or infinity; before PEFT changes the model by it."""
    if not path.exists():  # PEFT knows other places, and what to say
        return
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # not a dict
                value = file.get_tensor(key)
                if value.is_floating_point() and value.dtype.itemsize > 1 and not torch.isfinite(value).all():
                    raise ValueError(f"{path}: {key} holds NaN or infinite values. Take an earlier checkpoint.")
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a safetensors file, or cut short ({error}). Copy the adapter's whole folder again."
        ) from None


def peft_config(folder: str | os.PathLike[str]) -> "PeftConfig":
    """PEFT's own part of adapter_config.json. Given to `from_pretrained`, it does not warn of our key."""
    from peft import PeftConfig

    content = PeftConfig.from_json_file(str(Path(folder) / metadata.CONFIG_NAME))
    content.pop(metadata.KEY, None)
    return PeftConfig.from_peft_type(**content)
