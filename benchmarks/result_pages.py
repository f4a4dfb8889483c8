"""What reports and pictures of result files share: a table in Markdown, a figure in its file. Needs no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Table = tuple[Sequence[str], list[list[str]]]  # head, rows


def markdown(table: Table) -> str:
    head, rows = table
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@contextmanager
def figure(path: Path, rows: int, columns: int, title: str, **options: Any) -> Iterator[tuple[Any, Any]]:
    """(figure, axes), written to `path` behind the block."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(rows, columns, layout="constrained", **options)
    drawn.suptitle(title, fontsize=10)
    yield drawn, axes
    drawn.savefig(path, dpi=110)
    plt.close(drawn)


def machine_of(facts: dict[str, Any]) -> str:
    return str(facts.get("gpu") or facts["cpu"])


def draw_file(draw: Callable[[dict[str, Any], Path], None]) -> None:
    """The picture of the result file that the command line names first, in the file that it names second."""
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
