"""Checkpoints: nothing is cast, everything is plain, and what differs is converted, never silently."""

import copy
import io
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from halfbyte.optim import AdamW4bit, AdamW8bit, AdamWFp8
from halfbyte.optim.convert import to_torch
from halfbyte.optim.layout import layout_of
from halfbyte.optim.saving import group_format
from halfbyte.optim.state import moment_values
from tests.optim.training import ADAMW, ALL, SHAPES, params_of, states_equal, train

MANY = [*SHAPES, (16, 33), (12, 5, 7), (300, 16), (64, 4, 3, 3), (0, 8), (9, 6, 64), (2**20 + 3,)]


def reload(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as it would be read by anybody."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def twins(cls: type, shapes: list = MANY, dtype: torch.dtype = torch.float32, **options: Any) -> tuple:
    """A trained optimizer with its parameters, and a fresh one over copies of them."""
    params = params_of(shapes, dtype)
    optimizer = cls(params, **options)
    train(optimizer, params)
    others = [nn.Parameter(param.detach().clone()) for param in params]
    return optimizer, params, cls(others, **options), others


@pytest.mark.parametrize("peer", ["RMSprop", "Adagrad", "Adamax", "Adadelta", "ASGD", "Rprop"])
def test_states_of_other_optimizers_are_refused(peer: str) -> None:
    """They lack a moment, or name it otherwise: a step over them would read address 0. Nothing is changed."""
    param = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    param.grad = torch.ones_like(param)
    other = getattr(torch.optim, peer)([param], lr=0.5)
    other.step()
    lr = torch.tensor(1e-3)
    ours = AdamW8bit([param], lr=lr)
    with pytest.raises(ValueError, match=r"shape \[64, 64\] (has no exp_avg|is not complete)"):
        ours.load_state_dict(other.state_dict())
    assert lr == 1e-3 and not ours.state


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "step"])
def test_incomplete_states_are_refused(name: str, quantized: bool) -> None:
    """In a state dict, and where a hand has taken one out of the optimizer's own."""
    param = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    param.grad = torch.ones_like(param)
    ours = AdamW8bit([param], min_quant_numel=0 if quantized else 10**6)
    ours.step()
    saved = copy.deepcopy(ours.state_dict())
    if name not in saved["state"][0]:
        return
    del saved["state"][0][name], ours.state[param][name]
    with pytest.raises(ValueError, match=f"no '?{name}"):
        AdamW8bit([param]).load_state_dict(saved)
    with pytest.raises(ValueError, match=f"has no {name}"):
        ours.step()


@pytest.mark.parametrize(
    "wrong", [{"lr": float("nan")}, {"betas": (2.0, 3.0)}, {"eps": -1.0}, {"differentiable": True}]
)
def test_options_of_a_state_dict_are_checked(wrong: dict) -> None:
    param = nn.Parameter(torch.ones(8))
    ours = AdamW8bit([param])
    saved = ours.state_dict()
    saved["param_groups"][0] |= wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ours.load_state_dict(saved)


