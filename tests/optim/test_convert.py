"""torchao's and bitsandbytes' checkpoints, read and written; torchao itself is the oracle."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.optim import AdamW4bit, AdamW8bit, AdamWFp8
from halfbyte.optim.convert import read_checkpoint, to_torchao
from halfbyte.optim.formats import codebook
from halfbyte.optim.saving import group_format
from halfbyte.optim.state import moment_values
from tests.optim.training import params_of, train

SHAPES = [(64, 128), (33, 100), (64, 64), (5000,), (3,), (16, 256, 3, 3)]
PAIRS = [(AdamW8bit, "AdamW8bit"), (AdamW4bit, "AdamW4bit"), (AdamWFp8, "AdamWFp8")]


@pytest.fixture
def ao() -> Any:
    """torchao's optimizers, run eagerly: their step is the same code, and compiling it takes minutes."""
    module = pytest.importorskip("torchao.optim")
    torch.compiler.set_stance("force_eager")
    yield module
    torch.compiler.set_stance("default")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls, name", PAIRS)
def test_torchao_there_and_back(cls: type, name: str, ao: Any, tmp_path: Path) -> None:
    """Codes and scales arrive bit for bit (a positive-to-zero second moment aside), and go back bit for bit."""
    params = params_of(SHAPES)
    theirs = getattr(ao, name)(params, lr=1e-3)
    train(theirs, params)
    torch.save(theirs.state_dict(), tmp_path / "ao.pt")
    back = getattr(ao, name)(params)
    for source in (theirs.state_dict(), read_checkpoint(tmp_path / "ao.pt")):
        ours = cls(params)
        ours.load_state_dict(source)
        assert ours.param_groups[0]["lr"] == pytest.approx(1e-3)
        back.load_state_dict(to_torchao(ours))
        for param in params:
            state = ours.state[param]
            assert state["step"] == 3
            fmt = group_format(ours.param_groups[0])
            for moment in ("exp_avg", "exp_avg_sq"):
                original, written = theirs.state[param][moment], back.state[param][moment]
                assert type(original) is type(written)
                values = moment_values(state, moment, fmt, param.numel())
                if not hasattr(original, "codes"):
                    continue
                decoded = original.dequantize().flatten()
                same = values == decoded
                assert same.all() or (moment == "exp_avg_sq" and (decoded[~same] == 0).all())
                assert torch.equal(values, written.dequantize().flatten())
    train(back, params, 1)


