"""An adapter's folder: PEFT's own files, plus the `halfbyte` key that says which base and which rounding it is for.

PEFT's `save_pretrained` and `from_pretrained` work as ever; these two write and check the key around them, and load a
merge-aware adapter as merge-aware.
"""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from torch import nn

from halfbyte.lora import metadata
from halfbyte.lora.merge_aware import make_merge_aware, merge_aware_layers, merged_digest, quantizer_of
from halfbyte.lora.names import base_name
from halfbyte.nvfp4.convert import nvfp4_modules

if TYPE_CHECKING:
    from peft import PeftModel


def describe_adapter(model: nn.Module, *, start_step: int = 0) -> metadata.AdapterMetadata:
    """Metadata of the adapter on a model, as it is trained now: its NVFP4 targets, plain or merge-aware; for the
    latter its rounding and the digest of the merged weights, which the merged file must have.

    start_step  the optimizer step from which on training was merge-aware.
    """
    targets = [base_name(fqn) for fqn in nvfp4_modules(model) if fqn.endswith(".base_layer")]
    if not merge_aware_layers(model):
        return metadata.describe(model, targets)
    described = metadata.describe(
        model, targets, mode="merge-aware", quantizer=quantizer_of(model), start_step=start_step
    )
    return dataclasses.replace(described, merged_digest=merged_digest(model))


def save_adapter(peft_model: "PeftModel", folder: str | os.PathLike[str], *, start_step: int = 0) -> None:
    """PEFT's files, with the metadata in adapter_config.json. The adapter "default" lies in the folder itself."""
    peft_model.save_pretrained(str(folder))
    metadata.write(folder, describe_adapter(peft_model, start_step=start_step))


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
    any_base  attach although the base is another than the one it was trained on.
    cache     as in `make_merge_aware`; kwargs go to PEFT (is_trainable=True, adapter_name=...).
    raises    ValueError naming what differs from the base it was trained on; FileNotFoundError for no adapter.
    """
    from peft import PeftModel

    recorded = metadata.read(folder)
    if recorded is not None and not any_base:
        metadata.check(recorded, model)
    peft_model = PeftModel.from_pretrained(model, str(folder), **kwargs)
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
