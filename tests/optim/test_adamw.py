"""The optimizers behave as torch.optim's: options, groups, schedulers, scalers, copies, refusals."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.optim import lr_scheduler

from halfbyte.optim import Adam8bit, AdamW4bit, AdamW8bit, AdamWFp8
from tests.optim.training import ADAMW, ALL, SHAPES, give_grads, params_of, states_equal, train


@pytest.mark.parametrize("cls", ALL)
def test_signature(cls: type) -> None:
    names = list(inspect.signature(cls).parameters)
    assert names[:6] == ["params", "lr", "betas", "eps", "weight_decay", "amsgrad"]
    weight_decay = 1e-2 if "AdamW" in cls.__name__ else 0.0
    defaults = cls(params_of()).defaults
    assert (defaults["lr"], defaults["betas"], defaults["eps"]) == (1e-3, (0.9, 0.999), 1e-8)
    assert (defaults["weight_decay"], defaults["min_quant_numel"]) == (weight_decay, 4096)
    assert defaults["block_size"] == (128 if "4bit" in cls.__name__ else 256)


@pytest.mark.parametrize("cls", ALL)
def test_rebuilt_from_defaults_is_the_same(cls: type) -> None:
    """o27: bits, block size and every option survive `cls(params, **defaults)`."""
    options = {"lr": 3e-3, "betas": (0.8, 0.9), "block_size": 64, "min_quant_numel": 0, "amsgrad": True}
    params, others = params_of(), params_of()
    first = cls(params, **options, maximize=True, weight_decay=0.1, seed=3)
    second = cls(others, **first.defaults)
    train(first, params)
    train(second, others)
    assert states_equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize("cls, peer", [(AdamW8bit, torch.optim.AdamW), (Adam8bit, torch.optim.Adam)])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.5}])
def test_small_parameters_step_as_torchs(cls: type, peer: type, options: dict) -> None:
    """Below min_quant_numel states are fp32, so only the rounding of one association differs: 1e-6."""
    params, others = params_of(), params_of()
    ours = cls(params, lr=1e-2, min_quant_numel=10**9, **options)
    theirs = peer(others, lr=1e-2, **options)
    train(ours, params, 10)
    train(theirs, others, 10)
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", ADAMW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_size_and_dtype(cls: type, dtype: torch.dtype) -> None:
    """Every size is quantized with min_quant_numel=0, in any parameter dtype; the first step is fp32 AdamW's to the
    rounding of the parameter's dtype, since a fresh state is exact."""
    shapes = [(0,), (), (1,), (17,), (4097,), (3, 0, 2), (5, 3, 2), (64, 33)]
    params, others = params_of(shapes, dtype), [p.detach().float() for p in params_of(shapes, dtype)]
    optimizer = cls(params, min_quant_numel=0, lr=1e-2)
    train(optimizer, params, 1)
    for param, other in zip(params, others, strict=True):
        other.requires_grad_()
        other.grad = param.grad.float()
        torch.optim.AdamW([other], lr=1e-2).step()
        assert optimizer.state[param]["exp_avg"].dtype == torch.uint8
        tolerance = {"rtol": 2**-7, "atol": 1e-4} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(param.float(), other, check_dtype=False, **tolerance)
    train(optimizer, params, 2)
    assert all(param.isfinite().all() for param in params)


@pytest.mark.parametrize("cls", ADAMW)
def test_min_quant_numel_counts_values(cls: type) -> None:
    params = params_of([(4095,), (4096,), (64, 64)], torch.bfloat16)
    optimizer = cls(params)
    train(optimizer, params, 1)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32  # also for a bf16 parameter
    assert [optimizer.state[p]["exp_avg"].dtype for p in params[1:]] == [torch.uint8] * 2


@pytest.mark.parametrize("cls", ADAMW)
def test_fp32_gradients_on_bf16_parameters(cls: type) -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch insists on gradients of the parameter's dtype")
    param, other = params_of([(5000,)], torch.bfloat16)[0], params_of([(5000,)], torch.bfloat16)[0]
    grad = torch.randn(5000)
    param.grad_dtype = torch.float32
    param.grad, other.grad = grad, grad.bfloat16()
    optimizers = cls([param]), cls([other])
    for optimizer in optimizers:
        optimizer.step()
    exact = optimizers[0].state[param]["exp_avg_scale"]
    assert not torch.equal(exact, optimizers[1].state[other]["exp_avg_scale"])
    fp32 = cls([nn.Parameter(param.detach().float())])
    fp32.param_groups[0]["params"][0].grad = grad
    fp32.step()
    assert torch.equal(exact, fp32.state[fp32.param_groups[0]["params"][0]]["exp_avg_scale"])


