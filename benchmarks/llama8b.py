"""One LoRA training step of a model with Llama-3.1-8B's shapes on one GPU: tokens per second and peak memory.

    PYTHONPATH=. python benchmarks/llama8b.py [--out results.md] [--layers 32] [--kinds dense,nvfp4,...]

Random weights, rank 16 on all seven projections, sequences of 2048, micro-batch 4, gradient checkpointing, fused AdamW
on the factors in fp32. The script is the same for every base; peers are measured where they import. Below the table:
what the peak should be from arithmetic.
"""

import argparse
import gc
import importlib
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.need_gpu import need_gpu
from halfbyte.lora import fuse
from halfbyte.nvfp4 import NVFP4Linear, replace_module

SEQUENCE, BATCH, RANK = 2048, 4, 16
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HIDDEN, MIDDLE, KEYS, VOCABULARY = 4096, 14336, 1024, 128256
Shapes = list[tuple[int, int]]
LAYER_SHAPES: Shapes = [(HIDDEN, HIDDEN)] * 2 + [(KEYS, HIDDEN)] * 2 + [(MIDDLE, HIDDEN)] * 2 + [(HIDDEN, MIDDLE)]
WARMUP, STEPS = 2, 4


def llama(layers: int) -> PreTrainedModel:
    """The model in bf16 on the GPU, with random weights."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=MIDDLE,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def replace_projections(model: nn.Module, convert: Callable[[nn.Linear], nn.Module]) -> None:
    """Convert the seven projections of every layer, in place."""
    for fqn, module in list(model.named_modules()):
        if fqn.rpartition(".")[2] in PROJECTIONS:
            replace_module(model, fqn, convert(module))
            del module
    gc.collect()
    torch.cuda.empty_cache()


def to_bitsandbytes(linear: nn.Linear) -> nn.Module:
    bnb = importlib.import_module("bitsandbytes.nn")
    layer = bnb.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16)
    layer.weight = bnb.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    return layer.cuda()


def to_torchao(linear: nn.Linear) -> nn.Module:
    tensor = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    linear.weight = nn.Parameter(tensor.NVFP4Tensor.to_nvfp4(linear.weight.data), requires_grad=False)
    return linear


BASES: dict[str, Callable[[nn.Linear], nn.Module] | None] = {
    "dense": None,
    "nvfp4": NVFP4Linear.from_linear,
    "nvfp4-fused": NVFP4Linear.from_linear,
    "nvfp4-merge-aware": NVFP4Linear.from_linear,
    "bitsandbytes": to_bitsandbytes,
    "torchao": to_torchao,
}


def build(kind: str, layers: int) -> nn.Module:
    """The model with adapters, ready to train."""
    model = llama(layers)
    convert = BASES[kind]
    if convert is not None:
        replace_projections(model, convert)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=PROJECTIONS))
    if kind == "nvfp4-fused":
        fuse(peft)
    if kind == "nvfp4-merge-aware":
        importlib.import_module("halfbyte.lora").make_merge_aware(peft)
    return peft.train()


def measure(kind: str, layers: int) -> dict[str, float]:
    """Median seconds a step, tokens per second, bytes of the model, peak bytes."""
    model = build(kind, layers)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), device="cuda")
    model_bytes = torch.cuda.memory_allocated()
    seconds = []
    for step in range(WARMUP + STEPS):
        if step == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[WARMUP:])
    return {
        "seconds": median,
        "tokens/s": BATCH * SEQUENCE / median,
        "model": model_bytes,
        "peak": torch.cuda.max_memory_allocated(),
        "loss": loss.item(),
    }


def arithmetic(layers: int) -> list[tuple[str, float]]:
    """Bytes at the peak, which is at the loss or in a layer's backward, for an NVFP4 base."""
    weights = sum(n * k for n, k in LAYER_SHAPES) * layers
    adapters = sum((n + k) * RANK for n, k in LAYER_SHAPES) * layers
    tokens = BATCH * SEQUENCE
    logits = tokens * VOCABULARY
    return [
        ("base, 0.5625 bytes a weight", 0.5625 * weights),
        ("embedding and head, bf16", 2 * 2 * VOCABULARY * HIDDEN),
        ("adapters, fp32: value and two states", 12 * adapters),
        ("inputs kept by checkpointing, bf16", 2 * tokens * HIDDEN * (layers + 1)),
        ("logits and their gradient in bf16, log-softmax and its gradient in fp32", (2 + 2 + 4 + 4) * logits),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kinds", default=",".join(BASES), help="bases, separated by commas")
    options = parser.parse_args()
    need_gpu()
    text = [heading(options.layers)]
    header = "base | s a step | tokens/s | of dense | model GB | peak GB | loss"
    text += [f"| {header} |", "|" + "---|" * 7]
    print("\n".join(text), flush=True)
    dense = None
    for kind in options.kinds.split(","):
        row = row_of(kind, options.layers, dense)
        dense = dense or (row[1] if kind == "dense" else None)
        text.append(row[0])
        print(text[-1], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    parts = arithmetic(options.layers)
    text.append(
        "\nExpected peak of an NVFP4 base, GB: " + "; ".join(f"{name} {size / 1e9:.2f}" for name, size in parts)
    )
    text.append(f"Sum {sum(size for _, size in parts) / 1e9:.2f} GB.")
    print("\n".join(text[-2:]))
    if options.out:
        options.out.write_text("\n".join(text) + "\n")


def row_of(kind: str, layers: int, dense: float | None) -> tuple[str, float | None]:
    """A table row, and tokens per second; what does not import or run is a row that says so."""
    try:
        found = measure(kind, layers)
    except Exception as problem:
        return f"| {kind} | {type(problem).__name__}: {str(problem)[:80]} | | | | | |", None
    speed = found["tokens/s"]
    share = f"{speed / dense:.3f}" if dense else "1"
    return (
        f"| {kind} | {found['seconds']:.3f} | {speed:.0f} | {share} | {found['model'] / 1e9:.2f} | "
        f"{found['peak'] / 1e9:.2f} | {found['loss']:.3f} |",
        speed,
    )


def heading(layers: int) -> str:
    """Hardware and versions."""
    import peft
    import transformers
    import triton

    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, transformers "
        f"{transformers.__version__}, peft {peft.__version__}, python {platform.python_version()}; {layers} layers, "
        f"{BATCH} x {SEQUENCE} tokens, r = {RANK}\n"
    )


if __name__ == "__main__":
    main()
