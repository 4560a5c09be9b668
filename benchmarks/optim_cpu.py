"""Time a step of our three AdamWs on a CPU, fast and plain path, beside torch's, torchao's and bitsandbytes'.

    python benchmarks/optim_cpu.py --threads 2 --out benchmarks/results/optim-cpu.md      # about five minutes

Two sets of parameters, fp32 and bf16: the LoRA factors of Llama-3.1-8B (448 tensors, 42e6 values) and 64e6 values in
one tensor. All optimizers live in one process and step turn by turn, so that a busy machine slows all of them; the
figures are the median and the least of the rounds. On a busy machine take --threads 1: OpenMP's threads wait for each
other at the end of every tensor, so torch's figures explode when one of them is not scheduled. torchao's, whose steps
take seconds, get fewer rounds. First steps are timed in processes of their own: with an empty kernel cache, then with
the cache that the former left.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
SETS = {
    "LoRA, 448 tensors, 42e6": [s for _ in range(32) for out, inner in LLAMA for s in ((16, inner), (out, 16))],
    "one tensor, 64e6": [(8000, 8000)],
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS = {"8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}
PEERS = ("torchao", "bitsandbytes")
BASELINE = "torch AdamW(fused=True)"
TARGETS = {"LoRA, 448 tensors, 42e6": "at most 2x, plain 25x", "one tensor, 64e6": "at most 3x, plain 25x"}

Step = Callable[[], object]


def params_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter((torch.randn(shape) * 0.02).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def plain_step(params: list[nn.Parameter], name: str) -> Step:
    """The plain path, which AdamW takes by itself where numba is missing."""
    from halfbyte.optim.formats import FORMATS
    from halfbyte.optim.hyper import Hyper
    from halfbyte.optim.kernels import step_ref
    from halfbyte.optim.kernels.step import step
    from halfbyte.optim.state import new_state

    fmt, hyper, cache = FORMATS[name], Hyper(1e-3, 0.9, 0.999, 1e-8, 1e-2), {}
    states = [new_state(param, fmt, amsgrad=False) for param in params]
    grads = [param.grad for param in params]

    @torch.no_grad()
    def run() -> None:
        step(params, grads, states, hyper, fmt, cache=cache, path=step_ref)

    return run


def fast_step(params: list[nn.Parameter], name: str) -> Step:
    import halfbyte.optim

    return getattr(halfbyte.optim, OURS[name])(params).step


def peer_steps(params: list[nn.Parameter], peers: Sequence[str]) -> dict[str, Step]:
    """Of the slow peers those that can be imported."""
    steps: dict[str, Step] = {}
    try:
        if "torchao" not in peers:
            raise ImportError("not asked for")
        import torchao.optim

        for name in OURS.values():
            steps[f"torchao {name}"] = getattr(torchao.optim, name)(params).step
    except ImportError as error:
        print(f"torchao is left out: {error}", file=sys.stderr)
    try:
        if "bitsandbytes" not in peers:
            raise ImportError("not asked for")
        import bitsandbytes

        steps["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit(params).step
    except ImportError as error:
        print(f"bitsandbytes is left out: {error}", file=sys.stderr)
    return steps


def measure(params: list[nn.Parameter], rounds: int, slow_rounds: int, peers: Sequence[str]) -> dict[str, list[float]]:
    """{label: seconds of each round}. The first call of each, which allocates and compiles, is not counted."""
    steps: dict[str, Step] = {
        BASELINE: torch.optim.AdamW(params, fused=True).step,
        "torch AdamW(foreach=True)": torch.optim.AdamW(params, foreach=True).step,
    }
    steps |= {f"halfbyte {OURS[name]}": fast_step(params, name) for name in OURS}
    slow: dict[str, Step] = {}
    if slow_rounds:
        slow = {f"halfbyte {OURS[name]}, plain path": plain_step(params, name) for name in OURS} | peer_steps(
            params, peers
        )
    seconds: dict[str, list[float]] = {label: [] for label in (*steps, *slow)}
    for label, step in (steps | slow).items():
        start = time.perf_counter()
        step()
        print(f"  {label}: first step {time.perf_counter() - start:.2f} s", file=sys.stderr, flush=True)
    for i in range(rounds):
        for label, step in (steps | slow if i < slow_rounds else steps).items():
            start = time.perf_counter()
            step()
            seconds[label].append(time.perf_counter() - start)
    return {label: times for label, times in seconds.items() if times}


FIRST_STEP = """
import sys, time, torch
from torch import nn
params = [nn.Parameter(torch.randn(64 + i, 128 + 16 * i)) for i in range(60)]
for p in params:
    p.grad = torch.randn_like(p)
