"""Does a low-bit AdamW train as well as fp32 AdamW? A language model from scratch, same start, same data order.

    python benchmarks/optim_quality.py --out results                          # one GPU
    python benchmarks/optim_quality.py --preset tiny --device cpu --out /tmp   # a laptop: a smoke run
    python benchmarks/optim_quality.py --report results/*.jsonl --out benchmarks/results

Every optimizer trains the model of optim_quality_lm.py from the same weights on the same batches, once per seed.
Held-out loss is compared in pairs (same seed), so what the seeds share cancels; the standard error is that of the mean
of the paired differences. `adamw fp32, rerun` is fp32 AdamW again from weights moved by one part in 1e6: how much of a
difference is mere chaos. The largest move of any parameter in each step is recorded in units of that step's lr. More
than one --lr or --beta2 makes several recipes, each with a table of its own. Every finished run is one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import torch
from optim_quality_lm import Text, TinyLM, load_text
from optim_quality_optimizers import ARMS, OPTIMIZERS, check_torchao
from optim_quality_report import append, plot, read, report
from optim_quality_train import PRESETS, Data, Settings, train_side_by_side


def git_commit() -> str:
    """Of the checkout; "unknown" where there is none (say so with --commit)."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def environment(device: torch.device, text: Text, settings: Settings, commit: str) -> list[str]:
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    num_params = sum(p.numel() for p in TinyLM(settings.model).parameters())
    return [
        f"{machine}; Python {platform.python_version()}, torch {torch.__version__}; commit {commit}.",
        f"Model: {num_params / 1e6:.1f}e6 parameters, fp32 (bf16 autocast on a GPU); {settings}.",
        f"Text: {text.size_bytes / 1e6:.1f} MB of Python sources, SHA-256 {text.sha256}...; "
        f"{text.train.numel()} tokens to train on, {text.held_out.numel()} held out.",
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", help="names of optimizers or arms; default all optimizers, no arms")
    parser.add_argument("--seeds", type=int, nargs="*", help="default: the preset's")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float, nargs="*", help="default: the preset's")
    parser.add_argument("--beta2", type=float, nargs="*", help="default: the preset's")
    parser.add_argument("--side-by-side", type=int, default=1, help="runs that share the GPU, each on its own stream")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run that would end later")
    parser.add_argument("--tokens", type=Path, help="file that keeps the tokens from one call to the next")
    parser.add_argument("--check-torchao", action="store_true", help="compare with torchao's own steps first")
    parser.add_argument("--report", type=Path, nargs="*", help="train nothing: table and picture of these JSON lines")
    parser.add_argument("--sweep", type=Path, nargs="*", default=[], help="JSON lines whose losses the report lists")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--stem", default=f"{time.strftime('%Y-%m-%d')}-optim-quality", help="name of the result files")
    parser.add_argument("--commit", default=git_commit(), help="named in the report")
    return parser.parse_args()


def run(args: argparse.Namespace, settings: Settings, started: float) -> None:
    device = torch.device(args.device)
    text = load_text(settings.vocab_size, settings.text_bytes, args.tokens)
    notes = environment(device, text, settings, args.commit)
    if args.check_torchao:
        notes.append(f"torchao: {check_torchao(device)}.")
    print("\n".join(notes), f"\ntext after {time.perf_counter() - started:.1f} s", flush=True)
    lines = args.out / f"{args.stem}.jsonl"
    lines.unlink(missing_ok=True)
    append(lines, notes)
    data = Data(text.train.to(device), text.held_out.to(device), settings)
    builds = {**OPTIMIZERS, **ARMS}
    names = args.only or list(OPTIMIZERS)
    recipes = list(itertools.product(args.lr or [settings.lr], args.beta2 or [settings.beta2]))
    tasks = [
        (name, seed, replace(settings, lr=lr, beta2=beta2))
        for lr, beta2 in recipes
        for seed in settings.seeds
        for name in names
    ]
    slowest = 0.0
    for first in range(0, len(tasks), args.side_by_side):
        start = time.perf_counter()
        if start - started + 1.1 * slowest > args.seconds:
            print(f"out of time: {len(tasks) - first} runs not started", flush=True)
            break
        batch = [(name, seed, chosen, builds[name]) for name, seed, chosen in tasks[first : first + args.side_by_side]]
        for done in train_side_by_side(batch, data):
            append(lines, done)
            print(
                f"{done.recipe}: {done.name:28} seed {done.seed}: held-out {done.final:.4f}, "
                f"largest move {max(done.moves):.2f} lr",
                flush=True,
            )
        slowest = max(slowest, time.perf_counter() - start)
        print(f"{len(batch)} runs in {time.perf_counter() - start:.1f} s", flush=True)
    print(report(*read([lines]), None))


def main() -> None:
    started = time.perf_counter()
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.report:
        notes, runs = read(args.report)
        plot(runs, args.out / f"{args.stem}.png")
        (args.out / f"{args.stem}.md").write_text(report(notes, runs, f"{args.stem}.png", read(args.sweep)[1]))
        return
    settings = PRESETS[args.preset]
    settings = replace(settings, seeds=tuple(args.seeds or settings.seeds), num_steps=args.steps or settings.num_steps)
    run(args, settings, started)


if __name__ == "__main__":
    main()
