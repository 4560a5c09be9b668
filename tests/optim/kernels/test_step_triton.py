"""The fused kernels against `step_ref`, on the GPU where there is one, else through Triton's interpreter."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from halfbyte.optim.formats import FORMATS, StateFormat
from halfbyte.optim.hyper import Hyper
from halfbyte.optim.kernels import step_triton
from halfbyte.optim.kernels.step_triton import Tuning, unavailable
from halfbyte.optim.rounding import Counter
from tests.optim.kernels.contract import check_agreement, fresh_state, guarded, is_untouched, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUMELS = [1, 17, 4097, 0, 3000]
HYPER = Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1)
SMALL_CHUNKS = Tuning(tile=512, fold=2, chunk=1024)


def _grad(numel: int, seed: int) -> Tensor:
    """Heavy-tailed values over nine decades, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x *= (torch.randn(numel, generator=generator) * 3).exp()
    return x * (torch.rand(numel, generator=generator) > 0.1)


def _run(
    fmt: StateFormat,
    hyper: Hyper = HYPER,
    *,
    numels: list[int] = NUMELS,
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype = torch.float32,
    steps: int = 3,
    shift: int = 0,
    quantized: bool = True,
    counters: list[Counter] | None = None,
    options: dict | None = None,
    poison_grad: float | None = None,
) -> None:
    """Some steps, each against the reference from the same state."""
    generator = torch.Generator().manual_seed(7)
    params = [guarded(torch.randn(n, generator=generator).to(dtype), DEVICE, shift) for n in numels]
    fmt_of = [fmt if quantized else None for _ in numels]
    states = [fresh_state(p, f, hyper.amsgrad) for p, f in zip(params, fmt_of, strict=True)]
    cache: dict = {}
    for step in range(steps):
        grads = [_grad(n, 10 * step + i).to(grad_dtype) for i, n in enumerate(numels)]
        if poison_grad is not None and step == 1:
            for grad in grads:
                grad[:1] = poison_grad
        expected = [
            reference(p, g, s, hyper, fmt, counters=None if counters is None else [counters[i]], **(options or {}))
            for i, (p, g, s) in enumerate(zip(params, grads, states, strict=True))
        ]
        device_grads = [guarded(g, DEVICE, shift) for g in grads]
        device_options = {key: value.to(DEVICE) for key, value in (options or {}).items()}
        step_triton.step(
            params, device_grads, states, hyper, fmt, counters=counters, cache=cache, tuning=SMALL_CHUNKS,
            **device_options,
        )  # fmt: skip
        for param, state, want in zip(params, states, expected, strict=True):
            check_agreement(param, state, want, fmt)
            assert is_untouched(param) and all(is_untouched(x) for key, x in state.items() if key != "step")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    ],
)
def test_dtypes(name: str, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    _run(FORMATS[name], dtype=dtype, grad_dtype=grad_dtype, steps=2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("hyper", [HYPER._replace(amsgrad=True), HYPER._replace(decoupled=False, maximize=True)])
def test_variants(name: str, hyper: Hyper) -> None:
    _run(FORMATS[name], hyper, numels=[17, 1500])


@pytest.mark.parametrize("hyper", [HYPER, HYPER._replace(amsgrad=True, decoupled=False)])
def test_states_that_are_not_quantized(hyper: Hyper) -> None:
    _run(FORMATS["8bit"], hyper, quantized=False)


@pytest.mark.parametrize(
    ("name", "block_size"),
    [("8bit", 1), ("8bit", 100), ("8bit", 2048), ("fp8", 64), ("fp8", 3), ("4bit", 2), ("4bit", 6), ("4bit", 1024)],
)
def test_block_sizes(name: str, block_size: int) -> None:
    """Blocks that are no power of two, larger than a tile, or as short as a byte."""
    _run(FORMATS[name].with_block_size(block_size), numels=[1, 301, 2049], steps=2)


@pytest.mark.parametrize("name", FORMATS)
def test_addresses_that_are_not_aligned(name: str) -> None:
    """Views into a larger buffer, as DDP's gradient buckets and FSDP's flat parameters are."""
    _run(FORMATS[name], numels=[17, 1500], shift=1, steps=2, dtype=torch.bfloat16, grad_dtype=torch.bfloat16)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e25])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_an_element_that_is_not_finite(name: str, value: float, amsgrad: bool) -> None:
    """It is left out of its block's scales, and its codes are those the reference stores."""
    _run(FORMATS[name], HYPER._replace(amsgrad=amsgrad), numels=[1, 300], poison_grad=value)


