"""The files of one run: inputs, outputs, and care that no file of anybody else is lost."""

from __future__ import annotations

import glob
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

from ftbert.files.records import STREAM, Skipped
from ftbert.staging_folder import refuse_others_folder, staging_path


def stream_or_file(given: str | Path) -> Path:
    """STREAM for "-" itself; "./-", which pathlib takes for the same, is a file."""
    path = Path(given)
    return path.absolute() if path == STREAM and str(given) != "-" else path


def input_files(given: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that are read, in order: a pattern such as texts/*.txt, where there is no file of that name, stands for
    its matches, sorted. FileNotFoundError for one without a match."""
    found: list[Path] = []
    for one in [given] if isinstance(given, str | Path) else given:
        path = stream_or_file(one)
        if glob.has_magic(str(one)) and not path.exists():
            matches = sorted(glob.glob(str(one), recursive=True))
            if not matches:
                raise FileNotFoundError(f"{one}: matches no file")
            found += map(Path, matches)
        else:
            found.append(path)
    if not found:
        raise ValueError("no input; name a file at least")
    if STREAM in found and len(found) > 1:
        raise ValueError("standard input cannot be one of several inputs")
    return found


def output_file(given: str | Path) -> Path:
    """What is written. A link stays one, and the file that it names is written."""
    path = stream_or_file(given)
    if path == STREAM or not path.is_symlink():
        return path
    real = Path(os.path.realpath(path))
    if real.is_symlink():
        raise ValueError(f"{path}: is a link to itself; name another output")
    return real


def skipped_file(target: Path) -> Path:
    """Where the records are listed that were left out of `target`."""
    return target.with_name(target.name + ".skipped.jsonl")


def check_paths(sources: Sequence[Path], target: Path, skip_bad: bool, ranges: Path | None = None) -> None:
    """OSError or ValueError where `target` cannot be written, or a file would be lost: a source, a file written twice,
    or a file of somebody else. ranges: a file that is read or written beside these."""
    read = [source for source in sources if source != STREAM]
    written = [] if target == STREAM else [target]
    if target != STREAM:
        _check_target(target)
        if skip_bad:
            written.append(skipped_file(target))
    if ranges is not None:
        written.append(ranges)
    for path in written:
        if any(_same(path, source) for source in read):
            name = " (--skip-bad lists there what it leaves out)" if skip_bad and path == skipped_file(target) else ""
            raise ValueError(f"{path}: is the input itself{name}; name another output")
    if skip_bad and target != STREAM:
        expect_own_list(skipped_file(target))
    for one, other in combinations(written, 2):
        if _same(one, other):
            raise ValueError(f"{one}: would be written twice; name another file")
    for path in [*read, *([] if ranges is None else [ranges])] if target != STREAM else ():
        if staging_path(target).resolve() in path.resolve().parents:
            raise ValueError(f"{path}: lies in {staging_path(target)}, where unfinished work is kept; move it")


def expect_own_list(path: Path) -> None:
    """FileExistsError for a file that is no list of records left out."""
    if not os.path.lexists(path):
        return
    with suppress(OSError, ValueError):
        if not path.is_symlink():
            with path.open("rb") as file:
                first = json.loads(file.readline(1 << 20))
            if isinstance(first, dict) and tuple(first) == Skipped._fields:
                return
    raise FileExistsError(
        f"{path}: ftbert lists there what --skip-bad leaves out, and it did not write what is there; move it away, or "
        "name another output"
    )


def _check_target(target: Path) -> None:
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target}: the folder {target.parent} does not exist; make it first")
    if target.is_dir():
        raise IsADirectoryError(f"{target}: is a folder; expected the name of a file")
    if target.exists() and not target.is_file():
        raise ValueError(f"{target}: is no file; name another output")
    refuse_others_folder(staging_path(target))
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise PermissionError(f"{target}: cannot write into {target.parent} ({error.strerror})") from error


def _same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        if one.samefile(other):
            return True
    return os.path.realpath(one) == os.path.realpath(other)
