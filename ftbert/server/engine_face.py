"""What a worker needs of an engine in its own process."""

from __future__ import annotations

from typing import Protocol

from ftbert.server.work import Failure, Owner, Work


class EngineFace(Protocol):
    @property
    def ready(self) -> bool: ...

    @property
    def queued_tokens(self) -> int: ...

    def submit(self, works: list[Work]) -> list[tuple[Work, Failure]]: ...

    def cancel(self, owner: Owner, ids: list[int]) -> None: ...

    def close(self) -> None: ...
