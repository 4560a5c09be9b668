"""Kernels run on the GPU where there is one, else through Triton's interpreter (tests/conftest.py)."""

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
