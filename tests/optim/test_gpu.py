"""What only a GPU can show: no synchronization, side streams, graphs, other devices, huge tensors, memory."""

import pytest
import torch
from torch import nn

from halfbyte.optim import AdamW4bit, AdamW8bit
from tests.optim.training import ADAMW, params_of, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(shapes: list, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().to(device)) for p in params_of(shapes, dtype)]


def give_grads(params: list[nn.Parameter], seed: int = 0) -> None:
    for i, param in enumerate(params):
        generator = torch.Generator(param.device).manual_seed(seed * 1000 + i)
        param.grad = torch.randn(param.shape, generator=generator, device=param.device).to(param.dtype)


@pytest.mark.parametrize("cls", ADAMW)
def test_gpu_steps_as_the_cpu_does(cls: type) -> None:
    """fp32 parameters, ten steps with the same gradients. A code at a tie may fall to the other side, which moves a
    parameter by a share of lr: nine in ten within 1e-6, all within half of the way."""
    shapes = [(64, 128), (33, 200), (5000,), (17,), (4097,)]
    cpu, gpu = params_of(shapes), on_gpu(shapes, torch.float32)
    optimizers = cls(cpu, lr=1e-3), cls(gpu, lr=1e-3)
    for step in range(10):
        train(optimizers[0], cpu, 1, seed=step)
        for a, b in zip(cpu, gpu, strict=True):
            b.grad = a.grad.cuda()
        optimizers[1].step()
    for a, b in zip(cpu, gpu, strict=True):
        difference = (a - b.cpu()).abs()
        assert (difference <= 1e-6 + 1e-5 * a.abs()).float().mean() >= 0.9
        assert difference.max() <= 5e-3


@pytest.mark.parametrize("cls", ADAMW)
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)],
    ids=str,
)
def test_dtypes(cls: type, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """Narrow parameters, with gradients of their dtype or fp32: nine in ten equal the CPU's, all within two roundings
    or half of the way."""
    if dtype != grad_dtype and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no gradients of another dtype than the parameter's")
    shapes = [(64, 128), (33, 200), (17,)]
    cpu = params_of(shapes, dtype)
    gpu = on_gpu(shapes, dtype)
    optimizers = cls(cpu, lr=1e-3), cls(gpu, lr=1e-3)
    for step in range(5):
        for i, (a, b) in enumerate(zip(cpu, gpu, strict=True)):
            grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(100 * step + i)).to(grad_dtype)
            for param in (a, b):
                if dtype != grad_dtype:
                    param.grad_dtype = grad_dtype
                param.grad = grad.to(param.device)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(cpu, gpu, strict=True):
        difference = (a.float() - b.cpu().float()).abs()
        assert (difference == 0).float().mean() >= 0.9
        assert (difference <= 2.5e-3 + 2 * torch.finfo(dtype).eps * a.float().abs()).all()


