"""A frozen NVFP4 layer that every engine takes for what it is: an `nn.Linear` with three ordinary uint8 parameters.

| parameter      | shape       | bytes mean                                                                     |
|----------------|-------------|--------------------------------------------------------------------------------|
| `qdata`        | [N, K/2]    | two E2M1 codes, even column in the low nibble                                  |
| `scale`        | [N, K/16]   | E4M3; as uint8, for float8 is cast by mixed-precision policies, refused by gloo |
| `global_scale` | [4]         | one fp32; as bytes, for `model.bfloat16()` must not round it                   |

Nothing here has a floating dtype, so nothing upstream can cast, round or average it. They are parameters, not buffers:
FSDP2 and ZeRO shard parameters. torchao's tensor subclass is rejected: DDP, FSDP2, ZeRO and TP all fail on it.
Memory: 4.5 bits per weight. Price: the weight is decoded in forward and again in backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.nvfp4 import matmul
from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.dequantize import dequantize
from halfbyte.nvfp4.format import (
    BLOCK_SIZE,
    NVFP4Parts,
    bytes_to_float,
    check_in_features,
    check_parts,
    float_to_bytes,
)
from halfbyte.nvfp4.frozen_weight import FrozenWeight, FrozenWeightError
from halfbyte.nvfp4.quantize import quantize

COMPONENTS = ("qdata", "scale", "global_scale")


class NVFP4Linear(nn.Linear):
    """y = x @ W^T + bias with W in NVFP4, frozen. Starts as a weight of zeros; see `from_parts` and `from_linear`.

    dtype       the dtype in which `.weight` reads, and which `.to(dtype)` changes as it would a dense layer's.
    activation  None for a weight-only layer, or how the input is quantized.
    """

    qdata: nn.Parameter
    scale: nn.Parameter
    global_scale: nn.Parameter
    dtype: torch.dtype
    activation: ActivationQuant | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        activation: ActivationQuant | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not nn.Linear's: it would make a dense weight
        check_in_features(in_features, type(self).__name__)
        self.in_features, self.out_features = in_features, out_features
        self.dtype = dtype or torch.get_default_dtype()
        self.activation = activation
        for component, shape in component_shapes(out_features, in_features).items():
            self.register_parameter(component, frozen_bytes(torch.zeros(shape, dtype=torch.uint8, device=device)))
        zeros = torch.zeros(out_features, dtype=self.dtype, device=device) if bias else None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros, requires_grad=False))

    @classmethod
    def from_parts(
        cls,
        parts: NVFP4Parts,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        activation: ActivationQuant | None = None,
        name: str = "weight",
    ) -> "NVFP4Linear":
        """A layer that holds these components (shared, not copied, where they are contiguous)."""
        check_parts(parts, name)
        n, k = parts.shape
        layer = cls(k, n, device="meta", dtype=dtype, activation=activation)
        layer.qdata = frozen_bytes(parts.qdata.contiguous())
        layer.scale = frozen_bytes(parts.scale.contiguous().view(torch.uint8))
        layer.global_scale = frozen_bytes(float_to_bytes(parts.global_scale))
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return layer

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        global_scale: Tensor | None = None,
        name: str = "weight",
        scales: str = "max",
        activation: ActivationQuant | None = None,
    ) -> "NVFP4Linear":
        """Quantize a dense layer (see `quantize`); its bias is kept as it is."""
        weight = linear.weight.detach()
        parts = quantize(weight, global_scale=global_scale, name=name, scales=scales)
        return cls.from_parts(parts, linear.bias, dtype=weight.dtype, activation=activation, name=name)

    def parts(self) -> NVFP4Parts:
        """The components with the types that their bits mean; views, not copies."""
        return NVFP4Parts(
            self.qdata.detach(),
            self.scale.detach().view(torch.float8_e4m3fn),
            bytes_to_float(self.global_scale.detach()),
        )

    @property
    def held_shape(self) -> tuple[int, int]:
        """[rows, columns] that this module holds: all of them, except where a subclass holds a part."""
        return self.out_features, self.in_features

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The decoded weight [out, in]: free to ask for its shape, dtype, device; decoded when used; read-only."""
        return FrozenWeight(
            lambda: dequantize(self.parts(), self.dtype),
            self.held_shape,
            self.dtype,
            self.qdata.device,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise FrozenWeightError("assignment to .weight")
        super().__setattr__(name, value)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out] in the input's dtype."""
        return matmul.linear(input, self.qdata, self.scale, self.global_scale, self.bias, self.activation)

    def reset_parameters(self) -> None:
        """Refused: a frozen base is loaded, never drawn at random."""
        raise RuntimeError("an NVFP4 layer cannot be initialized at random; load its components (from_parts) instead")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "NVFP4Linear":
        # `.to(dtype)`, `.half()`, ... leave uint8 alone; an empty tensor tells what they do to a floating weight.
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for component in COMPONENTS:
            found = state_dict.get(prefix + component)
            if found is not None and found.dtype != torch.uint8:  # copy_ would convert the values, not the bits
                error_msgs.append(f"{prefix}{component}: found {found.dtype}, expected the raw bytes as torch.uint8")
                return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return text + (f", activation={self.activation}" if self.activation else "")


def component_shapes(out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the three uint8 parameters."""
    return {
        "qdata": (out_features, in_features // 2),
        "scale": (out_features, in_features // BLOCK_SIZE),
        "global_scale": (4,),
    }


def frozen_bytes(raw: Tensor) -> nn.Parameter:
    """A frozen parameter over uint8 bytes."""
    return nn.Parameter(raw.detach(), requires_grad=False)
