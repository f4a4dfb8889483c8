"""Models whose matrices are stored in 8 bits: calibration on texts, and the checkpoint that holds the result."""

from ftbert.quantization.e4m3 import LARGEST, best_scale, quantize_rows, rounded, to_e4m3
from ftbert.quantization.observe import Observed, observe
from ftbert.quantization.quantize import MOST_TEXTS, QuantizeResult, calibration_texts, quantize

__all__ = [
    "LARGEST", "MOST_TEXTS", "Observed", "QuantizeResult", "best_scale", "calibration_texts", "observe", "quantize",
    "quantize_rows", "rounded", "to_e4m3",
]  # fmt: skip