module = __import__(sys.argv[1], fromlist=["x"])
start = time.perf_counter()
getattr(module, sys.argv[2])(params).step()
print(time.perf_counter() - start)
"""


def first_steps(threads: int, with_torchao: bool) -> dict[str, list[float]]:
    """{label: seconds of the first step over 60 shapes, [empty cache, warm cache]}, each in a fresh process."""
    results: dict[str, list[float]] = {}
    modules = ["halfbyte.optim", "torch.optim", *(["torchao.optim"] if with_torchao else [])]
    for module in modules:
        for name in ("AdamW",) if module == "torch.optim" else ("AdamW8bit",):
            with tempfile.TemporaryDirectory() as folder:
                env = dict(os.environ, NUMBA_CACHE_DIR=folder, TORCHINDUCTOR_CACHE_DIR=folder)
                env["OMP_NUM_THREADS"] = str(threads)
                command = [sys.executable, "-c", FIRST_STEP, module, name]
                label = f"{module.split('.')[0]} {name}"
                for _ in range(2):
                    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
                    if done.returncode == 0:
                        results.setdefault(label, []).append(float(done.stdout.split()[-1]))
                    else:
                        print(f"{label}: {done.stderr[-300:]}", file=sys.stderr)
    return results


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def versions() -> str:
    found = []
    for package in ("torch", "numba", "torchao", "bitsandbytes"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def table(results: dict[str, dict[str, list[float]]]) -> list[str]:
    """One row an optimizer, one column a set: median (least) ms, and the median over the baseline's."""
    labels = list(dict.fromkeys(label for times in results.values() for label in times))
    lines = ["| AdamW | " + " | ".join(results) + " |", "|---|" + "---|" * len(results)]
    for label in labels:
        cells = []
        for times in results.values():
            if label not in times:
                cells.append("")
                continue
            median, base = statistics.median(times[label]), statistics.median(times[BASELINE])
            cells.append(f"{1e3 * median:.1f} ({1e3 * min(times[label]):.1f}) ms, {median / base:.1f}x")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def git_commit() -> str:
    """Of the checkout; "unknown" where there is none (say so with --commit)."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--slow-rounds", type=int, default=3, help="of the plain path and slow peers; 0 leaves them out"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), help="slow ones; torchao takes minutes"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--out", type=Path, help="write the Markdown here, too")
    parser.add_argument("--commit", default=git_commit(), help="named in the report")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    lines = [
        "# A step of AdamW on a CPU",
        "",
        f"{cpu_name()}, {args.threads} threads; Python {platform.python_version()}, {versions()}; "
        f"commit {args.commit}; load when started {os.getloadavg()[0]:.1f}.",
        f"Command: `python {' '.join(sys.argv)}`. Median (least) of {args.rounds} rounds turn by turn, "
        f"{args.slow_rounds} for the plain path and slow peers; x: median over that of {BASELINE}.",
        f"Targets: {'; '.join(f'{name}: {target}' for name, target in TARGETS.items())}.",
        "",
    ]
    results = {}
    for name, shapes in SETS.items():
        for dtype in args.dtypes:
            print(f"{name}, {dtype}", file=sys.stderr, flush=True)
            params = params_of(shapes, DTYPES[dtype])
            results[f"{name}, {dtype}"] = measure(params, args.rounds, args.slow_rounds, args.peers)
    lines += table(results)
    lines += [
        "",
        "First step over 60 shapes, seconds, in a fresh process: empty kernel cache, then with that cache.",
        "",
    ]
    for label, seconds in first_steps(
        args.threads, with_torchao=args.slow_rounds > 0 and "torchao" in args.peers
    ).items():
        lines.append(f"* {label}: {', '.join(f'{s:.2f}' for s in seconds)}")
    print("\n".join(lines))
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
