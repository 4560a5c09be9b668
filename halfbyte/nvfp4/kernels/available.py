"""Whether kernels can be compiled here; without Triton or numba the references serve, slower."""

import functools
import importlib.util


@functools.lru_cache(maxsize=1)
def has_triton() -> bool:
    """True when Triton is installed (PyTorch's CUDA builds for Linux bring it). Does not import it."""
    return importlib.util.find_spec("triton") is not None


@functools.lru_cache(maxsize=1)
def has_numba() -> bool:
    """True when numba is installed (`halfbyte[cpu]`). Does not import it."""
    return importlib.util.find_spec("numba") is not None
