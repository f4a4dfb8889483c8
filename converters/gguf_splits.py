"""How byte-level tokenizers split a text before their merges, by `tokenizer.ggml.pre`; and merges from scores.

The expressions are those of the models' own tokenizer.json, which llama.cpp's src/llama-vocab.cpp cites.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftbert.checkpoint import shown

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _byte_level(regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


def _by(expression: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False)]}


_MOST_CHARACTERS = 1 << 29  # Gemma's 262,144 tokens make it some ten million


@dataclass(frozen=True)
class Split:
    """begins: the token for a text's begin is put before it where the file does not say. whole_words: a word that is a
    token is not merged."""

    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    begins: bool = False
    whole_words: bool = False


_NFC = {"type": "NFC"}
_GPT2 = Split(_byte_level(True))
_DIGITS = Split({
    "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
})  # fmt: skip
_LLAMA3 = Split(_by(_WORDS.replace("DIGITS", "{1,3}")), begins=True, whole_words=True)
_SPLITS = {
    **dict.fromkeys(("gpt-2", "roberta-bpe", "phi-2", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    "modern-bert": Split(_byte_level(True), _NFC),
    "qwen2": Split(_by(_WORDS.replace("DIGITS", "")), _NFC),
}


def split_of(name: Any) -> Split:
    """ValueError for a name that is not known: another expression would make other ids."""
    if not isinstance(name, str) or name not in _SPLITS:
        raise ValueError(f"tokenizer.ggml.pre {shown(name)} is not known; known: {', '.join(sorted(_SPLITS))}")
    return _SPLITS[name]


def merges_of(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """SentencePiece's merges, best first: every pair of tokens that makes a token, by the score of what it makes. As
    transformers' `generate_merges` has them."""
    found: list[tuple[float, tuple[str, str]]] = []
    places = _places(Counter(map(len, scores)))
    for token, score in scores.items():
        # Parts of a token are not kept: of a long one that is none they would be its length, squared.
        pairs = ((token[:at], token[at:]) for at in places[len(token)])
        known = [(left, right) for left, right in pairs if left in scores and right in scores]
        found += [(score, pair) for pair in sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    found.sort(key=lambda one: -one[0])
    return [pair for _, pair in found]


def _places(counts: Mapping[int, int]) -> dict[int, list[int]]:
    """Where tokens of each length may be taken apart: into lengths that tokens have. ValueError where taking all of
    them apart so would read far more characters than any vocabulary makes it."""
    found, characters = dict[int, list[int]](), 0
    for length, count in counts.items():
        found[length] = [at for at in counts if length - at in counts]
        characters += count * length * len(found[length])
        if characters > _MOST_CHARACTERS:
            raise ValueError(f"tokens of up to {max(counts)} letters are too long to look for SentencePiece's merges")
    return found
