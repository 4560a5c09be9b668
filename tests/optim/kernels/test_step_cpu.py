"""The numba step against `step_ref`.

What must agree. exp_avg and exp_avg_sq are computed with the operations of torch's CPU kernels (lerp and addcmul fuse
their multiply-add), so codes and scales of one step from a common state are equal bit for bit; torch built or run
without fused multiply-add would differ by an ulp and, near a midpoint, by one code, so up to one code in 1,000 is
forgiven, by one. The parameter differs by rounding: torch's vectorized square root is not always correctly rounded,
and ours multiplies by 1 / sqrt(bias correction): 4 ulp of the update and one of the parameter.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from numba import njit

from halfbyte.optim.formats import FORMATS, StateFormat
from halfbyte.optim.hyper import Hyper
from halfbyte.optim.kernels import step_cpu, step_ref, table_cpu, values_cpu
from halfbyte.optim.kernels.step import choose_path
from halfbyte.optim.rounding import Counter, param_seed, random_bits, round_stochastic, step_key

SIZES = (1, 17, 0, 4096, 4097, 300, 70001)
HYPER = Hyper(1e-2, 0.9, 0.999, 1e-8, 1e-2)
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
]


def moment_names(amsgrad: bool) -> list[str]:
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]


def fresh_state(numel: int, fmt: StateFormat | None, amsgrad: bool = False) -> dict[str, Tensor]:
    """A state of zeros; fmt None: unquantized."""
    state = {"step": torch.zeros(())}
    for name in moment_names(amsgrad):
        if fmt is None:
            state[name] = torch.zeros(numel)
        else:
            state[name] = torch.zeros(fmt.num_bytes(numel), dtype=torch.uint8)
            state[name + "_scale"] = torch.zeros(fmt.num_blocks(numel))
    return state


def copied(states: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{key: value.clone() for key, value in state.items()} for state in states]


def gradients(step: int, dtype: torch.dtype, sizes=SIZES) -> list[Tensor]:
    """Three decades of magnitudes, and some exact zeros."""
    generator = torch.Generator().manual_seed(step)
    grads = []
    for numel in sizes:
        spread = 10 ** torch.empty(numel).uniform_(-3, 0, generator=generator)
        keep = torch.empty(numel).uniform_(generator=generator) > 0.02
        grads.append((torch.randn(numel, generator=generator) * spread * keep).to(dtype))
    return grads


def assert_states_equal(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    assert ours.keys() == reference.keys()
    for key, expected in reference.items():
        if expected.dtype == torch.uint8:
            # Two nibbles of a byte count as one code, which only tightens the bound.
            assert (ours[key] != expected).sum() <= expected.numel() / 1000, key
        else:
            torch.testing.assert_close(ours[key], expected, rtol=1e-6, atol=0, equal_nan=True, msg=key)


def assert_params_close(ours: Tensor, reference: Tensor, lr: float) -> None:
    """fp32: see the file's docstring; the update is at most 10 lr here. Narrow dtypes: one step of the dtype."""
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, reference, rtol=2.4e-7, atol=10 * lr * 5e-7, equal_nan=True)
    else:
        eps = torch.finfo(ours.dtype).eps
        torch.testing.assert_close(ours.float(), reference.float(), rtol=eps, atol=1e-7, equal_nan=True)
        assert (ours != reference).sum() <= 1 + ours.numel() / 1000


