"""Counters of all processes: rows of float64 in one file that they share. Any worker can sum them.

A worker has a row for each model, and a row for requests that it refused before it knew the model. An engine has a
single row. Names and buckets are TEI's, so that its dashboards work; ft_... are ours. Counters keep TEI's names,
without the suffix that client libraries append.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftbert.server.settings import Settings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of exposition
# Seconds between two signs of life of a process.
BEAT = 0.5
METHODS = ("single", "batch")
ERRORS = ("overloaded", "validation", "batch_size", "tokenization", "inference", "model_type", "dropped")
_SECONDS = tuple(1.5e-5 * 1.5**k for k in range(35))
_PHASES = ("duration", "tokenization_duration", "queue_duration", "inference_duration")

# name -> labels of each cell
COUNTERS: dict[str, tuple[str, ...]] = {
    "te_request_count": tuple(f'method="{method}"' for method in METHODS),
    "te_request_success": tuple(f'method="{method}"' for method in METHODS),
    "te_request_failure": tuple(f'err="{err}"' for err in ERRORS),
    "te_embed_count": ("",),
    "te_embed_success": ("",),
    "te_predict_count": ("",),
    "te_predict_success": ("",),
    "ft_tokens_total": ("",),
    "ft_engine_busy_seconds_total": ("",),
    "ft_generated_tokens_total": ("",),
    "ft_generation_busy_seconds_total": ("",),
    "ft_prompt_tokens_total": ("",),
    "ft_prompt_tokens_cached_total": ("",),
}
# Of what waits to be computed, and of texts that are written.
QUEUE = ("te_queue_size", "ft_queue_tokens", "ft_batch_budget_tokens")
SLOTS = ("ft_generation_slots", "ft_generation_slots_used", "ft_generation_waiting")
GAUGES = (*QUEUE, *SLOTS)
HISTOGRAMS: dict[str, tuple[float, ...]] = {
    **{f"te_{what}_{phase}": _SECONDS for what in ("request", "embed", "predict") for phase in _PHASES},
    "te_request_input_length": tuple(2.0**k for k in range(16)),
    "te_batch_next_size": tuple(2.0**k for k in range(13)),
    "te_batch_next_tokens": tuple(2.0**k for k in range(21)),
    "ft_time_to_first_token_seconds": _SECONDS,
    "ft_time_per_output_token_seconds": _SECONDS,
}
# What an engine counts; all else is about requests.
OF_ENGINES = {
    "ft_tokens_total", "ft_engine_busy_seconds_total", *GAUGES, "te_batch_next_size", "te_batch_next_tokens",
    "ft_generated_tokens_total", "ft_generation_busy_seconds_total",
}  # fmt: skip


def _places() -> tuple[dict[str, int], int]:
    """Where each metric begins in a row, and the cells of a row. A histogram: its buckets, +Inf, the sum."""
    places, end = {}, 0
    sizes = {name: len(labels) for name, labels in COUNTERS.items()} | dict.fromkeys(GAUGES, 1)
    for name, size in (sizes | {name: len(bounds) + 2 for name, bounds in HISTOGRAMS.items()}).items():
        places[name], end = end, end + size
    return places, end


PLACES, _BEAT = _places()
CELLS = _BEAT + 1


class Row:
    """What one process counts. A cell is written by one thread of it. cells: float64 [CELLS]."""

    def __init__(self, cells: NDArray[np.float64] | None = None) -> None:
        # One number of a memoryview is written in half the time of one of an array.
        self.cells: Any = (np.zeros(CELLS) if cells is None else cells).data

    def count(self, name: str, by: float = 1.0, label: int = 0) -> None:
        self.cells[PLACES[name] + label] += by

    def observe(self, name: str, value: float, times: int = 1) -> None:
        bounds, place = HISTOGRAMS[name], PLACES[name]
        self.cells[place + bisect_left(bounds, value)] += times
        self.cells[place + len(bounds) + 1] += value * times

    def failed(self, error: str) -> None:
        """error: one of ERRORS."""
        self.count("te_request_failure", label=ERRORS.index(error))

    def batch(self, texts: int, tokens: int) -> None:
        """An engine launches a batch."""
        self.observe("te_batch_next_size", texts)
        self.observe("te_batch_next_tokens", tokens)

    def computed(self, tokens: int, seconds: float) -> None:
        """Its result is there."""
        self.count("ft_tokens_total", tokens)
        self.count("ft_engine_busy_seconds_total", seconds)

    def queue(self, texts: int, tokens: int, budget: int) -> None:
        """What waits for an engine now."""
        for name, value in zip(QUEUE, (texts, tokens, budget), strict=True):
            self.cells[PLACES[name]] = value

    def slots(self, slots: int, used: int, waiting: int) -> None:
        """What an engine writes now: texts that have a slot, and that wait for one."""
        for name, value in zip(SLOTS, (slots, used, waiting), strict=True):
            self.cells[PLACES[name]] = value

    def written(self, tokens: int, seconds: float) -> None:
        """An engine's step of the texts in its slots."""
        self.count("ft_generated_tokens_total", tokens)
        self.count("ft_generation_busy_seconds_total", seconds)

    def beat(self) -> None:
        """This process lives: the supervisor looks at it."""
        self.cells[_BEAT] += 1

    @property
    def beats(self) -> float:
        return float(self.cells[_BEAT])

    def reset_gauges(self) -> None:
        """In a process that takes the row of one that died: counters go on, its queue is gone."""
        self.queue(0, 0, 0)
        self.slots(0, 0, 0)


