"""Several texts that grow a token at a time: they come and go between steps."""

from __future__ import annotations

from collections import OrderedDict, deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import Any

import torch
from torch import Tensor

from ftbert.decoding.choices import Choices
from ftbert.decoding.chosen import Chosen, sent
from ftbert.decoding.pace import Pace, Stopwatch
from ftbert.decoding.requests import Request, Token
from ftbert.decoding.ruled import Histories, counts_tokens
from ftbert.decoding.slots import WORTH_A_COPY, Slots, common_length
from ftbert.decoding.step_sampling import generator_of
from ftbert.decoding.text import Text

# Tokens that a step computes at most, unless more texts grow: what a step takes in memory and in time beside the texts
# that already grow is bounded, however many prompts begin together.
STEP_TOKENS = 8192
_ALONE = 4  # times as long is a piece while no text grows: only a text that comes waits for it
_LOOKED_AT = 64  # texts of those that wait, where the first wait for another's prompt


@dataclass
class _Step:
    """One that was launched. choices, chosen: None where no text's prompt was at its end. tokens: of prompts. watch:
    None where nobody asks for its time."""

    choices: Choices | None
    chosen: Chosen | None
    tokens: int
    watch: Stopwatch | None


class Generation:
    """Requests -> the tokens that follow, a call of `step` each; the order of texts in it is not theirs.

    Texts in slots of the decoder's cache are computed together. A text that has ended leaves its slot, and the next
    prompt is computed beside the others' next tokens; a long one in pieces. What a slot holds stays until it is needed,
    and a prompt that begins alike is computed from where it differs; also n texts of one prompt compute it once.

    `add`, `end`, `waiting` and `running` may be called from any thread, also while another is in `step`; they wait for
    nothing. `step` and `reset` are one thread's at a time.
    """

    def __init__(
        self, decoder: Any, slots: int, vocab: int, device: torch.device, *, wait_seconds: float | None = None,
        step_tokens: int = STEP_TOKENS, reuse: bool = True, ahead: bool | None = None,
    ) -> None:  # fmt: skip
        """decoder: a torch.classes.ftbert.Decoder with at least so many slots, all empty, of a model with `vocab`
        tokens. wait_seconds: what growing texts wait for others' prompts in a step; None: no bound but `step_tokens`.
        reuse: what slots hold of a prompt is not computed again. ahead: the next step is launched before this one's
        tokens are read, which it takes where they are; a text that turns out to have ended then is computed once more
        for nothing. None: on a GPU alone, where the host would wait."""
        self._decoder, self._vocab, self._device, self._step_tokens = decoder, vocab, device, step_tokens
        self.positions: int = decoder.positions()
        self.dtype: torch.dtype | None = None  # of logits, when some were computed
        self._slots = Slots(decoder, slots, reuse)
        self._reuse = reuse
        self._histories = Histories(slots, self.positions, device)
        self._pace = Pace(wait_seconds, step_tokens)
        self._places = count()
        self._added: deque[Text] = deque()  # by other threads, not seen by a step yet
        self._ends: deque[int] = deque()
        self._waiting: OrderedDict[int, Text] = OrderedDict()  # by place, without a slot
        self._texts: dict[int, Text] = {}  # by place, in slots
        self._steps: deque[_Step] = deque()  # launched, not read
        self._choices: Choices | None = None  # of the last step that chose tokens, which growing texts go on from
        self._chosen: Chosen | None = None
        self._under_way = 1 if device.type == "cpu" and not ahead or ahead is False else 2
        # That of whoever resumes a stream of text may be another each time.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @property
    def waiting(self) -> int:
        """Texts without a slot."""
        return len(self._added) + len(self._waiting)

    @property
    def running(self) -> int:
        """Texts in slots."""
        return len(self._texts)

    def add(self, request: Request) -> int:
        """The place of a new text, by which `step` names it. ValueError for a request that cannot be done."""
        request.check(self.positions, self._vocab)
        place = next(self._places)
        self._added.append(Text(place, request, list(request.prompt), generator_of(request.sampling)))
        return place

    def end(self, place: int) -> None:
        """This text needs no further token, whether it waits, grows or has ended. The next step is without it."""
        self._ends.append(place)

    def reset(self) -> None:
        """Ends all texts and forgets what slots hold, as after an error of `step`."""
        with self._on_stream():
            self._settle()
            self._steps.clear()
            for text in (*self._waiting.values(), *self._texts.values()):
                text.ended = True
            self._waiting.clear()
            self._texts.clear()
            self._choices = self._chosen = None
            self._slots.clear()

    def step(self) -> list[Token]:
        """The next token of each text that grows; none: all have ended. An error of the decoder leaves the texts as
        they were."""
        with self._on_stream():
            while True:
                while len(self._steps) < self._under_way and self._launch():
                    pass
                self._settle()
                if not self._steps:
                    return []
                if made := self._read(self._steps.popleft()):
                    return made

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _settle(self) -> None:
        """What other threads asked for."""
        ends = len(self._ends)  # these texts were added before
        while self._added:
            text = self._added.popleft()
            self._waiting[text.place] = text
        for _ in range(ends):
            place = self._ends.popleft()
            found = self._texts.get(place) or self._waiting.get(place)
            if found is not None:
                self._leave(found)

    def _leave(self, text: Text, forget: bool = False) -> None:
        text.ended = True
        if self._waiting.pop(text.place, None) is None:
            del self._texts[text.place]
            self._slots.leave(text.slot, forget)

    def _read(self, step: _Step) -> list[Token]:
        made: list[Token] = []
        ids, *others = step.chosen.read() if step.chosen is not None else [[]]
        if step.watch is not None:
            self._pace.took(step.watch.seconds(), step.tokens)
        if step.choices is None:
            return made
        for text, token, (logprob, top) in zip(step.choices.texts, ids, step.choices.told(others), strict=True):
            if text.ended:
                continue
            end = "error" if token < 0 else "eos" if token in text.request.rules.ends else ""
            if token >= 0:
                text.tokens.append(token)
                self._slots.read(text.slot, token)
            if not end and len(text.tokens) == text.request.most:
                end = "length"
            if end:
                # One token that is not finite reaches those before it: 0 times NaN in a product that leaves it out.
                self._leave(text, forget=end == "error")
            made.append(Token(text.place, token, end, logprob, top, text.cached))
        return made

    def _launch(self) -> bool:
        """A step of all that needs computing; False: nothing does."""
        self._settle()
        growing = [one for one in self._texts.values() if one.grows]
        room = max(1, min(self._step_tokens - len(growing), self._pace.size * (1 if growing else _ALONE)))
        begun = [] if growing and self._pace.rests else self._prompts(room)
        if not growing and not begun:
            return False
        watch = Stopwatch(self._device) if self._pace.bounded else None
        rows = [one.prompt[one.computed : one.computed + size] for one, size in begun]
        parts = [self._next_ids(growing)] if growing else []
        if rows:
            parts.append(sent(torch.tensor([one for row in rows for one in row]), self._device))
        ids = parts[0] if len(parts) == 1 else torch.cat(parts)
        offsets = torch.tensor([*accumulate([*(1 for _ in growing), *map(len, rows)], initial=0)], dtype=torch.int32)
        slots = torch.tensor([one.slot for one in [*growing, *(one for one, _ in begun)]], dtype=torch.int32)
        logits = self._decoder.forward(ids, offsets, slots, False)
        self.dtype = logits.dtype
        for one in growing:
            self._slots.add(one.slot, 1)
        for (one, size), row in zip(begun, rows, strict=True):
            one.computed += size
            self._slots.add(one.slot, size, row)
        # Of a prompt whose end is still to come nobody needs the next token; such prompts are the last.
        texts = growing + [one for one, _ in begun if one.computed == len(one.prompt)]
        step = _Step(None, None, sum(map(len, rows)), watch)
        if texts:
            if self._choices is None or self._choices.texts != texts:
                self._choices = Choices(texts, self._vocab, self._histories)
            self._chosen = self._choices.choose(logits[: len(texts)])
            step.choices, step.chosen = self._choices, self._chosen
            for one in texts:
                one.chosen += 1
        if watch is not None:
            watch.stop()
        self._steps.append(step)
        return True

    def _prompts(self, room: int) -> list[tuple[Text, int]]:
        """Texts whose prompts are computed next, and how many tokens of each: equal shares of the room, what a short
        one leaves going to the longer ones. Those that are computed to their ends come first, as they are shorter."""
        self._admit()
        left = sorted((one for one in self._texts.values() if not one.chosen), key=lambda one: one.rest)
        found = []
        for i, one in enumerate(left):
            size = min(one.rest, -(-room // (len(left) - i)))
            room -= size
            if size:
                found.append((one, size))
        return found

    def _admit(self) -> None:
        """Waiting texts into free slots. One whose prompt begins as another does that is being computed waits for
        that."""
        if not self._waiting or not self._slots.free:
            return
        for text in [*islice(self._waiting.values(), _LOOKED_AT)]:
            if not self._slots.free:
                return
            if self._shares_with_one_to_come(text):
                continue
            del self._waiting[text.place]
            text.slot, text.cached = self._slots.take(text.prompt)
            text.computed = text.cached
            self._texts[text.place] = text
            if counts_tokens(text.request.rules):
                self._histories.begin(text.slot, text.prompt)

    def _shares_with_one_to_come(self, text: Text) -> bool:
        if not self._reuse:
            return False
        computed = [one for one in self._texts.values() if not one.chosen]
        common = max((min(common_length(one.prompt, text.prompt), len(text.prompt) - 1) for one in computed), default=0)
        if common < max(WORTH_A_COPY, len(text.prompt) // 2):
            return False
        return common > self._slots.common(text.prompt) + WORTH_A_COPY

    def _next_ids(self, growing: list[Text]) -> Tensor:
        """int64 [growing] on the device: the tokens chosen last."""
        assert self._choices is not None and self._chosen is not None  # a text that grows was in the last step
        texts = self._choices.texts
        if texts == growing:
            return self._chosen.ids
        index = {one.place: i for i, one in enumerate(texts)}
        return self._chosen.ids.index_select(0, sent(torch.tensor([index[one.place] for one in growing]), self._device))
