"""Optimizers on meshes, against one process.

Why they must agree: every rank sees the same batch, so averaging gradients is exact; a shard of whole rows of 512
values is whole blocks of 256 or 128, so block scales are the same numbers; random bits depend on global indices.
Where a shard cuts blocks apart, its scales are finer than one process's, and only the codes' error is promised.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import halfbyte.optim
from halfbyte.optim.formats import FORMATS
from halfbyte.optim.layout import whole_values
from tests import dist
from tests.optim import sharded
from tests.optim.training import ADAMW

NAMES = [cls.__name__ for cls in ADAMW]


def run(world_size: int, fn: Any, *args: Any) -> list:
    return dist.run(world_size, fn, *args, timeout=200.0)


def assert_same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for key in left:
        if isinstance(left[key], dict):
            assert_same(left[key], right[key])
        else:
            assert left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]), key


@pytest.mark.parametrize("name, stochastic", [(name, True) for name in NAMES] + [("AdamW8bit", False)])
def test_fsdp2_bf16(name: str, stochastic: bool) -> None:
    """o1: and 20 steps, uneven shards (33 rows)."""
    args = (name, torch.bfloat16, 33, {"bf16_stochastic_round": stochastic}, 20)
    params, states = sharded.one_process(*args)
    for found_params, found_states in run(2, sharded.fsdp2, *args):
        assert_same(params, found_params)
        assert_same(states, found_states)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hidden", [33, 3])
def test_fsdp2_fp32_uneven_and_empty_shards(name: str, hidden: int) -> None:
    """o13: 33 rows on 4 ranks, and 3 rows, which leave one rank empty. Quantized: the rows of 512."""
    args = (name, torch.float32, hidden, {"min_quant_numel": 1500 if hidden == 3 else 4096, "amsgrad": True}, 5)
    params, states = sharded.one_process(*args)
    assert [state["exp_avg"].dtype == torch.uint8 for state in states.values()] == [True, False, False, False]
    for found_params, found_states in run(4, sharded.fsdp2, *args):
        assert_same(params, found_params)
        assert_same(states, found_states)


@pytest.mark.parametrize("name", NAMES)
def test_fsdp2_shards_that_cut_blocks(name: str) -> None:
    """Everything quantized, biases included: (64, 33) and the biases are cut inside a block. The shapes of the state
    dict stay; weights may differ by the codes' error, over five steps of 1e-2 a tenth (8 bits) or half (4) of the way.
    """
    args = (name, torch.float32, 33, {"min_quant_numel": 0}, 5)
    params, states = sharded.one_process(*args)
    shapes = {i: {key: value.shape for key, value in state.items()} for i, state in states.items()}
    for found_params, found_states in run(4, sharded.fsdp2, *args):
        for key, value in params.items():
            atol = 0.025 if "4bit" in name else 0.005
            torch.testing.assert_close(found_params[key], value, rtol=0, atol=atol)
        assert shapes == {i: {key: value.shape for key, value in state.items()} for i, state in found_states.items()}


@pytest.mark.parametrize("name", NAMES)
def test_ddp_stochastic_rounding(name: str, tmp_path: Path) -> None:
    """o15"""
    results = run(2, sharded.ddp, name, True, str(tmp_path))
    assert all(untouched for _, untouched, _ in results)
    for params, _, resumed in results:
        assert_same(params, results[0][0])
        assert_same(params, resumed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stochastic", [False, True])
def test_shard_along_columns(name: str, stochastic: bool) -> None:
    """o14: (64, 512) in two halves of 256 columns: whole blocks, so bits."""
    options = {"dtype": torch.bfloat16, "bf16_stochastic_round": stochastic}
    param, state = sharded.plain(name, (64, 512), options)
    for found_param, found_state in run(2, sharded.tensor_parallel, name, 1, (64, 512), options, None):
        assert torch.equal(param, found_param)
        assert_same(state, found_state)


@pytest.mark.parametrize("shape", [(64, 320), (64, 90)])
@pytest.mark.parametrize("name", NAMES)
def test_row_wise_tensor_parallel_to_one_process(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """o11: pieces of 160 and 45 columns are no whole blocks: gathered and quantized once. So the moments are one
    process's to the codes' error, which three steps pile up to 1 + 0.9 + 0.81 times on both sides: 2 x 2.7 x 0.13 of
    the largest for 4 bits, x 0.04 for the others, and a tenth of that on average."""
    path, options = str(tmp_path / "dcp"), {"min_quant_numel": 0}
    run(2, sharded.tensor_parallel, name, 1, shape, options, path)
    loaded, expected = sharded.plain(name, shape, options, path)[1], sharded.plain(name, shape, options)[1]
    assert loaded["step"] == 3
    fmt = FORMATS[getattr(halfbyte.optim, name).state_format]
    for moment in ("exp_avg", "exp_avg_sq"):
        left, right = (
            whole_values(torch.empty(shape), s[moment], s[moment + "_scale"], fmt, signed=moment == "exp_avg")
            for s in (loaded, expected)
        )
        bound = (0.7 if fmt.bits == 4 else 0.22) * right.abs().max()
        assert (left - right).abs().max() <= bound and (left - right).abs().mean() <= bound / 10


@pytest.mark.parametrize("name", NAMES)
def test_the_mesh_does_not_decide_what_is_quantized(name: str) -> None:
    """o3: (6, 1024) replicated twice, or sharded in two: the same state format, and the same bits."""
    options = {"bf16_stochastic_round": True, "dtype": torch.bfloat16}
    param, state = sharded.plain(name, (6, 1024), options)
    assert state["exp_avg"].dtype == torch.uint8
    cases = [((2, 1), "r0"), ((1, 2), "r0"), ((1, 2), "01"), ((2, 1), "01")]
    for sizes, placements in cases:
        for found in run(2, sharded.mesh_2d, name, sizes, placements, (6, 1024), options):
            assert torch.equal(param, found[0])
            assert_same(state, found[1])


@pytest.mark.parametrize("placements", ["r0", "r1", "01", "10", "00"])
def test_two_by_two_mesh(placements: str) -> None:
    options = {"bf16_stochastic_round": True, "dtype": torch.bfloat16}
    param, state = sharded.plain("AdamW8bit", (8, 1024), options)
    for found in run(4, sharded.mesh_2d, "AdamW8bit", (2, 2), placements, (8, 1024), options):
        assert torch.equal(param, found[0])
        assert_same(state, found[1])


@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_under_fsdp2(name: str, tmp_path: Path) -> None:
    """A 2 x 2 mesh whose column-wise layers are strided shards: given the same gradients, one process's bits."""
    options = {"bf16_stochastic_round": True}
    params, states = sharded.given_grads(name, options)
    for found_params, found_states, loaded in run(4, sharded.tensor_parallel_fsdp2, name, options, str(tmp_path / "x")):
        assert_same(params, found_params)
        assert_same(states, found_states)
        assert_same(states, loaded)


