"""Rotary positions of a GGUF file as transformers' rope_parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftbert.checkpoint import shown
from ftbert.converters.gguf_metadata import Metadata

_FACTORS = "rope_freqs.weight"
_TOLERANCE = 1e-5  # of a factor, which is stored as float32
# The factor beside yarn's frequencies is llama.cpp's 0.1 ln(factor) + 1, as transformers', where the file has none.
_YARN = {
    "original_max_position_embeddings": "original_context_length", "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow",
}  # fmt: skip


def rope(said: Metadata, head_size: int, theta: float) -> dict[str, Any]:
    """theta: where the file has none, as llama.cpp's converter leaves out a default of the model's own config. A file
    that says no type of scaling means linear."""
    base = said.number("rope.freq_base", theta)
    kind, factor = said.text("rope.scaling.type", "linear"), _factor(said)
    amplitude = said.number("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{said.arch}.rope.scaling.type {shown(kind)} is not supported: only none, linear, yarn")
    if (mixed := said.number("rope.scaling.yarn_ext_factor", -1.0)) not in (-1, 1 if kind == "yarn" else 0):
        raise ValueError(f"{said.arch}.rope.scaling.yarn_ext_factor {mixed} is not supported with type {shown(kind)}")
    scaled = kind != "none" and factor != 1
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if said.has(_FACTORS):
        factors = said.of.read(_FACTORS).float().numpy().astype(np.float64)
        if factors.shape != (head_size // 2,):
            raise ValueError(f"{_FACTORS}: {list(factors.shape)} factors for heads of {head_size}")
        if not np.allclose(factors, 1, atol=_TOLERANCE):
            if scaled:
                raise ValueError(f"{_FACTORS} and a scaling of type {kind} by {factor} are not supported together")
            found |= llama3(factors, base)
    if scaled:
        found |= {"rope_type": kind, "factor": factor}
    if scaled and kind == "yarn":
        values = {ours: said.number(f"rope.scaling.{key}", None) for ours, key in _YARN.items()}
        found |= {key: value for key, value in values.items() if value is not None}
        if amplitude != 1:
            found["attention_factor"] = amplitude * found.get("attention_factor", 0.1 * math.log(max(factor, 1)) + 1)
    elif (amplitude := amplitude * said.number("rope.scaling.yarn_attn_factor", 1.0)) != 1:
        raise ValueError(f"{said.arch}.rope.scaling.attn_factor {amplitude} is supported in a scaling by yarn alone")
    return found


def _factor(said: Metadata) -> float:
    """By which positions are divided: the older key where the newer one is missing; 0 is none."""
    older = said.number("rope.scale_linear", 1.0)
    return float(said.number("rope.scaling.factor", older)) or 1.0


def rope_by_type(said: Metadata, head_size: int, theta: float, both: bool = False) -> dict[str, Any]:
    """Of models whose layers of sliding attention have a theta of their own. both: whether these are scaled, too."""
    full = rope(said, head_size, theta)
    local = {"rope_theta": said.number("rope.freq_base_swa", 10_000.0)}
    return {"full_attention": full, "sliding_attention": (full if both else {"rope_type": "default"}) | local}


def llama3(factors: NDArray[np.float64], theta: float) -> dict[str, Any]:
    """Llama 3's rule from its result: the number by which the frequency of each pair is divided.

    The rule leaves fast pairs, divides slow ones by `factor`, and between them takes a share s of the plain frequency
    that is linear in it: s = (original / 2 pi * frequency - low) / (high - low). Only ratios of original, low and high
    can be seen, so low is taken to be 1, as in all of Meta's models. ValueError for factors of another rule.
    """
    if not (np.isfinite(factors).all() and factors.min() > 0.5 and theta > 0):
        raise ValueError(f"{_FACTORS}: factors from {factors.min():g} to {factors.max():g} with theta {theta:g}")
    frequencies = theta ** (-np.arange(len(factors)) / len(factors))
    factor = float(f"{factors.max():.6g}")
    between = (factors > 1 + _TOLERANCE) & (factors < factor * (1 - _TOLERANCE))
    if factor > 1 and between.sum() >= 2:
        shares = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, start = np.polyfit(frequencies[between], shares, 1)
        if slope > 0 > start:
            found = {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                "high_freq_factor": float(f"{1 - 1 / start:.4g}"),
                "original_max_position_embeddings": round(2 * math.pi * slope / -start),
            }  # fmt: skip
            if np.allclose(_llama3_factors(found, frequencies), factors, rtol=_TOLERANCE):
                return found
    raise ValueError(f"{_FACTORS}: factors from 1 to {factor:g} that are none of Llama 3's rule")


def _llama3_factors(rule: dict[str, Any], frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    turns = rule["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    shares = np.clip((turns - 1) / (rule["high_freq_factor"] - 1), 0, 1)
    return 1 / (shares + (1 - shares) / rule["factor"])
