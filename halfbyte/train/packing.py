"""Does the model keep packed samples apart? Asked of the model itself, not of a list of attention names.

Several samples in one sequence are told apart by their position ids (and sequence lengths) alone. Whether an attention
honours them depends on the implementation, the model and the library version; one that does not trains every sample on
its neighbours' words, and the loss looks fine. So two short samples are run packed, and the second also alone and as
a plain continuation of the first: packed must be much nearer to alone than the continuation is. A ratio needs no
tolerance per dtype or activation quantizer.
"""

from typing import Any

import torch
from torch import Tensor

LENGTH = 8
NEAR = 0.25  # of the continuation's distance; measured: 1e-6 (sdpa, fp32) when kept apart, 1.0 when not


def check_packing(model: Any, pad_token_id: int) -> None:
    """ValueError when the model lets packed samples see each other."""
    leak = packing_leak(model, pad_token_id)
    if leak > NEAR:
        raise ValueError(
            f"sample_packing: attention {model.config._attn_implementation!r} lets packed samples see each other "
            f"(measured: {leak:.0%} of what no separation at all would do); set sample_packing to false, or "
            "attn_implementation to flash_attention_2 or sdpa"
        )


@torch.no_grad()
def packing_leak(model: Any, pad_token_id: int) -> float:
    """How far the second of two packed samples is from being alone; 0 is apart, 1 is an ordinary continuation."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    vocabulary = model.config.get_text_config().vocab_size
    first, second = ([(7 * place + start) % vocabulary for place in range(LENGTH)] for start in (1, 5))
    collate = DataCollatorForLanguageModeling(pad_token_id=pad_token_id, padding_free=True)
    packed = {"input_ids": first + second, "seq_lengths": [LENGTH, LENGTH]}
    continued = {"input_ids": first + second, "seq_lengths": [2 * LENGTH]}
    alone = _hidden(model, collate([{"input_ids": second, "seq_lengths": [LENGTH]}]))
    apart = (_hidden(model, collate([packed])) - alone).norm()
    together = (_hidden(model, collate([continued])) - alone).norm()
    return float(apart / together)


def _hidden(model: Any, batch: dict[str, Any]) -> Tensor:
    """Logits of the last LENGTH tokens, in fp32."""
    training, device = model.training, next(model.parameters()).device
    inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    inputs.pop("labels")
    model.eval()
    try:
        return model(**inputs, use_cache=False).logits[0, -LENGTH:].float()
    finally:
        model.train(training)
