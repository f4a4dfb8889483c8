"""Long texts are cut before they are tokenised, where the tokens that count stay the same."""

from __future__ import annotations

import json
from typing import Any

# Pre-tokenizers that split at spaces, so that no token crosses one; normalizers that look at no neighbour across one.
_SPLITTING = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit", "ByteLevel", "Metaspace"}
_LOCAL = {
    "BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Precompiled", "ByteLevel",
}  # fmt: skip
# Longer than nearly all text: 4 to 6 characters a token are common.
_CHARACTERS_PER_TOKEN = 16


class Cutter:
    """Cuts at a space, so that a part has at least as many tokens as are kept, or is the whole text."""

    def __init__(self, tokenizer: Any, length: int) -> None:
        self._length = length
        self.size = _CHARACTERS_PER_TOKEN * length  # of the first try
        rules = json.loads(tokenizer.to_str())
        self.exact = _all_in(rules.get("pre_tokenizer"), "pretokenizers", _SPLITTING) and (
            rules.get("normalizer") is None or _all_in(rules["normalizer"], "normalizers", _LOCAL)
        ) and not any(" " in token["content"] for token in rules.get("added_tokens", []))

    def cut(self, text: str, side: str, size: int | None = None) -> str:
        """The first `size` characters, of side "left" the last ones; the whole text where that is not exact."""
        size = self.size if size is None else size
        if not self.exact or len(text) <= size + 1:
            return text
        if side == "left":
            at = text.find(" ", len(text) - size)
            # From the space on: to some tokenizers it belongs to the word.
            return text if at < 0 or not _word_before(text, at) else text[at:]
        at = text.rfind(" ", 1, size)
        return text if at < 0 or not _word_before(text, at) else text[:at]

    def second(self, one: str, other: str, side: str) -> str:
        """The second text of a pair. Where the first is short, only the second is truncated."""
        if len(one) * 2 >= self._length or side == "left":
            return other
        part = self.cut(other, side)
        # A part with few tokens would be truncated less than the whole: words of 16 letters on average are rare.
        return part if part.count(" ") >= self._length else other


def _word_before(text: str, at: int) -> bool:
    """Of several spaces some tokenizers make tokens: only a single one is cut at."""
    return not text[at - 1].isspace() and at + 1 < len(text) and not text[at + 1].isspace()


def _all_in(rule: Any, parts: str, known: set[str]) -> bool:
    if not isinstance(rule, dict):
        return False
    if rule.get("type") == "Sequence":
        return all(_all_in(part, parts, known) for part in rule.get(parts, []))
    splits = rule.get("split", True) is not False and rule.get("use_regex", True) is not False
    return rule.get("type") in known and splits
