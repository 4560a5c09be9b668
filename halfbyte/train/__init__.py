"""One training run: `train(build_config({...}))`.

`train` is resolved on first use, so that reading a config does not import transformers.
"""

from typing import TYPE_CHECKING, Any

from halfbyte.train.config import DatasetConfig, TrainConfig, build_config, load_config

if TYPE_CHECKING:
    from halfbyte.train.trainer import RunResult, train

__all__ = ["DatasetConfig", "RunResult", "TrainConfig", "build_config", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name in ("train", "RunResult"):
        from halfbyte.train import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'halfbyte.train' has no attribute {name!r}")
