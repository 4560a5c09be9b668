"""A tokenizer and a Llama small enough for tests, and the templates whose masks are tricky."""

from pathlib import Path
from typing import Any

# SmolLM2's way: ChatML, a default system prompt, no {% generation %} markers.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3's way: what an earlier answer thought is dropped once another turn follows.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ 'hm. ' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["user assistant system What is the sum of two numbers? It is their total.", "a b c the of and to in"]


def tokenizer(chat_template: str | None = CHATML) -> Any:
    """A byte-level BPE of a few hundred tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = chat_template
    return made


def model_config(**changes: Any) -> Any:
    """Llama: two layers, 64 wide, tied embeddings, 256 positions."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **{
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **changes,
        }
    )


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    import json

    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat_rows(count: int) -> list[dict[str, Any]]:
    """Conversations of different lengths, a few words each."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} and {number}?"},
                {"role": "assistant", "content": "the sum " * (1 + number % 4) + str(2 * number)},
            ]
        }
        for number in range(count)
    ]


def save_dense(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A dense fp32 model with its tokenizer, as transformers saves them."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(model_config(**changes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_base(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """The same in NVFP4, by `halfbyte quantize`."""
    from halfbyte.checkpoint.quantize import quantize_checkpoint

    quantize_checkpoint(save_dense(folder.with_name(folder.name + "-dense"), seed=seed, **changes), folder)
    return folder
