"""Metrics as Prometheus reads them. Counters keep TEI's names, without the suffix that client libraries append."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftbert.server.metrics import COUNTERS, GAUGES, HISTOGRAMS, PLACES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(rows: NDArray[np.float64]) -> bytes:
    """float64 [processes, cells], summed -> the text of a scrape."""
    cells = rows.sum(axis=0).tolist()
    lines = []
    for name, labels in COUNTERS.items():
        lines.append(f"# TYPE {name} counter")
        for i, label in enumerate(labels):
            lines.append(f"{name}{{{label}}} {_number(cells[PLACES[name] + i])}" if label else
                         f"{name} {_number(cells[PLACES[name]])}")  # fmt: skip
    for name in GAUGES:
        lines += [f"# TYPE {name} gauge", f"{name} {_number(cells[PLACES[name]])}"]
    for name, bounds in HISTOGRAMS.items():
        lines.append(f"# TYPE {name} histogram")
        place, total = PLACES[name], 0.0
        for i, bound in enumerate((*bounds, None)):
            total += cells[place + i]
            shown = "+Inf" if bound is None else f"{bound:.12g}"
            lines.append(f'{name}_bucket{{le="{shown}"}} {_number(total)}')
        lines += [f"{name}_sum {cells[place + len(bounds) + 1]!r}", f"{name}_count {_number(total)}"]
    return ("\n".join(lines) + "\n").encode()


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
