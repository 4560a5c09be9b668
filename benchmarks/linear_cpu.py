"""One LoRA training step on a CPU: a dense fp32 base against the same base in NVFP4, side by side.

    python benchmarks/linear_cpu.py [--threads 2] [--steps 6] [--layers 30] [--merge-aware] [--cpu-time]

The model has SmolLM2-135M's shapes and random weights; 4 x 128 tokens, rank 16 on all linear layers, fp32, no
checkpointing. Steps of all variants are interleaved; the ratio that counts is the median of the ratios taken round by
round. On a busy machine take --threads 1 --cpu-time: the processor time of one thread does not see the neighbours.
"""

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from halfbyte.nvfp4 import NVFP4Linear, replace_module

BATCH, TOKENS = 4, 128


def smollm2_135m(layers: int) -> LlamaForCausalLM:
    """SmolLM2-135M with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            tie_word_embeddings=True,
            initializer_range=0.02,
        )
    )


def to_nvfp4(model: nn.Module) -> nn.Module:
    """Quantize all linear layers but the head, in place."""
    for fqn, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and fqn != "lm_head":
            replace_module(model, fqn, NVFP4Linear.from_linear(module, name=fqn))
    return model


def with_lora(model: nn.Module) -> nn.Module:
    """Rank 16 on all linear layers, PEFT's ordinary LoRA."""
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))  # type: ignore[arg-type]


def stepper(model: nn.Module) -> Callable[[Tensor], float]:
    """A function that does one training step and returns the loss."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step(tokens: Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def variants(layers: int, merge_aware: bool) -> dict[str, Callable[[Tensor], float]]:
    """Name -> step."""
    models = {
        "dense fp32 LoRA": with_lora(smollm2_135m(layers)),
        "NVFP4 LoRA": with_lora(to_nvfp4(smollm2_135m(layers))),
    }
    if merge_aware:
        from halfbyte.lora import make_merge_aware

        for cache in (True, False):
            label = "W' kept" if cache else "W' recomputed"
            models[f"NVFP4 merge-aware, {label}"] = make_merge_aware(
                with_lora(to_nvfp4(smollm2_135m(layers))), cache=cache
            )
    return {name: stepper(model) for name, model in models.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--merge-aware", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="processor time of the process instead of wall time")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    steps = variants(args.layers, args.merge_aware)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(args.steps + 1):
        tokens = torch.randint(0, 49152, (BATCH, TOKENS))
        for name, step in steps.items():
            start = clock()
            loss = step(tokens)
            taken = clock() - start
            if round_number:  # the first round warms up
                seconds[name].append(taken)
            print(f"round {round_number} {name:34} {taken:7.3f} s  loss {loss:.4f}", flush=True)
    print(f"\n{platform.processor() or platform.machine()}, {args.threads} threads, torch {torch.__version__}")
    baseline = next(iter(steps))
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(times, seconds[baseline], strict=True))
        print(f"{name:34} median {statistics.median(times):.3f} s  best {min(times):.3f} s  ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
