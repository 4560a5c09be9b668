"""Random NVFP4 components: every code, and block scales over E4M3's finite positive range."""

import torch

from halfbyte.nvfp4 import NVFP4Parts


def random_parts(n: int, k: int, *, device: str = "cpu", seed: int = 0) -> NVFP4Parts:
    generator = torch.Generator().manual_seed(seed)
    qdata = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(1, 127, (n, k // 16), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)
    global_scale = torch.rand((), generator=generator) * 1e-3 + 1e-4
    return NVFP4Parts(qdata.to(device), scale.to(device), global_scale.to(device))
