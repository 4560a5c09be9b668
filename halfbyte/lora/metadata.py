"""The `halfbyte` key of adapter_config.json: which base an adapter belongs to, and how it was made.

PEFT and others ignore the key. A LoRA adapter of a 4-bit base is a change to *those* codes: on another base, or under
another rounding than it was trained for, it gives other results without a word. So it records digests and modes, and
loading or merging compares them. An override is the caller's to offer; it is recorded in what is written next.
"""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte.lora.merge import Rounding, Scales, check_modes
from halfbyte.lora.names import base_layers
from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.digest import model_digest, weight_digest
from halfbyte.nvfp4.linear import NVFP4Linear

CONFIG_NAME = "adapter_config.json"
KEY = "halfbyte"
FORMAT_VERSION = 1
QUANTIZER_VERSION = 3  # of the bits that merged_parts gives; a change that moves one code raises it
MODES = ("plain", "merge-aware")
SHOWN = 3  # differences spelled out in an error


@dataclass(frozen=True)
class Quantizer:
    """How base + delta is rounded to NVFP4; the arguments of `merged_parts`.

    dtype  base dtype that "nearest" rounds to, as torch names it ("bfloat16").
    """

    rounding: Rounding = "dither"
    scales: Scales = "keep"
    seed: int = 0
    dtype: str = "float32"
    version: int = QUANTIZER_VERSION


@dataclass(frozen=True)
class Target:
    """One NVFP4 layer that the adapter changes: its shape, the digest of its codes and scales, its activations.

    activation  "none" (weight-only), "dynamic", or the static tensor scale.
    """

    shape: tuple[int, int]
    digest: str
    activation: str | float = "none"


@dataclass(frozen=True)
class AdapterMetadata:
    """What `adapter_config.json` says under `halfbyte`."""

    mode: str = "plain"
    quantizer: Quantizer = field(default_factory=Quantizer)
    targets: dict[str, Target] = field(default_factory=dict)
    start_step: int = 0
    merged_digest: str | None = None
    overrides: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def base_digest(self) -> str:
        """SHA-256 over the targets' names, shapes and digests."""
        return model_digest({name: (target.shape, int(target.digest, 16)) for name, target in self.targets.items()})


def describe(
    model: nn.Module,
    names: Collection[str],
    *,
    mode: str = "plain",
    quantizer: Quantizer | None = None,
    start_step: int = 0,
) -> AdapterMetadata:
    """Metadata of an adapter on these layers (names in the base model) of a model, wrapped or not."""
    layers = base_layers(model)
    return AdapterMetadata(
        mode=mode,
        quantizer=quantizer or Quantizer(),
        targets={name: target_of(layers[name]) for name in sorted(names) if name in layers},
        start_step=start_step,
        versions=versions(),
    )


def target_of(layer: NVFP4Linear) -> Target:
    """What is recorded about one layer."""
    return Target(layer.parts().shape, f"{weight_digest(layer.parts()):016x}", activation_text(layer.activation))


def activation_text(activation: ActivationQuant | None) -> str | float:
    """ "none", "dynamic" or the static scale."""
    if activation is None:
        return "none"
    return "dynamic" if activation.scale is None else activation.scale


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch names so ("bfloat16"); ValueError for another word."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype; set dtype to one such as 'bfloat16'")
    return dtype


def check_quantizer(quantizer: Quantizer) -> None:
    """ValueError naming the first field that is not what `merged_parts` takes."""
    check_modes(quantizer.rounding, quantizer.scales)
    check_integer(quantizer.seed, "seed")
    check_integer(quantizer.version, "quantizer's version")
    dtype = torch_dtype(quantizer.dtype)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            f"dtype is {quantizer.dtype!r}, expected a floating one that weights are in, such as 'bfloat16'"
        )


def check_integer(value: Any, name: str, least: int | None = None) -> None:
    """ValueError for what is no int, or too small; True is none, though Python thinks so."""
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise ValueError(f"{name} is {value!r}, expected an integer{'' if least is None else f' >= {least}'}")


def versions() -> dict[str, str]:
    """Versions of what made the adapter; absent packages are left out."""
    import importlib.metadata

    found = {"torch": str(torch.__version__)}
    for package in ("halfbyte", "peft", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(folder: str | os.PathLike[str], metadata: AdapterMetadata) -> None:
    """Put the key into the folder's adapter_config.json, leaving every other key as it is."""
    path = Path(folder) / CONFIG_NAME
    config = json.loads(path.read_text())
    config[KEY] = dataclasses.asdict(metadata) | {"base_digest": metadata.base_digest}
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(config, indent=2, sort_keys=True))
    os.replace(temporary, path)


