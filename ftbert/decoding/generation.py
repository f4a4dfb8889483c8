"""Several texts that grow a token at a time: those that end make room for those that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ftbert.decoding.sampling import Sampling


class Generation:
    """Prompts as ids -> the tokens that follow, a call of `step` each; the order of texts in it is not theirs.

    Texts in slots of the decoder's cache are computed together. A text that has ended leaves its slot, and the next
    prompt is computed beside the others' next tokens.
    """

    def __init__(
        self, decoder: Any, slots: int, prompts: Sequence[Sequence[int]], sampling: Sampling, device: torch.device
    ) -> None:
        """decoder: a torch.classes.ftbert.Decoder with at least so many slots, all empty."""
        self._decoder, self._sampling, self._device = decoder, sampling, device
        self._waiting = deque(enumerate(prompts))
        self._free = list(range(slots))
        self._slots: dict[int, int] = {}  # by place, of texts that grow
        self._next: dict[int, Sequence[int]] = {}  # their tokens that are not in the cache
        self._generators: dict[int, torch.Generator] = {}

    def step(self) -> list[tuple[int, int]]:
        """(place, next token) of each text that grows; none: all have ended."""
        while self._waiting and self._free:
            place, prompt = self._waiting.popleft()
            self._slots[place], self._next[place] = self._free.pop(), prompt
            if not self._sampling.greedy:
                self._generators[place] = self._sampling.generator(place)
        places = list(self._slots)
        if not places:
            return []
        rows = [self._next[place] for place in places]
        ids = torch.tensor([one for row in rows for one in row]).to(self._device, non_blocking=True)
        offsets = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
        slots = torch.tensor([self._slots[place] for place in places], dtype=torch.int32)
        logits = self._decoder.forward(ids, offsets, slots, False)
        chosen = self._sampling.choose(logits, [self._generators[place] for place in places if self._generators])
        self._next = {place: [token] for place, token in zip(places, chosen, strict=True)}
        return list(zip(places, chosen, strict=True))

    def end(self, place: int) -> None:
        """This text needs no further token."""
        slot = self._slots.pop(place)
        self._decoder.truncate(slot, 0)
        self._free.append(slot)
        self._next.pop(place)
        self._generators.pop(place, None)
