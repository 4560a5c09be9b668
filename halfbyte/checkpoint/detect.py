"""What a checkpoint folder says it is: its config, and which NVFP4 format, if any, its weights are in."""

import json
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.formats.base import Format
from halfbyte.checkpoint.formats.compressed_tensors import CompressedTensorsFormat
from halfbyte.checkpoint.formats.modelopt import QUANT_FILE, ModelOptFormat
from halfbyte.checkpoint.formats.torchao import TorchaoFormat

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
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}.")
    return content


def detect(folder: Path, config: dict[str, Any]) -> Format | None:
    """The format that the folder declares; None when it declares no quantization.

    raises  ValueError for a quantization that halfbyte does not read, or two claims that contradict each other.
    """
    block = config.get("quantization_config") or config.get("compression_config")
    claims = []
    if block is not None:
        if not isinstance(block, dict) or not isinstance(block.get("quant_method"), str):
            raise ValueError(
                f"{folder / CONFIG_FILE}: quantization_config has no quant_method, found {str(block)[:80]}."
            )
        claims.append(block["quant_method"])
    if (folder / QUANT_FILE).exists():
        claims.append("modelopt")
    if len(set(claims)) > 1:
        raise ValueError(
            f"{folder}: config.json says {claims[0]}, {QUANT_FILE} says {claims[1]}. Remove the wrong one."
        )
    if not claims:
        return None
    if claims[0] not in FORMATS:
        raise ValueError(
            f"{folder}: quantized by {claims[0]}, expected {' or '.join(FORMATS)} with NVFP4 weights, or none."
        )
    return FORMATS[claims[0]]
