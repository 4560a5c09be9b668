"""The 4-bit format NVFP4: its quantizer, its frozen layer, the product and its gradient."""

from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.convert import nvfp4_modules, replace_module
from halfbyte.nvfp4.dequantize import dequantize
from halfbyte.nvfp4.format import BLOCK_SIZE, NVFP4Parts
from halfbyte.nvfp4.linear import NVFP4Linear
from halfbyte.nvfp4.quantize import quantize
from halfbyte.nvfp4.scaling import global_scale_for

__all__ = [
    "BLOCK_SIZE",
    "ActivationQuant",
    "NVFP4Linear",
    "NVFP4Parts",
    "dequantize",
    "global_scale_for",
    "nvfp4_modules",
    "quantize",
    "replace_module",
]
