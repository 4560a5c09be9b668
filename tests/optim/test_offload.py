"""States in CPU memory: the same steps, bit for bit, bucket by bucket; where there is a GPU, with its streams."""

import pytest
import torch

from halfbyte.optim import AdamW8bit
from halfbyte.optim.offload import buckets, step_offloaded
from tests.optim.training import ADAMW, params_of, states_equal, train


@pytest.mark.parametrize("cls", ADAMW)
def test_offloaded_steps_are_the_same(cls: type) -> None:
    """o24: an ordinary optimizer: groups, schedulers, defaults, state dicts."""
    params, others = params_of(), params_of()
    offloaded, plain = cls(params, offload_states=True), cls(others)
    assert offloaded.defaults["offload_states"] is True
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6) for o in (offloaded, plain)]
    for step in range(3):
        train(offloaded, params, 1, seed=step)
        train(plain, others, 1, seed=step)
        for scheduler in schedulers:
            scheduler.step()
    assert states_equal(offloaded, plain)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    plain.load_state_dict(offloaded.state_dict())
    assert plain.param_groups[0]["offload_states"] is False
    offloaded.load_state_dict(plain.state_dict())
    assert offloaded.param_groups[0]["offload_states"] is True and states_equal(offloaded, plain)


def test_buckets_keep_order_and_size() -> None:
    states = [{"exp_avg": torch.zeros(n)} for n in (10, 10, 100, 1, 1)]
    assert list(buckets(states, 80)) == [[0, 1], [2], [3, 4]]
    assert list(buckets([], 80)) == []


def test_every_bucket_is_copied_in_stepped_and_copied_out() -> None:
    states = [{"step": torch.zeros(()), "exp_avg": torch.full((4,), float(i))} for i in range(5)]
    params = [torch.zeros(4) for _ in states]
    seen = []

    def step(own: list, grads: list, here: list, members: list) -> None:
        seen.append(members)
        for state in here:
            state["exp_avg"] += 1
            state["step"] += 1

    step_offloaded(params, params, states, step, {}, limit_bytes=40)
    assert seen == [[0, 1], [2, 3], [4]]
    assert [state["exp_avg"][0].item() for state in states] == [1, 2, 3, 4, 5]
    assert all(state["step"] == 1 for state in states)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    """Moments stay in pinned CPU memory, parameters on the GPU, and the results are those without offload."""
    params = [torch.nn.Parameter(p.detach().cuda()) for p in params_of([(4096, 1024)] * 6 + [(17,)])]
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    offloaded, plain = AdamW8bit(params, offload_states=True), AdamW8bit(others)
    for seed in range(4):
        for pair in zip(params, others, strict=True):
            grad = torch.randn(pair[0].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
            for param in pair:
                param.grad = grad.clone()
        offloaded.step()
        plain.step()
    offloaded.synchronize()
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)
        for name, value in offloaded.state[param].items():
            stays = name == "step" or param.numel() < 4096
            assert value.device.type == ("cuda" if stays else "cpu")
            assert stays or value.is_pinned()
            assert torch.equal(value.cpu(), plain.state[other][name].cpu())
