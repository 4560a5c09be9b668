"""What a benchmark for GPUs says on a machine that has none."""

import sys

import torch


def need_gpu() -> None:
    """Leave with exit code 2, and one sentence on stderr, when there is no CUDA GPU, or no Triton to run on it."""
    if not torch.cuda.is_available():
        leave("needs a CUDA GPU, and PyTorch sees none here.")
    try:
        import triton  # noqa: F401
    except ImportError:
        leave("needs Triton; install it with: pip install triton")


def leave(why: str) -> None:
    print(f"{sys.argv[0]} {why}", file=sys.stderr)
    raise SystemExit(2)
