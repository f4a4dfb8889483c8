"""Checks that all readers of files share: no waiting for pipes, no unbounded JSON, errors that name the file and say
whether it is missing, broken or somebody else's."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ORIGIN = "source.json"  # in a folder that was made of a file: {"made_of": its path, "no_texts": why, ...}
_MOST_JSON = 64 << 20  # bytes; the largest index of shards is below 1 MB
_MOST_NESTED = 100  # lists and objects in each other: what walks over them later is no deeper than Python's stack
_KINDS = {"int": "a whole number", "float": "a finite number", "str": "a string", "bool": "true or false"}


def exists(path: Path) -> bool:
    """Whether there is something. PermissionError where this process may not know, False for what can be no path."""
    try:
        path.stat()
    except PermissionError as error:
        raise _forbidden(path) from error
    except (OSError, ValueError):
        return False
    return True


def expect_file(path: Path) -> None:
    """ValueError for a pipe, a device or a socket, which a reader would wait for; OSError where there is nothing,
    PermissionError where this process may not read it."""
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            kind = "a named pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
            raise ValueError(f"{path}: expected a file, it is {kind}")
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except PermissionError as error:
        raise _forbidden(path) from error


def list_folder(folder: Path) -> list[str]:
    """The names in it. OSError where it is no folder, PermissionError where this process may not look into it."""
    try:
        names = os.listdir(folder)
        (folder / ".").stat()  # reading names is one permission, opening what they name another
    except PermissionError as error:
        raise _forbidden(folder) from error
    return names


def _forbidden(path: Path) -> PermissionError:
    """Says who may not, and whose the file is, or the first folder on the way that is closed."""
    closed = next((one for one in reversed(path.absolute().parents) if not os.access(one, os.X_OK)), path)
    try:
        found = closed.stat()
        whose = f"; {closed} belongs to uid {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}"
    except OSError:
        whose = ""
    return PermissionError(errno.EACCES, f"no permission to read it for uid {os.geteuid()}{whose}", str(path))


def read_json_value(path: Path) -> Any:
    """What a JSON file holds. ValueError or OSError name the file."""
    expect_file(path)
    with path.open("rb") as file:
        data = file.read(_MOST_JSON + 1)
    if len(data) > _MOST_JSON:
        raise ValueError(f"{path}: has more than {_MOST_JSON >> 20} MB; that is no configuration")
    try:
        return parse_json(data.decode("utf-8"))
    except ValueError as error:  # UTF-8's among them
        raise ValueError(f"{path}: not valid JSON ({error})") from error


def parse_json(text: str) -> Any:
    """What JSON says. ValueError for broken JSON, a number of 5000 digits, lists and objects more than 100 deep."""
    deep = f"lists and objects that are nested more than {_MOST_NESTED} deep"
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(deep) from None
    level = [found]
    for _ in range(_MOST_NESTED + 1):
        inside = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [one for values in inside for one in values if isinstance(one, dict | list)]
        if not level:
            return found
    raise ValueError(deep)


def origin(path: Path) -> str:
    """The name that errors give to a model's folder, or to a file in it. A folder that was made of another file has
    that file's name."""
    for folder in (path, path.parent):
        note = folder / ORIGIN
        if note.is_file() and isinstance(document := read_json_value(note), dict) and document.get("made_of"):
            return str(document["made_of"]) if folder == path else f"{document['made_of']}: {path.name}"
    return str(path)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. ValueError or OSError name the file."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")  # noqa: TRY004
    return value


def expect_inside(path: Path, folder: Path) -> None:
    """ValueError for a link that leads out of `folder`. Of a hub's snapshot (models--*/snapshots/<revision>) the blobs
    of the same model count as inside."""
    home, real = folder.resolve(), path.resolve()
    hub = home.parent.parent
    homes = [home, hub] if home.parent.name == "snapshots" and hub.name.startswith("models--") else [home]
    if not any(real.is_relative_to(one) for one in homes):
        raise ValueError(f"{path}: is a link that leads out of {folder}, to {real}; put the file itself there")


def shown(value: Any) -> str:
    """A value out of a file, short enough for a message."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def typed(kind: str, name: str, value: Any) -> Any:
    """`value` if it is of that kind ("int", "float", "str", "bool"), nothing rounded or parsed; else ValueError."""
    good = {
        "int": type(value) is int,
        "float": type(value) in (int, float) and abs(value) < 1e300,  # no NaN, nor an int past every float
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
    }[kind]
    if not good:
        raise ValueError(f"{name}: expected {_KINDS[kind]}, got {shown(value)}")
    return value


def complaints(values: Mapping[str, Any], kinds: Mapping[str, str], needed: Set[str]) -> list[str]:
    """Every entry that is missing, unknown or not of its kind, see `typed`."""
    wrong = [f"missing {key}" for key in sorted(needed - values.keys())]
    wrong += [f"unknown {shown(key)}" for key in sorted(values.keys() - kinds.keys())]
    for key in kinds.keys() & values.keys():
        try:
            typed(kinds[key], key, values[key])
        except ValueError as error:
            wrong.append(str(error))
    return wrong


def is_unicode(text: str) -> bool:
    """False for a str with a lone surrogate, the only kind that no tokenizer takes."""
    if text.isascii():  # a flag of the object, so most texts cost nothing
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Gives an OSError that lacks one (a full disk, from `write`) this file's name."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        code = error.errno if error.errno is not None else 0
        raise OSError(code, os.strerror(code) if code else str(error), str(path)) from error
