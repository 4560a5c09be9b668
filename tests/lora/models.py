"""Small models over NVFP4 layers, for the tests of adapters."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from halfbyte.nvfp4 import ActivationQuant, NVFP4Linear, nvfp4_modules, replace_module


class Mlp(nn.Module):
    """in 32 -> up 64 -> relu -> down 32 -> head 8; the head stays dense."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=bias)
        self.down = nn.Linear(64, 32, bias=bias)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.up(x))))


def nvfp4_mlp(
    activation: ActivationQuant | None = None, dtype: torch.dtype = torch.float32, bias: bool = True
) -> nn.Module:
    """The Mlp, `up` and `down` in NVFP4; the same weights on every call."""
    torch.manual_seed(0)
    model = Mlp(bias).to(dtype)
    for name in ("up", "down"):
        layer = NVFP4Linear.from_linear(model.get_submodule(name), name=name, activation=activation)
        replace_module(model, name, layer)
    return model.requires_grad_(False)


def nvfp4_llama(**settings: Any) -> nn.Module:
    """A Llama of two layers with random weights, all linear layers but the head in NVFP4."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, **settings))
    for fqn, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and fqn != "lm_head":
            replace_module(model, fqn, NVFP4Linear.from_linear(module, name=fqn))
    return model.requires_grad_(False)


def with_lora(model: nn.Module, *, trained: bool = True, **settings: Any) -> Any:
    """A PeftModel with rank-4 LoRA on `up` and `down`; `trained` fills B, so that the adapter changes something."""
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["up", "down"]} | settings
    torch.manual_seed(1)
    peft_model = get_peft_model(model, LoraConfig(**config))
    if trained:
        fill(peft_model)
    return peft_model


def fill(model: nn.Module, size: float = 0.05) -> None:
    """Random values in every lora_B, the same on every call."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * size)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the trained parameters, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def base_bytes(model: nn.Module) -> list[bytes]:
    """The components of all NVFP4 layers."""
    return [
        getattr(layer, component).numpy().tobytes()
        for layer in nvfp4_modules(model).values()
        for component in ("qdata", "scale", "global_scale")
    ]
