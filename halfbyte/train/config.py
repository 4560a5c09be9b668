"""What a training run is told: one frozen object, built alike from YAML, from `key=value` and from Python.

The names are Axolotl's where they mean the same, because those are the files people bring. A name that is not known is
an error that names the nearest one: a misspelt `learnig_rate` must not train with the default. The docstring under a
field is its help text, printed by `halfbyte train --keys`; there is no second list of options anywhere.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

DataType = Literal["chat_template", "prompt_completion", "alpaca", "completion"]
OptimizerName = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adamw8bit",
    "adamw4bit",
    "adamwfp8",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    "ao_adamw_fp8",
]
SchedulerName = Literal["constant", "constant_with_warmup", "linear", "cosine"]

# Names from elsewhere that people look for under another word than ours; the nearest spelling would mislead.
KNOWN_ELSEWHERE = {
    "model_name_or_path": "base_model",
    "per_device_train_batch_size": "micro_batch_size",
    "num_train_epochs": "num_epochs",
    "max_seq_length": "sequence_len",
    "max_length": "sequence_len",
    "packing": "sample_packing",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
    "target_modules": "lora_target_modules",
    "lora_target_linear": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "r": "lora_r",
    "flash_attention": "attn_implementation",
}

# Keys of Accelerate's and Axolotl's fsdp_config that have nothing to say here -> why.
FSDP1 = "it is a setting of FSDP 1, and this is FSDP 2"
FSDP_UNNEEDED = {
    "sharding_strategy": f"{FSDP1}; use reshard_after_forward, and dp_replicate_size in the place of hybrid",
    "use_orig_params": FSDP1,
    "sync_module_states": f"{FSDP1}; rank 0 alone reads the weights, always",
    "forward_prefetch": FSDP1,
    "backward_prefetch": FSDP1,
    "backward_prefetch_policy": FSDP1,
    "limit_all_gathers": FSDP1,
    "min_num_params": FSDP1,
    "cpu_offload": "it is called offload_params",
    "version": "it is 2",
    "auto_wrap_policy": "the model's own blocks are gathered one at a time",
    "transformer_layer_cls_to_wrap": "the model's own blocks are gathered one at a time",
    "cpu_ram_efficient_loading": "rank 0 alone reads the weights, always",
    "state_dict_type": "checkpoints are sharded and the adapter is written whole, always",
    "activation_checkpointing": "use gradient_checkpointing",
    "mixed_precision_policy": "use bf16",
}
FSDP_SPELLINGS = {"offload": "offload_params: true", "shard_grad_op": "reshard_after_forward: false"}


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class DatasetConfig(_Strict):
    """One source of examples."""

    path: str
    """A .jsonl, .json or .parquet file, a folder (of such files, or saved by `datasets`), or a Hub id."""
    type: DataType | None = None
    """chat_template (messages), prompt_completion, alpaca or completion (plain text); read off the columns if unset."""
    split: str = "train"
    """Which split of a Hub data set or of a folder with several."""
    field_messages: str = "messages"
    """Column of the chat messages."""
    field: str = "text"
    """Column of the plain text."""


class FsdpConfig(_Strict):
    """How FSDP2 shards; the names are Accelerate's and Axolotl's."""

    reshard_after_forward: bool = True
    """Free a block's gathered weights between forward and backward, and gather them twice; false keeps them."""
    offload_params: bool = False
    """Keep shards, gradients and optimizer states in CPU memory."""

    @model_validator(mode="before")
    @classmethod
    def _for_fsdp2(cls, values: Any) -> Any:
        for key in values if isinstance(values, Mapping) else ():
            name = str(key).removeprefix("fsdp_")
            if name in FSDP_UNNEEDED:
                raise ValueError(f"fsdp_config: remove {key}: {FSDP_UNNEEDED[name]}")
        return values