def read(folder: str | os.PathLike[str]) -> AdapterMetadata | None:
    """The key's contents, or None when the adapter was not made by halfbyte.

    raises  FileNotFoundError without an adapter_config.json; ValueError for a key in a newer format, or that is
            damaged. Whether its quantizer is this one's, `other_quantizer` says.
    """
    path = Path(folder) / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no {CONFIG_NAME}; expected the folder of a PEFT adapter, such as RUN/adapter"
        )
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); copy the adapter again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(config).__name__}; copy the adapter again")
    raw = config.get(KEY)
    return None if raw is None else parse(raw, str(path))


def parse(raw: dict[str, Any], where: str) -> AdapterMetadata:
    """The key's JSON as an object; ValueError says what is wrong with it."""
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise ValueError(
            f"{where}: the {KEY} key has no format_version; it is damaged; copy the adapter again, or remove the key "
            "to go without its checks"
        )
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{where}: the adapter's metadata has format {version}, this halfbyte reads up to {FORMAT_VERSION}. "
            "Update halfbyte."
        )
    try:
        metadata = AdapterMetadata(
            mode=raw["mode"],
            quantizer=Quantizer(**raw["quantizer"] | {"version": raw["quantizer"]["version"]}),  # never by default
            targets={
                name: Target((int(target["shape"][0]), int(target["shape"][1])), target["digest"], target["activation"])
                for name, target in raw["targets"].items()
            },
            start_step=raw["start_step"],
            merged_digest=raw["merged_digest"],
            overrides=tuple(raw["overrides"]),
            format_version=version,
            versions=dict(raw["versions"]),
        )
        if raw["base_digest"] != metadata.base_digest or metadata.mode not in MODES:
            raise ValueError("mode or base_digest do not fit the rest")
        check_quantizer(metadata.quantizer)
        check_integer(metadata.start_step, "start_step", least=0)
        if not isinstance(metadata.merged_digest, str | None):
            raise ValueError(f"merged_digest is {metadata.merged_digest!r}, expected a digest or null")
        if metadata.merged_digest is not None and metadata.mode == "plain":
            raise ValueError("mode is 'plain', but merged_digest says that it was trained for merged weights")
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        cause = str(error) if type(error) is ValueError else repr(error)
        raise ValueError(
            f"{where}: the {KEY} key is damaged ({cause}); copy the adapter again, or remove the key to go without "
            "its checks"
        ) from None
    return metadata


def other_quantizer(metadata: AdapterMetadata) -> str | None:
    """What differs, when an adapter was trained for merged codes that this halfbyte does not make; None when it has
    them, or when it was trained beside the weight and for no codes."""
    trained = metadata.quantizer.version
    if metadata.mode != "merge-aware" or trained == QUANTIZER_VERSION:
        return None
    return (
        f"trained merge-aware for quantizer version {trained}, this halfbyte has {QUANTIZER_VERSION}: the codes differ"
    )


def check_version(metadata: AdapterMetadata) -> None:
    """ValueError naming both versions, when this halfbyte does not make the codes that the adapter was trained for."""
    if (found := other_quantizer(metadata)) is not None:
        by = metadata.versions.get("halfbyte", "of then")
        raise ValueError(
            f"This adapter was {found}. Train it with this halfbyte, or merge it with the one that trained it "
            f"({by}); any_base=True or --any-base takes it all the same."
        )


def differences(metadata: AdapterMetadata, present: Mapping[str, Target]) -> list[str]:
    """What in a model is not as the adapter recorded it, a line per layer; empty when it is the same base.

    present  the model's layers under the adapter, by name.
    """
    found = []
    for name, target in metadata.targets.items():
        if name not in present:
            found.append(f"{name}: not an NVFP4 layer of this model")
            continue
        here = present[name]
        for aspect in ("shape", "digest", "activation"):
            if getattr(here, aspect) != getattr(target, aspect):
                found.append(f"{name}: {aspect} is {getattr(here, aspect)}, recorded {getattr(target, aspect)}")
                break
    return found


def check(metadata: AdapterMetadata, model: nn.Module) -> None:
    """ValueError naming what differs, when the model is not the base that the adapter was trained on."""
    check_targets(metadata, present_targets(metadata, model))


def present_targets(metadata: AdapterMetadata, model: nn.Module) -> dict[str, Target]:
    """The layers of a model that the adapter recorded, as they are there."""
    layers = base_layers(model)
    return {name: target_of(layers[name]) for name in metadata.targets if name in layers}


def check_targets(metadata: AdapterMetadata, present: Mapping[str, Target]) -> None:
    """`check` against layers that have been described already."""
    found = differences(metadata, present)
    if found:
        more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
        raise ValueError(
            f"This adapter was trained on another base: {len(found)} of {len(metadata.targets)} layers differ. "
            + "; ".join(found[:SHOWN])
            + more
            + ". Use the base it was trained on."
        )
