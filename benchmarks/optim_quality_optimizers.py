"""The optimizers that optim_quality.py compares, each as a function that takes one step and never waits for the GPU.

A model's values and gradients lie in one buffer each, large parameters first (`Weights`). torch's and our optimizers
get the parameters as usual. torchao's steps, and the arms of optim_quality_formats.py, work on the large part as one
flat tensor: their blocks run over flattened parameters whose sizes are multiples of the block size, so the numbers are
those of separate tensors, at a fraction of the launches. torchao is driven by its own single_param_adam and state
classes, not compiled, with lr and step on the device; --check-torchao compares with its public optimizers bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from optim_quality_formats import Arm, Codec, code_values
from torch import Tensor, nn

EPS, DECAY = 1e-8, 0.01
MIN_QUANT_NUMEL = 4096
Step = Callable[[], None]


@dataclass(frozen=True)
class Hyper:
    """lr is a device tensor that the trainer fills before each step."""

    lr: Tensor
    betas: tuple[float, float]


class Weights:
    """Parameters whose values and gradients are pieces of two flat fp32 buffers, the quantized ones first."""

    def __init__(self, params: list[nn.Parameter], granule: int = 256) -> None:
        self.params = sorted(params, key=lambda p: p.numel() < MIN_QUANT_NUMEL)
        large = [p for p in self.params if p.numel() >= MIN_QUANT_NUMEL]
        assert all(p.numel() % granule == 0 for p in large), "blocks would run over two parameters"
        self.num_large = sum(p.numel() for p in large)
        self.values = torch.cat([p.detach().flatten() for p in self.params])
        self.grads = torch.zeros_like(self.values)
        start = 0
        for p in self.params:
            p.data = self.values[start : start + p.numel()].view(p.shape)
            p.grad = self.grads[start : start + p.numel()].view(p.shape)
            start += p.numel()

    def parts(self) -> list[tuple[Tensor, Tensor, bool]]:
        """(values, gradients, quantized) of the large parameters together and of the small ones together."""
        cut = self.num_large
        parts = [(self.values[:cut], self.grads[:cut], True), (self.values[cut:], self.grads[cut:], False)]
        return [part for part in parts if part[0].numel()]

    def embeddings_end(self, num: int) -> int:
        """Values in the first `num` parameters (the embeddings come first in optim_quality_lm's model)."""
        return sum(p.numel() for p in self.params[:num])


Build = Callable[[Weights, Hyper], Step]


def torch_adamw(weights: Weights, hyper: Hyper) -> Step:
    on_gpu = weights.values.is_cuda
    lr = hyper.lr if on_gpu else hyper.lr.clone()
    optimizer = torch.optim.AdamW(
        weights.params, lr=lr, betas=hyper.betas, eps=EPS, weight_decay=DECAY, fused=True, capturable=on_gpu
    )
    return _stepper(optimizer, hyper)


def ours(name: str, **options: int) -> Build:
    def build(weights: Weights, hyper: Hyper) -> Step:
        import halfbyte.optim

        cls = getattr(halfbyte.optim, name)
        return _stepper(
            cls(weights.params, lr=hyper.lr, betas=hyper.betas, eps=EPS, weight_decay=DECAY, **options), hyper
        )

    return build


def _stepper(optimizer: torch.optim.Optimizer, hyper: Hyper) -> Step:
    lr = optimizer.param_groups[0]["lr"]

    def step() -> None:
        lr.copy_(hyper.lr)
        optimizer.step()

    return step


def torchaos(name: str) -> Build:
    def build(weights: Weights, hyper: Hyper) -> Step:
        import torchao.optim
        from torchao.optim.adam import single_param_adam

        optimizer = getattr(torchao.optim, name)([torch.zeros(1)])
        num_steps = torch.zeros((), device=weights.values.device)
        parts = []
        for values, grads, quantized in weights.parts():
            states = [
                optimizer._new_buffer(values, signed) if quantized else torch.zeros_like(values)
                for signed in (True, False)
            ]
            parts.append((values, grads, states))

        @torch.no_grad()
        def step() -> None:
            num_steps.add_(1)
            for values, grads, (m, v) in parts:
                single_param_adam(values, grads, num_steps, m, v, None, hyper.lr, *hyper.betas, DECAY, EPS, True, False)

        return step

    return build


def simulated(arm: Arm) -> Build:
    """fp32 AdamW whose moments go through the arm's codecs after each step."""

    def build(weights: Weights, hyper: Hyper) -> Step:
        device = weights.values.device
        num_steps = torch.zeros((), device=device)
        first = weights.embeddings_end(2) if arm.skip_embeddings else 0
        parts = [(*part, torch.zeros_like(part[0]), torch.zeros_like(part[0])) for part in weights.parts()]
        codecs = (arm.exp_avg, arm.exp_avg_sq)
        tables = [c and code_values(c.name, signed).to(device) for c, signed in zip(codecs, (True, False), strict=True)]
        beta1, beta2 = hyper.betas

        @torch.no_grad()
        def step() -> None:
            num_steps.add_(1)
            for values, grads, quantized, m, v in parts:
                m.lerp_(grads, 1 - beta1)
                v.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
                move = m.clone()
                denominator = (v / (1 - beta2**num_steps)).sqrt_().add_(EPS)
                for moment, codec, table in zip((m, v), codecs, tables, strict=True):
                    if quantized and codec is not None:
                        moment[first:] = codec.roundtrip(moment[first:], table, num_steps, signed=moment is m)
                if arm.carry:
                    move.add_(move - m, alpha=arm.carry)
                values.mul_(1 - hyper.lr * DECAY)
                values.sub_(move / denominator * (hyper.lr / (1 - beta1**num_steps)))

        return step

    return build


OPTIMIZERS: dict[str, Build] = {
    "adamw fp32": torch_adamw,
    "adamw fp32, rerun": torch_adamw,
    "halfbyte AdamW8bit": ours("AdamW8bit"),
    "halfbyte AdamW4bit": ours("AdamW4bit"),
    "halfbyte AdamWFp8": ours("AdamWFp8"),
    "torchao AdamW8bit": torchaos("AdamW8bit"),
    "torchao AdamW4bit": torchaos("AdamW4bit"),
    "torchao AdamWFp8": torchaos("AdamWFp8"),
}

STOCHASTIC = "stochastic"
_8, _8S = Codec("8bit"), Codec("8bit", rounding=STOCHASTIC)
_F, _FS = Codec("fp8"), Codec("fp8", rounding=STOCHASTIC)
_4, _4S = Codec("4bit", 128), Codec("4bit", 128, STOCHASTIC)
_R, _RS, _RD = (Codec("even 16", 128, rounding, root=2) for rounding in ("nearest", STOCHASTIC, "dither"))
_Q, _QS = (Codec("even 16", 128, rounding, root=4) for rounding in ("nearest", STOCHASTIC))
_P, _PS = (Codec("power 1.5", 128, rounding) for rounding in ("nearest", STOCHASTIC))
ARMS: dict[str, Build] = {
    name: simulated(arm)
    for name, arm in {
        "8bit": Arm(_8, _8),
        "8bit m": Arm(_8, None),
        "8bit v": Arm(None, _8),
        "8bit, v stochastic": Arm(_8, _8S),
        "8bit, embeddings fp32": Arm(_8, _8, skip_embeddings=True),
        "fp8": Arm(_F, _F),
        "fp8, v stochastic": Arm(_F, _FS),
        "4bit": Arm(_4, _4),
        "4bit m": Arm(_4, None),
        "4bit v": Arm(None, _4),
        "4bit, m stochastic": Arm(_4S, _4),
        "4bit, v stochastic": Arm(_4, _4S),
        "4bit, both stochastic": Arm(_4S, _4S),
        "4bit, embeddings fp32": Arm(_4, _4, skip_embeddings=True),
        "4bit, v root": Arm(_4, _R),
        "4bit, v root stochastic": Arm(_4, _RS),
        "4bit, v root dither": Arm(_4, _RD),
        "4bit, m stochastic, v root stochastic": Arm(_4S, _RS),
        "4bit, v fourth root": Arm(_4, _Q),
        "4bit, v fourth root stochastic": Arm(_4, _QS),
        "4bit, m power 1.5": Arm(_P, _4),
        "4bit, m power 1.5, v root": Arm(_P, _R),
        "4bit, m power 1.5, v root stochastic": Arm(_P, _RS),
        "4bit, m power 1.5 stochastic, v root stochastic": Arm(_PS, _RS),
        "4bit, m power 1.5, v root stochastic, carry 1": Arm(_P, _RS, carry=1.0),
    }.items()
}


# --- torchao, checked -----------------------------------------------------------------------------


def check_torchao(device: torch.device) -> str:
    """torchao's public optimizers, eager, against how they are driven here: parameters after 5 steps, bit for bit."""
    import torchao.optim

    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        torch.manual_seed(0)
        mine = [nn.Parameter(torch.randn(64, 256, device=device)), nn.Parameter(torch.randn(100, device=device))]
        theirs = [p.detach().clone() for p in mine]
        hyper = Hyper(torch.zeros((), device=device), (0.9, 0.999))
        weights = Weights(mine)
        step, optimizer = torchaos(name)(weights, hyper), getattr(torchao.optim, name)(theirs)
        for i in range(5):
            weights.grads.normal_()
            for p, q in zip(mine, theirs, strict=True):
                q.grad = p.grad
            hyper.lr.fill_(1e-3 / (i + 1))
            step()
            optimizer.param_groups[0]["lr"].fill_(1e-3 / (i + 1))
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
        for p, q in zip(mine, theirs, strict=True):
            worst = (p - q).abs().max().item()
            if worst > 0:
                return f"{name} differs by {worst:.1e} from torchao's own step"
    return "bit-equal to torchao's own steps, eager"
