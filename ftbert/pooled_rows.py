"""A text's vector from its rows, in plain torch: for what is compared with transformers."""

from __future__ import annotations

from collections.abc import Callable

import torch

# By name: of the rows [tokens, hidden] of a text, whose places [tokens, 1] count from 1. A reference for tests too.
POOLED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": lambda rows, _: rows[0],
    "end": lambda rows, _: rows[-1],  # of a text as its tokenizer makes it, which ends there
    "last": lambda rows, _: rows[-1],
    "max": lambda rows, _: rows.max(0).values,
    "mean": lambda rows, _: rows.mean(0),
    "mean_sqrt_len": lambda rows, _: rows.sum(0) / len(rows) ** 0.5,
    "weightedmean": lambda rows, places: (rows * places).sum(0) / places.sum(),
}


def pooled(rows: torch.Tensor, pooling: str, skip: int = 0) -> torch.Tensor:
    """[tokens, hidden] -> [vector]. pooling: names joined by "+". skip: rows at the beginning that are left out."""
    skip = min(skip, len(rows) - 1)
    places = torch.arange(1.0, len(rows) + 1, device=rows.device)[skip:, None]
    return torch.cat([POOLED[mode](rows[skip:], places) for mode in pooling.split("+")])
