"""What a fast path may do differently from `step_ref`: halfbyte.optim.kernels.step, last paragraph."""

import torch
from torch import Tensor

from halfbyte.optim.formats import StateFormat
from halfbyte.optim.hyper import Hyper
from halfbyte.optim.kernels import step_ref
from halfbyte.optim.state_ops import unpack

POISON = 37  # values beside each tensor that nobody may write


def guarded(values: Tensor, device: str, shift: int = 0) -> Tensor:
    """A copy of `values` amid poisoned memory; shift moves it off the 16-byte grid."""
    buffer = torch.full((values.numel() + 2 * POISON + 27 + shift,), 77, dtype=values.dtype, device=device)
    start = 64 + shift  # 64 values are a multiple of 16 bytes in every dtype
    inside = buffer[start : start + values.numel()]
    inside.copy_(values.reshape(-1))
    return inside.view(values.shape)


def is_untouched(tensor: Tensor) -> bool:
    """Whether the memory around a guarded tensor still holds the poison."""
    start = tensor.storage_offset()
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return bool((whole[:start] == 77).all() and (whole[start + tensor.numel() :] == 77).all())


def fresh_state(param: Tensor, fmt: StateFormat | None, amsgrad: bool = False) -> dict[str, Tensor]:
    """A state of zeros, each tensor guarded."""
    state = {"step": torch.zeros((), device=param.device)}
    for name in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())):
        if fmt is None:
            state[name] = guarded(torch.zeros(param.shape), str(param.device))
        else:
            codes = torch.zeros(fmt.num_bytes(param.numel()), dtype=torch.uint8)
            state[name] = guarded(codes, str(param.device))
            state[name + "_scale"] = guarded(torch.zeros(fmt.num_blocks(param.numel())), str(param.device))
    return state


def reference(
    param: Tensor, grad: Tensor, state: dict[str, Tensor], hyper: Hyper, fmt: StateFormat, **options
) -> tuple[Tensor, dict[str, Tensor]]:
    """`step_ref` on copies on the CPU: (new parameter, new state)."""
    param = param.detach().cpu().clone()
    state = {key: value.cpu().clone() for key, value in state.items()}
    step_ref.step([param], [grad.cpu()], [state], hyper, fmt, **options)
    return param, state


def _rank(codes: Tensor, fmt: StateFormat) -> Tensor:
    """Codes as integers that ascend with their values; E4M3's two zeros are the same."""
    if fmt.bits == 4:
        return unpack(codes, 2 * codes.numel()).int()
    if fmt.name == "fp8":
        return torch.where(codes > 127, 128 - codes.int(), codes.int())
    return codes.int()


def check_agreement(
    param: Tensor, state: dict[str, Tensor], expected: tuple[Tensor, dict[str, Tensor]], fmt: StateFormat
) -> None:
    """Parameters to a few ulp, scales to a few ulp, codes equal but for a rare neighbour.

    Division and square root are good to 2 ulp and a product may be fused, so values differ by some 1e-7 (relative);
    a value that close to a midpoint may take the neighbouring code. That is one in 1e4 for random fp32 gradients, some
    more for bfloat16 ones, whose few bits put moments on the middle of two E4M3 codes; a bfloat16 parameter can land
    on its neighbour (2^-8) as often.
    """
    new_param, new_state = expected
    param = param.detach().cpu()
    close = {"rtol": 2e-6, "atol": 2e-7}
    if param.dtype == torch.float32:
        torch.testing.assert_close(param, new_param, **close, equal_nan=True)
    else:
        torch.testing.assert_close(param, new_param, rtol=2**-7, atol=1e-7, equal_nan=True)
        equal = (param == new_param) | param.isnan()
        assert (~equal).sum() <= 2 + 1e-3 * param.numel()
    assert state.keys() == new_state.keys()
    for key, want in new_state.items():
        have = state[key].cpu()
        if want.dtype != torch.uint8:
            # beta1 m and (1 - beta1) g may cancel: an error relative to those, not to their sum
            signed = key in ("exp_avg", "exp_avg_scale") and want.numel()
            atol = 2e-7 * float(want[want.isfinite()].abs().max()) if signed else 1e-37
            torch.testing.assert_close(have, want, rtol=2e-6, atol=atol, equal_nan=True)
            continue
        apart = (_rank(have, fmt) - _rank(want, fmt)).abs()
        assert (apart <= 1).all(), key
        assert (apart > 0).sum() <= 2 + 1e-3 * apart.numel(), key
