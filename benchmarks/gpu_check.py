"""Is everything that runs on a GPU right there? Kernels and layers against the CPU's reference, on real sizes.

    PYTHONPATH=. python benchmarks/gpu_check.py

Prints a line for each check and exits with 1 if one failed. Bits are compared as bits; where a sum's order is free, the
error is measured against float64. Outputs are filled with garbage before a kernel runs. tests/nvfp4/kernels has the
awkward sizes; run that first: `python -m pytest tests/nvfp4/kernels`.
"""

import platform
import sys
import traceback
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.need_gpu import need_gpu
from halfbyte.lora import merged_parts
from halfbyte.lora.fused_matmul import lora_linear
from halfbyte.nvfp4 import NVFP4Linear, NVFP4Parts, dequantize, global_scale_for, quantize
from halfbyte.nvfp4.frozen_product import frozen_product
from halfbyte.nvfp4.quantize import quantize_rows

N, K = 1536, 4096


def random_weight(n: int = N, k: int = K, seed: int = 0) -> Tensor:
    """bf16 on the CPU, with rows of very different size and a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * torch.logspace(-3, 1, n).unsqueeze(-1)
    return (weight * (1 + 20 * (torch.rand(n, k, generator=generator) < 1e-4))).bfloat16()


def to(parts: NVFP4Parts, device: str) -> NVFP4Parts:
    return NVFP4Parts(*(component.to(device) for component in parts))


def same_bits(a: Tensor, b: Tensor) -> str:
    """'' when equal bit for bit, else how many differ."""
    a, b = (t.cpu().contiguous().view(torch.uint8) for t in (a, b))
    return "" if torch.equal(a, b) else f"{int((a != b).sum())} of {a.numel()} bytes differ"


def error(found: Tensor, want: Tensor, limit: float) -> str:
    """'' when within limit of want's norm (float64), else the error."""
    size = ((found.double().cpu() - want).norm() / want.norm()).item()
    return "" if size <= limit else f"relative error {size:.2e}, allowed {limit:.0e}"


def check_dequantize(dtype: torch.dtype) -> str:
    parts = quantize(random_weight())
    return same_bits(dequantize(to(parts, "cuda"), dtype), dequantize(parts, dtype))


def check_quantize(dtype: torch.dtype) -> str:
    weight = random_weight().to(dtype)
    scale = global_scale_for(weight.abs().max())
    want = quantize_rows(weight.float(), scale)
    found = quantize(weight.cuda(), global_scale=scale)
    return same_bits(found.qdata, want[0]) + same_bits(found.scale.view(torch.uint8), want[1].view(torch.uint8))


def check_snap(rounding: str, dtype: torch.dtype) -> str:
    """The product's order differs between CPU and GPU; a code is expected to differ once in 10^12 or so."""
    parts = quantize(random_weight())
    generator = torch.Generator().manual_seed(1)
    lora_A = (torch.randn(16, K, generator=generator) * 0.02).to(dtype)
    lora_B = (torch.randn(N, 16, generator=generator) * 0.02).to(dtype)
    settings = {"name": "model.layers.3.mlp.up_proj", "seed": 5, "rounding": rounding}
    want = merged_parts(parts, lora_A, lora_B, 2 / 3, **settings)
    found = merged_parts(to(parts, "cuda"), lora_A.cuda(), lora_B.cuda(), 2 / 3, **settings)
    return same_bits(found.qdata, want.qdata) or ("nothing moved" if torch.equal(want.qdata, parts.qdata) else "")


def check_product(rows: int, dtype: torch.dtype) -> str:
    layer = NVFP4Linear.from_linear(dense_layer())
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(2)).to(dtype)
    want = x.double() @ dequantize(layer.parts()).double().T + layer.bias.double()
    layer.cuda()
    components = (layer.qdata.data, layer.scale.data, layer.global_scale.data)
    y = frozen_product(x.cuda(), *components, layer.bias.data.to(dtype))
    return error(y, want, 4e-3 if dtype == torch.bfloat16 else 1e-3)


