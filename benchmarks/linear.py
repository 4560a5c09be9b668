"""Time the NVFP4 layer and LoRA on one GPU beside dense bf16, and beside torchao and bitsandbytes where they import.

    PYTHONPATH=. python benchmarks/linear.py [--out results.md] [--only kernels,linear,decode,lora]

Every measured call is captured in a CUDA graph together with the same call on other weights, so that neither the host
nor the L2 cache decides: a graph runs through enough copies of the layer to pass three times the cache, and the median
of its replays is divided by the number of copies. Peak memory is what a forward and backward allocates on top of layer
and input. Speeds are against the bandwidth of a large copy and the dense product measured in the same process.
"""

import argparse
import importlib
import platform
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.need_gpu import need_gpu
from halfbyte.lora.fused_matmul import lora_linear
from halfbyte.lora.snap_adapter import snap_adapter
from halfbyte.nvfp4 import ActivationQuant, NVFP4Linear, dequantize

LAYERS = [(4096, 4096), (14336, 4096), (4096, 14336)]
TOKENS = [2048, 4096, 8192, 16384]
DECODE = [1, 2, 4, 8, 16, 32, 64]
CACHE_BYTES = 180e6  # three times an H200's L2
RANK, SCALING = 16, 2.0
Call = Callable[[], object]


def time_ms(calls: list[Call], replays: int = 15) -> float:
    """Median milliseconds of one call, of a graph that makes each of them once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) / len(calls)


def peak_mb(call: Call) -> float:
    """Megabytes allocated on top during a call, outside a graph."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak / 2**20


