"""Kernel launches that remember what Triton found out at the first one; and the first one, for all kernels at a time.

`kernel[grid](...)` binds forty arguments by name, looks at the type and alignment of each and compares the globals of
the source, 40 us of the host a launch. All of that comes out the same as long as a plan (table_triton.py) lives: its
tensors are the same ones, other pointers are not specialized, and scalars are always floats. So from the second launch
on the compiled kernel is called, as Triton's fused-softmax tutorial does.

With an empty cache a kernel costs half a second, two thirds of it in LLVM, ptxas and a C compiler, which do not hold
Python's lock: the kernels of a step are compiled in threads, by Triton's own means. Before the first one Triton has a
C compiler build its driver and hashes its own files, 0.4 s each: these go side by side too.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.runtime import cache, driver


class Launch:
    """One kernel with its grid and its compile-time arguments.

    constants  by name; in the kernel's signature they come last.
    options    num_warps, maxnreg, ...
    runner     the compiled kernel on its grid.
    """

    def __init__(self, kernel: Any, num_programs: int, constants: dict[str, Any], **options: Any) -> None:
        self.kernel, self.grid = kernel, (num_programs, 1, 1)
        self.constants, self.options = constants, options
        self.values = [constants[name] for name in kernel.arg_names if name in constants]
        self.runner: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> None:
        """Launch with the run-time arguments, whose types and alignments must be those it was compiled for."""
        if self.runner is not None:
            self.runner(*args, *self.values)
            return
        compiled = self.kernel[self.grid](*args, **self.constants, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            self.runner = compiled[self.grid]


def compile_together(launches: Sequence[Launch], arguments: Sequence[tuple], device: torch.device) -> None:
    """Compile and load the kernels of some launches for these arguments, each in a thread."""
    if not all(isinstance(launch.kernel, triton.JITFunction) for launch in launches):
        return
    with ThreadPoolExecutor(len(launches)) as pool:
        hashing = pool.submit(getattr(cache, "triton_key", int))  # keeps its result; older versions name it otherwise
        driver.active.get_current_device()
        hashing.result()
        with triton.AsyncCompileMode(pool):
            kernels = [
                launch.kernel.warmup(*args, grid=launch.grid, **launch.constants, **launch.options)
                for launch, args in zip(launches, arguments, strict=True)
            ]

        def load(launch: Launch, kernel: Any) -> None:
            with torch.cuda.device(device):
                compiled = kernel.result() if hasattr(kernel, "result") else kernel
                launch.runner = compiled[launch.grid]

        list(pool.map(load, launches, kernels))
