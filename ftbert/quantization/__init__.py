"""Models whose matrices are stored in 8 bits: calibration on texts, and the checkpoint that holds the result."""

from ftbert.quantization.cache import cached_at, in_8_bits, live_in_8_bits
from ftbert.quantization.e4m3 import LARGEST, best_scale, quantize_rows, rounded, to_e4m3
from ftbert.quantization.int8 import LARGEST_INT8, int8_rows, int8_table, smoothing, uint8_tokens
from ftbert.quantization.observe import Observed, observe
from ftbert.quantization.q8_0 import convert_to_q8_0, in_q8_0, q8_0_blocks, read_q8_0
from ftbert.quantization.quantize import MOST_TEXTS, QuantizeResult, calibration_texts, quantize
from ftbert.quantization.select import MOST_LEFT_OUT, altered
from ftbert.quantization.stored_type import Limits
from ftbert.quantization.stored_types import STORED_TYPES, stored_type

__all__ = [
    "LARGEST", "LARGEST_INT8", "MOST_LEFT_OUT", "MOST_TEXTS", "STORED_TYPES", "Limits", "Observed", "QuantizeResult",
    "altered", "best_scale", "cached_at", "calibration_texts", "convert_to_q8_0", "in_8_bits", "in_q8_0", "int8_rows",
    "int8_table", "live_in_8_bits", "observe", "q8_0_blocks", "quantize", "quantize_rows", "read_q8_0", "rounded",
    "smoothing", "stored_type", "to_e4m3", "uint8_tokens",
]  # fmt: skip
