"""Who shares a model: several devices of this process, or the processes of torch.distributed, which have to agree."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import distributed

from ftbert.building import ALONE, Ranks
from ftbert.checkpoint import Checkpoint
from ftbert.version import __version__

WORDS = ("tensor", "pipeline")
_TOLD_ROWS = 128
_MOST_DIFFERENCES = 5  # that an error shows of a rank

_Made = TypeVar("_Made")
_loads = 0  # of models that processes share, of which each counts the same
_beside: tuple[Any, Any] | None = None  # a default group of GPUs' tensors alone, and one of its processes for the CPU's


def find_ranks(parallel: str | None, places: Sequence[torch.device]) -> Ranks:
    """Each of several `places` is a rank. With a single place each process of the default process group is a rank, this
    process among them. ValueError for other words, and where there is no such group; RuntimeError where its processes
    do not reach each other on the CPU."""
    global _loads  # noqa: PLW0603
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
    asked = os.environ.get("FTBERT_COMPARE_RANKS", "")
    if asked not in ("", "off", "contents"):
        raise ValueError(f"FTBERT_COMPARE_RANKS: expected off or contents, got {asked!r}")
    comparisons = "" if asked == "off" else _on_the_cpu(group).group_name
    _loads += 1
    model = f"the {_loads}. of those that these processes share"
    return Ranks(group.rank(), group.size(), group.group_name, stages, comparisons, asked == "contents", model)


def _on_the_cpu(group: Any) -> Any:
    """A process group of the same processes that takes tensors of the CPU: itself, or one of gloo, made once."""
    global _beside  # noqa: PLW0603
    if "cpu:" in distributed.get_backend_config(group):
        return group
    if _beside is None or _beside[0] is not group:
        try:
            _beside = group, distributed.new_group(backend="gloo")
        except RuntimeError as error:
            raise RuntimeError(
                f"the processes do not reach each other over gloo, by which they compare their calls ({error}); "
                "GLOO_SOCKET_IFNAME names the network's interface, FTBERT_COMPARE_RANKS=off leaves it out"
            ) from error
    return _beside[1]


def agreed(
    ranks: Ranks, place: torch.device, work: Callable[[], _Made], told: Callable[[_Made], dict[str, str]]
) -> _Made:
    """What work() makes. Where ranks are processes each does it, and learns how the others fared: its own error, else
    RuntimeError where another failed, or where `told` of what it has made differs from rank 0's."""
    if not ranks.group:
        return work()
    failed: Exception | None = None
    said: dict[str, str] | str
    try:
        made = work()
        said = told(made)
    except Exception as error:  # noqa: BLE001 - whatever it is, the others wait for a word
        failed, said = error, f"{type(error).__name__}: {error}"
    everyone: list[dict[str, str] | str] = [""] * ranks.size
    group = None if not ranks.comparisons else _on_the_cpu(distributed.group.WORLD)
    with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
        distributed.all_gather_object(everyone, said, group=group)
    if failed is not None:
        raise failed
    wrong = [f"rank {rank} has failed: {one}" for rank, one in enumerate(everyone) if isinstance(one, str)]
    first = everyone[0]
    for rank, one in enumerate(everyone):
        if isinstance(one, dict) and isinstance(first, dict) and (differences := _differences(one, first)):
            wrong.append(f"rank {rank} differs from rank 0 in {differences}")
    if wrong:
        raise RuntimeError(f"the {ranks.size} ranks do not load the same model: {'; '.join(wrong)}")
    return made


def _differences(one: dict[str, str], first: dict[str, str]) -> str:
    names = [name for name in one | first if one.get(name) != first.get(name)]
    shown = [f"{name} ({one.get(name, 'none')}, there {first.get(name, 'none')})" for name in names[:_MOST_DIFFERENCES]]
    more = [f"and {len(names) - _MOST_DIFFERENCES} more"] if len(names) > _MOST_DIFFERENCES else []
    return ", ".join([*shown, *more])


def told_checkpoint(checkpoint: Checkpoint, ranks: Ranks, place: torch.device, **asked: Any) -> dict[str, str]:
    """What all ranks have to have alike before they read weights: how the model is asked for, each entry of its config,
    and of each tensor its shape and a sample."""
    config, source = checkpoint.config, checkpoint.source
    way = {"parallel": WORDS[ranks.stages], "device": place.type, "comparisons": bool(ranks.comparisons)}
    said = {"ftbert": __version__, **way, "contents": ranks.contents, **asked}
    told = {name: str(value) for name, value in said.items()}
    told |= _entries("config", {"encoder": config.encoder.to_json(), "heads": [vars(head) for head in config.heads]})
    shapes = source.shapes()
    for name in sorted({part for parts in checkpoint.tensors.values() for part in parts}):
        told[f"the weights of {name}"] = f"{list(shapes[name])} {source.sample(name)}"
    return told


def _entries(name: str, value: Any) -> dict[str, str]:
    """Every number and word of a JSON value, by where it stands."""
    if not isinstance(value, dict | list):
        return {name: str(value)}
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return {place: word for key, one in inner for place, word in _entries(f"{name}.{key}", one).items()}


def told_sums(encoder: Any) -> dict[str, str]:
    """For `info`: {"sum_over_ranks": "8.1 us for 128 rows of 1024, with residual and norm"}, measured now, of a model
    that ranks of this process share."""
    try:
        seconds = encoder.seconds_of_sum(_TOLD_ROWS)
    except RuntimeError as error:  # in a forked child, or while a stream is recorded
        return {"sum_over_ranks": f"not measured: {error}"}
    words = f"{1e6 * seconds:.1f} us for {_TOLD_ROWS} rows of {encoder.hidden()}, with residual and norm"
    return {"sum_over_ranks": words} if seconds > 0 else {}
