"""ftbert: BERT-family encoders at the hardware limit."""

from __future__ import annotations

from ftbert.config import EncoderConfig
from ftbert.model import Model, load

__version__ = "0.1.0"
__all__ = ["EncoderConfig", "Model", "__version__", "load"]
