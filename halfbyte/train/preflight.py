"""What can be refused before any weight is loaded: a user waits seconds for a wrong key, not for the model."""

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.detect import detect, read_config
from halfbyte.checkpoint.hub import local_folder
from halfbyte.checkpoint.load import load_model
from halfbyte.nvfp4.linear import NVFP4Linear
from halfbyte.parallel.agree import world_size
from halfbyte.parallel.deepspeed import check_config, read_deepspeed_config
from halfbyte.parallel.fsdp2 import check_torch, transformer_blocks
from halfbyte.parallel.mesh import check_degree, check_replicas
from halfbyte.parallel.tp_plan import check as check_plan
from halfbyte.parallel.tp_plan import plan_of
from halfbyte.train.config import TrainConfig

# tracker in the config -> packages of which it needs one
TRACKERS = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow",),
}


def check_launch() -> None:
    """ValueError for a launch whose settings `Trainer` would follow into what is not tested here: Accelerate's FSDP."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        version = os.environ.get("FSDP_VERSION", "1")
        raise ValueError(
            f"the launch asks for FSDP {version} through Accelerate, which `halfbyte train` does not run; launch "
            "without --use_fsdp, and set fsdp: true"
        )


def check_parallelism_config(degree: int) -> None:
    """ValueError for a launch with a parallelism config of Accelerate that is not the run's own layout.

    degree   tensor_parallel_size of the run.
    """
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return
    names = ("TP", "DP_REPLICATE", "DP_SHARD", "CP", "SP")
    tensor, replicas, *others = (int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")) for name in names)
    if tensor != degree:
        raise ValueError(
            f"the launch's parallelism config has tp_size {tensor}, but the run has tensor_parallel_size {degree}; "
            f"set tensor_parallel_size: {tensor}"
        )
    if max(others) > 1 or replicas not in (1, world_size() // degree):
        raise ValueError(
            f"the launch's parallelism config has dp_replicate, dp_shard, cp, sp sizes {replicas}, "
            f"{', '.join(map(str, others))}, expected 1, or dp_replicate {world_size() // degree}, the groups of "
            f"{degree} processes; leave these sizes out of the launch"
        )


def check_deepspeed(path: str) -> None:
    """See that DeepSpeed can be used as its config says.

    raises   FileNotFoundError or ValueError for the file, ImportError without the package, ValueError outside of a
             launch.
    """
    check_config(read_deepspeed_config(path))
    if importlib.util.find_spec("deepspeed") is None:
        raise ImportError("deepspeed is not installed; install it with: pip install 'halfbyte[deepspeed]'")
    if "RANK" not in os.environ:
        raise ValueError(
            f"deepspeed is set to {path}, but this process is not part of a launch; start it with: "
            "torchrun --nproc-per-node N -m halfbyte train ..."
        )


def check_fsdp(model: Any, replicas: int) -> None:
    """See that a model can be sharded over this launch.

    model    on the meta device.
    raises   RuntimeError for a torch that is too old; ValueError for one process, for a number of processes that does
             not divide into `replicas` groups, and for a model that names no blocks.
    """
    check_torch()
    if world_size() == 1:
        raise ValueError(
            "fsdp is set, but this is one process; start several with torchrun --nproc-per-node N -m halfbyte train "
            "..., or remove fsdp (a checkpoint that FSDP has written goes on without it)"
        )
    check_replicas(replicas, world_size())
    transformer_blocks(model)


def check_tensor_parallel(folder: Path, degree: int) -> None:
    """ValueError for a model, or a number of processes, that cannot be cut into `degree` parts."""
    if degree > 1:
        check_degree(degree, world_size())
        model = load_model(folder, device="meta")
        check_plan(model, plan_of(model), degree)


EARLY_REPORT = "report.html"  # of a `halfbyte report --watch` that was started before the run


def check_output_dir(output_dir: Path, *, resuming: bool) -> None:
    """Make the folder of the run, and see that it can be written.

    raises   FileExistsError when it holds something and no run is resumed, OSError when it cannot be written.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise FileExistsError(f"{output_dir}: output_dir is a file; give a folder")
    held = {entry.name for entry in output_dir.iterdir()} if output_dir.is_dir() else set()
    if held - {EARLY_REPORT} and not resuming:
        raise FileExistsError(
            f"{output_dir}: output_dir is not empty; choose a new folder, or continue with resume_from_checkpoint=true"
        )
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        probe = output_dir / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise PermissionError(
            f"{output_dir}: output_dir cannot be written ({error.strerror}); choose a folder that can"
        ) from error


