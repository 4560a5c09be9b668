"""Whether kernels can be compiled here; without Triton the references serve a GPU too, slower."""

import functools
import importlib.util


@functools.lru_cache(maxsize=1)
def has_triton() -> bool:
    """True when Triton is installed (PyTorch's CUDA builds for Linux bring it). Does not import it."""
    return importlib.util.find_spec("triton") is not None
