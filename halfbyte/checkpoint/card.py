"""The model card of an adapter or a merged model: what it is, how it was made, and the figures that were measured.

Everything in it is read from the folder's own records. A figure that nobody recorded is not there.
"""

import json
import math
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.detect import read_json
from halfbyte.checkpoint.hub import HUB_ID
from halfbyte.checkpoint.sidecar import read_record

METRICS = "metrics.jsonl"


def model_card(folder: Path, base_model: str | None = None) -> str:
    """Markdown with the Hub's metadata on top.

    folder      an adapter's (figures are read from the run around it) or a model's (from its halfbyte.json).
    base_model  the base's Hub id; None: what the folder says, if that is one.
    """
    from huggingface_hub import ModelCardData

    adapter = folder / "adapter_config.json"
    config = read_json(adapter) if adapter.is_file() else {}
    named = base_model or str(config.get("base_model_name_or_path") or "")
    data = ModelCardData(
        base_model=named if HUB_ID.fullmatch(named) and not Path(named).exists() else None,
        library_name="peft" if config else "transformers",
        pipeline_tag="text-generation",
        tags=["halfbyte", "nvfp4", *(["lora"] if config else [])],
    )
    facts = adapter_facts(folder, config) if config else model_facts(folder)
    title, use = (ADAPTER_TITLE, ADAPTER_USE) if config else (MODEL_TITLE, MODEL_USE)
    rows = "\n".join(f"| {cell(name)} | {cell(value)} |" for name, value in facts.items())
    return f"---\n{data.to_yaml()}\n---\n\n{title}\n\n| | |\n|---|---|\n{rows}\n\n{use}"


ADAPTER_TITLE = "# LoRA adapter on an NVFP4 base\n\nTrained with halfbyte."
MODEL_TITLE = "# Language model\n\nWritten by halfbyte."
ADAPTER_USE = """```python
import halfbyte
from halfbyte.lora import load_adapter

model = load_adapter(halfbyte.load_model(BASE), ADAPTER)      # PEFT's own from_pretrained loads it too
```

`halfbyte merge BASE ADAPTER OUT` makes one 4-bit model of both, and measures what is kept.
"""
MODEL_USE = """```python
import halfbyte

model = halfbyte.load_model(MODEL)      # in 4 bits; a dense one loads with transformers as usual
```
"""


def adapter_facts(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Rank, how it was trained, losses of the run that the folder lies in."""
    own = config.get("halfbyte") or {}
    facts = {"rank, alpha": f"{config.get('r')}, {config.get('lora_alpha')}", "trained": str(own.get("mode", "plain"))}
    quantizer = own.get("quantizer") or {}
    if own.get("mode") == "merge-aware":
        facts["for the rounding"] = f"{quantizer.get('rounding')}, block scales {quantizer.get('scales')}"
    if own.get("base_digest"):
        facts["digest of the base"] = str(own["base_digest"])[:16]
    facts |= losses(folder.parent / METRICS)
    versions = own.get("versions") or {}
    if versions:
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return facts


def losses(metrics: Path) -> dict[str, str]:
    """Steps and held-out loss, first and last, of a run's metrics; nothing where there are none."""
    rows = []
    for line in metrics.read_text("utf-8", "replace").splitlines() if metrics.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    rows = [row for row in rows if isinstance(row, dict)]
    held_out = [row["eval_loss"] for row in rows if isinstance(row.get("eval_loss"), float)]
    steps = [row["step"] for row in rows if isinstance(row.get("step"), int)]
    facts = {"optimizer steps": str(max(steps))} if steps else {}
    held_out = [loss for loss in held_out if math.isfinite(loss)]
    if len(held_out) > 1:
        facts["held-out loss (nats per token), before and after"] = f"{held_out[0]:.4f}, {held_out[-1]:.4f}"
    return facts


def model_facts(folder: Path) -> dict[str, str]:
    """What the record says: how it was quantized or merged, and what was kept."""
    record = read_record(folder)
    facts = {"made by": f"halfbyte {record.get('halfbyte_version', '')} {record.get('made_by', '')}".strip()}
    if record.get("made_by") == "merge":
        facts["written as"] = str(record.get("to"))
        if record.get("to") == "nvfp4":
            facts["rounding"] = f"{record.get('rounding')}, block scales {record.get('block_scales')}"
        if isinstance(record.get("retained"), float):
            facts["kept of the adapter's change"] = f"{record['retained']:.1%}"
    errors = record.get("errors")
    if isinstance(errors, dict) and errors:
        facts["mean relative error of the 4-bit weights"] = f"{sum(errors.values()) / len(errors):.4f}"
    return facts


def cell(text: str) -> str:
    """Text that stays in its cell of the table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
