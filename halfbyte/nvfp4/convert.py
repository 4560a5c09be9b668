"""Finding and exchanging layers of a model by name."""

from torch import nn

from halfbyte.nvfp4.linear import NVFP4Linear


def nvfp4_modules(model: nn.Module) -> dict[str, NVFP4Linear]:
    """All NVFP4 layers of a model by fully qualified name, those wrapped by PEFT (`...base_layer`) included."""
    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, NVFP4Linear)}


def replace_module(model: nn.Module, fqn: str, new: nn.Module) -> nn.Module:
    """Put `new` where `fqn` is, and return the module that was there. AttributeError when there is none."""
    parent_name, _, child = fqn.rpartition(".")
    parent = model.get_submodule(parent_name)
    old = parent.get_submodule(child)
    parent.add_module(child, new)
    return old
