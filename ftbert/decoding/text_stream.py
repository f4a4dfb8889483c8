"""Tokens to text while they come: never half a character, never what may turn out to be part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Tokens of the prompt that are decoded beside the first new ones, for the space between them.
_BEFORE = 6
# Tokens whose text may be held back as the beginning of a character, which has four bytes at most, a token each: more
# are no character, or a model that writes none.
_MOST_HELD = 16
_INCOMPLETE = "\ufffd"  # what decoders make of bytes that are no whole character, or not yet


class TextStream:
    """One text. Pieces joined are what all its tokens are decoded to, up to a stop string.

    stopped: a stop string came; it and what follows are not part of the text.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], prompt: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        """decode: ids to text. prompt: the ids that the text follows."""
        self._decode, self._stop = decode, [one for one in stop if one]
        self._ids = list(prompt[-_BEFORE:])
        self._read = len(self._ids)  # ids whose text was taken
        self._start = 0  # of ids that are decoded again: a word's space depends on the token before it
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain, "" for none."""
        if self.stopped:
            return ""
        self._ids.append(token)
        found = self._new_text()
        if found.endswith(_INCOMPLETE):
            return self._certain(self._cut(found)) if len(self._ids) - self._read > _MOST_HELD else ""
        self._advance()
        return self._certain(found)

    def end(self) -> str:
        """What was held back; no token comes any more."""
        if self.stopped:
            return ""
        found = self._new_text()
        self._advance()
        rest = self._certain(found) + self._held
        self._held = ""
        return rest

    def _new_text(self) -> str:
        known = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(known) :]

    def _cut(self, found: str) -> str:
        """Of text that is held for too long all but what may begin a character; its tokens are not decoded again."""
        end = len(self._ids)
        known = self._decode(self._ids[self._start : self._read])
        for cut in range(end - 3, end - 7, -1):
            rest = self._decode(self._ids[cut:])
            sure = self._decode(self._ids[self._start : cut])[len(known) :]
            if sure + rest == found:
                break
        else:
            cut, sure = end, found
        self._start = self._read = cut
        return sure

    def _advance(self) -> None:
        if len(self._ids) > self._read:
            self._start, self._read = self._read, len(self._ids)

    def _certain(self, text: str) -> str:
        self._held += text
        places = [place for one in self._stop if (place := self._held.find(one)) >= 0]
        if places:
            self.stopped = True
            sure, self._held = self._held[: min(places)], ""
            return sure
        keep = max((_overlap(self._held, one) for one in self._stop), default=0)
        sure, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sure


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` may begin with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