@pytest.mark.filterwarnings("ignore")
def test_read_without_torchao(ao: Any, tmp_path: Path) -> None:
    """In a process that cannot import torchao."""
    params = params_of(SHAPES)
    theirs = ao.AdamW4bit(params)
    train(theirs, params, 1)
    torch.save(theirs.state_dict(), tmp_path / "ao.pt")
    code = (
        "import sys; sys.modules['torchao'] = None\n"
        "import torch; from halfbyte.optim import AdamW4bit; from halfbyte.optim.convert import read_checkpoint\n"
        f"params = [torch.nn.Parameter(torch.zeros(shape)) for shape in {SHAPES}]\n"
        "optimizer = AdamW4bit(params); optimizer.load_state_dict(read_checkpoint('ao.pt'))\n"
        "print(int(optimizer.state[params[0]]['exp_avg'].sum()))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == int(theirs.state[params[0]]["exp_avg"].codes.sum())


@pytest.mark.filterwarnings("ignore")
def test_classes_are_known_in_read_checkpoint_only(ao: Any) -> None:
    """The stand-ins are no global setting: torch.load refuses the same file before and after."""
    params = params_of(SHAPES[:1])
    theirs = ao.AdamWFp8(params)
    train(theirs, params, 1)
    buffer = io.BytesIO()
    torch.save(theirs.state_dict(), buffer)
    before = set(torch.serialization.get_safe_globals())
    read_checkpoint(io.BytesIO(buffer.getvalue()))
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls, name", [PAIRS[0], PAIRS[2]])
def test_a_zero_second_moment_beside_a_live_first_one_is_repaired(cls: type, name: str, ao: Any) -> None:
    """torchao's next update there is m / eps; ours is at most what its block's smallest positive value allows, and
    the second moment of the others is untouched."""
    param = nn.Parameter(torch.zeros(4096))
    theirs = getattr(ao, name)([param], lr=1e-3)
    grad = torch.full((4096,), 1e-4)
    grad[::256] = 1.0
    for step in range(2):
        param.grad = grad.clone() if step == 0 else torch.where(grad == 1, grad, 0.0)
        theirs.step()
    exp_avg_sq = theirs.state[param]["exp_avg_sq"].dequantize()
    lost = (exp_avg_sq == 0) & (theirs.state[param]["exp_avg"].dequantize() != 0)
    assert lost.any()
    ours = cls([param], lr=1e-3)
    ours.load_state_dict(theirs.state_dict())
    fmt = group_format(ours.param_groups[0])
    repaired = moment_values(ours.state[param], "exp_avg_sq", fmt, 4096)
    assert (repaired[lost] > 0).all() and torch.equal(repaired[~lost], exp_avg_sq[~lost])
    before = param.detach().clone()
    param.grad = torch.zeros(4096)
    ours.step()
    assert (param - before).abs().max() <= 3e-3


def bitsandbytes_state(numel: int, block: int = 256) -> dict[str, Any]:
    """A state as bitsandbytes 0.48 writes it: codes into a map that it also stores, one absmax a block."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = -(-numel // block)
    return {
        "step": 12,
        "state1": torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator),
        "state2": torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator),
        "qmap1": codebook("8bit", True).clone(),
        "qmap2": codebook("8bit", False).clone(),
        "absmax1": torch.rand(num_blocks, generator=generator),
        "absmax2": torch.rand(num_blocks, generator=generator),
    }


@pytest.mark.parametrize("block", [256, 2048])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(block: int, nested: bool) -> None:
    """Values are qmap[code] * absmax; they are quantized once, so within half a code (0.04 amax) of that."""
    numel = 5000
    saved = bitsandbytes_state(numel, block)
    saved["state2"][:3] = 0  # zero second moments whose first moments live
    saved["state1"][:3] = 200
    small = {"step": 12, "state1": torch.full((10,), 0.5), "state2": torch.full((10,), 0.25)}
    if nested:
        keys = [key for key in saved if key != "step"]
        saved["__bnb_optimizer_quant_state__"] = {key: saved.pop(key) for key in keys}
    groups = [{"params": [0, 1], "lr": 2e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "alpha": 0.0}]
    params = params_of([(50, 100), (10,)])
    optimizer = AdamW8bit(params)
    with pytest.warns(UserWarning, match="bitsandbytes to 8bit"):
        optimizer.load_state_dict({"state": {0: _shaped(saved, (50, 100)), 1: small}, "param_groups": groups})
    flat = {**saved, **saved.get("__bnb_optimizer_quant_state__", {})}
    state, fmt = optimizer.state[params[0]], group_format(optimizer.param_groups[0])
    assert state["step"] == 12 and optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert "alpha" not in optimizer.param_groups[0]
    for name, digit in (("exp_avg", "1"), ("exp_avg_sq", "2")):
        spread = flat["absmax" + digit].repeat_interleave(block)[:numel]
        expected = flat["qmap" + digit][flat["state" + digit].flatten().long()] * spread
        assert ((moment_values(state, name, fmt, numel) - expected).abs() <= 0.04 * spread).all()
    assert (moment_values(state, "exp_avg_sq", fmt, numel)[:3] > 0).all()
    assert torch.equal(optimizer.state[params[1]]["exp_avg"], small["state1"])
    train(optimizer, params, 2)


def _shaped(saved: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """The codes in the parameter's shape, wherever they are nested."""
    return {
        key: _shaped(value, shape)
        if isinstance(value, dict)
        else value.view(shape)
        if key in ("state1", "state2")
        else value
        for key, value in saved.items()
    }