def copies(size_bytes: float) -> int:
    """How many layers of that many bytes exceed three times the cache; at least 2."""
    return min(max(2, int(-(-CACHE_BYTES // size_bytes))), 24)


def table(title: str, header: str, rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table, printed and returned."""
    columns = header.split("|")
    lines = [f"\n### {title}\n", f"|{header}|", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row) + " |" for row in rows]
    print("\n".join(lines), flush=True)
    return "\n".join(lines)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 4 GiB; not in a graph: there a slower engine copies."""
    source = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() * source.element_size() / (statistics.median(times) * 1e-3)


def dense(n: int, k: int) -> nn.Linear:
    layer = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    layer.weight.normal_(0, 0.02)
    return layer


def nvfp4(n: int, k: int, activation: ActivationQuant | None = None) -> NVFP4Linear:
    return NVFP4Linear.from_linear(dense(n, k), activation=activation)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def over(layers: Iterable[object], call: Callable[..., object], *args: object) -> list[Call]:
    """The call on each layer."""
    return [partial(call, layer, *args) for layer in layers]


def bench_kernels(bandwidth: float) -> str:
    """Dequantize, quantize and snap: microseconds and share of the copy bandwidth of the bytes that must move."""
    from halfbyte.nvfp4.kernels.quantize_triton import quantize as quantize_triton

    rows = []
    for n, k in LAYERS:
        layers = [nvfp4(n, k).parts() for _ in range(copies(n * k * 0.5625))]
        weights = [random(n, k) for _ in range(copies(n * k * 2))]
        factors = (torch.randn(RANK, k, device="cuda") * 0.02, torch.randn(n, RANK, device="cuda") * 0.02)
        merge = partial(snap_adapter, lora_A=factors[0], lora_B=factors[1], scaling=SCALING, name="layer", seed=0)
        calls: dict[str, tuple[float, list[Call]]] = {
            "dequantize to bf16": (2.5625, over(layers, dequantize, torch.bfloat16)),
            "dequantize to fp32": (4.5625, over(layers, dequantize, torch.float32)),
            "quantize bf16": (2.5625, over(weights, quantize_triton, torch.tensor(1e-3, device="cuda"))),
            f"snap, r = {RANK}": (1.0625, over(layers, partial(merge, dither=True))),
        }
        for name, (bytes_a_value, each) in calls.items():
            ms = time_ms(each)
            rows.append((name, f"{n}x{k}", ms * 1e3, n * k * bytes_a_value / (ms * 1e-3) / bandwidth))
    return table("Kernels", " kernel | layer | us | share of copy bandwidth ", rows)


def apply(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return layer(x)


def forward_backward(layer: Callable[[Tensor], Tensor], x: Tensor, g: Tensor, wrt: list[Tensor]) -> Call:
    """A call that runs the layer and takes the gradients of x and wrt."""
    return lambda: torch.autograd.grad(layer(x), [x, *wrt], g)


def bench_linear() -> str:
    """The frozen layer: forward, and forward and backward to x."""
    rows = []
    for n, k in LAYERS:
        kinds: dict[str, list[nn.Module]] = {"dense": [dense(n, k) for _ in range(2)]}
        kinds |= {"nvfp4": [nvfp4(n, k) for _ in range(2)], **peer_layers(n, k)}
        for m in TOKENS:
            x, g = random(m, k).requires_grad_(), random(m, n)
            base = None
            for kind, layers in kinds.items():
                with torch.no_grad():
                    forward = time_ms(over(layers, apply, x))
                both = [forward_backward(q, x, g, []) for q in layers]
                total, memory = time_ms(both), peak_mb(both[0])
                base = base or (forward, total)
                rows.append((f"{n}x{k}", m, kind, forward, total, forward / base[0], total / base[1], f"{memory:.0f}"))
    header = " layer | tokens | weight | forward ms | + backward ms | forward / dense | both / dense | peak MB "
    return table("Frozen linear, bf16 input", header, rows)


def bench_decode(bandwidth: float) -> str:
    """A few rows, forward only."""
    rows = []
    for n, k in LAYERS:
        dense_layers = [dense(n, k) for _ in range(copies(n * k * 2))]
        layers = [nvfp4(n, k) for _ in range(copies(n * k * 0.5625))]
        for m in DECODE:
            x = random(m, k)
            with torch.no_grad():
                base = time_ms(over(dense_layers, apply, x))
                ours = time_ms(over(layers, apply, x))
            share = n * k * 0.5625 / (ours * 1e-3) / bandwidth
            rows.append((f"{n}x{k}", m, base * 1e3, ours * 1e3, base / ours, share))
    header = " layer | rows | dense us | nvfp4 us | times faster | share of copy bandwidth "
    return table("Few rows, bf16", header, rows)


def bench_lora() -> str:
    """LoRA at rank 16 with fp32 factors, forward and backward to x, A and B, beside the frozen layer alone."""
    rows = []
    for n, k in LAYERS:
        for m in (2048, 8192):
            base = None
            for kind, layer, wrt in lora_kinds(n, k):
                x, g = random(m, k).requires_grad_(), random(m, n)
                call = forward_backward(layer, x, g, wrt)
                ms, memory = time_ms([call, call]), peak_mb(call)
                base = base or ms
                rows.append((f"{n}x{k}", m, kind, ms, ms / base, f"{memory:.0f}"))
    header = " layer | tokens | kind | forward + backward ms | / frozen alone | peak MB "
    return table(f"LoRA, r = {RANK}, fp32 factors, bf16 input", header, rows)


def lora_kinds(n: int, k: int) -> list[tuple[str, Callable[[Tensor], Tensor], list[Tensor]]]:
    """(name, layer, what else gets gradients)."""
    layer, dynamic, base = nvfp4(n, k), nvfp4(n, k, ActivationQuant()), dense(n, k)
    lora_A = (torch.randn(RANK, k, device="cuda") * 0.02).requires_grad_()
    lora_B = (torch.randn(n, RANK, device="cuda") * 0.02).requires_grad_()
    wrt = [lora_A, lora_B]
    components = (layer.qdata, layer.scale, layer.global_scale)

    def unfused(below: nn.Module) -> Callable[[Tensor], Tensor]:  # what PEFT's forward does, factors in fp32
        return lambda x: (below(x) + F.linear(F.linear(x.float(), lora_A), lora_B) * SCALING).to(x.dtype)

    def fused(p: float) -> Callable[[Tensor], Tensor]:
        return lambda x: lora_linear(x, lora_A, lora_B, components, None, scaling=SCALING, p=p)

    kinds = [
        ("frozen alone", layer, []),
        ("frozen alone, dynamic activations", dynamic, []),
        ("fused LoRA", fused(0.0), wrt),
        ("fused LoRA, dropout 0.1", fused(0.1), wrt),
        ("PEFT's order of operations", unfused(layer), wrt),
        ("the same over dense bf16", unfused(base), wrt),
    ]
    return kinds + merge_aware_kind(layer, lora_A, lora_B)


def merge_aware_kind(layer: NVFP4Linear, lora_A: Tensor, lora_B: Tensor) -> list:
    """The merge-aware layer, which computes W' in forward and again in backward."""
    from halfbyte.lora.merge import Recipe
    from halfbyte.lora.merge_aware_matmul import merge_aware_linear

    components, recipe = (layer.qdata, layer.scale, layer.global_scale), Recipe("layer")

    def forward(x: Tensor) -> Tensor:
        return merge_aware_linear(x, lora_A, lora_B, components, None, scaling=SCALING, recipe=recipe)

    return [("merge-aware, recomputed", forward, [lora_A, lora_B])]


def peer_layers(n: int, k: int) -> dict[str, list[nn.Module]]:
    """The same layer in other libraries, where they import."""
    found: dict[str, list[nn.Module]] = {}
    if has("bitsandbytes"):
        bnb = importlib.import_module("bitsandbytes.nn")
        layer = bnb.Linear4bit(k, n, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        layer.weight = bnb.Params4bit(random(n, k).cpu(), requires_grad=False, quant_type="nf4")
        found["bitsandbytes NF4"] = [layer.cuda()] * 2
    if has("torchao"):
        tensor = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
        layer = dense(n, k)
        layer.weight = nn.Parameter(tensor.NVFP4Tensor.to_nvfp4(layer.weight.data), requires_grad=False)
        found["torchao NVFP4"] = [layer] * 2
    return found


def has(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    parser.add_argument("--only", default="kernels,linear,decode,lora", help="which tables, separated by commas")
    options = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    wanted = options.only.split(",")
    parts = [heading(bandwidth)]
    parts += [bench_kernels(bandwidth)] if "kernels" in wanted else []
    parts += [bench_decode(bandwidth)] if "decode" in wanted else []
    parts += [bench_lora()] if "lora" in wanted else []
    parts += [bench_linear()] if "linear" in wanted else []
    if options.out:
        options.out.write_text("\n".join(parts) + "\n")


def heading(bandwidth: float) -> str:
    """Hardware and versions, and the two ceilings."""
    import triton

    a, b = random(8192, 8192), random(8192, 8192)
    tflops = 2 * 8192**3 / (time_ms([lambda: a @ b]) * 1e-3) / 1e12
    text = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, python "
        f"{platform.python_version()}; copy {bandwidth / 1e12:.2f} TB/s, 8192^3 bf16 product {tflops:.0f} TFLOP/s"
    )
    print(text, flush=True)
    return text


if __name__ == "__main__":
    main()
