"""Low-bit AdamW on factors that are cut over ranks.

Where a rank's part holds whole blocks of the states, a block's scale and codes are those of one process, so five steps
with the same gradients are equal to the bit. Where a block would span two parts, the parts have blocks of their own:
the error from fp32 AdamW is then no larger than one process's.
"""

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from halfbyte.optim import AdamW4bit, AdamW8bit, AdamWFp8
from halfbyte.parallel.gather import gather_trainable
from halfbyte.parallel.tensor_parallel import part, tensor_parallel
from halfbyte.parallel.tp_layers import cut_factors
from tests.dist import run
from tests.parallel.models import PROJECTIONS, tiny_base, trainable
from tests.parallel.test_tensor_parallel import mesh_of_all
from tests.parallel.training import error

OPTIMIZERS = {"8bit": AdamW8bit, "4bit": AdamW4bit, "fp8": AdamWFp8}
ALIGNED = {"hidden_size": 512, "intermediate_size": 512, "num_key_value_heads": 4, "num_hidden_layers": 1}
STEPS = 5


def lora(r: int, **changes: int) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=r, target_modules=PROJECTIONS, init_lora_weights=False)
    return peft.get_peft_model(tiny_base(packed=False, **changes), config)


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 7919 * step)
    return torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).pow(4)


def stepped(model: nn.Module, shapes: dict[str, torch.Size], kind: type, mesh: Any, **options: Any) -> nn.Module:
    """Five steps on gradients that are drawn whole, and cut for a factor that is."""
    cut = cut_factors(model)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                whole = gradient(name, shapes[name], step)
                parameter.grad = part(whole, cut[name][0], mesh) if name in cut else whole
        optimizer.step()
    return model


def aligned(name: str, r: int) -> tuple[bool, int]:
    """Whether all factors equal one process's; how many there are."""
    mesh, whole = mesh_of_all(), lora(r, **ALIGNED)
    shapes = {n: p.shape for n, p in whole.named_parameters()}
    model = stepped(tensor_parallel(lora(r, **ALIGNED), mesh), shapes, OPTIMIZERS[name], mesh)
    expected = trainable(stepped(whole, shapes, OPTIMIZERS[name], None))
    found = gather_trainable(model)
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected), len(found)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("r", [16, 8])
def test_equals_one_process_where_blocks_align(name: str, r: int) -> None:
    """With r 8 a factor has the 4096 values from which on its state is quantized, and its parts have fewer."""
    for equal, count in run(2, aligned, name, r):
        assert equal and count == 14


def unaligned(name: str) -> tuple[float, float]:
    """Errors from fp32 AdamW's update: cut, and on one process."""
    mesh, options = mesh_of_all(), {"min_quant_numel": 0}
    whole, start = lora(4), trainable(lora(4))
    shapes = {n: p.shape for n, p in whole.named_parameters()}
    runs = (
        stepped(tensor_parallel(lora(4), mesh), shapes, OPTIMIZERS[name], mesh, **options),
        stepped(whole, shapes, OPTIMIZERS[name], None, **options),
        stepped(lora(4), shapes, torch.optim.AdamW, None),
    )
    cut, alone, exact = ({n: t - start[n] for n, t in gather_trainable(model).items()} for model in runs)
    errors = [[error({n: found[n]}, {n: exact[n]}) for n in exact] for found in (cut, alone)]
    return sum(errors[0]) / len(exact), sum(errors[1]) / len(exact)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_is_within_quantization_where_they_do_not(name: str) -> None:
    for cut, alone in run(2, unaligned, name):
        assert 0 < cut < 1.3 * alone and alone < 0.5
