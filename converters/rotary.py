"""Rotary positions of a config.json of transformers, as `attention.rotary` of ours (docs/checkpoint.md).

What transformers' modeling_rope_utils.py computes, in float64. Without scaling the file says theta; scaled frequencies
are listed.
"""

from __future__ import annotations

import math
from typing import Any

from ftbert.checkpoint import shown, typed

Config = dict[str, Any]


def rope_of(document: Config) -> Config:
    """What config.json says on positions beside rope_theta; `rope_scaling` is the older name."""
    found = document.get("rope_scaling") or document.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise ValueError(f"rope_parameters: expected an object, got {shown(found)}")
    return found


def rotary(document: Config, rope: Config, theta: float, head_size: int, rules: tuple[str, ...] = ()) -> dict[str, Any]:
    """The entry `rotary` of a layer.

    rope: the object in `document` for this layer. theta: where neither rope nor config.json has one. rules: of scaling,
    which only this family has.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in (*_RULES, *rules):
        known = ", ".join((*_RULES, *rules))
        raise ValueError(f"rope_scaling of type {shown(kind)} is not supported: only {known}")
    part = rope.get("partial_rotary_factor", document.get("partial_rotary_factor"))
    if part is not None and part != 1:
        raise ValueError(f"partial_rotary_factor {shown(part)} is not supported: transformers turns whole heads here")
    base = rope.get("rope_theta", document.get("rope_theta", theta))
    base = float(typed("float", "rope_theta", base))
    if not 0 < base < 1e15:
        raise ValueError(f"rope_theta: expected a number above 0 and below 1e15, got {base}")
    return {"theta": base} if kind == "default" else _SCALED[kind](_Rope(document, rope, base, head_size))


class _Rope:
    """One rope object with what its rule looks up."""

    def __init__(self, document: Config, rope: Config, theta: float, head_size: int) -> None:
        self.document, self.rope, self.theta, self.dims = document, rope, theta, head_size

    def number(self, key: str, default: float | None = None) -> float:
        value = self.rope.get(key)
        value = float(typed("float", f"rope_parameters.{key}", default if value is None else value))
        if not 0 < value < 1e12:
            raise ValueError(f"rope_parameters.{key}: expected a number above 0, got {value}")
        return value

    @property
    def trained(self) -> float:
        """The longest sequence before scaling."""
        rows = self.document.get("max_position_embeddings")
        own = self.number("original_max_position_embeddings", rows)
        return float(typed("float", "original_max_position_embeddings",
                           self.document.get("original_max_position_embeddings") or own))  # fmt: skip

    def plain(self, theta: float | None = None) -> list[float]:
        return [(theta or self.theta) ** (-i / self.dims) for i in range(0, self.dims, 2)]


def _linear(one: _Rope) -> dict[str, Any]:
    factor = one.number("factor")
    return {"frequencies": [frequency / factor for frequency in one.plain()]}


def _llama3(one: _Rope) -> dict[str, Any]:
    factor, low, high = (one.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))

    def scaled(frequency: float) -> float:
        turns = one.trained * frequency / (2 * math.pi)  # within the trained length
        if turns > high or high == low:
            return frequency if turns > low else frequency / factor
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - share) * frequency / factor + share * frequency

    return {"frequencies": [scaled(frequency) for frequency in one.plain()]}


def _yarn(one: _Rope) -> dict[str, Any]:
    rope, dims = one.rope, one.dims
    longest = typed("float", "max_position_embeddings", one.document.get("max_position_embeddings", 0))
    factor = one.number("factor", longest / one.trained)

    def stretch(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    amplitude = stretch()
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        amplitude = stretch(one.number("mscale")) / stretch(one.number("mscale_all_dim"))
    if rope.get("attention_factor") is not None:
        amplitude = one.number("attention_factor")

    def pair(turns: float) -> float:
        """The pair that turns so often within the trained length."""
        return dims * math.log(one.trained / (turns * 2 * math.pi)) / (2 * math.log(one.theta))

    if one.theta == 1:
        raise ValueError("rope_theta 1 with rope_scaling of type 'yarn' is not supported")
    low, high = pair(one.number("beta_fast", 32)), pair(one.number("beta_slow", 1))
    if rope_of(one.document).get("truncate", True):  # of the outer object, as transformers reads it
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low or 0.001
    shares = [min(max((i - low) / width, 0.0), 1.0) for i in range(dims // 2)]  # of interpolation
    made = [(1 - share) * plain + share * plain / factor for plain, share in zip(one.plain(), shares, strict=True)]
    return {"frequencies": made, "amplitude": amplitude}


def _dynamic(one: _Rope) -> dict[str, Any]:
    trained = typed("int", "max_position_embeddings", one.document.get("max_position_embeddings", 0))
    return {"theta": one.theta, "stretch": {"factor": one.number("factor"), "trained": trained}}


def _ntk(one: _Rope) -> dict[str, Any]:
    """Of the GTE models' own code (model type "new"): theta and frequencies scaled, at any length."""
    if one.rope.get("mixed_b") is not None:
        raise ValueError("rope_scaling with mixed_b is not supported")
    factor = one.number("factor")
    return {"frequencies": [f / factor ** (2 / one.dims) for f in one.plain(one.theta * factor)]}


_SCALED = {"linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "ntk": _ntk}
_RULES = ("default", "linear", "dynamic", "llama3", "yarn")
