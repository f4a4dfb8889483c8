"""Tokens to text while they come: never half a character, never what may turn out to be part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

# Tokens of the prompt that are decoded beside the first new ones, for the space between them.
_BEFORE = 6
# Tokens whose text may be held back as the beginning of a character, which has four bytes at most, a token each: more
# are no character, or a model that writes none.
_MOST_HELD = 16
_INCOMPLETE = "\ufffd"  # what decoders make of bytes that are no whole character, or not yet


class TextStream:
    """One text. Pieces joined are what all its tokens are decoded to, up to a stop string.

    Stop strings are looked for in the text with its special tokens, as transformers' are; the pieces are without.
    stopped: a stop string came, `stop`; it and what follows are not part of the text.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], prompt: Sequence[int] = (), stop: Sequence[str] = (),
        special: Mapping[int, str] | None = None,
    ) -> None:  # fmt: skip
        """decode: ids to text. prompt: the ids that the text follows. special: ids that `decode` leaves out, and how
        they are spelled."""
        self._decode, self._stop, self._special = decode, [one for one in stop if one], special or {}
        self._ids = [one for one in prompt if one not in self._special][-_BEFORE:]
        self._read = len(self._ids)  # ids whose text was taken
        self._start = 0  # of ids that are decoded again: a word's space depends on the token before it
        self._held: list[tuple[str, bool]] = []  # text and special tokens, and whether it is shown
        self.stopped, self.stop = False, ""

    def push(self, token: int) -> str:
        """The text that this token makes certain, "" for none."""
        if self.stopped:
            return ""
        if token in self._special:  # not among the ids: the space between those around it is as without it
            return self._certain(self._special[token], shown=False)
        self._ids.append(token)
        found = self._new_text()
        if found.endswith(_INCOMPLETE):
            return self._certain(self._cut(found)) if len(self._ids) - self._read > _MOST_HELD else ""
        self._advance()
        return self._certain(found)

    def end(self, last: int | None = None) -> str:
        """What was held back; no token comes any more. last: the token that said so, which is not part of the text but
        may complete a stop string."""
        if self.stopped:
            return ""
        found = self._new_text()
        self._advance()
        rest = self._certain(found)
        if last is not None and not self.stopped:
            rest += self._certain(self._special.get(last) or self._decode([last]), shown=False)
        return rest + self._taken(sum(len(text) for text, _ in self._held))

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

    def _certain(self, text: str, shown: bool = True) -> str:
        self._held.append((text, shown))
        whole = "".join(part for part, _ in self._held)
        places = [(place, one) for one in self._stop if (place := whole.find(one)) >= 0]
        if places:
            first, self.stop = min(places)
            self.stopped = True
            sure = self._taken(first)
            self._held.clear()
            return sure
        return self._taken(len(whole) - max((_overlap(whole, one) for one in self._stop), default=0))

    def _taken(self, count: int) -> str:
        """What is shown of the first `count` characters that are held, which then are no longer."""
        sure, rest = "", []
        for text, shown in self._held:
            sure += text[:count] if shown else ""
            if len(text) > count:
                rest.append((text[count:], shown))
            count = max(count - len(text), 0)
        self._held = rest
        return sure


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` may begin with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