def both(
    params: list[Tensor], states: list[dict], hyper: Hyper, fmt: StateFormat, make_grads, num_steps: int = 4, **kwargs
) -> None:
    """Step twice from the same point, compare, and go on from the reference's result."""
    cache: dict = {}
    for step in range(num_steps):
        grads = make_grads(step)
        reference, reference_states = [p.clone() for p in params], copied(states)
        step_ref.step(reference, grads, reference_states, hyper, fmt, **kwargs)
        step_cpu.step(params, grads, states, hyper, fmt, cache=cache, **kwargs)
        for p, q, state, expected in zip(params, reference, states, reference_states, strict=True):
            assert_states_equal(state, expected)
            assert_params_close(p, q, float(hyper.lr))
            p.copy_(q)
            for key, value in expected.items():
                state[key].copy_(value)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_reference(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Awkward sizes, quantized and unquantized states in one call."""
    fmt = FORMATS[name]
    params = [torch.randn(numel).to(dtypes[0]) for numel in SIZES]
    states = [fresh_state(numel, None if numel in (17, 300) else fmt) for numel in SIZES]
    both(params, states, HYPER, fmt, lambda step: gradients(step, dtypes[1]))


@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.5])
def test_small_beta1(beta1: float) -> None:
    """Gradients that shrink by six decades in a step: what is left of the old moment must not drown the new one."""
    fmt = FORMATS["8bit"]
    params = [torch.randn(numel) for numel in SIZES]
    states = [fresh_state(numel, None if numel in (17, 300) else fmt) for numel in SIZES]
    hyper = HYPER._replace(beta1=beta1)
    both(
        params, states, hyper, fmt, lambda step: [grad * 10.0 ** (-6 * step) for grad in gradients(step, torch.float32)]
    )


@pytest.mark.parametrize("change", ["amsgrad", "l2", "maximize", "no decay", "tensors", "amsgrad, l2, maximize"])
def test_variants_of_the_formula(change: str) -> None:
    fmt = FORMATS["8bit"]
    hyper = HYPER._replace(amsgrad="amsgrad" in change, decoupled="l2" not in change, maximize="maximize" in change)
    if change == "no decay":
        hyper = hyper._replace(weight_decay=0.0)
    if change == "tensors":
        hyper = hyper._replace(lr=torch.tensor(1e-2), beta1=torch.tensor(0.8), beta2=torch.tensor(0.99))
    params = [torch.randn(numel) for numel in SIZES]
    states = [fresh_state(numel, None if numel == 300 else fmt, hyper.amsgrad) for numel in SIZES]
    both(params, states, hyper, fmt, lambda step: gradients(step, torch.float32))


@pytest.mark.parametrize("block_size", [1, 3, 64, 300, 5000])
@pytest.mark.parametrize("name", FORMATS)
def test_any_block_size(name: str, block_size: int) -> None:
    """Odd ones too, where two 4-bit blocks share a byte, and ones above a tile."""
    fmt = FORMATS[name].with_block_size(block_size)
    sizes = (1, 17, 4097, 20011)
    params = [torch.randn(numel) for numel in sizes]
    states = [fresh_state(numel, fmt) for numel in sizes]
    both(params, states, HYPER, fmt, lambda step: gradients(step, torch.float32, sizes), num_steps=2)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_bad_gradient_touches_itself_alone(name: str, amsgrad: bool) -> None:
    """NaN, both infinities and an overflowing square, in whole blocks and in a tail; later steps are ordinary."""
    fmt, numel = FORMATS[name], 1000
    params, states = [torch.randn(numel)], [fresh_state(numel, fmt, amsgrad)]

    def make(step: int) -> list[Tensor]:
        (grad,) = gradients(step, torch.float32, (numel,))
        if step == 1:
            for index, value in ((3, torch.nan), (300, torch.inf), (301, -torch.inf), (302, 3e19), (990, torch.nan)):
                grad[index] = value
        return [grad]

    both(params, states, HYPER._replace(amsgrad=amsgrad), fmt, make)
    assert params[0].isnan().nonzero().flatten().tolist() == [3, 300, 301, 990]


@pytest.mark.parametrize("name", FORMATS)
def test_grad_scale_and_found_inf(name: str) -> None:
    fmt = FORMATS[name]
    params, states = [torch.randn(5000)], [fresh_state(5000, fmt)]
    both(
        params,
        states,
        HYPER,
        fmt,
        lambda step: [g * 1000 for g in gradients(step, torch.float32, (5000,))],
        grad_scale=torch.tensor([1000.0]),
        found_inf=torch.zeros(1),
    )
    before, before_states = [p.clone() for p in params], copied(states)
    grads = [torch.full((5000,), torch.inf)]
    step_cpu.step(params, grads, states, HYPER, fmt, found_inf=torch.ones(1), cache={})
    assert torch.equal(params[0], before[0])
    assert all(torch.equal(states[0][key], before_states[0][key]) for key in states[0])


@pytest.mark.parametrize("name", FORMATS)
def test_every_value_is_written_and_no_neighbour(name: str) -> None:
    """States and parameter lie inside larger buffers full of NaN (bytes: 0xA5) and start from there."""
    fmt, numel, margin = FORMATS[name], 4097, 64

    def inside(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        fill = 0xA5 if dtype == torch.uint8 else torch.nan
        buffer = torch.full((count + 2 * margin,), fill, dtype=dtype)
        return buffer, buffer[margin : margin + count]

    param_buffer, param = inside(numel, torch.bfloat16)
    param.copy_(torch.randn(numel))
    buffers, state = [param_buffer], {"step": torch.zeros(())}
    for key, value in fresh_state(numel, fmt).items():
        if key != "step":
            buffer, state[key] = inside(value.numel(), value.dtype)
            buffers.append(buffer)
    # Codes and scales of NaN make every old moment NaN: what a step leaves must be its own.
    grad = torch.randn(numel)
    reference, expected = param.clone(), {key: value.clone() for key, value in state.items()}
    step_ref.step([reference], [grad], [expected], HYPER, fmt)
    step_cpu.step([param], [grad], [state], HYPER, fmt, cache={})
    assert_states_equal(state, expected)
    assert torch.equal(param.isnan(), reference.isnan())
    for buffer in buffers:
        edges = torch.cat([buffer[:margin], buffer[-margin:]])
        assert (edges == 0xA5).all() if buffer.dtype == torch.uint8 else edges.isnan().all()


@njit
def _round_all(x, counter, start, key, multiply, out):
    row = np.zeros(15, np.int64)
    row[table_cpu.NUMEL], row[table_cpu.OFFSET :] = 1000, counter
    values_cpu.store_stochastic(x, out, row, start, key, multiply)


@pytest.mark.parametrize(
    "counter",
    [Counter(7, 0, 1000, 1000), Counter(2**32 - 1, 3, 10, 35), Counter(123, 2**33 + 5, 1, 2**31)],
    ids=["whole", "columns of a matrix", "beyond 2^32"],
)
def test_stochastic_rounding_draws_the_references_bits(counter: Counter) -> None:
    x = torch.randn(500) * 10 ** torch.empty(500).uniform_(-40, 30)
    x[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    start, count = 250, 11
    seed = param_seed(counter.seed, 2)
    expected = round_stochastic(x, random_bits(counter._replace(seed=seed), count, start, start + 500, x.device))
    out = np.zeros(500, np.uint16)
    key, multiply = (np.uint32(k) for k in step_key(seed, count))
    _round_all(x.numpy(), np.array(counter[1:], np.int64), start, key, multiply, out)
    ours = torch.from_numpy(out).view(torch.int16).view(torch.bfloat16)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def test_a_stochastic_step() -> None:
    """Equal to the reference but where the fp32 parameter's last ulp meets the threshold: one in thousands."""
    fmt, hyper = FORMATS["8bit"], HYPER._replace(stochastic=True)
    params = [torch.randn(numel).bfloat16() for numel in SIZES]
    states = [fresh_state(numel, fmt) for numel in SIZES]
    counters = [Counter(param_seed(5, i), 1000 * i, max(1, n), max(1, n)) for i, n in enumerate(SIZES)]
    nearest = [p.clone() for p in params]
    step_cpu.step(nearest, gradients(0, torch.bfloat16), copied(states), HYPER, fmt, cache={})
    both(params, states, hyper, fmt, lambda step: gradients(step, torch.bfloat16), num_steps=1, counters=counters)
    assert (nearest[-1] != params[-1]).float().mean() > 0.01


def test_a_group_of_empty_tensors_only() -> None:
    """As on a rank that got no row of any parameter: nothing to do but to count the step."""
    fmt = FORMATS["8bit"]
    states = [fresh_state(0, fmt), fresh_state(0, None)]
    params, grads = [torch.empty(0), torch.empty(0, 5)], [torch.empty(0), torch.empty(0, 5)]
    for _ in range(2):
        step_cpu.step(params, grads, states, HYPER, fmt, cache={})
    assert [float(state["step"]) for state in states] == [2.0, 2.0]


def test_tensors_may_move_and_lists_may_change() -> None:
    """One cache over steps whose gradients, parameters, states and members differ; unrelated memory stays."""
    fmt, cache = FORMATS["8bit"], {}
    params = [torch.randn(5000) for _ in range(3)]
    states = [fresh_state(5000, fmt) for _ in range(3)]
    reference, reference_states = [p.clone() for p in params], copied(states)
    for step, members in enumerate([(0, 1, 2), (0, 1, 2), (2, 0), (1,), (0, 1, 2)]):
        grads = gradients(step, torch.float32, (5000,) * len(members))
        if step == 3:
            params[1], states[1] = params[1].clone(), copied(states)[1]
        step_cpu.step([params[i] for i in members], grads, [states[i] for i in members], HYPER, fmt, cache=cache)
        step_ref.step([reference[i] for i in members], grads, [reference_states[i] for i in members], HYPER, fmt)
    for p, q, state, expected in zip(params, reference, states, reference_states, strict=True):
        assert state["step"] == expected["step"] == 4
        assert_states_equal(state, expected)
        assert_params_close(p, q, 1e-2)


def test_threads_share_the_work_and_agree() -> None:
    """Four threads over several batches give one thread's bits: chunks do not depend on the number of threads."""
    fmt, sizes = FORMATS["8bit"], (1_100_003, 5, 300_000)
    params = [torch.randn(numel) for numel in sizes]
    states = [fresh_state(numel, fmt) for numel in sizes]
    other, other_states = [p.clone() for p in params], copied(states)
    grads = gradients(0, torch.float32, sizes)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        step_cpu.step(params, grads, states, HYPER, fmt, cache={})
        torch.set_num_threads(4)
        step_cpu.step(other, grads, other_states, HYPER, fmt, cache={})
    finally:
        torch.set_num_threads(threads)
    for p, q, state, other_state in zip(params, other, states, other_states, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(state[key], other_state[key]) for key in state)


def test_autograd_notices_the_step() -> None:
    """A parameter saved for backward and stepped before it raises, as with torch's own optimizers."""
    param = torch.randn(100, requires_grad=True)
    loss = (param * param).sum()
    with torch.no_grad():
        step_cpu.step([param], [torch.ones(100)], [fresh_state(100, None)], HYPER, FORMATS["8bit"], cache={})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_is_chosen_for_the_cpu_alone() -> None:
    assert choose_path(torch.device("cpu"), torch.float16, FORMATS["4bit"], HYPER) is step_cpu
    assert step_cpu.unavailable(torch.device("cuda"), FORMATS["4bit"], HYPER) is not None