@pytest.mark.parametrize("quantized", [True, False])
def test_channels_last_moments_go_on_as_torchs(quantized: bool) -> None:
    """The step reads a state's memory in order, whatever the strides of the one it was loaded from."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(8, 3, 3, 3, generator=draw).to(memory_format=torch.channels_last)
    theirs, ours = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    peer, own = (
        torch.optim.AdamW([theirs], lr=1e-2),
        AdamW8bit([ours], lr=1e-2, min_quant_numel=0 if quantized else 4096),
    )
    for step in range(6):
        theirs.grad = torch.randn(8, 3, 3, 3, generator=draw).to(memory_format=torch.channels_last) * (1 + step)
        ours.grad = theirs.grad.clone()
        if step == 3:
            ours.data.copy_(theirs.data)
            own.load_state_dict(peer.state_dict())
        peer.step()
        if step >= 3:
            own.step()
    assert (theirs - ours).abs().max() < (0.1 if quantized else 1e-4) * 1e-2


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"min_quant_numel": 0, "block_size": 100}, {"min_quant_numel": 0}])
def test_save_and_load_are_exact(cls: type, dtype: torch.dtype, options: dict) -> None:
    """o8: bit-equal states, fp32 ones stay fp32 for bf16 parameters, and the next steps are the same."""
    optimizer, params, fresh, others = twins(cls, dtype=dtype, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.load_state_dict(reload(optimizer.state_dict()))
    assert states_equal(optimizer, fresh)
    assert all(t.dtype in (torch.uint8, torch.float32) for state in fresh.state.values() for t in state.values())
    train(optimizer, params, 2, seed=7)
    train(fresh, others, 2, seed=7)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize("cls", ADAMW)
def test_state_dict_keeps_the_layouts_promise(cls: type) -> None:
    optimizer, params, _, _ = twins(cls, min_quant_numel=0)
    fmt = group_format(optimizer.param_groups[0])
    for index, state in optimizer.state_dict()["state"].items():
        layout = layout_of(tuple(params[index].shape), fmt)
        for name in ("exp_avg", "exp_avg_sq"):
            assert tuple(state[name].shape) == layout.codes
            assert tuple(state[name + "_scale"].shape) == layout.scales
        assert all(type(tensor) is torch.Tensor for tensor in state.values())


def test_weights_only_in_a_process_that_never_imported_us(tmp_path: Path) -> None:
    """o9"""
    optimizer, *_ = twins(AdamW4bit)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    code = (
        "import sys, torch; d = torch.load('optimizer.pt', weights_only=True); "
        "assert not any(m.startswith('halfbyte') for m in sys.modules); print(len(d['state']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(MANY)


def test_safetensors_after_flattening(tmp_path: Path) -> None:
    optimizer, _, fresh, _ = twins(AdamW8bit)
    state_dict = optimizer.state_dict()
    flat = {f"{i}.{key}": value for i, state in state_dict["state"].items() for key, value in state.items()}
    save_file({key: value.contiguous() for key, value in flat.items()}, tmp_path / "optimizer.safetensors")
    states: dict[int, dict] = {}
    for name, value in load_file(tmp_path / "optimizer.safetensors").items():
        index, key = name.split(".")
        states.setdefault(int(index), {})[key] = value
    fresh.load_state_dict({"state": states, "param_groups": state_dict["param_groups"]})
    assert states_equal(optimizer, fresh)


@pytest.mark.parametrize("cls", ADAMW)
@pytest.mark.parametrize("other", ADAMW)
@pytest.mark.parametrize("blocks", [(256, 128), (128, 256), (128, 128), (64, 100)])
def test_format_and_block_size_change_on_load(cls: type, other: type, blocks: tuple[int, int]) -> None:
    """o21: the loading optimizer keeps its own format and says what it did; the moments stay what the codes can hold.

    Each code is within half a codebook step of its value: 4-bit ones 0.13 (exp_avg) or 1/16 (floor of exp_avg_sq) of
    the block's amax, the others 0.04; a conversion adds the two.
    """
    params = params_of()
    optimizer = cls(params, block_size=blocks[0])
    train(optimizer, params)
    fresh = other(params, block_size=blocks[1])
    if cls is other and blocks[0] % blocks[1] == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fresh.load_state_dict(reload(optimizer.state_dict()))  # smaller blocks inherit their scale: exact
    else:
        with pytest.warns(UserWarning, match="converted on load"):
            fresh.load_state_dict(reload(optimizer.state_dict()))
    assert fresh.param_groups[0]["block_size"] == blocks[1]
    assert fresh.param_groups[0]["state_format"] == other.state_format
    tolerance = 0.13 * sum(c is AdamW4bit for c in (cls, other)) + 0.04
    for param in params:
        for name in ("exp_avg", "exp_avg_sq"):
            old = moment_values(optimizer.state[param], name, group_format(optimizer.param_groups[0]), param.numel())
            new = moment_values(fresh.state[param], name, group_format(fresh.param_groups[0]), param.numel())
            assert (old - new).abs().max() <= tolerance * old.abs().max()
    train(fresh, params, 2)


@pytest.mark.parametrize("cls", ADAMW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_adamw_and_back(cls: type, dtype: torch.dtype) -> None:
    """o21: fp32 states quantize within their codes' error (as above) and go back as exactly what the codes say."""
    params = params_of(dtype=dtype)
    theirs = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.2)
    train(theirs, params)
    ours = cls(params)
    with pytest.warns(UserWarning, match="torch to"):
        ours.load_state_dict(reload(theirs.state_dict()))
    assert ours.param_groups[0]["lr"] == 3e-3 and ours.param_groups[0]["weight_decay"] == 0.2
    fmt = group_format(ours.param_groups[0])
    back = torch.optim.AdamW(params)
    back.load_state_dict(reload(to_torch(ours)))
    for param in params:
        assert ours.state[param]["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            old, held = theirs.state[param][name].float(), moment_values(ours.state[param], name, fmt, param.numel())
            assert (old.flatten() - held).abs().max() <= (0.13 if cls is AdamW4bit else 0.04) * old.abs().max()
            assert torch.equal(back.state[param][name].float().flatten(), held.to(dtype).float())
    train(back, params, 1)
    train(ours, params, 1)


def test_min_quant_numel_may_differ() -> None:
    """States that were quantized become fp32, and the reverse, as the loading optimizer was built."""
    params = params_of()
    small = AdamW8bit(params, min_quant_numel=0)
    train(small, params)
    large = AdamW8bit(params, min_quant_numel=10**9)
    with pytest.warns(UserWarning, match="to fp32"):
        large.load_state_dict(small.state_dict())
    fmt = group_format(small.param_groups[0])
    for param in params:
        assert torch.equal(
            large.state[param]["exp_avg"].flatten(), moment_values(small.state[param], "exp_avg", fmt, param.numel())
        )
    with pytest.warns(UserWarning, match="to 8bit"):
        small.load_state_dict(large.state_dict())
    train(small, params)


def test_a_newer_version_is_refused() -> None:
    optimizer, _, fresh, _ = twins(AdamW8bit)
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][0]["state_version"] = 99
    with pytest.raises(ValueError, match="state_version 99"):
        fresh.load_state_dict(state_dict)


