"""One training run of optim_quality.py: the recipe, the batches, and three CUDA graphs that hold everything.

Recipe: AdamW (0.9, 0.999), linear warm-up over a fifth of the steps, a cosine down to a tenth, gradients clipped to
norm 1. A first recipe (50 steps of warm-up, no clipping) left its first plateau at a step that any disturbance changed:
the losses of one optimizer differed by 5% from seed to seed, and no comparison came out of it.

On a GPU the forward and backward pass, the optimizer's step and the evaluation are each captured into a CUDA graph
after two ordinary steps, and replayed without a word from Python: batch, learning rate and records are indexed by a
step counter on the device. Several runs may share the GPU, each on its own stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from optim_quality_lm import ModelConfig, TinyLM
from optim_quality_optimizers import Build, Hyper, Weights
from optim_quality_report import Run
from torch import Tensor

EAGER_STEPS = 2
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Settings:
    num_steps: int = 1000
    batch_size: int = 32
    lr: float = 1e-3
    beta2: float = 0.999
    warmup_share: float = 0.2
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    eval_every: int = 50
    eval_batches: int = 16
    final_eval_batches: int = 72
    vocab_size: int = 4096
    text_bytes: int = 40_000_000
    model: ModelConfig = ModelConfig(4096)

    @property
    def recipe(self) -> str:
        return f"lr {self.lr:g}, betas (0.9, {self.beta2:g})"


PRESETS = {
    "full": Settings(),
    "small": Settings(
        num_steps=300,
        batch_size=16,
        seeds=(0, 1),
        eval_batches=8,
        final_eval_batches=40,
        vocab_size=1024,
        text_bytes=4_000_000,
        model=ModelConfig(1024, dim=128, num_layers=2, num_heads=4, context=64),
    ),
    "tiny": Settings(
        num_steps=40,
        batch_size=8,
        seeds=(0, 1),
        eval_every=20,
        eval_batches=4,
        final_eval_batches=10,
        vocab_size=512,
        text_bytes=1_000_000,
        model=ModelConfig(512, dim=64, num_layers=2, num_heads=2, context=64),
    ),
}


def lr_at(settings: Settings, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = max(1, round(settings.warmup_share * settings.num_steps))
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    share = (step - warmup) / max(1, settings.num_steps - warmup)
    return settings.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


class Data:
    """Random windows of the training tokens, the same for every run of a seed; fixed windows of the held-out ones."""

    def __init__(self, tokens: Tensor, held_out: Tensor, settings: Settings) -> None:
        self.tokens, self.settings = tokens, settings
        self.offsets = torch.arange(settings.model.context + 1, device=tokens.device)
        span, size = settings.model.context, settings.batch_size
        num = min(settings.final_eval_batches, (held_out.numel() - 1) // span // size)
        starts = torch.arange(num * size, device=tokens.device)[:, None] * span
        # Batch i takes every num-th window, so that a few batches are a fair sample of all.
        self.held_out = held_out[starts + self.offsets].view(size, num, -1).transpose(0, 1).contiguous()

    def starts(self, seed: int) -> Tensor:
        """First token of each window of a run: [steps, batch]."""
        generator = torch.Generator().manual_seed(1000 + seed)
        shape = (self.settings.num_steps, self.settings.batch_size)
        high = self.tokens.numel() - self.offsets.numel()
        return torch.randint(high, shape, generator=generator).to(self.tokens.device)


class Training:
    """A model in training. Its gradients stay at their address, and no step waits for the GPU."""

    def __init__(self, name: str, seed: int, settings: Settings, build: Build, data: Data) -> None:
        self.name, self.seed, self.settings, self.data = name, seed, settings, data
        self.device = data.tokens.device
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        torch.manual_seed(seed)
        self.model = TinyLM(settings.model).to(self.device)
        self.weights = Weights(list(self.model.parameters()))
        if name.endswith("rerun"):
            self.weights.values.mul_(1 + 1e-6)
        self.starts = data.starts(seed)
        self.lrs = torch.tensor([lr_at(settings, i) for i in range(settings.num_steps)], device=self.device)
        self.lr = self.lrs[0].clone()
        self.done = torch.zeros(1, dtype=torch.long, device=self.device)
        self.losses, self.moves = torch.zeros_like(self.lrs), torch.zeros_like(self.lrs)
        self.before = torch.empty_like(self.weights.values)
        self.eval_window = data.held_out[0].clone()
        self.eval_loss = torch.zeros((), device=self.device)
        self.held_out: dict[int, Tensor] = {}
        self.optimizer_step = build(self.weights, Hyper(self.lr, (0.9, settings.beta2)))
        self.bodies: dict[str, Callable[[], None]] = {
            "gradients": self._gradients,
            "update": self._update,
            "evaluate": self._evaluate,
        }
        self.replays: dict[str, Callable[[], None]] = {}
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def on_stream(self) -> AbstractContextManager:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def loss_of(self, window_BT: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            return self.model(window_BT)

    def _gradients(self) -> None:
        starts = self.starts.index_select(0, self.done).view(-1, 1)
        self.weights.grads.zero_()
        loss = self.loss_of(self.data.tokens[starts + self.data.offsets])
        loss.backward()
        with torch.no_grad():
            self.losses.index_copy_(0, self.done, loss.detach().view(1))
            norm = self.weights.grads.norm()
            self.weights.grads.mul_((CLIP_NORM / (norm + 1e-6)).clamp(max=1.0))

    @torch.no_grad()
    def _update(self) -> None:
        self.lr.copy_(self.lrs.index_select(0, self.done).view(()))
        self.before.copy_(self.weights.values)
        self.optimizer_step()
        move = self.before.sub_(self.weights.values).abs_().amax() / self.lr
        self.moves.index_copy_(0, self.done, move.view(1))
        self.done.add_(1)

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.eval_loss.add_(self.loss_of(self.eval_window))

    def _run(self, name: str, step: int) -> None:
        """A body as it is in the first steps, then as a CUDA graph, where there is one."""
        if self.stream is not None and step >= EAGER_STEPS and name not in self.replays:
            self.replays[name] = captured(self.bodies[name], self.stream, f"{self.name}, {name}")
        self.replays.get(name, self.bodies[name])()

    def step(self, step: int) -> None:
        with self.on_stream():
            self._run("gradients", step)
            self._run("update", step)
            if step == 0:
                self._evaluate()  # once as it is, so that it can be captured
            last = step + 1 == self.settings.num_steps
            if (step + 1) % self.settings.eval_every == 0 or last:
                self.held_out[step + 1] = self._held_out_loss(
                    step, len(self.data.held_out) if last else self.settings.eval_batches
                )

    def _held_out_loss(self, step: int, num_batches: int) -> Tensor:
        windows = self.data.held_out[:num_batches]
        self.eval_loss.zero_()
        for window in windows:
            self.eval_window.copy_(window)
            self._run("evaluate", step)
        return self.eval_loss / len(windows)

    def result(self) -> Run:
        held_out = {step: loss.item() for step, loss in self.held_out.items()}
        return Run(self.settings.recipe, self.name, self.seed, held_out, self.losses.tolist(), self.moves.tolist())


def captured(body: Callable[[], None], stream: torch.cuda.Stream, what: str) -> Callable[[], None]:
    """`body` as a CUDA graph, not run by this call. It must have run before, so that nothing is still lazy."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            body()
    except RuntimeError as error:
        print(f"{what}: no CUDA graph, so this run is slow: {error}", flush=True)
        torch.cuda.synchronize()
        return body
    return graph.replay


def train_side_by_side(batch: Iterable[tuple[str, int, Settings, Build]], data: Data) -> list[Run]:
    """Runs of equal length, one step of each in turn, so that their kernels overlap on the GPU."""
    trainings = [Training(*one, data) for one in batch]
    for step in range(trainings[0].settings.num_steps):
        for training in trainings:
            training.step(step)
    if data.tokens.is_cuda:
        torch.cuda.synchronize()
    return [training.result() for training in trainings]
