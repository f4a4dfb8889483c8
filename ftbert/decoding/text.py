"""A request on its way through a generation."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ftbert.decoding.requests import Request


@dataclass(eq=False)
class Text:
    """generator: None where no token is drawn. slot: -1 where it waits. computed: tokens of the prompt that are in the
    cache, `cached` of them as others left them. chosen: tokens that follow so far; tokens: those that the host has
    read."""

    place: int
    request: Request
    prompt: list[int]
    generator: torch.Generator | None
    slot: int = -1
    cached: int = 0
    computed: int = 0
    chosen: int = 0
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def grows(self) -> bool:
        return 0 < self.chosen < self.request.most

    @property
    def rest(self) -> int:
        """Tokens of the prompt that are still to be computed."""
        return len(self.prompt) - self.computed
