"""`load_model`: a checkpoint folder as an ordinary transformers model with `NVFP4Linear` inside.

The model is built empty; each NVFP4 weight is read straight into its layer, and everything else is loaded by
transformers' own code, from tensors that are read when it asks for them. No dequantized weight ever exists, and at most
a few tensors exist beside the model (benchmarks/load_peak.py). A quantizer registered with transformers
was the alternative: `from_pretrained` maps the files into memory, so that what is converted counts twice, and marks the
model as quantized, which makes trainers refuse it or treat it as somebody else's format.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfbyte.checkpoint import plausible
from halfbyte.checkpoint.contents import Fp8Weight, read_contents
from halfbyte.checkpoint.detect import detect, read_config
from halfbyte.checkpoint.finite import count_nonfinite
from halfbyte.checkpoint.formats.base import Format, StoredWeight
from halfbyte.checkpoint.hub import local_folder
from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.skeleton import Skeleton, complain
from halfbyte.checkpoint.tensor_file import DTYPE_NAMES
from halfbyte.nvfp4.convert import nvfp4_modules, replace_module
from halfbyte.nvfp4.linear import NVFP4Linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(
    path: str | os.PathLike[str], *, dtype: torch.dtype | str | None = None, device: torch.device | str = "cpu"
) -> "PreTrainedModel":
    """The model in an NVFP4 checkpoint, frozen, in eval mode, its weights still in 4 bits.

    path    a folder, or a Hub id.
    dtype   of everything that is not NVFP4; None takes the config's, as transformers does.
    device  where the tensors go; each is moved as it is read. "meta" checks the files' headers and reads no weight.
    memory  peak at most 1.15 times the bytes of the loaded model.
    raises  FileNotFoundError; ValueError naming file, key, found and expected, for damage, for keys that the model
            lacks or misses, for a layer that transformers would fuse, and for a folder without NVFP4 weights.
    """
    from halfbyte.checkpoint.hf_quantizer import SaveRefused

    folder = local_folder(path)
    config = read_config(folder)
    format = detect(folder, config)
    if format is None:
        raise ValueError(dense_message(folder))
    with Shards(folder) as shards:
        skeleton = Skeleton.from_folder(folder, dtype=as_dtype(dtype))
        contents = read_contents(shards, format, config, lambda key: skeleton.target(key).name, skeleton.can_do_without)
        if not contents.weights:
            raise ValueError(
                f"{folder}: its config says {format.name}, but it holds no NVFP4 weight. Make a base that does with "
                "`halfbyte quantize`."
            )
        layers = match_layers(skeleton, shards, contents.weights)
        if contents.notice:
            warnings.warn(f"{folder}: {contents.notice}.", stacklevel=2)
        suspicious: dict[str, str] = {}
        dense = {
            key: lazy(shards, key, device, suspicious, contents.fp8.get(key))
            for key in [*contents.dense, *contents.fp8]
        }
        load_dense(skeleton, shards, dense, set(layers), device)
        for fqn, weight in layers.items():
            place(skeleton.model, fqn, read_layer(format, shards, weight, skeleton, fqn, device, suspicious))
        if suspicious:
            warnings.warn(f"{folder}: {plausible.summary(suspicious)}", stacklevel=2)
    model = finish(skeleton, folder, device)
    model.hf_quantizer = SaveRefused()  # type: ignore[assignment]  # transformers sets it so, too
    return model


def dense_message(folder: Path) -> str:
    """Why a folder that declares no quantization cannot be loaded here."""
    with Shards(folder) as shards:
        raw = any(key.endswith(".qdata") for key in shards)
    if raw:
        return (
            f"{folder}: written by save_pretrained of a model with NVFP4 layers, whose raw components no loader "
            "knows. Keep the base's folder and save the adapter; `halfbyte merge` writes the two as one model."
        )
    return f"{folder}: found a dense model, expected NVFP4 weights. Quantize it first: halfbyte quantize {folder} OUT"


def load_dense_model(
    path: str | os.PathLike[str], *, dtype: torch.dtype | str | None = None, device: torch.device | str = "cpu"
) -> "PreTrainedModel":
    """The same for a folder without quantization: the dense model, frozen."""
    folder = local_folder(path)
    if detect(folder, read_config(folder)) is not None:
        raise ValueError(f"{folder}: found a quantized model, expected a dense one. Load it with halfbyte.load_model.")
    with Shards(folder) as shards:
        skeleton = Skeleton.from_folder(folder, dtype=as_dtype(dtype))
        suspicious: dict[str, str] = {}
        load_dense(skeleton, shards, {key: lazy(shards, key, device, suspicious) for key in shards}, set(), device)
        if suspicious:
            warnings.warn(f"{folder}: {plausible.summary(suspicious)}", stacklevel=2)
    return finish(skeleton, folder, device)


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A torch dtype from its name; ValueError for one that is not floating."""
    if isinstance(dtype, str):
        dtype = None if dtype == "auto" else getattr(torch, dtype, dtype)  # type: ignore[assignment]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2):
        raise ValueError(f"dtype is {dtype}, expected float32, bfloat16 or float16.")
    return dtype


