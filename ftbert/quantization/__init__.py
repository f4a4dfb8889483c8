"""Models whose matrices are stored in 8 bits: calibration on texts, and the checkpoint that holds the result."""

from ftbert.quantization.e4m3 import LARGEST, quantize_rows, rounded, to_e4m3
from ftbert.quantization.observe import Observed, observe
from ftbert.quantization.quantize import MOST_TEXTS, QuantizeResult, quantize

__all__ = [
    "LARGEST", "MOST_TEXTS", "Observed", "QuantizeResult", "observe", "quantize", "quantize_rows", "rounded", "to_e4m3",
]  # fmt: skip
