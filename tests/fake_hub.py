"""A hub of one repository, which is a folder, in place of the client's: no network."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest


class Hub:
    """A hub of one repository, in a folder. downloads: how each was asked for, with the files that it brought."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        import huggingface_hub

        self.home, self.snapshot = tmp_path / "repository", tmp_path / "snapshot"
        self.home.mkdir()
        self.error: Exception | None = None
        self.asked: dict[str, Any] = {}
        self.downloads: list[tuple[dict[str, Any], list[str]]] = []

        def make(api: Any, *, token: Any = None) -> None:
            self.asked["token"] = token

        def list_repo_files(api: Any, repository: str, *, revision: str | None = None) -> list[str]:
            self.asked["revision"] = revision
            if self.error is not None:
                raise self.error
            return self.files()

        def snapshot_download(repository: str, **how: Any) -> str:
            patterns = how.pop("allow_patterns", None)
            brought = [name for name in self.files() if patterns and any(fnmatch(name, one) for one in patterns)]
            brought = [name for name in brought if not (self.snapshot / name).exists()]
            self.downloads.append((how, brought))
            for name in brought:
                (self.snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                (self.snapshot / name).write_bytes((self.home / name).read_bytes())
            if not self.snapshot.exists():
                raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
            return str(self.snapshot)

        monkeypatch.setattr(huggingface_hub.HfApi, "__init__", make)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", list_repo_files)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.home)) for path in self.home.rglob("*") if path.is_file())

    def put(self, *names: str) -> None:
        for name in names:
            (self.home / name).parent.mkdir(parents=True, exist_ok=True)
            (self.home / name).write_bytes(b"{}")

    def fetched(self) -> list[str]:
        return sorted(name for _, names in self.downloads for name in names)
