"""Without a GPU, Triton kernels run through Triton's interpreter.

Triton reads the variable when a kernel is defined, its own library's included, so it is set before any test imports it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