def test_what_changes_from_step_to_step() -> None:
    """Fresh gradients, other options, a moved parameter and moved states: the kernels that were compiled and the table
    that was made are used again only where they fit. The CPU does the same beside it."""
    shapes = [(64, 128), (33, 200), (17,)]
    cpu, gpu = params_of(shapes), on_gpu(shapes, torch.float32)
    optimizers = AdamW8bit(cpu, lr=1e-3), AdamW8bit(gpu, lr=1e-3)
    for step in range(10):
        for optimizer in optimizers:
            group = optimizer.param_groups[0]
            group["maximize"], group["weight_decay"] = step == 2, 0 if step in (3, 4) else 0.1
            group["lr"] = torch.tensor(1e-3, device="cuda") if step == 5 and optimizer is optimizers[1] else 1e-3
        train(optimizers[0], cpu, 1, seed=step)
        for a, b in zip(cpu, gpu, strict=True):
            b.grad = a.grad.cuda()
        if step == 6:
            gpu[0].data = gpu[0].data.clone()
        if step == 7:
            for state in optimizers[1].state.values():
                for name, value in state.items():
                    state[name] = value.clone()
        optimizers[1].step()
    for a, b in zip(cpu, gpu, strict=True):
        difference = (a - b.cpu()).abs()
        assert (difference <= 1e-6 + 1e-5 * a.abs()).float().mean() >= 0.9
        assert difference.max() <= 5e-3


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_step_never_synchronizes(tensor_lr: bool) -> None:
    """o25, with 30 distinct shapes (o7), a device lr, gradient scale and found_inf."""
    params = on_gpu([(7 * n, 64) for n in range(1, 31)] + [(5,)])
    lr = torch.tensor(1e-3, device="cuda") if tensor_lr else 1e-3
    optimizer = AdamW8bit(params, lr=lr, bf16_stochastic_round=True)
    give_grads(params)
    optimizer.step()
    optimizer.grad_scale, optimizer.found_inf = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_side_stream() -> None:
    """o25: gradients made and stepped on a stream that is not the current one."""
    params, others = on_gpu([(512, 1024)] * 4), on_gpu([(512, 1024)] * 4)
    optimizers = AdamW8bit(params), AdamW8bit(others)
    stream = torch.cuda.Stream()
    for seed in range(5):
        with torch.cuda.stream(stream):
            give_grads(params, seed)
            optimizers[0].step()
        give_grads(others, seed)
        optimizers[1].step()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_cuda_graph() -> None:
    """A captured step replays with new gradients and a new lr, and counts its steps."""
    params, others = on_gpu([(512, 1024), (100,)]), on_gpu([(512, 1024), (100,)])
    lrs = [torch.tensor(1e-3, device="cuda") for _ in range(2)]
    captured, plain = AdamW8bit(params, lr=lrs[0], capturable=True), AdamW8bit(others, lr=lrs[1])
    give_grads(params, 0)
    give_grads(others, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for step in range(1, 4):
        for pair in zip(params, others, strict=True):
            grad = torch.randn_like(pair[0])
            pair[0].grad.copy_(grad)
            pair[1].grad = grad
        for lr in lrs:
            lr.fill_(1e-3 / step)
        graph.replay()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    assert captured.state[params[0]]["step"] == 4


@pytest.mark.parametrize("cls", ADAMW)
def test_no_transient_memory(cls: type) -> None:
    """o28: a step allocates at most 1 MB, many small tensors or few large ones."""
    for shapes in ([(16, 2048)] * 448, [(4096, 4096)] * 2):
        params = on_gpu(shapes)
        optimizer = cls(params)
        give_grads(params)
        optimizer.step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        assert torch.cuda.max_memory_allocated() - before <= 2**20


@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    """o26: the last elements are stepped, and neighbours in memory are not touched."""
    numel = 2**31 + 1000
    buffer = torch.zeros(numel + 2000, dtype=torch.bfloat16, device="cuda")
    param = nn.Parameter(buffer[1000 : 1000 + numel])
    param.grad = torch.ones_like(param)
    optimizer = AdamW4bit([param], lr=1e-2, weight_decay=0.0)
    optimizer.step()
    optimizer.step()
    assert (buffer[:1000] == 0).all() and (buffer[-1000:] == 0).all()
    for at in (0, 2**31 - 1, 2**31, numel - 1):
        assert param[at].item() == pytest.approx(-2e-2, rel=0.02)


@pytest.mark.gpus(2)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_several_devices() -> None:
    """o29: parameters on cuda:1 while cuda:0 is current, alone and in one group with others."""
    one, two = on_gpu([(512, 1024)], device="cuda:0"), on_gpu([(512, 1024)], device="cuda:1")
    optimizer = AdamW8bit([*one, *two])
    for _ in range(3):
        for param in (*one, *two):
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert torch.equal(one[0].cpu(), two[0].cpu())
    assert optimizer.state[two[0]]["exp_avg"].device == two[0].device


def test_grad_scaler_on_the_device() -> None:
    """An overflow skips the step inside the kernel; the count stays."""
    params = on_gpu([(512, 1024)], torch.float16)
    optimizer = AdamW8bit(params)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
    scaler.scale(torch.ones((), device="cuda"))
    before = params[0].detach().clone()
    params[0].grad = torch.full_like(params[0], torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(params[0], before) and optimizer.state[params[0]]["step"] == 0
    params[0].grad = torch.ones_like(params[0])
    scaler.step(optimizer)
    assert optimizer.state[params[0]]["step"] == 1 and not torch.equal(params[0], before)
