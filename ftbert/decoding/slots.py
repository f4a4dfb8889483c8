"""The tokens in the slots of a cache, and the choice of a slot for a prompt: keys and values of its first tokens are
not computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Tokens from which on a copy of their keys and values is made, which takes some launches a layer.
WORTH_A_COPY = 16


@dataclass
class _Slot:
    """ids: of its tokens, as far as the host knows them. there: how many tokens the cache has. used: when its text
    ended, or its tokens were copied, in steps of the clock; 0: never."""

    ids: list[int] = field(default_factory=list)
    there: int = 0
    busy: bool = False
    used: int = 0

    @property
    def held(self) -> int:
        return min(len(self.ids), self.there)


class Slots:
    """Slots of a decoder. That of a text that has ended keeps its keys and values until another text needs it: the slot
    that was used least lately is given up first."""

    def __init__(self, decoder: Any, count: int, reuse: bool) -> None:
        """decoder: a torch.classes.ftbert.Decoder with at least so many slots, all empty. reuse: False: each prompt is
        computed whole."""
        self._decoder, self._reuse = decoder, reuse
        self._slots = [_Slot() for _ in range(count)]
        self._clock = 0

    @property
    def free(self) -> bool:
        return not all(one.busy for one in self._slots)

    def common(self, prompt: Sequence[int]) -> int:
        """Tokens at the beginning of the prompt that `take` would find computed."""
        return self._best(prompt)[1]

    def take(self, prompt: list[int]) -> tuple[int, int]:
        """A free slot, and how many of the prompt's first tokens it holds: never all, as the last one's logits are
        needed. Other tokens of the slot are forgotten, unless most of them would be: then the common ones are copied
        to the slot that was used least lately."""
        best, common = self._best(prompt)
        source = self._slots[best]
        if common and not source.busy and 2 * common >= source.held:
            into = best
        else:
            if common >= WORTH_A_COPY:
                source.used = self._now()
            free = [place for place, one in enumerate(self._slots) if not one.busy]
            into = min(free, key=lambda place: self._slots[place].used)
            if into != best:
                common = self._copied(best, into, common)
        slot = self._slots[into]
        if slot.there != common:
            self._decoder.truncate(into, common)
        slot.ids, slot.there, slot.busy = prompt[:common], common, True
        return into, common

    def _copied(self, source: int, into: int, count: int) -> int:
        """How many of these tokens are in the other slot then: none where a copy is not worth it."""
        if count < WORTH_A_COPY:
            return 0
        self._decoder.copy_prefix(source, [into], count)
        self._slots[into].there = count
        return count

    def leave(self, slot: int, forget: bool = False) -> None:
        """Its text has ended. forget: what it left is of no use to others."""
        one = self._slots[slot]
        one.busy, one.used = False, self._now()
        if forget or not self._reuse:
            one.ids, one.there, one.used = [], 0, 0
            self._decoder.truncate(slot, 0)

    def add(self, slot: int, count: int, ids: Sequence[int] = ()) -> None:
        """So many tokens were computed there; ids: those that the host knows."""
        self._slots[slot].there += count
        self._slots[slot].ids += ids

    def read(self, slot: int, token: int) -> None:
        """The host knows the next token of this slot, which is computed, or will be."""
        self._slots[slot].ids.append(token)

    def clear(self) -> None:
        """All slots are free and empty."""
        for place, one in enumerate(self._slots):
            one.ids, one.there, one.busy, one.used = [], 0, False, 0
            self._decoder.truncate(place, 0)

    def _now(self) -> int:
        self._clock += 1
        return self._clock

    def _best(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The slot that holds most of the prompt's first tokens, a free one among equal ones, and how many of them,
        but for the last."""
        if not self._reuse:
            return 0, 0
        most, _, place = max(
            (min(common_length(one.ids, prompt), one.there), not one.busy, -place)
            for place, one in enumerate(self._slots)
        )
        return -place, min(most, len(prompt) - 1)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Of the beginning that both have; slices are compared, not tokens."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
