"""Why `save_pretrained` of a model from `load_model` writes nothing.

transformers would write the layers' raw components beside a config that names no format: a folder that looks like a
checkpoint, in which no loader finds a weight and `from_pretrained` draws the linears at random. It asks the model's
`hf_quantizer` before it writes; ours refuses, and says what to do. Writing NVFP4 from there was the alternative: the
config would have to name a format for as long as the model lives, and trainers take such a model for somebody else's.
Adapters are saved as ever, by PEFT and by transformers' own `add_adapter`.
"""

from typing import Any

from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin


class SaveRefused(HfQuantizer):
    """Lets everything pass but a save of the base's own weights."""

    def __init__(self) -> None:
        super().__init__(QuantizationConfigMixin(quant_method="nvfp4, by halfbyte"))  # type: ignore[arg-type]

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, str]]:
        """Called by `save_pretrained` before it writes a file; ValueError unless it is going to save an adapter."""
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}
        raise ValueError(
            "save_pretrained cannot write a model whose weights are NVFP4: no loader knows its layers' raw components. "
            "Save the adapter instead (PEFT's save_pretrained or halfbyte.lora.save_adapter) and write base and "
            "adapter as one model with `halfbyte merge BASE ADAPTER OUT`; an unchanged base is copied by "
            "`halfbyte export`. To train dense parts in full, name them in LoraConfig(modules_to_save=...)."
        )

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True
