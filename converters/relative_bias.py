"""MPNet's bias by distance: a table by bucket [buckets, heads] <-> ours by distance [heads, 2*span-1]."""

from __future__ import annotations

import math

import torch

from ftbert.checkpoint import ModelConfig
from ftbert.converters.family import Config, Derived, entry

_BUCKETS = 32  # transformers' MPNet looks up 32 whatever relative_attention_num_buckets says
_MAX_DISTANCE = 128
SPAN = _MAX_DISTANCE + 1  # past it every distance is in its side's last bucket, which is how the table's ends are read


def buckets(span: int) -> torch.Tensor:
    """The bucket of column(key) - column(query) = -(span-1) ... span-1, int64 [2*span-1].

    As transformers' MPNetEncoder.relative_position_bucket: exact up to 8, then logarithmic, the sides apart. The
    float32 logarithm is theirs too, since it decides where a boundary falls.
    """
    distance = torch.arange(span - 1, -span, -1)  # column(query) - column(key)
    half, exact = _BUCKETS // 2, _BUCKETS // 4
    side = (distance < 0).long() * half
    distance = distance.abs()
    scale = math.log(_MAX_DISTANCE / exact)
    large = exact + (torch.log(distance.float() / exact) / scale * (half - exact)).long()
    return side + torch.where(distance < exact, distance, large.clamp(max=half - 1))


def _shapes(encoder: ModelConfig, config: Config, ours: list[int]) -> list[list[int]]:
    assert encoder.relative_bias is not None
    return [[entry(config, "relative_attention_num_buckets", "int", _BUCKETS), encoder.relative_bias.heads]]


def _make(encoder: ModelConfig, sources: list[torch.Tensor]) -> torch.Tensor:
    assert encoder.relative_bias is not None
    return sources[0][buckets(encoder.relative_bias.span)].t().contiguous()


def _undo(encoder: ModelConfig, config: Config, ours: torch.Tensor) -> list[torch.Tensor]:
    table = torch.zeros(_shapes(encoder, config, list(ours.shape))[0], dtype=ours.dtype)
    table[buckets((ours.shape[1] + 1) // 2)] = ours.t()  # buckets that no distance reaches are never looked up
    return [table]


MPNET_BIAS = Derived(("encoder.relative_attention_bias.weight",), _shapes, _make, _undo)
