"""Texts to token ids in a worker, without torch or transformers: the engine sent the tokenizer's file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftbert.server.description import Description
from ftbert.server.errors import ApiError, validation
from ftbert.text import FastTokenizer, LimitedPairs, TemplateEncoder, Tokens, expanded, panics_as_errors, tokens_of

# More characters are not handed to `tokenizers` at once: there they take up to 600 MB.
_LONGEST = 1 << 20
# Fewer characters are tokenised at once: handing them to a thread costs more (60 us) than doing it. By nanotoken
# 16,384 of prose in 16 texts take 50 us, of random letters 560.
INLINE_CHARACTERS, _INLINE_CHARACTERS_WORDPIECE = 512, 16384
_PROMPTS_KEPT = 256


@dataclass
class Encoded:
    """Texts of a request. ids: int32 [tokens]; offsets: int64 [texts + 1]; skip, types, marked, targets, keys, query:
    as of Job. encodings: of `tokenizers`, where places in the text were asked for."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    characters: int
    skip: NDArray[np.int32] | None = None
    types: NDArray[np.uint8] | None = None
    marked: NDArray[np.int32] | None = None
    targets: NDArray[np.int32] | None = None
    keys: NDArray[np.int32] | None = None
    query: NDArray[np.float32] | None = None
    encodings: Sequence[Any] = ()

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])


