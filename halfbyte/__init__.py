"""halfbyte: adapters on 4-bit (NVFP4) language models, and low-bit AdamW.

`halfbyte.load_model` is resolved on first use, so that `import halfbyte.optim` and `halfbyte --help` stay light.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.checkpoint.load import load_model

__all__ = ["__version__", "load_model"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "load_model":
        from halfbyte.checkpoint.load import load_model

        return load_model
    raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
