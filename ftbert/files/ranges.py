"""The file of ranges that vectors are quantised by: read where it exists, else measured over the first texts."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftbert.files.records import STREAM, Position, Reader
from ftbert.input_file import expect_file, named

CALIBRATION_TEXTS = 8192


def check_ranges_file(path: Path | None, precision: str, sources: list[Path]) -> None:
    """ValueError or OSError for what the file can be refused for before a model is loaded."""
    if path is None:
        if precision in ("int8", "uint8"):
            raise ValueError(
                f"precision {precision} needs --ranges FILE (ranges=): a .npy that is read where it exists, else "
                f"measured over the first {CALIBRATION_TEXTS} texts and written"
            )
        return
    if precision not in ("int8", "uint8"):
        raise ValueError(f"--ranges is for --precision int8 and uint8; got {precision}")
    if path.suffix.lower() != ".npy":
        raise ValueError(f"{path}: expected the name of a .npy")
    if path.exists():
        expect_file(path)
    elif STREAM in sources:
        raise ValueError(f"{path}: does not exist, and standard input can be read once only; measure over a file first")
    elif not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist; make it first")


def ranges_in(path: Path, precision: str, width: int, measured: Iterator[NDArray[np.float32]]) -> Any:
    """float32 [2, width]: what `path` holds, else the range of `measured`, vectors [n, width], which is then written.
    ValueError for a file that holds something else, and for fewer than two vectors."""
    from ftbert.text import check_ranges, ranges_of

    if not path.exists():
        parts = list(measured)
        if sum(map(len, parts)) < 2:
            raise ValueError(f"{path}: the range of two vectors at least; got fewer texts")
        _write(path, ranges_of(np.concatenate(parts)))
    try:
        return check_ranges(np.load(path, allow_pickle=False), precision, width)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: {error}") from error


def first_texts(reader: Reader) -> Iterator[tuple[None, list[str]]]:
    """The good records' texts, CALIBRATION_TEXTS of them, as windows."""
    left = CALIBRATION_TEXTS
    for chunk in reader.chunks(Position()):
        texts = list(islice(chunk.texts, left))
        left -= len(texts)
        if texts:
            yield None, texts
        if not left:
            return


def _write(path: Path, ranges: Any) -> None:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with named(beside), beside.open("xb") as file:
            np.save(file, ranges)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(beside, path)
        except FileExistsError:
            pass  # another run has measured meanwhile, and its ranges count
        except OSError:  # no hard links here
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
