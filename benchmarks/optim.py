"""Time a step of our three AdamWs on one GPU beside torch's, torchao's, bitsandbytes' and flashoptim's.

    python benchmarks/optim.py --out results.md            # everything that can be imported, about five minutes
    python benchmarks/optim.py --seconds 140               # what fits; slow peers come last
    python benchmarks/optim.py --peers torch --tune        # also time how a step is cut into programs

First the kernels are compared with the plain CPU step on fresh random inputs; nothing is timed if they disagree. Then,
one optimizer after the other: the median device time of a step (events, behind a kernel that keeps the GPU busy while
the host enqueues), the host's time for it, the share of the copy floor (the bytes that must move, at the bandwidth of a
large copy measured here), and memory allocated on top during a step. Each of the other libraries runs in a process of
its own, so that one that compiles for minutes can be stopped. First steps are timed in processes of their own with
empty kernel caches.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

LAYERS = 8
LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
"""The linear layers of a layer of Llama-3.1-8B, [out, in]; two norms of 4096 go with them."""

OURS = {"8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}
STATE_BYTES = {"8bit": 2 * (1 + 4 / 256), "4bit": 2 * (0.5 + 4 / 128), "fp8": 2 * (1 + 4 / 256)}
PEERS = ("torch", "flashoptim", "torchao", "bitsandbytes")


def full_shapes() -> list[tuple[int, ...]]:
    """8 layers of Llama-3.1-8B: 72 tensors, 1.745e9 parameters."""
    return [shape for _ in range(LAYERS) for shape in (*LLAMA, (4096,), (4096,))]


def lora_shapes(r: int = 16) -> list[tuple[int, ...]]:
    """LoRA factors of rank 16 on all linear layers of Llama-3.1-8B: 448 tensors, 42e6 parameters."""
    return [shape for _ in range(32) for out, inner in LLAMA for shape in ((r, inner), (out, r))]


def many_shapes() -> list[tuple[int, ...]]:
    """60 tensors, no two of one shape."""
    return [(64 + i, 128 + 16 * i) for i in range(60)]


def params_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype) * 0.02) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def optimizers(peers: list[str], torchao_names: list[str]) -> Iterator[tuple[str, Callable[[list[nn.Parameter]], Any]]]:
    """(label, constructor) of ours and of the peers that can be imported."""
    import halfbyte.optim

    for name in OURS.values():
        yield f"halfbyte {name}", getattr(halfbyte.optim, name)
    for peer in peers:
        try:
            yield from _peer(peer, torchao_names)
        except ImportError as error:
            print(f"{peer} is left out: {error}", file=sys.stderr)


def maker_of(label: str) -> Callable[[list[nn.Parameter]], Any]:
    """One constructor; imports its library alone."""
    return dict(optimizers([peer for peer in PEERS if label.startswith(f"{peer} ")], list(OURS.values())))[label]


def _peer(peer: str, torchao_names: list[str]) -> list[tuple[str, Callable[[list[nn.Parameter]], Any]]]:
    if peer == "torch":
        return [("torch AdamW(fused=True)", lambda params: torch.optim.AdamW(params, fused=True))]
    if peer == "flashoptim":
        flash = import_module("flashoptim").FlashAdamW
        return [("flashoptim FlashAdamW", flash)]
    if peer == "torchao":
        ao = import_module("torchao.optim")
        return [(f"torchao {name}", getattr(ao, name)) for name in torchao_names]
    bnb = import_module("bitsandbytes").optim
    return [("bitsandbytes AdamW8bit", bnb.AdamW8bit)]


def copy_bandwidth() -> float:
    """Bytes a second of a device-to-device copy of 8 GiB, read and written bytes counted."""
    a = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / (median_device_ms(lambda: b.copy_(a), 10) / 1e3)


def median_device_ms(run: Callable[[], Any], repeats: int) -> float:
    """Median device time; the device waits behind a long kernel, so that gaps between launches are not counted."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)  # about 10 ms
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def median_host_ms(run: Callable[[], Any], prepare: Callable[[int], Any], repeats: int) -> float:
    """Median time until the call returns, on an idle device."""
    times = []
    for i in range(repeats):
        prepare(i)
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def time_optimizer(make: Callable, params: list[nn.Parameter], repeats: int) -> dict[str, float]:
    """Device and host milliseconds, and MiB allocated on top of what was there, of one optimizer's step."""
    optimizer = make(params)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    extra = torch.cuda.max_memory_allocated() - before
    start = time.perf_counter()
    optimizer.step()
    torch.cuda.synchronize()
    repeats = max(5, min(repeats, int(1.0 / (time.perf_counter() - start))))
    device = median_device_ms(optimizer.step, repeats)
    host = median_host_ms(optimizer.step, lambda i: None, repeats)
    moved = float("nan")
    if sum(p.numel() for p in params) < 1e8:  # gradients at fresh addresses, as zero_grad() makes them
        sets = [[p.grad for p in params], [torch.randn_like(p) * 1e-3 for p in params]]

        def swap(i: int) -> None:
            for param, grad in zip(params, sets[i % 2], strict=True):
                param.grad = grad

        moved = median_host_ms(optimizer.step, swap, repeats)
    return {"device": device, "host": host, "moved": moved, "extra": extra / 2**20}


