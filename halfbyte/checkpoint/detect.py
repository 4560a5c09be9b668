"""What a checkpoint folder says it is: its config, and which NVFP4 format, if any, its weights are in."""

import json
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoint.formats.base import Format
from halfbyte.checkpoint.formats.compressed_tensors import CompressedTensorsFormat
from halfbyte.checkpoint.formats.modelopt import QUANT_FILE, ModelOptFormat
from halfbyte.checkpoint.formats.torchao import TorchaoFormat
from halfbyte.checkpoint.shards import Shards

CONFIG_FILE = "config.json"
FORMATS: dict[str, Format] = {
    format.name: format for format in (TorchaoFormat(), CompressedTensorsFormat(), ModelOptFormat())
}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict. FileNotFoundError or ValueError naming the file."""
    return read_json(folder / CONFIG_FILE)


def read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: not there. Expected a Hugging Face model folder with a {CONFIG_FILE}.")
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}). Mend the file, or fetch it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}. Fetch the file again.")
    return content


def detect(folder: Path, config: dict[str, Any]) -> Format | None:
    """The format that the folder declares; None when it declares no quantization.

    raises  ValueError for a quantization that halfbyte does not read, or two claims that contradict each other.
    """
    claims = []
    for field in ("quantization_config", "compression_config"):
        block = config.get(field)
        if not block:
            continue
        if not isinstance(block, dict) or not isinstance(block.get("quant_method"), str):
            raise ValueError(
                f"{folder / CONFIG_FILE}: {field} has no quant_method, found {str(block)[:80]}. Name it "
                f"({', '.join(FORMATS)}), or fetch the file again."
            )
        claims.append((block["quant_method"], f"{CONFIG_FILE}'s {field}"))
    if (folder / QUANT_FILE).exists():
        claims.append(("modelopt", f"the file {QUANT_FILE}"))
    if len({method for method, _ in claims}) > 1:
        said = ", ".join(f"{where} says {method}" for method, where in claims)
        raise ValueError(f"{folder}: two claims of what format it is in: {said}. Remove the wrong one.")
    if not claims:
        return None
    method = claims[0][0]
    if method not in FORMATS:
        raise ValueError(
            f"{folder}: quantized by {method}, expected {' or '.join(FORMATS)} with NVFP4 weights, or none. Quantize "
            "the dense original instead (halfbyte quantize)."
        )
    return FORMATS[method]


def check_one_format(shards: Shards, format: Format) -> None:
    """ValueError naming the key, when a folder of one format also holds codes under another's names."""
    for key in shards:
        spec = shards.spec(key)
        if spec.dtype != torch.uint8 or len(spec.shape) != 2:
            continue
        for other in FORMATS.values():
            if other is not format and key.endswith(other.codes_suffix):
                raise ValueError(
                    f"{shards.path_of(key)}: {key} is how {other.name} keeps NVFP4 codes, but the folder says that it "
                    f"is in {format.name}'s format. Two formats in one folder are not read; export it again."
                )
