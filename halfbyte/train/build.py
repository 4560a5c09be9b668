"""The parts of a run, each made from the config: model, adapter, optimizer, arguments of the trainer."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from halfbyte.checkpoint.load import load_model
from halfbyte.checkpoint.load_part import load_part
from halfbyte.lora import fuse
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.parallel import synchronize, together
from halfbyte.parallel.agree import world_size
from halfbyte.parallel.deepspeed import client_config, dtype_of, read_deepspeed_config, spread, stage_of
from halfbyte.parallel.launch import rank
from halfbyte.parallel.mesh import TENSOR, tensor_mesh
from halfbyte.train import merge_aware
from halfbyte.train.config import OptimizerName, TrainConfig
from halfbyte.train.engine import Engine
from halfbyte.train.fsdp import shard
from halfbyte.train.preflight import check_targets
from halfbyte.train.tensor_parallel import cut

# name in the config -> where the class is, and what it is told beside lr, betas, eps and weight_decay
OPTIMIZERS: dict[OptimizerName, tuple[str, str, dict[str, Any]]] = {
    "adamw_torch": ("torch.optim", "AdamW", {}),
    "adamw_torch_fused": ("torch.optim", "AdamW", {"fused": True}),
    "adamw8bit": ("halfbyte.optim", "AdamW8bit", {}),
    "adamw4bit": ("halfbyte.optim", "AdamW4bit", {}),
    "adamwfp8": ("halfbyte.optim", "AdamWFp8", {}),
    "adamw_torch_8bit": ("halfbyte.optim", "AdamW8bit", {}),
    "adamw_torch_4bit": ("halfbyte.optim", "AdamW4bit", {}),
    "ao_adamw_fp8": ("halfbyte.optim", "AdamWFp8", {}),
}
LOAD_TIMEOUT_S = 3600.0  # ranks without weights wait this long for the one that reads them
NEVER = 10**9  # in steps; Trainer still saves at the end


def pick_device(config: TrainConfig) -> torch.device:
    """Where to train. ValueError for cuda on a machine without it."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device here; set device to cpu or auto")
    return torch.device("cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu")


def use_bf16(config: TrainConfig, device: torch.device) -> bool:
    """Whether to compute in bf16; "auto" does so on a GPU that can."""
    if config.bf16 == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return config.bf16


def build_model(config: TrainConfig, folder: Path) -> tuple[Any, Engine | None]:
    """The frozen NVFP4 base with its adapter, a `peft.PeftModel`, and the engine that has spread it, if one has.

    Rank 0 alone reads the weights; the others get them from it, after the models have been compared. Where layers are
    cut, each rank reads its parts.
    raises   ValueError for an unknown attention or a base without NVFP4 weights, on all ranks.
    """
    device = pick_device(config)
    if config.tensor_parallel_size > 1:
        return build_cut(config, folder, device)
    zero = read_deepspeed_config(config.deepspeed) if config.deepspeed else {}
    sharded = config.fsdp or stage_of(zero) == 3 and world_size() > 1
    first = torch.device("cpu") if sharded else device  # the whole base need not fit a GPU that gets a part
    with together("Loading the base", timeout=LOAD_TIMEOUT_S):
        base = load_base(config, folder, first if rank() == 0 else torch.device("meta"))
        model = attach_adapter(config, base, folder)
    if config.fsdp:
        return shard(config, model, device)
    if config.deepspeed:
        spread(model, zero, engine_dtype(config, zero), device=device, timeout=LOAD_TIMEOUT_S)
        return model, None
    synchronize(model, device=device)
    return model, None


def build_cut(config: TrainConfig, folder: Path, device: torch.device) -> tuple[Any, Engine]:
    """The same for tensor parallelism."""
    mesh = tensor_mesh(device.type, config.tensor_parallel_size)
    with together("Loading the base", timeout=LOAD_TIMEOUT_S):
        model = attach_adapter(config, load_base(config, folder, device, mesh[TENSOR]), folder)
    return cut(model, mesh)


def load_base(config: TrainConfig, folder: Path, device: torch.device, mesh: DeviceMesh | None = None) -> Any:
    """The frozen base in the dtype of the run; with a mesh, this rank's part of it."""
    dtype = torch.bfloat16 if use_bf16(config, pick_device(config)) else torch.float32
    if mesh is None:
        base = load_model(folder, dtype=dtype, device=device)
    else:
        base = load_part(folder, mesh, dtype=dtype, device=device)
    if not nvfp4_modules(base):
        raise ValueError(f"{folder}: base_model has no NVFP4 weight; make such a base with `halfbyte quantize`")
    if config.attn_implementation:
        try:
            base.set_attn_implementation(config.attn_implementation)
        except (ValueError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"attn_implementation {config.attn_implementation!r}: {reason}; set sdpa or eager, or remove it"
            ) from error
    base.config.use_cache = False
    return base


