"""A layer's name in the base model, whatever has been wrapped around it since.

The dither's offsets and an adapter's metadata go by this name, so trainer, writer and every engine must agree on it.
"""

from torch import nn

from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.linear import NVFP4Linear

PREFIXES = ("base_model.model.", "module.", "_orig_mod.")  # PEFT, DDP and DeepSpeed, torch.compile
INNER = ("base_layer", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def base_name(fqn: str) -> str:
    """ "base_model.model.model.layers.0.mlp.up_proj.base_layer" -> "model.layers.0.mlp.up_proj"."""
    stripped = True
    while stripped:
        stripped = False
        for prefix in PREFIXES:
            if fqn.startswith(prefix):
                fqn, stripped = fqn[len(prefix) :], True
    return ".".join(part for part in fqn.split(".") if part not in INNER)


def adapted_layers(model: nn.Module) -> list[str]:
    """Names, in the base model, of the NVFP4 layers that have an adapter over them."""
    return [base_name(fqn) for fqn in nvfp4_modules(model) if fqn.endswith(".base_layer")]


def base_layers(model: nn.Module) -> dict[str, NVFP4Linear]:
    """NVFP4 layers of a model, wrapped or not, by their names in the base model."""
    return {base_name(fqn): module for fqn, module in nvfp4_modules(model).items()}