def open_rows(path: Path | None, rows: int) -> NDArray[np.float64]:
    """float64 [rows, CELLS] in a file, which is made where it is missing; without a path in memory."""
    if path is None:
        return np.zeros((rows, CELLS))
    if not path.exists():
        path.write_bytes(bytes(8 * rows * CELLS))
    return np.asarray(np.memmap(path, dtype=np.float64, mode="r+", shape=(rows, CELLS)))  # its own indexing is slow


class Metrics:
    """The rows of a server, of which this process writes those of a worker or of an engine.

    path: of their file, None: in memory. worker: whose requests `requests` counts.
    """

    def __init__(self, settings: Settings, path: Path | None = None, worker: int = 0) -> None:
        self._models = [name for name, _ in settings.models]
        self._devices = settings.engines
        self._workers = max(1, settings.workers or 0)
        self._first = worker * (1 + len(self._models))
        self.rows = open_rows(path, len(self.labels))

    @cached_property
    def labels(self) -> list[tuple[bool, str, str]]:
        """Of each row: whether an engine counts in it, the model and the device. A request is for a model wherever that
        is computed: its device is all of them. What is refused before its model is known is a single model's."""
        everywhere = ",".join(self._devices)
        of_models = [(False, model, everywhere) for model in self._models]
        of_worker = [of_models[0] if len(of_models) == 1 else (False, "", ""), *of_models]
        of_engines = [(True, model, device) for model in self._models for device in self._devices]
        return of_worker * self._workers + of_engines

    def requests(self, model: str = "") -> Row:
        """Of this worker. model: by its name; of another name, or none, what has no model."""
        place = self._models.index(model) + 1 if model in self._models else 0
        return Row(self.rows[self._first + place])

    def engine(self, model: int, device: int) -> Row:
        first = self._workers * (1 + len(self._models))
        return Row(self.rows[first + model * len(self._devices) + device])

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return exposition(self.rows, self.labels)


def exposition(rows: NDArray[np.float64], labels: Sequence[tuple[bool, str, str]]) -> bytes:
    """rows: float64 [rows, cells], summed where their labels are the same. labels: see Metrics."""
    sums: dict[tuple[bool, str, str], list[float]] = {}
    for whose in dict.fromkeys(labels):
        sums[whose] = rows[[one == whose for one in labels]].sum(axis=0).tolist()
    lines = []
    for name, kind in _KINDS.items():
        lines.append(f"# TYPE {name} {kind}")
        for (engine, model, device), cells in sums.items():
            # Before the model is known, a request can only fail.
            if engine == (name in OF_ENGINES) and (model or name == "te_request_failure"):
                lines += _samples(name, cells, f'model="{_escaped(model)}",device="{_escaped(device)}"')
    return ("\n".join(lines) + "\n").encode()


_KINDS = dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(HISTOGRAMS, "histogram")


def _samples(name: str, cells: Sequence[float], labels: str) -> list[str]:
    place = PLACES[name]
    if name not in HISTOGRAMS:
        own = COUNTERS.get(name, ("",))
        joined = [",".join(filter(None, (one, labels))) for one in own]
        return [f"{name}{{{one}}} {_number(cells[place + i])}" for i, one in enumerate(joined)]
    lines, total, bounds = [], 0.0, HISTOGRAMS[name]
    for i, bound in enumerate((*bounds, None)):
        total += cells[place + i]
        shown = "+Inf" if bound is None else f"{bound:.12g}"
        lines.append(f'{name}_bucket{{{labels},le="{shown}"}} {_number(total)}')
    sums = repr(cells[place + len(bounds) + 1])
    return [*lines, f"{name}_sum{{{labels}}} {sums}", f"{name}_count{{{labels}}} {_number(total)}"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
