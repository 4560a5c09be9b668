"""Peak memory of a training step, planned and measured, for a handful of shapes and ways to train.

    PYTHONPATH=. python benchmarks/peak_memory.py --device cuda --out benchmarks/results/peak-memory-gpu.md   # one GPU
    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/peak_memory.py --out ...                                 # a CPU

On a GPU: torch's count of allocated bytes. On a CPU: every allocation and release of torch's CPU allocator in one step,
as the profiler records them, added to the bytes of weights and states; so it is the same quantity, of tensors alone,
and does not depend on what else runs. Models have random weights; the second step is measured, when states exist.
"""

import argparse
import gc
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from halfbyte.lora import fuse, make_merge_aware
from halfbyte.nvfp4 import NVFP4Linear, replace_module
from halfbyte.plan.engine import Engine
from halfbyte.plan.memory import CPU_PROCESS, Memory, kept_codes, plan_memory
from halfbyte.plan.read import read_shape
from halfbyte.plan.settings import Settings

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw_torch": torch.optim.AdamW,
    "adamw_torch_fused": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
}


@dataclass(frozen=True)
class Case:
    """A model and a way to train it. model, config: transformers' model type, and what to change in its config."""

    name: str
    settings: Settings
    model: str = "llama"
    config: dict[str, Any] = field(default_factory=dict)


SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 512, "use_cache": False, "tie_word_embeddings": False}
WORDS = {**SMALL, "vocab_size": 16384}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B |= {"vocab_size": 128256, "use_cache": False, "tie_word_embeddings": False}
QWEN = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN |= {"head_dim": 128, "vocab_size": 151936, "use_cache": False, "tie_word_embeddings": True}

OWN = Settings(2, 256, device="cpu", bf16=False, loss="logits", autocast=False, padded=False)
TRL = replace(OWN, loss="fused-head", autocast=True)
CKPT: dict[str, Any] = {"gradient_checkpointing": True}
CPU_CASES = [
    Case("Llama, fp32", OWN, config=SMALL),
    Case("Llama, fp32, checkpointing", replace(OWN, **CKPT), config=SMALL),
    Case("Llama, bf16", replace(OWN, bf16=True), config=SMALL),
    Case("Llama, bf16, checkpointing", replace(OWN, bf16=True, **CKPT), config=SMALL),
    Case("Llama, bf16, 16384 words", replace(OWN, bf16=True), config=WORDS),
    Case("Llama, fp32, TRL's loss", TRL, config=WORDS),
    Case("Llama, bf16 autocast, TRL's loss, checkpointing", replace(TRL, bf16=True, **CKPT), config=WORDS),
    Case("Llama, fp32, attention mask", replace(OWN, padded=True), config=SMALL),
    Case("Llama, fp32, dropout 0.1", replace(OWN, lora_dropout=0.1), config=SMALL),
    Case("Llama, fp32, two micro-batches a step", replace(OWN, gradient_accumulation_steps=2), config=SMALL),
    Case(
        "Llama, bf16, lm_head trained in full", replace(OWN, bf16=True, lora_modules_to_save=("lm_head",)), config=WORDS
    ),
    Case(
        "Llama, bf16, LoRA on q and v", replace(OWN, bf16=True, lora_target_modules=("q_proj", "v_proj")), config=SMALL
    ),
    Case("Llama, bf16, PEFT's forward", replace(OWN, bf16=True, forward="peft"), config=SMALL),
    Case("Llama, bf16, PEFT's forward, checkpointing", replace(OWN, bf16=True, forward="peft", **CKPT), config=SMALL),
    Case("Llama, bf16, dense base", replace(OWN, bf16=True, forward="peft", packed=False), config=SMALL),
    Case("Llama, fp32, merge-aware", replace(OWN, forward="merge-aware"), config=SMALL),
    Case("Llama, fp32, eager attention", OWN, config={**SMALL, "attn_implementation": "eager"}),
    Case("Qwen 3, bf16", replace(OWN, bf16=True), "qwen3", {**SMALL, "head_dim": 32}),
    Case("Qwen 3, bf16, checkpointing", replace(OWN, bf16=True, **CKPT), "qwen3", {**SMALL, "head_dim": 32}),
    Case("Gemma 3, fp32", OWN, "gemma3_text", {**SMALL, "head_dim": 32}),
    Case("Gemma 3, bf16, checkpointing", replace(OWN, bf16=True, **CKPT), "gemma3_text", {**SMALL, "head_dim": 32}),
    Case("Phi 3, bf16", replace(OWN, bf16=True), "phi3", {**SMALL, "pad_token_id": 0}),
    Case("GPT-NeoX, bf16", replace(OWN, bf16=True), "gpt_neox", {k: v for k, v in SMALL.items() if "key" not in k}),
]
GPU = Settings(4, 2048, loss="logits", autocast=False, padded=False, optimizer="adamw_torch_fused")
GPU_TRL = replace(GPU, loss="fused-head", autocast=True)
EIGHT = {**LLAMA_8B, "num_hidden_layers": 8}
GPU_CASES = [
    Case("8 layers of Llama-3.1-8B, 4 x 2048, own loss, checkpointing", replace(GPU, **CKPT), config=EIGHT),
    Case("the same, TRL's loss under autocast", replace(GPU_TRL, **CKPT), config=EIGHT),
    Case("... without checkpointing", GPU_TRL, config=EIGHT),
    Case("... with an attention mask", replace(GPU_TRL, padded=True), config=EIGHT),
    Case("... dropout 0.1", replace(GPU_TRL, lora_dropout=0.1), config=EIGHT),
    Case("... PEFT's forward", replace(GPU_TRL, forward="peft"), config=EIGHT),
    Case("... merge-aware", replace(GPU_TRL, forward="merge-aware"), config=EIGHT),
    Case(
        "... AdamW8bit, lm_head trained",
        replace(GPU_TRL, optimizer="adamw8bit", lora_modules_to_save=("lm_head",)),
        config=EIGHT,
    ),
    Case(
        "... 1 x 16384, checkpointing", replace(GPU_TRL, micro_batch_size=1, sequence_len=16384, **CKPT), config=EIGHT
    ),
    Case(
        "all 32 layers, 1 x 4096, TRL's loss, checkpointing",
        replace(GPU_TRL, micro_batch_size=1, sequence_len=4096, **CKPT),
        config={**LLAMA_8B, "num_hidden_layers": 32},
    ),
    Case("12 layers of Qwen3-4B, 4 x 2048, TRL's loss", GPU_TRL, "qwen3", {**QWEN, "num_hidden_layers": 12}),
]


