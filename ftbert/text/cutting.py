"""Where a long text can be cut before it is tokenised without changing the tokens of what is kept.

A tokenizer reads the whole text before it truncates: 1 MB takes half a second, and 512 tokens of it remain. Cut between
two words the tokens of a part are the first, or the last, of the whole text's, as long as nothing in the tokenizer
looks across such a place. The tokenizer's own description says what does; what is not known here is not cut.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

# These drop white space and look at one word at a time ...
_DROP_SPACE = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
# ... these keep a space with the word behind it.
_KEEP_SPACE = ("ByteLevel", "Metaspace")
# Behind one of those: they divide words only.
_WITHIN_WORDS = (*_DROP_SPACE, *_KEEP_SPACE, "Punctuation", "Digits")
# Normalizers that never join what stands on both sides of a space: Unicode's forms compose nothing with U+0020.
_LOCAL = ("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Strip", "StripAccents", "Precompiled")

# Letters, digits and ASCII punctuation that stay unchanged and join no space. In all of Unicode's forms none becomes a
# space, is removed, or makes a grapheme with a space behind it.
_PLAIN = "[!-~À-ʯΆ-ҁҊ-Ֆא-תء-غف-يक-हก-ฮぁ-ゖァ-ヺ一-鿿가-힣]"
_IDEOGRAPHS = "一-鿿"  # each is a word of its own where the normalizer puts spaces around it

# Characters of a first part for each token kept. English has 4.7; where a part has too few tokens it is doubled.
CHARACTERS = 8
_NEAR = 128  # characters before the end of a part in which a place is looked for first


@dataclass(frozen=True)
class Cutter:
    """places: matches where a text can be cut, in front of the match. sides: truncation sides for which that is so."""

    places: re.Pattern[str]
    sides: tuple[str, ...]

    @classmethod
    def of(cls, fast: Any) -> Cutter | None:
        """For a `tokenizers.Tokenizer`; None where it is not known to look at words one at a time."""
        described = json.loads(fast.to_str())
        steps = _steps(described["pre_tokenizer"], "pretokenizers")
        normalizers = _steps(described["normalizer"], "normalizers")
        if not steps or not all(map(_is_local, normalizers)) or any(s["type"] not in _WITHIN_WORDS for s in steps[1:]):
            return None
        first, kinds = steps[0], [one["type"] for one in normalizers]
        added = described["added_tokens"]
        if any(_has_space(fast, token["content"]) for token in added):
            return None  # one could stand across the cut
        if first["type"] in _DROP_SPACE:
            apart = any(n["type"] == "BertNormalizer" and n["handle_chinese_chars"] for n in normalizers)
            spaces = f"[ \\t\\n\\r{_IDEOGRAPHS if apart else ''}]"
            plain = "" if set(kinds) <= {"BertNormalizer", "Lowercase"} else f"(?<={_PLAIN})"
            return cls(re.compile(plain + spaces), ("right", "left"))
        if first["type"] not in _KEEP_SPACE or not first.get("use_regex", first.get("split", False)):
            return None
        # On the left the space must stay with the word behind it.
        left = not any(token["rstrip"] for token in added) and "Strip" not in kinds
        return cls(re.compile(f"(?<={_PLAIN}) "), ("right", "left") if left else ("right",))

    def part(self, text: str, size: int, side: str) -> str:
        """More than size / 2 characters of `text` and at most `size`, from its beginning, or for side "left" from its
        end; all of it where it is not much longer. Without a place to cut there, of twice that size."""
        while side in self.sides and len(text) > size + _NEAR:
            if side == "left":
                first = self.places.search(text, len(text) - size, len(text) - size // 2)
                if first is not None:
                    return text[first.start() :]
            for near in (_NEAR, size) if side == "right" else ():
                found = [place.start() for place in self.places.finditer(text, max(size - near, size // 2) + 1, size)]
                if found:
                    return text[: found[-1]]
            size *= 2
        return text


def _steps(described: Any, parts: str) -> list[dict[str, Any]]:
    """Of a normalizer or pre-tokenizer as tokenizer.json describes it, sequences laid flat."""
    if described is None:
        return []
    if described["type"] != "Sequence":
        return [described]
    return [step for part in described[parts] for step in _steps(part, parts)]


def _is_local(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _LOCAL
    pattern, content = normalizer["pattern"], normalizer["content"]
    if pattern == {"Regex": " {2,}"}:  # of several spaces one
        return bool(content == " ")
    return "String" in pattern and not re.search(r"\s", pattern["String"] + content)


def _has_space(fast: Any, content: str) -> bool:
    normalized = content if fast.normalizer is None else fast.normalizer.normalize_str(content)
    return re.search(r"\s", content + normalized) is not None or not normalized
