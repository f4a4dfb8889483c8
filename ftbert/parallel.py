"""Who shares a model: several devices of this process, or the processes of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from ftbert.building import ALONE, Ranks

WORDS = ("tensor", "pipeline")
_TOLD_ROWS = 128


def find_ranks(parallel: str | None, places: Sequence[torch.device]) -> Ranks:
    """With several `places` each is a rank; with one, each process of the default process group, of which this process
    is one. ValueError for other words, and where there is no such group."""
    if parallel is None:
        return ALONE
    if parallel not in WORDS:
        raise ValueError(f"parallel: expected {' or '.join(map(repr, WORDS))}, got {parallel!r}")
    stages = parallel == "pipeline"
    if len(places) > 1:
        return Ranks(size=len(places), stages=stages)
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError(
            f"parallel={parallel!r} shares a model among several devices, and got {places[0]} alone: name them "
            '(device=["cuda:0", "cuda:1"]), or call torch.distributed.init_process_group in each of several processes '
            "(torchrun starts them)"
        )
    group = distributed.group.WORLD
    assert group is not None
    if group.size() == 1:
        return ALONE
    return Ranks(group.rank(), group.size(), group.group_name, stages and group.size() > 1)


def told_sums(encoder: Any) -> dict[str, str]:
    """For `info`: {"sum_over_ranks": "8.1 us for 128 rows of 1024, with residual and norm"}, measured now, of a model
    that ranks of this process share."""
    try:
        seconds = encoder.seconds_of_sum(_TOLD_ROWS)
    except RuntimeError as error:  # in a forked child, or while a stream is recorded
        return {"sum_over_ranks": f"not measured: {error}"}
    words = f"{1e6 * seconds:.1f} us for {_TOLD_ROWS} rows of {encoder.hidden()}, with residual and norm"
    return {"sum_over_ranks": words} if seconds > 0 else {}