@pytest.mark.parametrize("quantized", [True, False])
def test_grad_scaler(quantized: bool) -> None:
    fmt = FORMATS["8bit"]
    scale = torch.tensor([1024.0])
    _run(fmt, numels=[17, 600], quantized=quantized, options={"grad_scale": scale, "found_inf": torch.zeros(1)})
    _run(fmt, numels=[17, 600], quantized=quantized, options={"grad_scale": scale, "found_inf": torch.ones(1)})


@pytest.mark.parametrize(
    "counter", [Counter(12345, 0, 3000, 3000), Counter(2**32 - 5, 2**32 - 900, 3000, 3000), Counter(9, 70, 50, 400)]
)
@pytest.mark.parametrize("quantized", [True, False])
def test_stochastic_rounding_draws_the_references_bits(counter: Counter, quantized: bool) -> None:
    """Whole tensors, offsets beyond 2^32, and shards along another dimension than the first."""
    _run(
        FORMATS["8bit"], HYPER, numels=[3000], dtype=torch.bfloat16, grad_dtype=torch.bfloat16, counters=[counter],
        quantized=quantized, steps=2,
    )  # fmt: skip


def test_learning_rate_zero_and_beta_zero() -> None:
    _run(FORMATS["8bit"], Hyper(0.0, 0.0, 0.0, 1e-8, 0.0), numels=[300])


def test_eps_zero_divides_by_no_zero() -> None:
    """A gradient of 1e-20 has a subnormal square: its move stays bounded with eps = 0. A gradient of 0 gives NaN there,
    as in torch, so there is none."""
    param = torch.ones(300, device=DEVICE)
    state = fresh_state(param, FORMATS["8bit"])
    grad = torch.where(torch.arange(300) % 2 == 0, 1.0, 1e-20).to(DEVICE)
    step_triton.step([param], [grad], [state], Hyper(1e-3, 0.9, 0.999, 0.0, 0.0), FORMATS["8bit"], cache={})
    assert (param - 1).abs().max() <= 1.1e-3


@pytest.mark.parametrize("tuning", [Tuning(), Tuning(lanes=False), Tuning(tile=1024, num_warps=2, prefetch=True)])
def test_ways_to_cut_a_step(tuning: Tuning) -> None:
    """Tile, warps, the way 8-bit codes are decoded: the results are those of the reference."""
    fmt = FORMATS["8bit"]
    param, grad = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(DEVICE), _grad(3000, 1).to(DEVICE)
    state, cache = fresh_state(param, fmt), {}
    for _ in range(2):
        expected = reference(param, grad, state, HYPER, fmt)
        step_triton.step([param], [grad], [state], HYPER, fmt, cache=cache, tuning=tuning)
        check_agreement(param, state, expected, fmt)


def test_tensor_hyper_parameters() -> None:
    """0-d tensors of the CPU are read; those of a device are handed to the kernel (on a GPU, here if there is one)."""
    hyper = HYPER._replace(lr=torch.tensor(1e-2), beta1=torch.tensor(0.9), beta2=torch.tensor(0.999))
    _run(FORMATS["4bit"], hyper, numels=[300])
    if torch.cuda.is_available():
        on_device = [x.to("cuda") for x in (hyper.lr, hyper.beta1, hyper.beta2)]
        _run(FORMATS["4bit"], HYPER._replace(lr=on_device[0], beta1=on_device[1], beta2=on_device[2]), numels=[300])


def test_mixed_states_in_one_call() -> None:
    """Quantized, small and empty tensors together, moved between steps: the tables follow."""
    fmt, hyper, cache = FORMATS["8bit"], HYPER, {}
    params = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (700, 5, 0, 1025)]
    states = [fresh_state(p, None if p.numel() == 5 else fmt) for p in params]
    plans = set()
    for step in range(4):
        grads = [_grad(p.numel(), step).to(DEVICE) for p in params]
        if step == 2:  # a state and a parameter move
            states[0]["exp_avg"] = states[0]["exp_avg"].clone()
            params[3] = params[3].clone()
        expected = [reference(*item, hyper, fmt) for item in zip(params, grads, states, strict=True)]
        step_triton.step(params, grads, states, hyper, fmt, cache=cache)
        for param, state, want in zip(params, states, expected, strict=True):
            check_agreement(param, state, want, fmt)
        plans.add(id(cache["plan"]))
    assert len(plans) == 2, "the tables are rebuilt when parameters or states move, not when gradients do"


def test_what_it_cannot_serve_is_said() -> None:
    assert "not on cpu" in unavailable(torch.device("cpu"), FORMATS["8bit"], HYPER)
    if torch.cuda.is_available():
        device = torch.device("cuda")
        assert unavailable(device, FORMATS["8bit"], HYPER) is None
        assert "block size" in unavailable(device, FORMATS["4bit"].with_block_size(3), HYPER)
        assert "registers" in unavailable(device, FORMATS["8bit"].with_block_size(2**14), HYPER)
