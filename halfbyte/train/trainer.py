"""One run, in order: check, read the data, load the base, attach the adapter, train, leave the adapter.

`Trainer` below is TRL's `SFTTrainer` with a few hooks, one level deep: where checkpoints are written (staged and
renamed), how the held-out loss is averaged (over tokens, not over batches), two numbers in the logs, and what an engine
does in the place of DDP (engine.py). The rest of what people know from `Trainer` holds: callbacks, `report_to`,
Accelerate, resume.
"""

import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import GradientAccumulationPlugin
from transformers import PrinterCallback
from trl import SFTTrainer

from halfbyte.checkpoint import resume
from halfbyte.checkpoint.card import model_card
from halfbyte.checkpoint.output import atomic_folder, only_writer, write_text
from halfbyte.checkpoint.sidecar import read_record
from halfbyte.lora import metadata, start_step
from halfbyte.lora.adapter_files import CARD_NAME
from halfbyte.lora.names import adapted_layers
from halfbyte.parallel.agree import together, world_size
from halfbyte.parallel.deepspeed import read_deepspeed_config, stage_of
from halfbyte.parallel.gather import describe_adapter as describe_sharded
from halfbyte.parallel.gather import gather_trainable
from halfbyte.parallel.launch import process_group, rank
from halfbyte.parallel.zero3 import gathering
from halfbyte.train import build, callbacks, merge_aware, preflight
from halfbyte.train.config import TrainConfig, dump_config
from halfbyte.train.data import Data, load_data
from halfbyte.train.encode import IGNORED
from halfbyte.train.engine import Engine, EngineAccelerator, without_parallelism_config
from halfbyte.train.files import ADAPTER, BASE, CONFIG, MEMORY, METRICS, PLOT, SAMPLES, VERSIONS, read_metrics
from halfbyte.train.memory import MemoryByKind
from halfbyte.train.packing import check_packing
from halfbyte.train.plan import check_fits
from halfbyte.train.ranks import check_same_config, check_same_run
from halfbyte.train.samples import Samples
from halfbyte.train.states import check_states, load_shards, writer_of

SCHEDULER = "scheduler.pt"  # Trainer's name
PREPARE_TIMEOUT_S = 3600.0  # ranks wait this long for each other; reading a large data set takes a while
SAVE_TIMEOUT_S = 600.0
PACKAGES = ("halfbyte", "torch", "transformers", "peft", "trl", "accelerate", "datasets", "safetensors")


@dataclass(frozen=True)
class RunResult:
    """What a run left: the adapter's folder, its last step, the held-out loss at the start and at the end, if any."""

    adapter: Path
    step: int
    loss_before: float | None
    loss_after: float | None


def train(config: TrainConfig) -> RunResult:
    """Train an adapter as the config says, and leave it in output_dir/adapter.

    raises   ValueError, FileNotFoundError, FileExistsError or PermissionError for what the user can mend, most of them
             before any weight is loaded; OSError when a checkpoint cannot be written.
    """
    with process_group(build.pick_device(config)), build.accelerates_environment(), ExitStack() as until_done:
        return train_on_this_rank(config, until_done)


def train_on_this_rank(config: TrainConfig, until_done: ExitStack) -> RunResult:
    """`train`, as one process of a launch or as the only one; what fails on one rank is raised on all.

    until_done  holds the lock of output_dir, which rank 0 takes once the folder is known to be good.
    """
    output_dir = Path(config.output_dir)
    check_same_config(config, timeout=PREPARE_TIMEOUT_S)
    with together("Preparing the run", timeout=PREPARE_TIMEOUT_S):
        checkpoint = resume.find_checkpoint(output_dir, config.resume_from_checkpoint)
        anew = checkpoint is None and config.resume_from_checkpoint != "auto"
        data, folder, tokenizer = prepare(config, resuming=not anew)
        if rank() == 0:
            until_done.enter_context(only_writer(output_dir))
        run = run_identity(config, data)
        if checkpoint is not None:
            resume.check_same_run(checkpoint, run)
            check_states(checkpoint, config, world_size())
        if rank() == 0:
            print(data.summary(), flush=True)
            check_fits(config, folder, build.pick_device(config), data.longest(), world_size())

    check_same_run(run, checkpoint, timeout=PREPARE_TIMEOUT_S)
    model, engine = build.build_model(config, folder)
    described = describe_adapter(model, spread=engine is not None or bool(config.deepspeed))
    with together("Checking the run", timeout=PREPARE_TIMEOUT_S):
        if config.sample_packing:
            with gathering(model):
                check_packing(model, tokenizer.pad_token_id)
        if checkpoint is not None and described is not None:
            check_same_base(checkpoint, described)

    trainer = make_trainer(config, model, engine, tokenizer, data, run, described, resuming=checkpoint is not None)
    if config.merge_aware and not config.max_steps:
        config.check_start_step(trainer.planned_steps())
    if trainer.is_world_process_zero():
        resume.clear_staging(output_dir)
        write_text(output_dir / CONFIG, dump_config(config))
        write_text(output_dir / VERSIONS, json.dumps(versions(), indent=1))
        write_text(output_dir / BASE, json.dumps(read_record(folder), indent=1))
    if checkpoint is not None and resume.step_of(checkpoint) >= trainer.planned_steps():
        return finished(checkpoint, output_dir)
    if checkpoint is not None and trainer.is_world_process_zero():
        done = resume.step_of(checkpoint)
        print(f"{checkpoint}: going on after step {done} of {trainer.planned_steps()}", flush=True)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.save_adapter(output_dir / ADAPTER)
    return result_of(trainer.state.global_step, output_dir)


