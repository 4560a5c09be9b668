"""Packed samples must not see each other; an attention that lets them is found by what it computes."""

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from halfbyte.train.packing import check_packing, packing_leak
from tests.train import tiny


def model(attention: str):
    torch.manual_seed(0)
    config = tiny.model_config(attn_implementation=attention)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def blind_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Causal, and blind to every mask, as a kernel that only knows `is_causal` is."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_usual_attentions_keep_samples_apart(attention) -> None:
    assert packing_leak(model(attention), pad_token_id=0) < 1e-4
    check_packing(model(attention), pad_token_id=0)


def test_an_attention_blind_to_the_samples_is_refused() -> None:
    AttentionInterface.register("blind_for_test", blind_attention)
    refused = model("blind_for_test")
    with pytest.raises(
        ValueError, match="'blind_for_test' lets packed samples see each other.*sample_packing to false"
    ):
        check_packing(refused, pad_token_id=0)
    assert not refused.training
