"""A GGUF file as a source of dense weights: blocks dequantized, names and rotary order put back to Hugging Face's.

llama.cpp stores q and k of Llama models with the rows of each head interleaved (convert_hf_to_gguf.py `permute`); that
is undone here. Config and tokenizer are built by transformers from the file's own metadata. Its loader of the weights
is not used: it holds the whole model in fp32. Architectures whose weights llama.cpp changes in other ways (Gemma adds
one to its norms, experts are stacked) are refused.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfbyte.checkpoint.skeleton import Skeleton
from halfbyte.checkpoint.tensor_file import TensorSpec

# architecture -> are the rows of q and k permuted?
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False, "smollm3": False}


class GGUFSource:
    """`DenseSource` over a .gguf file. Tensors read as fp32; those that stay dense are kept in `dense_dtype`.

    memory  the vocabulary, and the tensor that is read; the file is mapped.
    raises  ImportError without the gguf package; ValueError for a damaged file or an architecture not listed above.
    """

    def __init__(self, path: Path, dense_dtype: torch.dtype = torch.bfloat16):
        self.dense_dtype: torch.dtype | None = dense_dtype
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ImportError(
                "Reading a .gguf file needs the gguf package; install it with: pip install 'halfbyte[train]'"
            ) from error
        self.path = path
        try:
            self._reader = GGUFReader(path)
            self._architecture = str(self._reader.fields["general.architecture"].contents())
        except (ValueError, KeyError, IndexError, OSError) as error:
            raise ValueError(f"{path}: not a readable GGUF file ({error}). Fetch it again.") from error
        if self._architecture not in ARCHITECTURES:
            raise ValueError(
                f"{path}: a GGUF of architecture {self._architecture}, expected {', '.join(ARCHITECTURES)}. Take the "
                "model's safetensors instead."
            )
        self.config = self._read_config()
        self._tensors = self._match()

    def keys(self) -> list[str]:
        return list(self._tensors)

    def spec(self, key: str) -> TensorSpec:
        return TensorSpec(torch.float32, tuple(int(size) for size in reversed(self._tensors[key].shape)))

    def read(self, key: str) -> Tensor:
        from gguf.quants import dequantize

        tensor = self._tensors[key]
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        values = values.reshape(self.spec(key).shape)
        if ARCHITECTURES[self._architecture] and ("attn_q." in tensor.name or "attn_k." in tensor.name):
            heads = self.config.num_attention_heads if "attn_q." in tensor.name else self.config.num_key_value_heads
            values = unpermute(values, heads)
        return values

    @property
    def size_bytes(self) -> int:
        return sum(int(tensor.n_bytes) for tensor in self._tensors.values())

    def config_json(self) -> dict[str, Any]:
        return {**self.config.to_diff_dict(), "dtype": str(self.dense_dtype).removeprefix("torch.")}

    def copy_sidecars(self, out: Path) -> None:
        from transformers import AutoTokenizer, GenerationConfig

        AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name).save_pretrained(out)
        GenerationConfig.from_model_config(self.config).save_pretrained(out)

    def close(self) -> None:
        self._tensors = {}

    def _read_config(self) -> Any:
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(self.path.parent, gguf_file=self.path.name)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{self.path}: transformers cannot read the model's settings from it ({error}). Take the model's "
                "safetensors instead."
            ) from error
        config.dtype = self.dense_dtype
        return config

    def _match(self) -> dict[str, Any]:
        """The model's parameter names -> the file's tensors; every one of each must find its partner."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        skeleton = Skeleton(self.config, self.path)
        self.config.architectures = [type(skeleton.model).__name__]
        architecture = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == self._architecture)
        names = get_tensor_name_map(architecture, self.config.num_hidden_layers)
        there = {tensor.name: tensor for tensor in self._reader.tensors}
        matched, missing = {}, []
        for parameter, _ in skeleton.model.named_parameters(remove_duplicate=False):
            if parameter in skeleton.model.all_tied_weights_keys:
                continue
            name = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
            if name in there:
                matched[parameter] = there.pop(name)
            else:
                missing.append(parameter)
        there.pop("rope_freqs.weight", None)  # scaled rotary frequencies: in the config already
        if missing or there:
            raise ValueError(
                f"{self.path}: the model needs {missing[:3]}, the file holds in addition {list(there)[:3]}. Take the "
                "model's safetensors instead."
            )
        return matched


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of a q or k weight [N, K] (or bias [N]): from pairs of rows to halves of each head."""
    rows = weight.shape[0] // num_heads
    return weight.reshape(num_heads, rows // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
