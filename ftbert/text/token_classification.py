"""Logits of tokens to entities, as transformers' TokenClassificationPipeline makes them. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRATEGIES = ("none", "simple", "first", "average", "max")
IGNORED = ("O",)  # labels that are left out where the caller names no others


@dataclass
class _Labelled:
    """A token, or the tokens of a word. tokens: their places in the encoding."""

    tokens: list[int]
    label: str
    score: np.float32


class TokenLabels:
    """fast: a `tokenizers.Tokenizer`. unknown_id: of its unknown token. labels: names, in the order of the logits."""

    def __init__(self, fast: Any, unknown_id: int | None, labels: Sequence[str]) -> None:
        self._fast, self._unknown_id, self._labels = fast, unknown_id, labels
        # With a prefix for what continues a word, a token says itself whether it does.
        self._knows_words = bool(getattr(fast.model, "continuing_subword_prefix", None))

    def entities(
        self, text: str, encoding: Any, logits: NDArray[np.float32], strategy: str, ignored: Collection[str]
    ) -> list[dict[str, Any]]:
        """encoding: of `text`, with special tokens. logits: float32 [tokens, labels]. strategy: one of `STRATEGIES`.

        With "none" a dict for each token: entity, score, index (of the token), word, start, end (in characters of
        `text`). Else a dict for each run of neighbours with the same label: entity_group (without B- and I-), score,
        word, start, end. "first", "average" and "max" first give all tokens of a word the same label. `ignored`:
        labels, or groups, that are left out.
        """
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
        tokens = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
        if strategy in ("none", "simple"):
            labelled = [self._label([i], scores[i]) for i in tokens]
        else:
            words = self._words(text, encoding, tokens)
            labelled = [self._label(word, _of_word(scores[word], strategy)) for word in words]
        if strategy == "none":
            return [
                {
                    "entity": one.label, "score": float(one.score), "index": one.tokens[0],
                    "word": self._token(text, encoding, one.tokens[0]), **_place(encoding, one.tokens),
                }
                for one in labelled if one.label not in ignored
            ]  # fmt: skip
        found = []
        for group in _groups(labelled):
            name = group[0].label.split("-", 1)[-1]
            if name in ignored:
                continue
            strings = [self._string(text, encoding, one.tokens, whole=strategy != "simple") for one in group]
            score = float(np.mean([one.score for one in group]))
            place = _place(encoding, [*group[0].tokens, *group[-1].tokens])
            found.append({"entity_group": name, "score": score, "word": self._joined(strings), **place})
        return found

    def _label(self, tokens: list[int], scores: NDArray[np.float32]) -> _Labelled:
        best = int(scores.argmax())
        return _Labelled(tokens, self._labels[best], scores[best])

    def _words(self, text: str, encoding: Any, tokens: list[int]) -> list[list[int]]:
        """Neighbouring tokens that are one word."""
        found: list[list[int]] = []
        ids, offsets = encoding.ids, encoding.offsets
        for i in tokens:
            start, end = offsets[i]
            if ids[i] == self._unknown_id:
                continues = False
            elif self._knows_words:
                continues = len(self._fast.id_to_token(ids[i])) != end - start
            else:
                continues = start > 0 and " " not in text[start - 1 : start + 1]
            if found and continues:
                found[-1].append(i)
            else:
                found.append([i])
        return found

    def _token(self, text: str, encoding: Any, i: int) -> str:
        """As the vocabulary has it; where it has none, what stands in the text."""
        if encoding.ids[i] == self._unknown_id:
            start, end = encoding.offsets[i]
            return text[start:end]
        return str(self._fast.id_to_token(encoding.ids[i]))

    def _string(self, text: str, encoding: Any, tokens: list[int], whole: bool) -> str:
        """Of one token, or with `whole` of a word."""
        strings = [self._token(text, encoding, i) for i in tokens]
        return self._joined(strings) if whole else strings[0]

    def _joined(self, strings: list[str]) -> str:
        decoder = self._fast.decoder
        return " ".join(strings) if decoder is None else str(decoder.decode(strings))


def _of_word(scores: NDArray[np.float32], strategy: str) -> NDArray[np.float32]:
    """[tokens of a word, labels] -> [labels]."""
    if strategy == "average":
        mean: NDArray[np.float32] = scores.mean(axis=0)
        return mean
    return scores[0 if strategy == "first" else int(scores.max(axis=1).argmax())]


def _groups(labelled: list[_Labelled]) -> list[list[_Labelled]]:
    """Neighbours of one label; one with B- begins anew."""
    found: list[list[_Labelled]] = []
    last = None
    for one in labelled:
        begins, name = one.label.startswith("B-"), one.label[2:] if one.label[:2] in ("B-", "I-") else one.label
        if name == last and not begins:
            found[-1].append(one)
        else:
            found.append([one])
        last = name
    return found


def _place(encoding: Any, tokens: list[int]) -> dict[str, int]:
    return {"start": encoding.offsets[tokens[0]][0], "end": encoding.offsets[tokens[-1]][1]}