@pytest.mark.parametrize("name, asynchronous", [(name, False) for name in NAMES] + [("AdamW4bit", True)])
def test_dcp_on_other_world_sizes(name: str, asynchronous: bool, tmp_path: Path) -> None:
    """o11, o12: saved on 2 ranks, loaded on 1, 3 and 4. Rows of 512 are whole blocks: exact, and nothing is said."""
    path = str(tmp_path / "dcp")
    saved = run(2, sharded.dcp_save, name, path, 33, {}, asynchronous)[0]
    for world_size in (1, 4) if asynchronous else (1, 3, 4):
        for states, said in run(world_size, sharded.dcp_load, name, path, 33, {}):
            assert_same(saved, states)
            assert not said


@pytest.mark.parametrize("name", NAMES)
def test_dcp_converts_blocks_that_another_mesh_cuts(name: str, tmp_path: Path) -> None:
    """With everything quantized, (64, 33) is cut elsewhere on 4 ranks: converted once, with a warning. The same mesh is
    exact, and so is a plain process for what is aligned."""
    path = str(tmp_path / "dcp")
    options = {"min_quant_numel": 0}
    saved = run(2, sharded.dcp_save, name, path, 33, options, False)[0]
    for states, said in run(2, sharded.dcp_load, name, path, 33, options):
        assert_same(saved, states)
        assert not said
    for states, _ in run(4, sharded.dcp_load, name, path, 33, options):
        assert_same(saved[0], states[0])
    states, said = run(1, sharded.dcp_load, name, path, 33, options, False)[0]
    assert_same(saved[0], states[0])
    assert said


@pytest.mark.parametrize("from_rank_zero", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_full_state_dict(name: str, from_rank_zero: bool) -> None:
    """o12"""
    for states, loaded, lr in run(2, sharded.full_state_dict, name, from_rank_zero, not from_rank_zero):
        assert_same(states, loaded)
        assert lr == 1e-2


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_is_refused_before_training(use_orig_params: bool) -> None:
    """o10"""
    for said in run(2, sharded.fsdp1, use_orig_params):
        assert "fully_shard" in said


@pytest.mark.parametrize("name", NAMES)
def test_zero_redundancy_optimizer(name: str) -> None:
    params, _ = sharded.one_process(name, torch.float32, 33, {}, 3)
    for weights, continued, resumed in run(2, sharded.zero_redundancy, name):
        assert_same(params, weights)
        assert_same(continued, resumed)
