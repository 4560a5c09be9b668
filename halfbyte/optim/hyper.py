"""What one step needs to know beside the tensors."""

from typing import NamedTuple

from torch import Tensor


class Hyper(NamedTuple):
    """Hyper-parameters of one param group, as the kernels take them.

    lr            float, or 0-d tensor of any device and dtype (read on the device: no synchronization).
    beta1, beta2  floats (a 0-d tensor is allowed as torch's `betas` are).
    eps           added to sqrt(exp_avg_sq / bias correction).
    weight_decay  coefficient; decoupled=True: p *= 1 - lr * weight_decay (AdamW), else g += weight_decay * p (Adam).
    maximize      step up the gradient.
    amsgrad       the states hold max_exp_avg_sq (codes and scale), and it divides.
    stochastic    round bf16 parameters stochastically (halfbyte.optim.rounding); others always to nearest.
    """

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    eps: float
    weight_decay: float
    decoupled: bool = True
    maximize: bool = False
    amsgrad: bool = False
    stochastic: bool = False