def attach_adapter(config: TrainConfig, base: Any, folder: Path) -> Any:
    """PEFT's LoRA on the base, fused (lora/fused.py) or merge-aware; A is drawn from the run's seed."""
    from peft import get_peft_model
    from transformers import set_seed

    check_targets(base, config)
    set_seed(config.seed)
    model = get_peft_model(base, lora_config(config), low_cpu_mem_usage=base.device.type == "meta")
    return merge_aware.attach(config, model, folder) if config.merge_aware else fuse(model)


def lora_config(config: TrainConfig) -> Any:
    """The `peft.LoraConfig` of a run."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # annotated int, used as a float
        lora_dropout=config.lora_dropout,
        target_modules=config.lora_target_modules,
        modules_to_save=config.lora_modules_to_save,
        init_lora_weights=config.peft_init_lora_weights,
    )


def optimizer_cls_and_kwargs(config: TrainConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """What `Trainer` asks for to make the optimizer itself, after it has placed the parameters."""
    module, name, extra = OPTIMIZERS[config.optimizer]
    arguments = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "weight_decay": config.weight_decay,
    }
    return getattr(importlib.import_module(module), name), {**arguments, **extra}


def engine_dtype(config: TrainConfig, zero: dict[str, Any]) -> torch.dtype | None:
    """What the engine casts floating parameters to: what its config says, else what the run says."""
    if any(zero.get(key, {}).get("enabled", "auto") != "auto" for key in ("bf16", "fp16")):
        return dtype_of(zero)
    return torch.bfloat16 if use_bf16(config, pick_device(config)) else None


def deepspeed_config(path: str) -> dict[str, Any]:
    """A DeepSpeed config with what the run itself says filled in by `Trainer`, where the file leaves it open."""
    found = client_config(read_deepspeed_config(path))
    auto: dict[str, Any] = {"gradient_clipping": "auto", "gradient_accumulation_steps": "auto"}
    auto["train_micro_batch_size_per_gpu"] = "auto"
    if not found.keys() & {"bf16", "fp16"}:
        auto["bf16"] = {"enabled": "auto"}
    return {**auto, **found}


@contextmanager
def accelerates_environment() -> Iterator[None]:
    """Put Accelerate's variables back as they were: `Trainer` leaves word of DeepSpeed there, for later runs too."""
    before = {key: value for key, value in os.environ.items() if key.startswith("ACCELERATE_")}
    try:
        yield
    finally:
        for key in [key for key in os.environ if key.startswith("ACCELERATE_")]:
            del os.environ[key]
        os.environ |= before


def deepspeed_on_cpus() -> dict[str, Any]:
    """Accelerate's state for a launch of CPU processes under DeepSpeed, to be used as it is.

    `Trainer` would leave the backend to Accelerate, which then looks for GPUs and takes each process for the only one.
    """
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier run in this process, as Trainer does
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as Trainer does, for these lines
    try:
        PartialState(backend="gloo")
    finally:
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
    return {"use_configured_state": True}


def trainer_arguments(config: TrainConfig, *, evaluates: bool, resuming: bool) -> Any:
    """The `trl.SFTConfig` of a run.

    Checkpoints are rotated by us (checkpoint/resume.py), so Trainer's own save_total_limit stays unset.
    """
    from trl import SFTConfig

    device = pick_device(config)
    return SFTConfig(
        output_dir=config.output_dir,
        per_device_train_batch_size=config.micro_batch_size,
        per_device_eval_batch_size=config.eval_batch_size or config.micro_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        num_train_epochs=config.num_epochs,
        max_steps=config.max_steps or -1,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm,
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if config.gradient_checkpointing else None,
        bf16=use_bf16(config, device),
        use_cpu=device.type == "cpu" and not config.deepspeed,  # Accelerate would leave DeepSpeed out
        deepspeed=deepspeed_config(config.deepspeed) if config.deepspeed else None,
        accelerator_config=deepspeed_on_cpus() if config.deepspeed and device.type == "cpu" else None,
        seed=config.seed,
        data_seed=config.seed,
        logging_steps=config.logging_steps,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=config.save_steps or NEVER,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=config.eval_steps or NEVER,
        eval_on_start=evaluates and not resuming,
        prediction_loss_only=True,
        report_to=config.report_to or "none",
        disable_tqdm=True,
        max_length=config.sequence_len,
        packing=config.sample_packing,
        eval_packing=False,
        dataset_kwargs={"skip_prepare_dataset": not config.sample_packing},
        dataloader_pin_memory=device.type == "cuda",
    )