def finished(checkpoint: Path, output_dir: Path) -> RunResult:
    """The result of a run that had taken all its steps, its adapter published from the last checkpoint.

    It may have been killed between the two. Trainer itself would take one step more.
    """
    with together("Publishing the adapter", timeout=SAVE_TIMEOUT_S):
        if rank() == 0:
            print(f"{checkpoint}: all steps have been taken; to go on, raise max_steps or num_epochs", flush=True)
            with atomic_folder(output_dir / ADAPTER, replace=True) as partial:
                resume.copy_adapter(checkpoint, partial)
    return result_of(resume.step_of(checkpoint), output_dir)


def prepare(config: TrainConfig, *, resuming: bool) -> tuple[Data, Path, Any]:
    """Everything that needs no weight: (data, base folder, tokenizer), or the error a user can mend."""
    from halfbyte.checkpoint.skeleton import Skeleton

    build.pick_device(config)
    preflight.check_launch()
    preflight.check_parallelism_config(config.tensor_parallel_size)
    if config.deepspeed:
        preflight.check_deepspeed(config.deepspeed)
    preflight.check_report_to(config.report_to)
    folder = preflight.base_folder(config)
    preflight.check_sequence_len(folder, config.sequence_len)
    skeleton = Skeleton.from_folder(folder).model
    preflight.check_targets(skeleton, config)
    preflight.check_tensor_parallel(folder, config.tensor_parallel_size)
    if config.fsdp:
        preflight.check_fsdp(skeleton, config.dp_replicate_size)
    tokenizer = preflight.load_tokenizer(folder)
    data = load_data(config, tokenizer)
    if rank() == 0:  # one rank: another's test file would make the folder look used
        preflight.check_output_dir(Path(config.output_dir), resuming=resuming)
    return data, folder, tokenizer


def run_identity(config: TrainConfig, data: Data) -> dict[str, Any]:
    """What must not change for a run to continue where another stopped: the examples and their order."""
    per_step = config.micro_batch_size * config.gradient_accumulation_steps
    per_step *= world_size() // config.tensor_parallel_size
    same = {key: getattr(config, key) for key in ("sample_packing", "seed", "optimizer")}
    if config.tensor_parallel_size > 1:
        same["tensor_parallel_size"] = config.tensor_parallel_size
    if config.deepspeed:
        same["ZeRO stage"] = stage_of(read_deepspeed_config(config.deepspeed))
    same |= merge_aware.identity(config)
    return {"training data": data.fingerprint()[:16], "examples per step": per_step, **same}


def describe_adapter(model: Any, *, spread: bool) -> metadata.AdapterMetadata | None:
    """The base layers under the adapter, with digests of their codes; taken once, since the base is frozen.

    Called on all ranks. Where an engine may have spread the base, on rank 0 alone; None elsewhere.
    """
    if spread:
        return describe_sharded(model)
    return metadata.describe(model, adapted_layers(model))


def check_same_base(checkpoint: Path, described: metadata.AdapterMetadata) -> None:
    """ValueError naming the layers, when the checkpoint's adapter was trained on, or for, other codes."""
    recorded = metadata.read(checkpoint)
    if recorded is not None:
        try:
            metadata.check_version(recorded)
            metadata.check_targets(recorded, described.targets)
        except ValueError as error:
            raise ValueError(f"{checkpoint}: {error}") from None