def floor_ms(params: list[nn.Parameter], state_bytes: float, bandwidth: float) -> float:
    """Each parameter and state read and written once, each gradient read once."""
    numel = sum(p.numel() for p in params)
    return numel * (3 * params[0].element_size() + 2 * state_bytes) / bandwidth * 1e3


def check_correct() -> None:
    """Kernels against the plain step on the CPU, two steps on fresh random inputs of awkward sizes.

    raises  AssertionError when a parameter is off by more than 1e-5 of the step or codes by more than rare neighbours.
    """
    from halfbyte.optim.formats import FORMATS
    from halfbyte.optim.hyper import Hyper
    from halfbyte.optim.kernels import step_ref, step_triton
    from halfbyte.optim.state import new_state

    hyper = Hyper(1e-2, 0.9, 0.999, 1e-8, 0.1)
    generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
    for fmt in FORMATS.values():
        wanted = [torch.randn(n, generator=generator) for n in (1, 17, 4097, 300_000)]
        have = [p.cuda() for p in wanted]
        states = [new_state(p, fmt, amsgrad=False) for p in wanted]
        device_states = [{key: x.cuda() for key, x in state.items()} for state in states]
        cache: dict = {}
        for _ in range(2):
            grads = [torch.randn(p.shape, generator=generator) for p in wanted]
            step_ref.step(wanted, grads, states, hyper, fmt)
            step_triton.step(have, [g.cuda() for g in grads], device_states, hyper, fmt, cache=cache)
        for want, param, state, device_state in zip(wanted, have, states, device_states, strict=True):
            # a code that rounds the other way moves the second step by up to a tenth of lr, rarely
            off = (param.cpu() - want).abs()
            assert (off > 1e-7 + 1e-6 * want.abs()).sum() <= 1 + 1e-3 * want.numel() and off.max() < 5e-3, fmt.name
            for key in ("exp_avg", "exp_avg_sq"):
                differ = (state[key] != device_state[key].cpu()).sum()
                assert differ <= 2 + 1e-3 * want.numel(), (fmt.name, key, int(differ))


