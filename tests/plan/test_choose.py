"""Engines, network, disk, and the choice."""

from dataclasses import replace

import pytest

from halfbyte.plan.choose import CUDA_CONTEXT, MARGIN, choose, engines, options, remedy
from halfbyte.plan.disk import plan_disk
from halfbyte.plan.engine import Engine
from halfbyte.plan.memory import plan_memory
from halfbyte.plan.network import network_bytes
from halfbyte.plan.settings import Settings
from halfbyte.plan.table import yaml_lines
from tests.plan.recorded import LLAMA_8B, shape

S = Settings(gradient_checkpointing=True)


@pytest.fixture(scope="module")
def model():
    return shape(LLAMA_8B, S)


def test_sharded_ranks_add_up_to_the_whole(model) -> None:
    one = plan_memory(model, S, Engine())
    for engine, base, states in (
        (Engine("ddp", 4), 1, 1),
        (Engine("zero1", 4), 1, 4),
        (Engine("zero2", 4), 1, 4),
        (Engine("zero3", 4), 4, 4),
        (Engine("fsdp2", 4), 4, 4),
        (Engine("fsdp2", 8, replicas=2), 4, 4),
    ):
        found = plan_memory(model, S, engine)
        assert found.base == pytest.approx(one.base / base), engine.name
        assert found.optimizer == pytest.approx(one.optimizer / states), engine.name
    assert plan_memory(model, S, Engine("fsdp2", 4, reshard=False)).gathered > one.base


def test_network_by_hand(model) -> None:
    """Llama 8B, r = 16: 41.9e6 factors in fp32, base 6.03 GB."""
    grads, base = 4 * model.adapter_params, model.base_bytes(2)
    assert network_bytes(model, S, Engine()) == 0
    assert network_bytes(model, S, Engine("ddp", 2)) == grads
    assert network_bytes(model, S, Engine("zero2", 4)) == 1.5 * grads
    twice = replace(S, gradient_accumulation_steps=2)
    assert network_bytes(model, twice, Engine("ddp", 2)) == grads
    assert network_bytes(model, twice, Engine("fsdp2", 4)) == pytest.approx(2 * 0.75 * (2 * (base + grads) + grads))
    # TP 2: o and down forward, and again in the recomputation; q, k, v, gate, up backward; seven whole factors, fp32
    values = 32 * 2048 * (2 * 2 * 4096 + 5 * 4096)
    assert network_bytes(model, S, Engine("one", 1, 2)) == 2 * values + 32 * 4 * 16 * 7 * 4096


def test_disk(model) -> None:
    disk = plan_disk(model, replace(S, optimizer="adamw8bit"))
    assert disk.merged_bf16 == 2 * 8_030_261_248
    assert disk.checkpoint == pytest.approx(model.adapter_params * (4 + 2.125))


def test_products_for_64_gpus(model) -> None:
    names = [engine.name for engine in engines(model, 64)]
    assert names[:3] == ["DDP 64", "HSDP, 8 x 8", "FSDP2 64"]
    assert {"ZeRO-1 64", "ZeRO-2 64", "ZeRO-3 64", "TP 2 x DDP 32", "TP 8 x DDP 8"} < set(names)
    assert [engine.name for engine in engines(model, 1)] == ["one process"]
    assert "TP 2" in [engine.name for engine in engines(model, 2)]


@pytest.mark.parametrize(
    ("gpus", "memory", "batch", "taken"),
    [
        (1, 141e9, 1, ("one process", False, 1)),
        (1, 24e9, 1, ("one process", False, 1)),
        (1, 24e9, 4, ("one process", True, 4)),
        (2, 24e9, 16, ("DDP 2", True, 8)),
        (2, 24e9, 64, ("DDP 2", True, 8)),
        (2, 8e9, 1, ("FSDP2 2", True, 1)),
    ],
)
def test_the_first_that_fits(model, gpus, memory, batch, taken) -> None:
    """Nothing computed twice if it fits, then checkpointing, then a smaller batch, and sharding where that fails."""
    found = options(model, Settings(micro_batch_size=batch), gpus, memory)
    chosen = choose(found)
    assert chosen is not None
    settings = chosen.settings
    assert (chosen.engine.name, settings.gradient_checkpointing, settings.micro_batch_size) == taken
    assert settings.micro_batch_size * settings.gradient_accumulation_steps == batch
    peak = plan_memory(model, settings, chosen.engine).peak
    assert peak * MARGIN + CUDA_CONTEXT <= memory
    for each in found:
        largest = replace(each.settings, micro_batch_size=2 * (each.largest_batch or 0) or 1)
        assert plan_memory(model, largest, each.engine).peak * MARGIN + CUDA_CONTEXT > memory


def test_nothing_fits(model) -> None:
    assert choose(options(model, S, 1, 5e9)) is None
    text = remedy(model, S, 1, 5e9)
    assert "micro_batch_size 1" in text and "fsdp: true" in text
    assert choose(options(model, S, 1, None)) is None


def test_yaml_is_what_the_training_config_takes(model) -> None:
    """Every engine's lines, read back by the config."""
    import yaml

    from halfbyte.train.config import build_config
    from halfbyte.train.plan import engine_of, settings_of

    for each in options(model, S, 16, 80e9):
        if each.engine.kind.startswith("zero"):
            continue  # names a file of DeepSpeed's
        values = yaml.safe_load("\n".join(yaml_lines(each)))
        config = build_config({"base_model": "b", "datasets": ["d.jsonl"], "output_dir": "o", **values})
        assert engine_of(config, 16) == each.engine
        assert settings_of(config, "cuda") == each.settings