def test_groups_with_their_own_options() -> None:
    """Each group does what an optimizer of its own would do; one joins later, as PEFT and GANs do."""
    params, others = params_of(), params_of()
    joint = AdamW8bit([{"params": params[:2], "lr": 1e-2, "weight_decay": 0.0}], betas=(0.8, 0.95))
    joint.add_param_group({"params": params[2:], "block_size": 64, "amsgrad": True})
    apart = [
        AdamW8bit(others[:2], lr=1e-2, weight_decay=0.0, betas=(0.8, 0.95)),
        AdamW8bit(others[2:], betas=(0.8, 0.95), block_size=64, amsgrad=True),
    ]
    for step in range(3):
        give_grads(params, step)
        give_grads(others, step)
        joint.step()
        for optimizer in apart:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_lr_of_a_group_is_assigned() -> None:
    """o4"""
    params = params_of()
    optimizer = AdamW8bit(params)
    before = params[0].detach().clone()
    optimizer.param_groups[0]["lr"] = 1e-4
    train(optimizer, params, 1)
    assert 0 < (params[0] - before).abs().max() < 2e-4


def test_tensor_lr_is_not_shared_by_groups() -> None:
    """o5"""
    params = params_of()
    lr = torch.tensor(1e-3)
    optimizer = AdamW8bit([{"params": params[:1]}, {"params": params[1:]}], lr=lr)
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.1])
    train(optimizer, params, 1)
    scheduler.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([1e-3, 1e-4])
    assert optimizer.param_groups[0]["lr"] is lr  # a CUDA graph's owner steers with it
    assert float(optimizer.defaults["lr"]) == pytest.approx(1e-3)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o)], o),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_it_as_torchs(name: str, tensor_lr: bool) -> None:
    """o6: the same lr and betas every step, and the same parameters (unquantized, 1e-5)."""
    params, others = params_of(), params_of()
    lr = torch.tensor(1e-2) if tensor_lr else 1e-2
    ours = AdamW8bit(params, lr=lr, min_quant_numel=10**9)
    theirs = torch.optim.AdamW(others, lr=copy.copy(lr), foreach=False)
    ours_scheduler, theirs_scheduler = SCHEDULERS[name](ours), SCHEDULERS[name](theirs)
    for step in range(5):
        give_grads(params, step)
        give_grads(others, step)
        ours.step()
        theirs.step()
        ours_scheduler.step()
        theirs_scheduler.step()
        group, other = ours.param_groups[0], theirs.param_groups[0]
        assert float(group["lr"]) == pytest.approx(float(other["lr"]))
        assert group["betas"] == pytest.approx(other["betas"])
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-5)


def test_thirty_shapes_and_changing_scalars_need_no_compiler() -> None:
    """o6, o7: every scalar changes at every step over 30 shapes, and torch's compiler is never asked."""
    params = params_of([(n, 7 * n + 64) for n in range(1, 31)])
    optimizer = AdamW8bit(params, min_quant_numel=0)
    torch._dynamo.utils.counters.clear()
    for step in range(3):
        group = optimizer.param_groups[0]
        group.update(lr=1e-3 / (step + 1), betas=(0.9 - 0.01 * step, 0.999), weight_decay=0.01 * step, eps=1e-8)
        train(optimizer, params, 1, seed=step)
    assert not torch._dynamo.utils.counters["frames"]


def test_reduce_on_plateau_and_weight_decay_schedule() -> None:
    params = params_of()
    optimizer = AdamW8bit(params, lr=1e-2)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(3):
        optimizer.param_groups[0]["weight_decay"] = 0.1 / (step + 1)
        train(optimizer, params, 1)
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_closure_hooks_and_loss() -> None:
    params = params_of([(5000,)])
    optimizer = AdamW8bit(params)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (params[0] ** 2).sum()
        loss.backward()
        seen.append("closure")
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first and seen == ["pre", "closure", "post"] * 2


@pytest.mark.parametrize("cls", ADAMW)
def test_grad_scaler(cls: type) -> None:
    """A scaled run equals an unscaled one where the scale is a power of two, and an overflow skips the step."""
    params, others = params_of(), params_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scaled, plain = cls(params), cls(others)
    for step in range(4):
        give_grads(params, step, scale=1024.0)
        give_grads(others, step)
        if step == 1:
            params[0].grad[0, 0] = torch.inf
        else:
            plain.step()
        if step == 2:
            scaler.unscale_(scaled)
        scaler.scale(torch.ones(()))
        scaler.step(scaled)
        scaler.update()
        scaler._scale.fill_(1024.0)
    assert states_equal(scaled, plain)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_clipping_accumulation_and_parameters_without_grad() -> None:
    params = params_of()
    optimizer = AdamW8bit(params)
    give_grads(params, 0)
    params[1].grad = None
    before = params[1].detach().clone()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    assert torch.equal(before, params[1]) and params[1] not in optimizer.state
    (params[0].sum() + params[1].sum()).backward()
    params[0].sum().backward()
    optimizer.step()
    assert params[1] in optimizer.state