def make_trainer(
    config: TrainConfig,
    model: Any,
    engine: Engine | None,
    tokenizer: Any,
    data: Data,
    run: Mapping[str, Any],
    described: metadata.AdapterMetadata | None,
    *,
    resuming: bool,
) -> "Trainer":
    """The trainer of a run, with what it shows and keeps."""
    output_dir = Path(config.output_dir)
    trainer = Trainer(
        model=model,
        args=build.trainer_arguments(config, evaluates=data.held_out is not None, resuming=resuming),
        train_dataset=data.train,
        eval_dataset=data.held_out,
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=build.optimizer_cls_and_kwargs(config),
        callbacks=[
            callbacks.MetricsFile(output_dir / METRICS),
            callbacks.LossPlot(output_dir / METRICS, output_dir / PLOT),
            callbacks.ProgressLine(),
            callbacks.Diverged(),
            *([merge_aware.StartStep(config.merge_aware_start_step)] if config.merge_aware else []),
            *([] if config.deepspeed else [MemoryByKind(output_dir / MEMORY)]),
            *sample_answers(config, tokenizer),
        ],
        run=run,
        described=described,
        keep=config.save_total_limit,
        engine=engine,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def sample_answers(config: TrainConfig, tokenizer: Any) -> list[Samples]:
    """The callback that answers the run's prompts, if there are any."""
    path = Path(config.output_dir) / SAMPLES
    wanted = config.sample_prompts
    return [Samples(path, wanted, config.sample_max_new_tokens, tokenizer)] if wanted else []


class Trainer(SFTTrainer):
    """SFTTrainer whose checkpoints are complete or not there.

    run        what a resumed run must share with this one (checkpoint/resume.py).
    described  metadata of the adapter, written into its config; on rank 0 at least.
    keep       how many checkpoints to keep; None keeps all.
    engine     of a model that we have spread over the ranks; None: one process, DDP or DeepSpeed, by Accelerate.
    """

    def __init__(
        self,
        *args: Any,
        run: Mapping[str, Any],
        described: metadata.AdapterMetadata | None,
        keep: int | None = None,
        engine: Engine | None = None,
        **kwargs: Any,
    ):
        self._run, self._described, self._keep, self._engine = run, described, keep, engine
        self._staging: Path | None = None
        self._tokens_logged = 0
        super().__init__(*args, **kwargs)
        self._clock = callbacks.Clock()
        self.add_callback(self._clock)
        self._tokens_per_example = mean_labels(self.eval_dataset) if self.eval_dataset is not None else 1.0

    def create_accelerator_and_postprocess(self) -> None:
        """As Trainer's; with an engine, the accelerator that passes on what the engine says."""
        with without_parallelism_config():
            super().create_accelerator_and_postprocess()
            if self._engine is not None:
                options = self._build_accelerator_args(
                    dataloader_config=self.accelerator.dataloader_config,
                    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # Trainer accumulates itself
                )
                self.accelerator = EngineAccelerator(self._engine, **options)
                self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if self._engine is None:  # an engine has placed it, perhaps on both
            super()._move_model_to_device(model, device)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Examples per optimizer step, over all ranks that get different ones."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes

    def planned_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Trainer's own checkpoint, written into a staging folder, then sealed and renamed by rank 0."""
        output_dir = Path(str(self.args.output_dir))
        name = f"{resume.PREFIX}{self.state.global_step}"
        self._staging = resume.staging_folder(output_dir)
        try:
            with together(f"Writing {name}", timeout=SAVE_TIMEOUT_S):
                super()._save_checkpoint(model, trial)
            with together(f"Sealing {name}", timeout=SAVE_TIMEOUT_S):
                described = self.describe_adapter()
                if self.is_world_process_zero():
                    metadata.write(self._staging / name, described)
                    resume.seal(self._staging / name, step=self.state.global_step, run=self._run)
                    resume.publish(self._staging / name, output_dir / name)
                    resume.rotate(output_dir, self._keep)
        except Exception as error:
            if self.is_world_process_zero():  # another may have given up on it while it still writes there
                resume.clear_staging(output_dir)
            if isinstance(error, resume.WRITE_ERRORS):
                raise resume.save_failed(output_dir / name, error) from error
            raise
        finally:
            self._staging = None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._engine is None:
            return super()._save_optimizer_and_scheduler(output_dir)
        assert self.optimizer is not None and self.lr_scheduler is not None
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._engine.save_optimizer(self.optimizer, folder)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._engine is None and writer_of(Path(checkpoint)) != "FSDP2":
            return super()._load_optimizer_and_scheduler(checkpoint)
        assert self.optimizer is not None and self.lr_scheduler is not None
        if self._engine is None:
            load_shards(Path(checkpoint), self.model, self.optimizer)  # type: ignore[arg-type]  # optional there
        else:
            self._engine.load_optimizer(self.optimizer, Path(checkpoint))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._engine is None:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._engine.load_adapter(Path(resume_from_checkpoint))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's; what an engine has sharded is gathered and its shapes checked before anything is written."""
        if not self.is_deepspeed_enabled and self._engine is None:
            return super().save_model(output_dir, _internal_call)
        self._save(output_dir, state_dict=gather_trainable(self.model))  # type: ignore[arg-type]  # optional there

    def save_adapter(self, folder: Path) -> None:
        """The adapter in PEFT's files, and the tokenizer, in a folder that is complete, or as it was before."""
        with together("Saving the adapter", timeout=SAVE_TIMEOUT_S):
            described = self.describe_adapter()
            if not self.args.should_save:
                return self.save_model(str(folder))  # a sharded model gathers on every rank; only rank 0 writes
            with atomic_folder(folder, replace=True) as partial:
                self.save_model(str(partial))
                (partial / "training_args.bin").unlink(missing_ok=True)
                metadata.write(partial, described)
                write_text(partial / CARD_NAME, model_card(partial))  # in the place of PEFT's empty form

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None for the run's folder: TRL's would name no base and no data."""

    def describe_adapter(self) -> Any:
        """Metadata of the adapter as it is now; of a merge-aware one with the digest of its merged weights.

        On rank 0; None elsewhere. All ranks call it, since an engine may have to gather the base.
        """
        start = self._run.get("merge_aware_start_step", 0)
        if (self.is_deepspeed_enabled or self._engine is not None) and self._run.get("merge_aware"):
            return describe_sharded(self.model, start_step=start_step(start, self.state.max_steps))  # type: ignore[arg-type]
        if not self.is_world_process_zero():
            return None
        assert self._described is not None
        return merge_aware.described_now(self._described, self.model, start, self.state.max_steps)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """The batch's loss, scaled so that the evaluation's mean over examples is the mean over tokens.

        Trainer averages batch means, which weighs a token in a short example more, and changes with the batch size.
        Examples that fill up the last batch of all ranks do not count.
        """
        inputs = self._prepare_inputs(inputs)
        own = self.own_examples(len(inputs["labels"]))
        inputs["labels"][own:] = IGNORED
        copies = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=torch.tensor(max(own, 1) * copies))
        return loss.detach() / self._tokens_per_example, None, None

    def own_examples(self, size: int) -> int:
        """How many of this rank's batch are not repeated from the start, as happens in the last batch of all ranks."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return size
        return min(max(state.remainder - self.accelerator.process_index * self.args.eval_batch_size, 0), size)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds tokens per second (of training steps alone) and peak memory to the lines with a training loss."""
        if "loss" in logs:
            seconds, tokens = self._clock.lap(), self._total_train_tokens - self._tokens_logged
            self._tokens_logged = self._total_train_tokens
            logs["tokens_per_second"] = tokens / seconds if seconds else 0.0
            logs["memory_gb"] = peak_memory_bytes() / 1e9
        super().log(logs, start_time)


def mean_labels(rows: Any) -> float:
    """Mean number of predicted tokens per example; the first token is never predicted."""
    return sum(label != IGNORED for labels in rows["labels"] for label in labels[1:]) / len(rows)


def peak_memory_bytes() -> int:
    """Of this process: on its GPU if it uses one, else resident."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Versions of what ran, and on what."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    return found | {package: importlib.metadata.version(package) for package in PACKAGES}


def result_of(step: int, output_dir: Path) -> RunResult:
    """The run's result; the loss before training is read from the metrics, which a resumed run inherits."""
    losses = [row["eval_loss"] for row in read_metrics(output_dir / METRICS) if "eval_loss" in row]
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    return RunResult(output_dir / ADAPTER, step, first, last)
