"""Several texts that grow a token at a time: those that end make room for those that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ftbert.decoding.chosen import Chosen, sent
from ftbert.decoding.rules import Ruled
from ftbert.decoding.sampling import Sampling

# Tokens that a step computes at most, unless more texts grow: what a step takes in memory and in time beside the texts
# that already grow is bounded, however many prompts begin together.
STEP_TOKENS = 8192


@dataclass(eq=False)
class _Text:
    place: int
    prompt: Sequence[int]
    most: int  # tokens that may follow
    slot: int
    generator: torch.Generator | None
    computed: int = 0  # tokens of the prompt that are in the cache
    chosen: int = 0  # tokens that follow so far
    ended: bool = False

    @property
    def grows(self) -> bool:
        return 0 < self.chosen < self.most


class Generation:
    """Prompts as ids -> the tokens that follow, a call of `step` each; the order of texts in it is not theirs.

    Texts in slots of the decoder's cache are computed together. A text that has ended leaves its slot, and the next
    prompt is computed beside the others' next tokens; a long one in pieces.

    ahead: the next step is launched before this one's tokens are read, which it takes where they are; a text that
    turns out to have ended then is computed once more for nothing.
    """

    def __init__(
        self, decoder: Any, slots: int, prompts: Sequence[Sequence[int]], most: Sequence[int], sampling: Sampling,
        device: torch.device, ahead: bool | None = None, step_tokens: int = STEP_TOKENS, ruled: Ruled | None = None,
    ) -> None:  # fmt: skip
        """decoder: a torch.classes.ftbert.Decoder with at least so many slots, all empty. most: tokens that follow each
        prompt. ahead: None, on a GPU alone, where the host would wait. ruled: of as many slots; None: logits are taken
        as they are."""
        self._decoder, self._sampling, self._device, self._step_tokens = decoder, sampling, device, step_tokens
        self._ruled = ruled
        self._waiting = deque((place, *of) for place, of in enumerate(zip(prompts, most, strict=True)))
        self._free = list(range(slots))
        self._texts: dict[int, _Text] = {}  # by place, those in slots
        self._steps: deque[tuple[list[_Text], Chosen]] = deque()  # launched, not read
        self._last: tuple[list[_Text], Chosen] | None = None  # whose ids the growing texts' next tokens are
        self._under_way = 1 if device.type == "cpu" and not ahead or ahead is False else 2
        # That of whoever resumes a stream of text may be another each time.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def step(self) -> list[tuple[int, int]]:
        """(place, next token) of each text that grows; none: all have ended."""
        with self._on_stream():
            while True:
                while len(self._steps) < self._under_way and self._launch():
                    pass
                if not self._steps:
                    return []
                texts, chosen = self._steps.popleft()
                made = [(one.place, token) for one, token in zip(texts, chosen.read(), strict=True) if not one.ended]
                if made:
                    return made

    def end(self, place: int) -> None:
        """This text needs no further token."""
        text = self._texts.pop(place)
        text.ended = True
        with self._on_stream():
            self._decoder.truncate(text.slot, 0)
        self._free.append(text.slot)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _launch(self) -> bool:
        """A step of all that needs computing; False: nothing does."""
        growing = [one for one in self._texts.values() if one.grows]
        begun = self._prompts(self._step_tokens - len(growing))
        if not growing and not begun:
            return False
        rows = [list(one.prompt[one.computed : one.computed + count]) for one, count in begun]
        parts = [self._next_ids(growing)] if growing else []
        if rows:
            parts.append(sent(torch.tensor([one for row in rows for one in row]), self._device))
        ids = parts[0] if len(parts) == 1 else torch.cat(parts)
        offsets = torch.tensor([*accumulate([*(1 for _ in growing), *map(len, rows)], initial=0)], dtype=torch.int32)
        slots = torch.tensor([one.slot for one in [*growing, *(one for one, _ in begun)]], dtype=torch.int32)
        logits = self._decoder.forward(ids, offsets, slots, False)
        for one, count in begun:
            one.computed += count
        # Of a prompt whose end is still to come, the last, nobody needs the next token.
        texts = growing + [one for one, _ in begun if one.computed == len(one.prompt)]
        if not texts:
            return True
        chosen = self._choose(texts, logits[: len(texts)])
        for one in texts:
            one.chosen += 1
        self._last = texts, chosen
        self._steps.append(self._last)
        return True

    def _choose(self, texts: list[_Text], logits: Tensor) -> Chosen:
        generators = [one.generator for one in texts if one.generator]
        if self._ruled is None:
            return self._sampling.choose(logits, generators)
        begins = [len(one.prompt) for one in texts]
        lengths = [begin + one.chosen for begin, one in zip(begins, texts, strict=True)]
        ruled = self._ruled.apply(logits, [one.slot for one in texts], begins, lengths)
        chosen = self._sampling.choose(ruled, generators, logits.dtype)
        self._ruled.add(chosen.ids)
        return chosen

    def _prompts(self, room: int) -> list[tuple[_Text, int]]:
        """Texts whose prompts are computed next, and how many tokens of each: whole ones, but for a first that is
        longer than the room; of that a piece, and it comes last."""
        found = [(one, len(one.prompt) - one.computed) for one in self._texts.values() if not one.chosen]  # one at most
        while self._waiting and self._free:
            length = len(self._waiting[0][1])
            if found and sum(count for _, count in found) + length > room:
                break
            place, prompt, most = self._waiting.popleft()
            generator = None if self._sampling.greedy else self._sampling.generator(place)
            text = self._texts[place] = _Text(place, prompt, most, self._free.pop(), generator)
            if self._ruled is not None:
                self._ruled.begin(text.slot, prompt)
            found.append((text, length))
        if found and found[0][1] > room:
            found = [(found[0][0], max(room, 1))]
        return found

    def _next_ids(self, growing: list[_Text]) -> Tensor:
        """int64 [growing] on the device: the tokens chosen last."""
        assert self._last is not None  # a text that grows was in the last step
        texts, chosen = self._last
        if texts == growing:
            return chosen.ids
        index = {one.place: i for i, one in enumerate(texts)}
        return chosen.ids.index_select(0, sent(torch.tensor([index[one.place] for one in growing]), self._device))