class TextEncoder:
    """Thread-safe; calls release the GIL while they tokenise. whole: a `tokenizers.Tokenizer` that never truncates.
    inline: characters of single texts that are not worth a thread. special_of_pairs: tokens added to two texts."""

    def __init__(self, description: Description) -> None:
        from tokenizers import Tokenizer

        self.about = description
        with panics_as_errors():
            self.whole: Any = Tokenizer.from_str(description.text.tokenizer)
        self.whole.encode_special_tokens = description.text.encode_special_tokens
        self._fast = FastTokenizer(self.whole, description.model.token_types > 1)
        self._templates = TemplateEncoder(self.whole, self._fast.cutter)
        self._limited = LimitedPairs(self.whole, self._fast.cutter, description.model.token_types > 1)
        self.special_of_pairs = self._limited.special
        self.inline = INLINE_CHARACTERS if self._fast.wordpiece is None else _INLINE_CHARACTERS_WORDPIECE
        self._skips: dict[str, int] = {}
        self._words: dict[int, str] = {}

    def text(self, ids: list[int]) -> str:
        """Without special tokens."""
        return str(self.whole.decode(ids, skip_special_tokens=True))

    def word(self, token: int) -> str:
        """How a token is written within a text; a special one by its name."""
        if (found := self._words.get(token)) is None:
            once = str(self.whole.decode([token], skip_special_tokens=False))
            twice = str(self.whole.decode([token, token], skip_special_tokens=False))
            found = self._words[token] = twice[len(once) :]  # with the space before a word
        return found

    def encode(
        self, inputs: Sequence[str | list[int]], prompt: str, truncate: bool, side: str, most: int | None = None
    ) -> Encoded:
        """`prompt` stands before texts, not before ids, which are taken as they are. most: tokens of a text with the
        special ones; None: the model's. ApiError 422: too long and not to be truncated, or an id outside the
        vocabulary."""
        most = most or self.about.text.max_length
        texts = [prompt + one for one in inputs if isinstance(one, str)]
        reading = self.about.text.reading
        if reading is not None and truncate:
            texts = reading.cut(texts, most)
        found = self._tokens(texts, truncate, side, most)
        if reading is not None:
            found = reading.kept(found)
        if len(texts) < len(inputs):
            rows = iter(found.rows())
            found = _joined(
                [next(rows) if isinstance(x, str) else self._given(x, truncate, side, most) for x in inputs]
            )
        encoded = Encoded(found.ids.astype(np.int32), found.starts, sum(map(len, texts)))
        if prompt and not self.about.text.include_prompt:
            skip = self._prompt_tokens(prompt)
            encoded.skip = np.array([skip if isinstance(one, str) else 0 for one in inputs], dtype=np.int32)
        return encoded

    def encode_queries(
        self, inputs: Sequence[str | list[int]], prompt: str, truncate: bool, side: str, most: int | None = None
    ) -> Encoded:
        """`encode`, and each made longer where the model's folder says so."""
        expansion = self.about.vectors.expansion
        if expansion is None:
            return self.encode(inputs, prompt, truncate, side, most)
        length = expansion.length if expansion.exact else max(most or self.about.text.max_length, expansion.length)
        made = self.encode(inputs, prompt, truncate, side, length)
        given = Tokens(made.ids.astype(np.int64), made.offsets)
        found = expanded(given, expansion.token, expansion.length, expansion.attend)
        keys = None if found.marks is None else np.array(found.marks, dtype=np.int32)
        return Encoded(found.ids.astype(np.int32), found.starts, made.characters, keys=keys)

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        truncate: bool,
        side: str,
        *,
        prompt: str = "",
        most: int | None = None,
        limits: tuple[int | None, int | None] = (None, None),
        instruct: str | None = None,
    ) -> Encoded:
        """Two texts of one sequence each, the longer cut first. `prompt` stands before the first one. most: as of
        `encode`. limits: most tokens of its own that the first and the second text keep before they are paired, None:
        all. Where the model has a template for pairs, they go through that, with the prompt as its system's message, or
        `instruct`, where the template has a place for it (`Description.instructed`)."""
        tokens = None
        template = self.about.scores.templates.get(prompt)
        if instruct and self.about.scores.instructed is not None:
            template = self.about.scores.instructed.instructed(instruct)
        if template is not None:
            if limits != (None, None):
                raise validation("this model's pairs go through a template: texts are not limited one by one")
            tokens, prompt = partial(self._templates.tokens, template=template), ""
        if limits != (None, None):
            first, second = limits
            if first is not None and prompt:  # which is no part of the query
                first += len(self.whole.encode(prompt, add_special_tokens=False).ids)
            tokens = partial(self._limited.tokens, limits=(first, second))
        if prompt:
            prompted = {a: prompt + a for a in {a for a, _ in pairs}}  # one copy of a query, not one for each document
            pairs = [(prompted[a], b) for a, b in pairs]
        found = self._tokens(pairs, truncate, side, most or self.about.text.max_length, tokens)
        types = None if found.types is None else found.types.astype(np.uint8)
        return Encoded(found.ids.astype(np.int32), found.starts, sum(len(a) + len(b) for a, b in pairs), types=types)

    def encode_with_places(self, texts: Sequence[str], truncate: bool, side: str) -> Encoded:
        """With the encoding of each text. ApiError 422: too long and not to be truncated."""
        most = self.about.text.max_length
        for text in texts:
            if self._part(text, side) is not text and side == "left":  # the tokenizer cuts them, but on the right only
                raise _too_long_to_read(len(text))
        try:
            made = self._fast.encodings(texts, most if truncate else most + 1, side)
        except Exception as error:  # noqa: BLE001 - as in _tokens
            raise ApiError("Tokenizer", f"Tokenization error: {type(error).__name__}") from None
        found = self._checked(tokens_of([one.ids for one in made]))
        if not truncate and found.lengths.max(initial=0) > most:
            raise _too_long("more", most)
        return Encoded(found.ids.astype(np.int32), found.starts, sum(map(len, texts)), encodings=made)

    def encode_chunks(self, parts: Sequence[str], prompt: str) -> Encoded:
        """Parts of one text as one sequence, each marked by its first token: that which ends within it. ApiError 422:
        longer than the model reads, or a part without a token."""
        text, starts, at = prompt, [], len(prompt)
        for part in parts:
            text += part
            starts.append(at)
            at += len(part)
        encoded = self.encode_with_places([text], truncate=False, side="right")
        encoding = encoded.encodings[0]
        own = np.array(encoding.special_tokens_mask, dtype=np.bool_) == 0
        ends = np.maximum.accumulate(np.where(own, [end for _, end in encoding.offsets], 0))
        if own.any():
            ends[np.flatnonzero(own)[-1] + 1 :] = len(text) + 1  # behind the text: the last part's
        marked = np.searchsorted(ends, starts, side="right")
        marked[0] = 0
        before = np.append(0, np.cumsum(own))  # of each token, those of the text that stand before it
        if (np.diff(before[np.append(marked, len(ends))]) < 1).any():
            raise validation("`late_chunking`: each input needs a token of its own", param="input")
        encoded.marked = marked.astype(np.int32)
        if prompt and not self.about.text.include_prompt:
            encoded.skip = np.array([self._prompt_tokens(prompt)], dtype=np.int32)
        return encoded

    def _tokens(
        self, texts: Sequence[Any], truncate: bool, side: str, most: int,
        tokens: Callable[[Sequence[Any], int, str], Tokens] | None = None,
    ) -> Tokens:  # fmt: skip
        """By `tokens`, None: the tokenizer's own way."""
        length = most if truncate else most + 1
        given = [self._looked_at(text, side) for text in texts]
        try:
            found = (tokens or self._fast.tokens)(given, length, side)
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing more precise
            raise ApiError("Tokenizer", f"Tokenization error: {type(error).__name__}") from None
        found = self._checked(found)
        for i, (text, looked_at) in enumerate(zip(texts, given, strict=True)):
            if looked_at is not text and found.lengths[i] < length:  # what was left out may have more
                raise _too_long_to_read(len(text))
        if not truncate and found.lengths.max(initial=0) > most:
            raise _too_long("more", most)
        return found

    def _checked(self, found: Tokens) -> Tokens:
        """ApiError 422 in the words of `encode` where the model has no row for an id."""
        try:
            return found.check(self.about.model.vocab, self.about.model.token_types)
        except ValueError as error:  # its words hold no text
            raise ApiError("Tokenizer", f"Tokenization error: {error}") from None

    def _looked_at(self, text: Any, side: str) -> Any:
        """A text or a pair; of a long text so much that its first or last tokens are those of the whole. ApiError 413
        where it cannot be cut."""
        if not isinstance(text, str):
            for one in text:
                self._part(one, side)  # the tokenizer cuts pairs
            if (both := min(map(len, text))) > _LONGEST:  # it would count the tokens of both to the end
                raise _too_long_to_read(both)
            return text
        return text if self._fast.wordpiece is not None else self._part(text, side)

    def _part(self, text: str, side: str) -> str:
        if len(text) <= _LONGEST:
            return text
        cutter = self._fast.cutter
        part = text if cutter is None else cutter.part(text, _LONGEST, side)
        if len(part) > 2 * _LONGEST:
            raise _too_long_to_read(len(text))
        return part

    def _given(self, ids: list[int], truncate: bool, side: str, most: int) -> NDArray[np.int64]:
        if not ids:
            raise validation("`inputs` cannot be empty")
        if min(ids) < 0 or max(ids) >= self.about.model.vocab:
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise validation(
                f"token id {str(bad)[:20]} is outside the model's vocabulary of {self.about.model.vocab}. Ids must be "
                "those of this model's tokenizer; with langchain-openai set check_embedding_ctx_length=False to send "
                "text",
                param="input",
            )
        if len(ids) > most and not truncate:
            raise _too_long(str(len(ids)), most)
        return np.array(ids[-most:] if side == "left" else ids[:most], dtype=np.int64)

    def _prompt_tokens(self, prompt: str) -> int:
        if (known := self._skips.get(prompt)) is None:
            ids = self._tokens([prompt], True, "right", self.about.text.max_length).ids
            known = len(ids) - (len(ids) > 0 and int(ids[-1]) in self.about.text.special_ids)
            if len(self._skips) >= _PROMPTS_KEPT:  # requests may bring prompts of their own
                self._skips.clear()
            self._skips[prompt] = known
        return known


def _too_long(given: str, most: int) -> ApiError:
    return validation(f"`inputs` must have less than {most + 1} tokens. Given: {given}")


def _too_long_to_read(characters: int) -> ApiError:
    words = (
        f"a text of {characters} characters cannot be cut where words end, as those of more than {_LONGEST} must be; "
        "send its beginning"
    )
    return ApiError("Validation", f"Input validation error: {words}", status=413)


def _joined(rows: list[NDArray[np.int64]]) -> Tokens:
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(list(map(len, rows)), out=starts[1:])
    return Tokens(np.concatenate(rows), starts)