@pytest.mark.parametrize("cls", ALL)
def test_copies(cls: type) -> None:
    """o22: deepcopy and pickle before and after a step; the copy goes on exactly as the original."""
    params = params_of()
    optimizer = cls(params, amsgrad=True)
    for _ in range(2):
        pair = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
        for twin in pair:
            own = [p for group in twin.param_groups for p in group["params"]]
            reference = copy.deepcopy(optimizer)
            train(twin, own, 1, seed=9)
            train(reference, [p for g in reference.param_groups for p in g["params"]], 1, seed=9)
            assert states_equal(twin, reference)
        train(optimizer, params, 1)


def test_share_memory() -> None:
    """States are updated in place, so Hogwild's shared tensors stay shared."""
    params = params_of([(5000,), (10,)])
    optimizer = AdamW8bit(params)
    train(optimizer, params, 1)
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.share_memory_()
    pointers = [t.data_ptr() for state in optimizer.state.values() for t in state.values()]
    train(optimizer, params, 1)
    assert pointers == [t.data_ptr() for state in optimizer.state.values() for t in state.values()]
    assert all(t.is_shared() for state in optimizer.state.values() for t in state.values())


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": True}])
def test_torchs_implementation_switches_are_accepted(options: dict) -> None:
    params = params_of()
    optimizer = AdamW8bit(params, **options)
    train(optimizer, params, 1)
    reloaded = AdamW8bit(params_of(), **options)
    reloaded.load_state_dict(optimizer.state_dict())
    assert states_equal(optimizer, reloaded)


def test_frozen_bytes_may_be_among_the_parameters() -> None:
    """A frozen NVFP4 base is uint8 parameters without gradients; `model.parameters()` hands them over too."""
    frozen = nn.Parameter(torch.zeros(16, dtype=torch.uint8), requires_grad=False)
    params = params_of([(5000,)])
    optimizer = AdamW8bit([frozen, *params])
    train(optimizer, params, 1)
    assert frozen not in optimizer.state


@pytest.mark.parametrize("cls", ADAMW)
def test_default_dtype_and_device_do_not_disturb_it(cls: type) -> None:
    params, others = params_of(), params_of()
    reference = cls(others)
    train(reference, others)
    try:
        torch.set_default_dtype(torch.bfloat16)
        optimizer = cls(params)
        for step in range(3):
            torch.set_default_dtype(torch.float32)
            give_grads(params, step)
            torch.set_default_dtype(torch.bfloat16)
            with torch.device("meta"):
                optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert states_equal(optimizer, reference)


@pytest.mark.parametrize("cls", ADAMW)
def test_amsgrad_is_checkpointed(cls: type) -> None:
    """o19"""
    params, others = params_of(), params_of()
    optimizer, reloaded = cls(params, amsgrad=True), cls(others, amsgrad=True)
    train(optimizer, params)
    with torch.no_grad():
        for other, param in zip(others, params, strict=True):
            other.copy_(param)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    reloaded.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert states_equal(optimizer, reloaded)
    train(optimizer, params, 2, seed=5)
    train(reloaded, others, 2, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_block_sizes_and_formats_in_one_process() -> None:
    """o2: one process, several formats and block sizes over the same shapes; no setting leaks into another."""
    results = {}
    for _ in range(2):
        for cls in (AdamW8bit, AdamW4bit, AdamWFp8):
            for block_size in (256, 128):
                params = params_of()
                optimizer = cls(params, block_size=block_size)
                train(optimizer, params)
                key = (cls, block_size)
                if key in results:
                    assert all(torch.equal(a, b) for a, b in zip(params, results[key], strict=True))
                results[key] = params
                num_blocks = -(-params[0].numel() // block_size)
                assert optimizer.state[params[0]]["exp_avg_scale"].shape == (num_blocks,)


@pytest.mark.parametrize("cls", ADAMW)
def test_channels_last_and_strided_parameters(cls: type) -> None:
    shape = (16, 32, 3, 3)
    plain, last = params_of([shape])[0], nn.Parameter(params_of([shape])[0].to(memory_format=torch.channels_last))
    strided = nn.Parameter(params_of([shape])[0].detach().repeat_interleave(2, dim=0)[::2])
    assert not strided.is_contiguous()
    for param in (plain, last, strided):
        optimizer = cls([param])
        for step in range(3):
            param.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    assert torch.equal(plain, last.contiguous()) and torch.equal(plain, strided.contiguous())


@pytest.mark.parametrize("cls", ADAMW)
def test_a_step_count_may_be_set_to_a_number(cls: type) -> None:
    """As scripts do that start bias correction anew."""
    params, others = params_of(), params_of()
    ours, again = cls(params), cls(others)
    train(ours, params)
    train(again, others)
    for param, other in zip(params, others, strict=True):
        ours.state[param]["step"], again.state[other]["step"] = 0, torch.tensor(0.0)
    train(ours, params)
    train(again, others)
    assert states_equal(ours, again)


def test_named_parameters() -> None:
    model = nn.Linear(100, 50)
    optimizer = AdamW8bit(model.named_parameters())
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_shapes_cover_all_kinds() -> None:
    assert {len(shape) for shape in SHAPES} >= {0, 1, 2, 4}
