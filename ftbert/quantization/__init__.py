"""Models whose matrices are stored in 8 bits: calibration on texts, and the checkpoint that holds the result."""

from ftbert.quantization.cache import cached_at, in_fp8, live_in_fp8
from ftbert.quantization.e4m3 import LARGEST, best_scale, quantize_rows, rounded, to_e4m3
from ftbert.quantization.observe import Observed, observe
from ftbert.quantization.quantize import MOST_TEXTS, QuantizeResult, calibration_texts, quantize
from ftbert.quantization.select import MEAN_COSINE, MOST_LEFT_OUT, WORST_COSINE
from ftbert.quantization.simulate import altered

__all__ = [
    "LARGEST", "MEAN_COSINE", "MOST_LEFT_OUT", "MOST_TEXTS", "WORST_COSINE", "Observed", "QuantizeResult", "altered",
    "best_scale", "cached_at", "calibration_texts", "in_fp8", "live_in_fp8", "observe", "quantize", "quantize_rows",
    "rounded", "to_e4m3",
]  # fmt: skip