def test_states_of_another_model_are_refused() -> None:
    optimizer, *_ = twins(AdamW8bit, [(64, 128), (5000,)])
    with pytest.raises(ValueError, match="param groups"):
        AdamW8bit(params_of([(64, 128)])).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="another model"):
        AdamW8bit(params_of([(128, 64), (5000,)])).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="another model"):
        AdamW8bit(params_of([(64, 129), (5000,)])).load_state_dict(to_torch(optimizer))


def test_hooks_of_state_dicts() -> None:
    optimizer, _, fresh, _ = twins(AdamW8bit)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "extra": 1})
    fresh.register_load_state_dict_pre_hook(lambda o, d: seen.append(d["extra"]))
    fresh.register_load_state_dict_post_hook(lambda o: seen.append("load post"))
    fresh.load_state_dict(optimizer.state_dict())
    assert seen == ["save pre", 1, "load post"]


def test_a_tensor_lr_keeps_its_identity() -> None:
    params = params_of()
    lr = torch.tensor(1e-3)
    optimizer = AdamWFp8(params, lr=lr)
    train(optimizer, params, 1)
    state_dict = reload(optimizer.state_dict())
    state_dict["param_groups"][0]["lr"] = torch.tensor(5e-4)
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] is lr and float(lr) == pytest.approx(5e-4)


def test_loading_does_not_alias_the_state_dict() -> None:
    """An optimizer that was loaded from another's live state dict does not step the other's states."""
    optimizer, params, fresh, others = twins(AdamW8bit)
    fresh.load_state_dict(optimizer.state_dict())
    before = {k: v.clone() for k, v in optimizer.state[params[0]].items()}
    train(fresh, others, 1)
    assert all(torch.equal(before[key], optimizer.state[params[0]][key]) for key in before)


def test_codes_without_their_scales_are_no_moments() -> None:
    params = params_of()
    optimizer = AdamW8bit(params)
    train(optimizer, params)
    damaged = optimizer.state_dict()
    damaged["state"] = {
        key: {n: v for n, v in s.items() if n != "exp_avg_scale"} for key, s in damaged["state"].items()
    }
    with pytest.raises(ValueError, match="codes without their scales"):
        AdamW8bit(params_of()).load_state_dict(damaged)