def config_of(case: Case) -> Any:
    """transformers' config of a case."""
    return AutoConfig.for_model(case.model, **case.config)


def build(case: Case) -> Any:
    """The model with its adapter, ready to train."""
    s = case.settings
    torch.manual_seed(0)
    with torch.device(s.device):
        model = AutoModelForCausalLM.from_config(config_of(case), dtype=torch.bfloat16 if s.bf16 else torch.float32)
    if s.packed:
        for fqn, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and fqn != "lm_head":
                replace_module(model, fqn, NVFP4Linear.from_linear(module, name=fqn))
            del module
    model.requires_grad_(False)
    if s.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    targets = s.lora_target_modules
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=s.lora_r,
        lora_alpha=32,
        lora_dropout=s.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=list(s.lora_modules_to_save) or None,
    )
    adapted = peft.get_peft_model(model, config)
    if s.forward != "peft":
        make_merge_aware(adapted) if s.forward == "merge-aware" else fuse(adapted)
    return adapted.train()


def stepper(case: Case, model: Any) -> Callable[[], None]:
    """A function that takes one optimizer step."""
    from trl.trainer.utils import add_fused_lm_head

    import halfbyte.optim

    s = case.settings
    factory = OPTIMIZERS.get(s.optimizer, halfbyte.optim.AdamW8bit)
    optimizer = factory([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    tokens = torch.randint(0, model.config.vocab_size, (s.micro_batch_size, s.sequence_len), device=s.device)
    batch = {"input_ids": tokens, "labels": tokens}
    if s.padded:
        batch["attention_mask"] = torch.ones_like(tokens)
        batch["attention_mask"][-1, s.sequence_len // 2 :] = 0
    if s.loss == "fused-head":
        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "is_top1"))

    def loss() -> torch.Tensor:
        with torch.autocast(s.device, dtype=torch.bfloat16, enabled=s.autocast and s.bf16):
            if s.loss == "logits":
                return model(**batch).loss
            found = model(**batch, fused_lm_head=True)
            return -found.log_probs.sum() / found.label_mask.sum()

    def step() -> None:
        for _ in range(s.gradient_accumulation_steps):
            loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(case: Case) -> float:
    """Bytes of tensors at the worst moment of the second step."""
    model = build(case)
    gc.collect()
    step = stepper(case, model)
    step()
    if case.settings.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    # Made anew in each step, the merged weights that a CPU keeps are counted by the allocator; the release of the last
    # step's is not recorded.
    shape = read_shape(config_of(case), Path(case.name), case.settings)
    return allocator_peak(step) + planned(case).at_rest - kept_codes(shape, case.settings)


def allocator_peak(call: Callable[[], None]) -> float:
    """The most bytes that a call has from torch's CPU allocator at once."""
    return allocations(call)[0]


def allocations(call: Callable[[], None]) -> tuple[int, int]:
    """(most bytes that a call has from torch's CPU allocator at once, bytes that it has not given back at its end)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    live = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most, live


def planned(case: Case) -> Memory:
    """The plan of a case; on a CPU without the process, since tensors alone are measured."""
    shape = read_shape(config_of(case), Path(case.name), case.settings)
    memory = plan_memory(shape, case.settings, Engine())
    return replace(memory, peak=memory.peak - CPU_PROCESS) if case.settings.device == "cpu" else memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    unit = 1e9 if options.device == "cuda" else 1e6
    lines = [
        f"# Peak memory of a training step, planned and measured, on {'one GPU' if unit == 1e9 else 'a CPU'}",
        "",
        f"{name}; torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}, Python "
        f"{platform.python_version()}. `python benchmarks/peak_memory.py --device {options.device}`.",
        "",
        f"| case | measured {'GB' if unit == 1e9 else 'MB'} | planned | error | the plan's worst moment |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for case in GPU_CASES if options.device == "cuda" else CPU_CASES:
        memory, found = planned(case), measured(case)
        error = memory.peak / found - 1
        row = f"| {case.name} | {found / unit:.3f} | {memory.peak / unit:.3f} | {error:+.1%} | {memory.where} |"
        lines.append(row)
        print(row, flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