class TrainConfig(_Strict):
    """Everything one run is told. Frozen: what is written to output_dir/config.yaml is what ran."""

    base_model: str = Field(min_length=1)
    """NVFP4 checkpoint: a folder, or a Hub id."""
    adapter: Literal["lora", "qlora"] = "lora"
    """lora; qlora means the same here, since the base is 4-bit."""
    lora_r: int = Field(default=16, gt=0)
    """Rank of the adapter."""
    lora_alpha: float = Field(default=32, gt=0)
    """The adapter's change is scaled by lora_alpha / lora_r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input."""
    lora_target_modules: list[str] | str = "all-linear"
    """Names (or endings of names) of the linears to adapt, one regular expression, or all-linear."""
    lora_modules_to_save: list[str] | None = None
    """Modules trained in full and saved with the adapter, such as lm_head or embed_tokens."""
    peft_init_lora_weights: Literal[True, "gaussian", "orthogonal"] = True
    """PEFT's init_lora_weights: true (B is zero), gaussian or orthogonal. Those that rewrite the base are refused."""
    merge_aware: bool = False
    """Train the merged 4-bit weight itself, whose bytes `halfbyte merge` then writes (docs/merge_aware.md)."""
    merge_aware_start_step: int | float = Field(default=0, ge=0)
    """Plain LoRA before this optimizer step; a fraction of the run when written as one (0.25)."""
    merge_aware_rounding: Literal["dither", "nearest"] = "dither"
    """nearest is for files of tools that requantize by rounding to nearest; it trains worse."""
    merge_aware_scales: Literal["keep", "fresh"] | None = None
    """The base's block scales, or fresh ones from the merged weight; unset: keep with dither, fresh with nearest."""

    datasets: list[DatasetConfig] = Field(min_length=1)
    """Training data; several sources are joined."""
    test_datasets: list[DatasetConfig] = []
    """Held-out data, instead of val_set_size."""
    val_set_size: float = Field(default=0, ge=0)
    """Held out from the training data: a share below 1, or a count. The choice depends on seed alone."""
    sequence_len: int = Field(default=2048, gt=0)
    """Longest example in tokens; longer ones are cut."""
    sample_packing: bool = False
    """Put several examples into one sequence; needs an attention that keeps them apart (attn_implementation)."""

    micro_batch_size: int = Field(default=1, gt=0)
    """Examples per forward pass and device."""
    gradient_accumulation_steps: int = Field(default=1, gt=0)
    """Forward passes per optimizer step."""
    num_epochs: float = Field(default=1, gt=0)
    """Passes over the data; max_steps overrides it."""
    max_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps."""
    learning_rate: float = Field(default=2e-4, ge=0)
    """Peak learning rate."""
    lr_scheduler: SchedulerName = "cosine"
    """Course of the learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    optimizer: OptimizerName = "adamw_torch"
    """AdamW of torch (fp32 states), or with 8-bit, 4-bit or FP8 states."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this norm; 0 clips nothing."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: about a third slower, much less memory."""
    bf16: bool | Literal["auto"] = "auto"
    """Compute in bf16. auto: on a GPU that can, fp32 otherwise."""
    attn_implementation: str | None = None
    """eager, sdpa, flash_attention_2, ...; the model's own default if unset."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    deepspeed: str | None = None
    """A DeepSpeed config (JSON) for a launch of several processes: ZeRO-1, 2 or 3. DDP if unset."""

    fsdp: bool = False
    """Shard base, adapter and optimizer states over the processes of a launch, with FSDP2."""
    fsdp_config: FsdpConfig = FsdpConfig()
    """reshard_after_forward (false: gathered blocks stay until backward); offload_params (true: to CPU memory)."""
    fsdp_version: int = 2
    """FSDP 1 is refused."""
    dp_replicate_size: int = Field(default=1, gt=0)
    """Groups of processes that each hold the whole model, sharded inside the group by fsdp (HSDP)."""

    tensor_parallel_size: int = Field(default=1, gt=0)
    """Processes that share one copy of the model, each layer cut over them; a launch has a multiple of them."""

    output_dir: str = Field(min_length=1)
    """Folder of the run. Must be new or empty, unless a run is resumed."""
    logging_steps: int = Field(default=1, gt=0)
    """Steps between two lines of metrics."""
    save_steps: int | None = Field(default=None, gt=0)
    """Steps between two checkpoints; none but the last if unset."""
    save_total_limit: int | None = Field(default=None, gt=0)
    """Checkpoints to keep; the last complete one always stays."""
    eval_steps: int | None = Field(default=None, gt=0)
    """Steps between two evaluations; before and after the run if unset."""
    eval_batch_size: int | None = Field(default=None, gt=0)
    """Examples per forward pass in evaluations; micro_batch_size if unset."""
    resume_from_checkpoint: bool | str = False
    """true: the newest complete checkpoint in output_dir; auto: the same if there is one; or a checkpoint's folder."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of the adapter's init, the data order and the held-out choice."""
    sample_prompts: list[str] = []
    """Answered before and after the run, into samples.jsonl and the report."""
    sample_max_new_tokens: int = Field(default=64, gt=0)
    """Longest of these answers, in tokens."""
    report_to: list[str] = []
    """Also report to tensorboard, wandb, ..., beside metrics.jsonl."""

    @field_validator("datasets", "test_datasets", mode="before")
    @classmethod
    def _paths_are_datasets(cls, value: Any) -> Any:
        items = [value] if isinstance(value, str | Mapping) else value
        if not isinstance(items, list | tuple):
            return value
        return [{"path": item} if isinstance(item, str) else item for item in items]

    @field_validator("fsdp", mode="before")
    @classmethod
    def _fsdp_is_on_or_off(cls, value: Any) -> Any:
        words = value.split() if isinstance(value, str) else value
        if not isinstance(words, list) or not words or words == [""]:
            return value or False
        config = ", ".join(FSDP_SPELLINGS[word] for word in words if word in FSDP_SPELLINGS)
        hybrid = ", and dp_replicate_size: N" if any("hybrid" in str(word) for word in words) else ""
        raise ValueError(
            f"fsdp is {value!r}, which is how FSDP 1 was written; write fsdp: true"
            + (f", and fsdp_config: {{{config}}}" if config else "")
            + hybrid
        )

    @field_validator("fsdp_version")
    @classmethod
    def _fsdp_is_2(cls, value: int) -> int:
        if value != 2:
            raise ValueError(f"fsdp_version is {value}, which cannot shard a packed base; remove it, for FSDP 2")
        return value

    @field_validator("peft_init_lora_weights", mode="before")
    @classmethod
    def _base_stays_as_it_is(cls, value: Any) -> Any:
        if isinstance(value, str) and value.startswith(("pissa", "olora", "loftq", "corda", "lora_ga")):
            raise ValueError(
                f"peft_init_lora_weights: {value} subtracts the adapter's start from the base weight, and the base is "
                "frozen in 4 bits; use true, gaussian or orthogonal"
            )
        return value

    @field_validator("report_to", "sample_prompts", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: Any) -> Any:
        if value in (None, "none", "None"):
            return []
        return [value] if isinstance(value, str) else value

    def check_start_step(self, max_steps: int) -> None:
        """ValueError for a merge_aware_start_step that a run of max_steps never reaches.

        It would train plain LoRA and call it merge-aware. 1.0, all of the run, says so itself and is taken.
        """
        step = self.merge_aware_start_step
        if self.merge_aware and isinstance(step, int) and step >= max_steps:
            raise ValueError(
                f"merge_aware_start_step is {step}, but the run takes {max_steps} steps, so it would never be "
                "merge-aware; lower it, or give a share of the run such as 0.5"
            )

    @model_validator(mode="after")
    def _fits_together(self) -> "TrainConfig":
        if self.val_set_size >= 1 and self.val_set_size != int(self.val_set_size):
            raise ValueError(
                f"val_set_size is {self.val_set_size}; give a share below 1, or a whole number of examples"
            )
        if isinstance(self.merge_aware_start_step, float) and self.merge_aware_start_step > 1:
            raise ValueError(
                f"merge_aware_start_step is {self.merge_aware_start_step}: a fraction is at most 1.0, and a "
                "step is written without a point"
            )
        if self.max_steps:
            self.check_start_step(self.max_steps)
        if self.val_set_size and self.test_datasets:
            raise ValueError(
                "val_set_size and test_datasets are both set; held-out data can come from one of them only; remove the "
                "other"
            )
        engines = {
            "deepspeed": bool(self.deepspeed),
            "fsdp": self.fsdp,
            "tensor_parallel_size": self.tensor_parallel_size > 1,
        }
        spread = [name for name, asked in engines.items() if asked]
        if len(spread) > 1:
            raise ValueError(f"{' and '.join(spread)} are set; a run uses one of them, so remove the other")
        if not self.fsdp and (self.dp_replicate_size > 1 or self.fsdp_config != FsdpConfig()):
            raise ValueError("dp_replicate_size or fsdp_config is set, but fsdp is not; set fsdp: true, or remove it")
        if self.sample_prompts and spread:
            raise ValueError(
                f"sample_prompts and {spread[0]} are both set, but no process of such a run is sure to hold the whole "
                "model to answer with; remove sample_prompts"
            )
        if self.eval_steps and not (self.val_set_size or self.test_datasets):
            raise ValueError("eval_steps is set, but there is no held-out data; set val_set_size or test_datasets too")
        return self


PARENTS: dict[str, type[BaseModel]] = {
    "datasets": DatasetConfig,
    "test_datasets": DatasetConfig,
    "fsdp_config": FsdpConfig,
}


def build_config(values: Mapping[str, Any], *, source: str = "config") -> TrainConfig:
    """TrainConfig from a mapping of keys; `source` says in errors where they came from.

    raises   ValueError, one sentence, for an unknown key (with the nearest known one), a missing one, a wrong type or a
             value out of range.
    """
    try:
        return TrainConfig(**values)
    except ValidationError as error:
        raise ValueError(f"{source}: {_sentence(error)}") from None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """TrainConfig from a YAML file and `key=value` overrides, the later winning.

    path       YAML mapping; relative paths inside it are relative to the working folder, as in a shell.
    overrides  such as `learning_rate=1e-4` or `datasets.0.path=more.jsonl`; the value is read as YAML.
    raises     FileNotFoundError; ValueError for what is not a mapping, not YAML, or not a config.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such config file; give the path of a YAML file")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: not readable as YAML ({error}); expected lines such as `base_model: folder`"
        ) from None
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise ValueError(f"{path}: found {found}, expected a mapping of keys such as `base_model: folder`")
    for override in overrides:
        apply_override(values, override)
    return build_config(values, source=str(path))


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one dotted key of nested mappings and lists in place, from `key=value`."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ValueError(f"override {override!r}: expected key=value, such as learning_rate=1e-4")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"override {override!r}: the value is not readable as YAML; quote it") from None
    *parents, last = dotted.split(".")
    target: Any = values
    try:
        for key in parents:
            target = target[int(key)] if isinstance(target, list) else target.setdefault(key, {})
        target[int(last) if isinstance(target, list) else last] = value
    except (ValueError, IndexError, TypeError, AttributeError):
        raise ValueError(
            f"override {override!r}: {dotted} leads nowhere in the config; name keys that are there, and entries of a "
            "list by number"
        ) from None


