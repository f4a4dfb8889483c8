"""A bias by distance: a table by bucket [buckets, heads] <-> ours by distance [heads, 2*span-1]."""

from __future__ import annotations

import math
from typing import Any

import torch

from ftbert.checkpoint import ModelConfig
from ftbert.converters.family import Config, Derived, entry

_BUCKETS = "relative_attention_num_buckets"
_MAX_DISTANCE = "relative_attention_max_distance"
_USUAL = {_BUCKETS: 32, _MAX_DISTANCE: 128}


def buckets(count: int, span: int) -> torch.Tensor:
    """The bucket, of so many, of column(key) - column(query) = -(span-1) ... span-1, int64 [2*span-1].

    As transformers' T5Attention._relative_position_bucket with span - 1 for its max_distance: exact up to a quarter of
    the buckets, then logarithmic, the sides apart. The float32 logarithm is theirs too, since it decides where a
    boundary falls.
    """
    distance = torch.arange(1 - span, span)  # column(key) - column(query)
    half, exact = count // 2, count // 4
    side = (distance > 0).long() * half
    distance = distance.abs()
    scale = math.log((span - 1) / exact)
    large = exact + (torch.log(distance.float() / exact) / scale * (half - exact)).long()
    return side + torch.where(distance < exact, distance, large.clamp(max=half - 1))


def add_bias(
    config: Config, description: dict[str, Any], *, of: str = "model", most: int = 0, distance: int = 0
) -> None:
    """Puts a table of biases into `description`, in buckets as the config says. of: as of RelativeBiasConfig. most:
    buckets that are looked up whatever the config says; distance: the largest one of its own, likewise."""
    found = {key: entry(config, key, "int", usual) for key, usual in _USUAL.items()}
    count, longest = most or found[_BUCKETS], distance or found[_MAX_DISTANCE]
    if found[_BUCKETS] < (most or 4):
        least = f"transformers looks {most} of them up" if most else "expected at least 4, two for each side"
        raise ValueError(f"{_BUCKETS} {found[_BUCKETS]}: {least}")
    if longest <= count // 4:
        raise ValueError(
            f"{_MAX_DISTANCE} {longest} contradicts {_BUCKETS} {count}, of which each side has {count // 4} for the "
            f"distances below {count // 4} alone: expected a larger distance"
        )
    attention = description["layer"]["attention"]
    attention["relative_bias"] = True
    # Past the largest distance each is in its side's last bucket, which is how the table's ends are read.
    description["relative_bias"] = {"span": longest + 1, "heads": attention["heads"], "of": of}


def bias_table(name: str, most: int = 0) -> Derived:
    """The row of a table that transformers calls so. most: buckets that are looked up, whatever the table has."""

    def shapes(encoder: ModelConfig, config: Config, ours: list[int]) -> list[list[int]]:
        return [[entry(config, _BUCKETS, "int", _USUAL[_BUCKETS]), ours[0]]]

    def make(encoder: ModelConfig, sources: list[torch.Tensor]) -> torch.Tensor:
        assert encoder.relative_bias is not None
        return sources[0][buckets(most or len(sources[0]), encoder.relative_bias.span)].t().contiguous()

    def undo(encoder: ModelConfig, config: Config, ours: torch.Tensor) -> list[torch.Tensor]:
        table = torch.zeros(shapes(encoder, config, list(ours.shape))[0], dtype=ours.dtype)
        # Buckets that no distance reaches are never looked up.
        table[buckets(most or len(table), (ours.shape[1] + 1) // 2)] = ours.t()
        return [table]

    return Derived((name,), shapes, make, undo)
