"""A tiny Llama on a packed base with a LoRA adapter, and the batches it is trained on."""

import peft
import torch
import transformers.trainer  # noqa: F401 - imported here, hence once for all workers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

from halfbyte.nvfp4.convert import replace_module
from halfbyte.nvfp4.linear import NVFP4Linear

VOCABULARY, LENGTH = 64, 12
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_base(
    seed: int = 0, dtype: torch.dtype = torch.float32, packed: bool = True, **changes: int
) -> LlamaForCausalLM:
    """Two layers, width 32, GQA; every projection packed, embeddings, norms and head dense."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    config = LlamaConfig(**settings | changes, attention_bias=True, use_cache=False)
    model = LlamaForCausalLM(config).to(dtype)
    for fqn, module in list(model.named_modules()):
        if packed and fqn.split(".")[-1] in PROJECTIONS:
            assert isinstance(module, nn.Linear)
            replace_module(model, fqn, NVFP4Linear.from_linear(module))
    return model.requires_grad_(False)


def tiny_lora(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    adapter_seed: int = 0,
    dropout: float = 0.0,
    packed: bool = True,
    device: str = "cpu",
    targets: list[str] = PROJECTIONS,
    **changes: int,
) -> peft.PeftModel:
    """The tiny base with an adapter on every projection whose B is not zero, so that A has gradients at once."""
    base = tiny_base(seed, dtype, packed, **changes).to(device)
    torch.manual_seed(1000 + adapter_seed)
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=targets)
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
        if "lora_B" in name and device != "meta":
            nn.init.normal_(parameter, std=0.05)
    return model


def batch(step: int, part: int, rows: int = 2) -> Tensor:
    """Tokens [rows, LENGTH] of one micro-batch; the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(7919 * step + part)
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of a causal language model over the micro-batch."""
    tokens = tokens.to(next(model.parameters()).device)
    return model(input_ids=tokens, labels=tokens).loss


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by name, as they are now; the wrapper's prefix removed."""
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