def tune(fmt_name: str, shapes: list[tuple[int, ...]], bandwidth: float) -> list[list[str]]:
    """Rows (cut, milliseconds, share of the floor) for several ways to cut a step into programs."""
    from halfbyte.optim.formats import FORMATS
    from halfbyte.optim.hyper import Hyper
    from halfbyte.optim.kernels import step_triton
    from halfbyte.optim.state import new_state

    fmt = FORMATS[fmt_name]
    params = [p.data.view(-1) for p in params_of(shapes, torch.bfloat16)]
    grads = [torch.randn_like(p) * 1e-3 for p in params]
    states = [new_state(p, fmt, amsgrad=False) for p in params]
    floor = floor_ms(params, STATE_BYTES[fmt_name], bandwidth)
    timed: list[tuple[float, Any]] = []
    for tile, num_warps, fold in ((256, 1, 1), (512, 1, 2), (512, 2, 1), (1024, 2, 2)):
        for chunk, lanes, prefetch in product((4096, 8192), (True, False), (False, True)):
            for maxnreg in (None, 80) if fold == 2 else (None,):
                if not lanes and fmt_name != "8bit" or prefetch and (fold == 2 or chunk == 4096):
                    continue
                timed.append((0.0, step_triton.Tuning(tile, num_warps, fold, chunk, lanes, prefetch, maxnreg)))
    for i, (_, tuning) in enumerate(timed):
        cache: dict = {}

        def run(tuning: Any = tuning, cache: dict = cache) -> None:
            hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 1e-2)
            step_triton.step(params, grads, states, hyper, fmt, cache=cache, tuning=tuning)

        for _ in range(3):
            run()
        timed[i] = (median_device_ms(run, 7), tuning)
    timed.sort(key=lambda pair: pair[0])
    step_triton.TUNINGS[fmt_name] = timed[0][1]
    rows = [[str(tuple(tuning)), f"{ms:.3f}", f"{floor / ms:.1%}"] for ms, tuning in timed]
    return rows


