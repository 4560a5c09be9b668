"""What `NVFP4Linear.weight` returns: a tensor that reads like the dense weight and refuses to be written.

PEFT, transformers and users read `layer.weight`: usually its device, dtype and shape, sometimes its values. They also
write it: PEFT's merge adds the adapter into it, PiSSA and OLoRA replace it by a residual. On a temporary such a write
would be lost without a word, and the adapter with it. So this is a wrapper tensor that holds no values: metadata costs
nothing, an operation dequantizes, and an operation that would write raises. Views of it are of the same kind.

Rejected: a plain dequantized tensor (writes are lost), one with `requires_grad` (in-place writes under no_grad and
`.data` pass), and writing back through the quantizer (nearest rounding erases an ordinary adapter).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Decode = Callable[[], Tensor]  # computes the dense values
REFUSAL = (
    "The weight of an NVFP4 layer cannot be written: it is decoded from 4-bit codes on every access, so the change "
    "would be lost. To merge a LoRA adapter, use `halfbyte merge` (or halfbyte.lora.merged_parts), which rounds "
    "it into the codes; initializations that rewrite the base (pissa, olora, loftq, corda, lora_ga) need a dense base: "
    'use init_lora_weights=True, "gaussian", "orthogonal" or "eva".'
)


class FrozenWeightError(RuntimeError):
    """A write to the decoded weight of an NVFP4 layer."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"{REFUSAL} (refused: {operation})")


class FrozenWeight(Tensor):
    """A read-only [out, in] tensor whose values are computed when an operation asks for them."""

    _decode: Decode

    @staticmethod
    def __new__(cls, decode: Decode, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "FrozenWeight":
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]

    def __init__(self, decode: Decode, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._decode = decode

    @classmethod
    def of(cls, dense: Tensor) -> "FrozenWeight":
        """A read-only wrapper around values that are already there, e.g. a view."""
        return cls(lambda: dense, dense.shape, dense.dtype, dense.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FrozenWeight(shape={list(self.shape)}, dtype={self.dtype}, device={self.device}, decoded from NVFP4)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._decode().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._decode().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        array = self._decode().numpy(force=force)
        array.setflags(write=False)
        return array

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise FrozenWeightError("assignment to .data")
        if func == torch.Tensor.requires_grad_ and (kwargs or {}).get("requires_grad", args[1] if args[1:] else True):
            raise FrozenWeightError("requires_grad_()")
        if func == torch.Tensor.requires_grad.__set__ and args[1]:  # type: ignore[attr-defined]
            raise FrozenWeightError("requires_grad = True")
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_writes(func, args, kwargs)
        if func is torch.ops.aten.detach.default:
            source = args[0]
            return cls(source._decode, source.shape, source.dtype, source.device)
        result = func(
            *tree_map_only(FrozenWeight, FrozenWeight._decode_of, args),
            **tree_map_only(FrozenWeight, FrozenWeight._decode_of, kwargs),
        )
        if any(value.alias_info is not None for value in func._schema.returns):
            return tree_map_only(Tensor, cls.of, result)
        return result

    @staticmethod
    def _decode_of(weight: "FrozenWeight") -> Tensor:
        return weight._decode()


def refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """FrozenWeightError when the operator's schema says it writes into an argument that is a FrozenWeight."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, FrozenWeight) for item in values):
            raise FrozenWeightError(func._schema.name)