def dense_layer() -> nn.Linear:
    layer = nn.Linear(K, N, bias=True)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(N, K, generator=torch.Generator().manual_seed(3)) * 0.02)
        layer.bias.copy_(torch.randn(N, generator=torch.Generator().manual_seed(4)).bfloat16())
    return layer


def check_lora(dtype: torch.dtype, p: float) -> str:
    """y, dx, dA, dB of the fused function on the GPU against float64; with dropout, of its own mask (a linear map)."""
    layer = NVFP4Linear.from_linear(dense_layer()).cuda()
    generator = torch.Generator().manual_seed(5)
    x, g = (torch.randn(300, width, generator=generator).to(dtype) for width in (K, N))
    lora_A, lora_B = torch.randn(16, K, generator=generator) * 0.02, torch.randn(N, 16, generator=generator) * 0.1
    inputs = [t.cuda().requires_grad_() for t in (x, lora_A, lora_B)]
    components = (layer.qdata, layer.scale, layer.global_scale)
    torch.manual_seed(6)
    y = lora_linear(*inputs, components, layer.bias, scaling=2.0, p=p)
    found = (y, *torch.autograd.grad(y, inputs, g.cuda()))
    torch.manual_seed(6)
    mask = torch.native_dropout(torch.ones_like(inputs[0]), p, True)[0].double().cpu() if p else 1.0
    exact = [t.double().requires_grad_() for t in (x, lora_A, lora_B)]
    weight = dequantize(to(layer.parts(), "cpu")).double()
    want_y = exact[0] @ weight.T + layer.bias.double().cpu() + 2 * ((exact[0] * mask) @ exact[1].T) @ exact[2].T
    want = (want_y, *torch.autograd.grad(want_y, exact, g.double()))
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
    return "".join(error(*pair, limit) for pair in zip(found, want, strict=True))


def check_graph(rows: int) -> str:
    """A captured forward and backward replays to the eager result on new input (a stale one would be off by 1.4)."""
    layer = NVFP4Linear.from_linear(dense_layer()).cuda()
    components = (layer.qdata, layer.scale, layer.global_scale)
    x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16).requires_grad_()
    lora_A = (torch.randn(16, K, device="cuda") * 0.02).requires_grad_()
    lora_B = (torch.randn(N, 16, device="cuda") * 0.1).requires_grad_()

    def step() -> tuple[Tensor, ...]:
        y = lora_linear(x, lora_A, lora_B, components, layer.bias, scaling=2.0)
        return (y, *torch.autograd.grad(y.float().square().sum(), (x, lora_A, lora_B)))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.normal_()
    graph.replay()
    want = step()
    return "".join(error(found, exact.double().cpu(), 1e-2) for found, exact in zip(captured, want, strict=True))


def checks() -> dict[str, Callable[[], str]]:
    """Every check by name; each returns '' or what is wrong."""
    floats = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    found: dict[str, Callable[[], str]] = {}
    for name, dtype in floats.items():
        found[f"dequantize to {name}"] = lambda dtype=dtype: check_dequantize(dtype)
        found[f"quantize {name}"] = lambda dtype=dtype: check_quantize(dtype)
        found[f"snap, dithered, {name} factors"] = lambda dtype=dtype: check_snap("dither", dtype)
    found["snap, nearest"] = lambda: check_snap("nearest", torch.float32)
    for rows in (1, 3, 4, 5, 16, 33, 64, 65, 300):
        for name in ("bf16", "fp16"):
            found[f"product, {rows} rows, {name}"] = lambda r=rows, d=floats[name]: check_product(r, d)
    for name in ("bf16", "fp32"):
        for p in (0.0, 0.25):
            found[f"LoRA {name}, dropout {p}"] = lambda d=floats[name], p=p: check_lora(d, p)
    found["CUDA graph, 300 rows"] = lambda: check_graph(300)
    found["CUDA graph, 16 rows"] = lambda: check_graph(16)
    return found


def main() -> int:
    need_gpu()
    import triton

    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"python {platform.python_version()}"
    )
    failures = 0
    for name, check in checks().items():
        try:
            problem = check()
        except Exception:
            problem = traceback.format_exc()
        failures += bool(problem)
        print(f"{'FAIL' if problem else 'ok  '} {name} {problem}")
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    sys.exit(main())