def run_limited(options: list[str], limit: float) -> tuple[list[str], str]:
    """This script with other options, empty kernel caches, and all that it starts stopped after `limit` seconds.

    returns  lines of its output, and "" or why there are no more.
    """
    if limit < 1:
        return [], "not run: no time left"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        with open(f"{folder}/out", "w+") as out, open(f"{folder}/err", "w+") as err:
            process = subprocess.Popen(
                [sys.executable, __file__, *options],
                env=os.environ | caches,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            why = ""
            try:
                if process.wait(limit):
                    err.seek(0)
                    why = "failed: " + (err.read().strip().splitlines() or ["?"])[-1][:80]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # and the compilers that it started
                process.wait()
                why = f"> {limit:.0f} s"
            out.seek(0)
            return out.read().strip().splitlines(), why


def first_step_seconds(label: str, limit: float) -> str:
    """A first step over 60 shapes in a process of its own with empty kernel caches, in seconds."""
    lines, why = run_limited(["--first-step", label], limit)
    return why or lines[-1]


def print_first_step(label: str) -> None:
    make = maker_of(label)
    optimizer = make(params_of(many_shapes(), torch.bfloat16))
    torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    torch.cuda.synchronize()
    print(f"{time.perf_counter() - start:.2f}")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def versions() -> str:
    found = []
    for package in ("torch", "triton", "torchao", "flashoptim", "bitsandbytes"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"{torch.cuda.get_device_name()}, Python {platform.python_version()}, " + ", ".join(found)


class Set(NamedTuple):
    """Parameters to step: shapes, dtype, most repeats, and whether the peers step them too."""

    title: str
    shapes: Callable[[], list]
    dtype: torch.dtype
    repeats: int
    with_peers: bool = True


SETS = [
    Set("8 layers of Llama-3.1-8B, bf16, 72 tensors", full_shapes, torch.bfloat16, 15),
    Set("LoRA, 448 tensors, 42e6 parameters, bf16", lora_shapes, torch.bfloat16, 30),
    Set("LoRA, 448 tensors, 42e6 parameters, fp32", lora_shapes, torch.float32, 30, with_peers=False),
]
HEAD = ["AdamW", "device ms", "share of floor", "host ms", "host ms, gradients moved", "MiB on top"]


def row(label: str, make: Callable, chosen: Set, bandwidth: float) -> list[str]:
    """A row of a set's table; an optimizer that fails is a row too, not the end of the run."""
    params = params_of(chosen.shapes(), chosen.dtype)
    fmt_name = {name: key for key, name in OURS.items()}.get(label.removeprefix("halfbyte "))
    state_bytes = STATE_BYTES.get(fmt_name or "", float("nan"))
    if label.startswith("torch "):
        state_bytes = 2.0 * params[0].element_size()
    try:
        took = time_optimizer(make, params, chosen.repeats)
    except Exception as error:
        return [label, f"failed: {type(error).__name__}: {str(error)[:80]}", "", "", "", ""]
    share = floor_ms(params, state_bytes, bandwidth) / took["device"]
    torch.cuda.empty_cache()
    return [
        label,
        f"{took['device']:.3f}",
        "" if share != share else f"{share:.1%}",
        f"{took['host']:.2f}",
        "" if took["moved"] != took["moved"] else f"{took['moved']:.2f}",
        f"{took['extra']:.2f}",
    ]


def print_rows(label: str) -> None:
    """In a peer's own process: a line of JSON for each set, as soon as it is known."""
    make = maker_of(label)
    for chosen in SETS:
        if chosen.with_peers:
            print(json.dumps(row(label, make, chosen, float("nan"))), flush=True)


def peer_rows(label: str, limit: float) -> list[list[str]]:
    """A row for each of the peers' sets, from a process that is stopped after `limit` seconds."""
    lines, why = run_limited(["--worker", label], limit)
    rows = [json.loads(line) for line in lines if line.startswith("[")]
    missing = sum(chosen.with_peers for chosen in SETS) - len(rows)
    return rows + [[label, why or "no result", "", "", "", ""]] * missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--torchao", nargs="*", default=list(OURS.values()), help="torchao's classes to time")
    parser.add_argument("--seconds", type=float, default=1e6, help="stop slow peers so that all takes about that long")
    parser.add_argument("--peer-limit", type=float, default=300, help="seconds for one peer")
    parser.add_argument("--first-step-limit", type=float, default=100, help="seconds to wait for a first step")
    parser.add_argument("--out", help="write the tables to this Markdown file as well")
    parser.add_argument("--tune", action="store_true", help="time ways to cut a step into programs")
    parser.add_argument("--first-step", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_step:
        return print_first_step(args.first_step)
    if args.worker:
        return print_rows(args.worker)
    began = time.monotonic()

    def left() -> float:
        return args.seconds - (time.monotonic() - began)

    check_correct()
    bandwidth = copy_bandwidth()
    sections = [
        f"{versions()}; a large copy moves {bandwidth / 1e12:.2f} TB/s",
        "The kernels agree with the plain step.",
    ]
    if args.tune:
        for name in OURS:
            rows = tune(name, full_shapes(), bandwidth)
            sections.append(f"### {name}: tile, warps and tiles of a program\n\n" + table(["cut", "ms", "share"], rows))
            print(sections[-1], flush=True)
    makers = list(optimizers(args.peers, args.torchao))
    fast = [maker for maker in makers if maker[0].startswith(("halfbyte", "torch "))]
    slow = [label for label, _ in makers if label not in dict(fast)]
    tables = {chosen.title: [row(label, make, chosen, bandwidth) for label, make in fast] for chosen in SETS}
    torch.cuda.empty_cache()
    first = [[label, first_step_seconds(label, min(args.first_step_limit, left()))] for label, _ in fast]
    for chosen in SETS:
        print(f"### {chosen.title}\n\n" + table(HEAD, tables[chosen.title]), flush=True)
    for label in sorted(slow, key=lambda label: label.startswith("torchao")):  # torchao compiles the longest
        rows = peer_rows(label, min(args.peer_limit, left()))
        print(*rows, sep="\n", flush=True)
        for chosen, own in zip((chosen for chosen in SETS if chosen.with_peers), rows, strict=True):
            tables[chosen.title].append(own)
    for label in sorted(slow, key=lambda label: label.startswith("torchao")):
        first.append([label, first_step_seconds(label, min(args.first_step_limit, left()))])
    sections += [f"### {title}\n\n" + table(HEAD, rows) for title, rows in tables.items()]
    sections.append("### First step over 60 shapes, empty kernel caches\n\n" + table(["AdamW", "seconds"], first))
    text = "\n\n".join(sections) + "\n"
    print(text)
    if args.out:
        with open(args.out, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()