def base_folder(config: TrainConfig) -> Path:
    """The folder of the NVFP4 base. ValueError for a model without NVFP4 weights, FileNotFoundError for none at all."""
    folder = local_folder(config.base_model)
    if detect(folder, read_config(folder)) is None:
        raise ValueError(
            f"{config.base_model}: base_model has no NVFP4 weight; make such a base with "
            f"`halfbyte quantize {config.base_model} OUT`, and train on OUT"
        )
    return folder


def load_tokenizer(folder: Path) -> Any:
    """The base's tokenizer, with a padding token. ValueError when the folder has none that transformers can read."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # a dozen kinds, one meaning
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{folder}: no tokenizer that transformers can read ({reason}); copy the model's own"
        ) from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(f"{folder}: the tokenizer has neither a padding nor an end-of-text token; set one of them")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_sequence_len(folder: Path, sequence_len: int) -> None:
    """ValueError when the model was not built for sequences this long."""
    config = read_config(folder)
    limit = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    if limit and sequence_len > limit:
        raise ValueError(f"sequence_len is {sequence_len}, but the model's limit is {limit} positions; lower it")


def check_report_to(names: list[str]) -> None:
    """ValueError for a tracker that transformers does not know, or whose package is not installed."""
    from transformers.integrations import get_reporting_integration_callbacks

    for name in names:
        packages = TRACKERS.get(name)
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            raise ValueError(
                f"report_to: {name!r} needs the package {packages[0]}, which is not installed; install it with: "
                f"pip install {packages[0]}"
            )
        try:
            for callback in get_reporting_integration_callbacks([name]):
                callback()
        except Exception as error:  # each tracker's callback complains in its own way
            raise ValueError(
                f"report_to: {name!r} cannot be used ({' '.join(str(error).split())}); set it up, or remove it"
            ) from error


def check_targets(model: Any, config: TrainConfig) -> None:
    """ValueError when a name of lora_target_modules or lora_modules_to_save matches no module of the model.

    model   the real one, or one on the meta device.
    """
    from torch import nn

    linears = [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)]
    suffixes = ", ".join(sorted({fqn.rpartition(".")[2] for fqn in linears}))
    targets = config.lora_target_modules
    if isinstance(targets, str) and targets != "all-linear":
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise ValueError(
                f"lora_target_modules {targets!r} is no regular expression ({error}); give a list of names, or mend it"
            ) from None
        if not any(pattern.fullmatch(fqn) for fqn in linears):
            raise ValueError(f"lora_target_modules {targets!r} matches no linear layer; the model has {suffixes}")
    elif isinstance(targets, list):
        for target in targets or [""]:
            if not any(fqn == target or fqn.endswith(f".{target}") for fqn in linears):
                raise ValueError(f"lora_target_modules: {target!r} matches no linear layer; the model has {suffixes}")
    check_saved_modules(model, config.lora_modules_to_save or [], suffixes)


def check_saved_modules(model: Any, names: list[str], suffixes: str) -> None:
    """ValueError when a module to train in full is not there, or holds frozen 4-bit weights."""
    for name in names:
        found = [(fqn, module) for fqn, module in model.named_modules() if fqn == name or fqn.endswith(f".{name}")]
        if not found:
            raise ValueError(f"lora_modules_to_save: {name!r} matches no module of the model; it has {suffixes}, ...")
        for fqn, module in found:
            if any(isinstance(part, NVFP4Linear) for part in module.modules()):
                raise ValueError(
                    f"lora_modules_to_save: {name!r} matches {fqn}, whose 4-bit weights cannot be trained in full; "
                    "adapt it with lora_target_modules, or keep it dense with `halfbyte quantize --exclude`"
                )
