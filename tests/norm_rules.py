"""The norms that products may contain, as ops are told of them."""

from __future__ import annotations

from typing import NamedTuple

from ftbert.tuning import WITH_LAYERNORM, WITH_PRENORM


class Rule(NamedTuple):
    """How a norm is told to an op, and whether it has a beta."""

    kind: str = "layer"
    offset: float = 0.0
    rounding: str = "once"
    beta: bool = True


LAYER = [Rule(), Rule(beta=False)]
RMS = [Rule("rms", beta=False), Rule("rms", 0.0, "before_gamma", False), Rule("rms", 1.0, "once"), Rule("rms", -0.5, "before_gamma")]
RULES = {WITH_LAYERNORM: LAYER, WITH_PRENORM: LAYER + RMS}