def match_layers(skeleton: Skeleton, shards: Shards, stored: dict[str, StoredWeight]) -> dict[str, StoredWeight]:
    """Model's fqn -> weight. ValueError naming the layer when the model has no such linear of that shape."""
    layers = {}
    for weight in stored.values():
        target = skeleton.target(weight.weight_name)
        where = shards.path_of(weight.keys["qdata"])
        if target.fused:
            raise ValueError(
                f"{where}: {weight.fqn} is NVFP4, but transformers fuses it with others into {target.name} while "
                "loading, which 4-bit weights do not survive. Quantize the dense original with `halfbyte quantize`, "
                "which keeps that layer dense."
            )
        if not target.known and skeleton.ignores(weight.weight_name):
            continue
        fqn = target.name.removesuffix(".weight")
        module = skeleton.model.get_submodule(fqn) if target.known else None
        if not isinstance(module, nn.Linear):
            raise ValueError(
                f"{where}: {weight.fqn} is an NVFP4 weight, but the model of its config has no such linear layer. Take "
                "config and weights from one checkpoint."
            )
        expected = (module.out_features, module.in_features)
        if weight.shape != expected:
            raise ValueError(
                f"{where}: {weight.keys['qdata']} holds a weight {weight.shape}, the config expects {expected}. Take "
                "both from one checkpoint."
            )
        if target.name in skeleton.tied:
            raise ValueError(
                f"{where}: {weight.fqn} is NVFP4, but the config ties it to the embeddings. Set tie_word_embeddings to "
                "false in config.json."
            )
        layers[fqn] = weight
    return layers


def read_layer(
    format: Format,
    shards: Shards,
    weight: StoredWeight,
    skeleton: Skeleton,
    fqn: str,
    device: torch.device | str,
    suspicious: dict[str, str],
) -> NVFP4Linear:
    """One layer from disk, with the bias that the dense load has put in place; notes scales that cannot be right."""
    old = skeleton.model.get_submodule(fqn)
    if torch.device(device).type == "meta":
        n, k = weight.shape
        has_bias = old.bias is not None
        return NVFP4Linear(k, n, has_bias, device="meta", dtype=skeleton.dtype, activation=weight.activation)
    parts = format.read(shards, weight)
    doubt = plausible.implausible(parts.scale, parts.global_scale)
    if doubt:
        suspicious[fqn] = doubt
    parts = type(parts)(*(component.to(device) for component in parts))
    bias: Tensor | None = old.bias  # type: ignore[assignment]
    return NVFP4Linear.from_parts(parts, bias, dtype=skeleton.dtype, activation=weight.activation, name=fqn)


def place(model: nn.Module, fqn: str, layer: NVFP4Linear) -> None:
    """Put the layer where the dense one was, with its training flag."""
    old = replace_module(model, fqn, layer)
    layer.train(old.training)


class LazyTensor:
    """A tensor on disk, in the little that transformers' loader asks of a safetensors slice."""

    def __init__(self, read: Callable[[], Tensor], dtype_name: str, shape: tuple[int, ...]):
        self._read, self._dtype_name, self._shape = read, dtype_name, shape

    def get_dtype(self) -> str:
        return self._dtype_name

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self._read()[index]


def lazy(
    shards: Shards, key: str, device: torch.device | str, suspicious: dict[str, str], fp8: Fp8Weight | None = None
) -> LazyTensor:
    """A key's tensor, or the dense form of an FP8 weight; without values when the model is to stay on meta.

    suspicious  where NaN and infinity are noted.
    """
    spec = shards.spec(key)
    dtype = torch.float32 if fp8 is not None else spec.dtype

    def read() -> Tensor:
        if torch.device(device).type == "meta":
            return torch.empty(spec.shape, dtype=dtype, device="meta")
        value = shards.read(key) if fp8 is None else fp8.read(shards, dtype)
        bad = count_nonfinite(value)
        if bad:
            suspicious[key] = f"{bad} of its {value.numel()} values are NaN or infinite"
        return value

    return LazyTensor(read, DTYPE_NAMES[dtype], spec.shape)


def load_dense(
    skeleton: Skeleton, shards: Shards, tensors: dict[str, LazyTensor], quantized: set[str], device: torch.device | str
) -> None:
    """Load these tensors into the skeleton with transformers' own renaming, fusing and casting; then tie.

    quantized  fqns whose `.weight` comes from elsewhere.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    model = skeleton.model
    config = LoadStateDictConfig(
        device_map={"": device},
        dtype=skeleton.dtype,
        dtype_plan=model._get_dtype_plan(skeleton.dtype),
        weight_mapping=skeleton.mapping,
    )
    info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config)
    info.missing_keys -= {f"{fqn}.weight" for fqn in quantized}
    if info.mismatched_keys:
        name, found, expected = sorted(info.mismatched_keys)[0]
        raise ValueError(
            f"{shards.folder}: {name} is {list(found)}, but the config expects {list(expected)}. Take both from one "
            "checkpoint."
        )
    if info.conversion_errors:
        name, error = sorted(info.conversion_errors.items())[0]
        raise ValueError(
            f"{shards.folder}: transformers could not convert {name} ({error}). Take config and weights from one "
            "checkpoint, or update transformers."
        )
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    complain("the model needs, but no file holds", info.missing_keys, shards.folder)
    complain("the files hold, but the model of the config does not know", info.unexpected_keys, shards.folder)


def finish(skeleton: Skeleton, folder: Path, device: torch.device | str) -> "PreTrainedModel":
    """Buffers to the device, everything frozen, generation config, eval mode: as `from_pretrained` leaves a model."""
    from transformers import GenerationConfig

    model = skeleton.model
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    model.requires_grad_(False)
    model.config._name_or_path = str(folder)
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left or torch.device(device).type == "meta", f"still without values: {left[:3]}"
    assert all(layer.qdata.dtype == torch.uint8 for layer in nvfp4_modules(model).values())
    return model.eval()