def dump_config(config: TrainConfig) -> str:
    """The config as YAML, every key written out; `load_config` of it gives an equal object."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def config_help() -> str:
    """One line per key: name, default, meaning. For `halfbyte train --keys`."""
    lines = []
    for name, field in TrainConfig.model_fields.items():
        value = field.default.model_dump() if isinstance(field.default, BaseModel) else field.default
        default = "required" if field.is_required() else yaml.safe_dump(value, default_flow_style=True)
        default = default.split("\n")[0]
        lines.append(f"{name} ({default}): {field.description}")
    return "\n".join(lines)


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known key that an unknown one most likely meant, or None."""
    known = list(known)
    if KNOWN_ELSEWHERE.get(key) in known:
        return KNOWN_ELSEWHERE[key]
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.5)), None)


def _sentence(error: ValidationError) -> str:
    """The first complaint of pydantic, unknown keys before others, as one sentence."""
    complaints: dict[str, list[Any]] = {}
    for item in sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden"):
        complaints.setdefault(_key(item["loc"]), []).append(item)
    key, items = next(iter(complaints.items()))
    more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
    if items[0]["type"] == "extra_forbidden":
        model = PARENTS[key.split(".")[0]] if "." in key else TrainConfig
        nearest = nearest_key(key.rpartition(".")[2], model.model_fields)
        known = f"expected {', '.join(model.model_fields)}" if "." in key else "`halfbyte train --keys` lists all"
        return f"unknown key {key!r}; " + (f"did you mean {nearest!r}?" if nearest else known) + more
    if items[0]["type"] == "missing":
        return f"key {key!r} is missing and has no default; add it{more}"
    message = " or ".join(item["msg"].removeprefix("Value error, ").removeprefix("Input should be ") for item in items)
    if not key or items[0]["type"] == "value_error":
        return message + more
    return f"{key} is {items[0]['input']!r}, expected {message}{more}"


def _key(location: tuple[int | str, ...]) -> str:
    """Dotted key of a complaint; the names of a union's members, which pydantic appends, are dropped."""
    members = ("list[", "literal[")
    return ".".join(str(part) for part in location if part not in ("bool", "str") and not str(part).startswith(members))
