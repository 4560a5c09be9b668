"""How a layer's input is treated before the product: not at all (None), or quantized to NVFP4 as well."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ActivationQuant:
    """Quantize the input to NVFP4 (W4A4).

    scale  tensor scale of the activations (it multiplies: value = code * block scale * scale), fixed at calibration;
           None takes it from each batch, largest magnitude / 2688.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not 0 < self.scale < float("inf"):
            raise ValueError(
                f"the activation scale must be finite and positive, got {self.scale}; leave it out (None) to take it "
                "from each batch"
            )
