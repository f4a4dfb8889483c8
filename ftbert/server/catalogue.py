"""Models of --models-dir: loaded and unloaded by name while the server runs.

The folder is read once, at the start, and all processes know its models by the settings. Which of them are wanted is in
files of the server's own folder: a worker writes them, the supervisor starts and ends engines by them, workers follow.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

from ftbert.server.settings import Settings

_FILES, _FOLDERS_HAVE = (".gguf", ".onnx"), ("config.json", "modules.json", "*.gguf", "*.onnx")


def models_in(folder: str) -> tuple[tuple[str, str], ...]:
    """Name and path of each model: folders by their names, files without suffix. NotADirectoryError; ValueError where
    there is none, or two have one name."""
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise NotADirectoryError(f"models-dir: expected a folder of models; got {folder!r}")
    found: dict[str, str] = {}
    for path in sorted(place.iterdir()):
        if path.name.startswith(".") or not _is_model(path):
            continue
        name = path.name if path.is_dir() else path.stem
        if name in found:
            raise ValueError(f"models-dir: two models have the name {name}: {found[name]} and {path}")
        found[name] = str(path)
    if not found:
        raise ValueError(f"models-dir: {folder} holds no model: no folder with config.json, no .gguf or .onnx file")
    return tuple(found.items())


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return any(next(path.glob(pattern), None) is not None for pattern in _FOLDERS_HAVE)
    return path.suffix in _FILES and path.is_file()


class Catalogue:
    """Which models are wanted, by their places in the settings. folder: the server's."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.first = len(settings.models) - settings.on_demand
        self._most = settings.models_max
        self._folder = folder
        self._wanted, self._failed = folder / "wanted", folder / "failed"
        for one in (self._wanted, self._failed):
            one.mkdir(exist_ok=True)

    def wanted(self) -> set[int]:
        return {int(path.name) for path in self._wanted.iterdir()}

    def want(self, model: int) -> bool:
        """False: as many are wanted as may be."""
        with self._alone():
            wanted = self.wanted()
            if model not in wanted and self._most and len(wanted) >= self._most:
                return False
            for name in (f"{model}", f"{model}.words"):
                (self._failed / name).unlink(missing_ok=True)
            (self._wanted / str(model)).touch()
        return True

    def drop(self, model: int) -> None:
        (self._wanted / str(model)).unlink(missing_ok=True)

    def explain(self, model: int, words: str) -> None:
        """Why it cannot be loaded, by its process."""
        (self._failed / f"{model}.words").write_text(words, encoding="utf-8")

    def fail(self, model: int, code: int) -> None:
        """It could not be loaded, and is not tried again. code: what its process ended with."""
        words = ""
        with contextlib.suppress(OSError):
            words = (self._failed / f"{model}.words").read_text(encoding="utf-8")
        made = self._failed / f"{model}.new"
        made.write_text(json.dumps([code, words]), encoding="utf-8")
        made.replace(self._failed / str(model))
        self.drop(model)

    def failure(self, model: int) -> tuple[int, str] | None:
        """The code and the words; None where it was not tried, or is there."""
        with contextlib.suppress(FileNotFoundError):
            code, words = json.loads((self._failed / str(model)).read_text(encoding="utf-8"))
            return code, words
        return None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with (self._folder / "wanted.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
