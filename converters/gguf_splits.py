"""How byte-level tokenizers split a text before their merges, by `tokenizer.ggml.pre`; and merges from scores.

The expressions are those of the models' own tokenizer.json, which llama.cpp's src/llama-vocab.cpp cites; of names that
its converter gives to a family of models, and of `default`, llama.cpp's own.
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
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Of GPT-4o's kin words end where upper case follows lower case.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+ENDING|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*ENDING|\p{{N}}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK_WORDS = (
    _ASCII_MARKS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NORDIC_WORDS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _byte_level(regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


def _by(*expressions: str) -> dict[str, Any]:
    """One after the other, each in the pieces that those before it have left."""
    splits = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False} for one in expressions
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, _byte_level(False)]}


_MOST_CHARACTERS = 1 << 29  # Gemma's 262,144 tokens make it some ten million


@dataclass(frozen=True)
class Split:
    """begins: the token for a text's begin is put before it where the file does not say. whole_words: a word that is a
    token is not merged. separates: between two texts stands a separator beside the first one's end, where the file does
    not say; None: there is none, although llama.cpp's converter says so of every file."""

    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    begins: bool = False
    whole_words: bool = False
    separates: bool | None = False


_NFC = {"type": "NFC"}
_GPT2 = Split(_byte_level(True))
_DIGITS = Split({
    "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
})  # fmt: skip
_BY_THREE = _by(_WORDS.replace("DIGITS", "{1,3}"))
_BY_ONE = _by(_WORDS.replace("DIGITS", ""))
_CASED_BY_THREE = _by(
    _CASED.replace("ENDING", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", "{1,3}"),
)
USUAL = "default"  # llama.cpp's, of files that name none
_SPLITS = {
    **dict.fromkeys((
        "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-de", "jina-v2-es", "gigachat",
        "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4",
    ), _GPT2),
    **dict.fromkeys(("roberta-bpe", "jina-v1-en", "jina-v2-code"), Split(_byte_level(True), separates=True)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS
    ),
    **dict.fromkeys((
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
    ), Split(_BY_THREE, begins=True, whole_words=True)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), Split(_BY_THREE)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2"), Split(_BY_ONE, _NFC)),
    **dict.fromkeys(("stablelm2", "megrez", "kormo", "hunyuan", "solar-open", "grok-2"), Split(_BY_ONE)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), Split(_CASED_BY_THREE)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Split(
        _by(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_WORDS)
    )),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), Split(_by(_NORDIC_WORDS))),
    USUAL: Split(_by(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-coder": Split(
        _by(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "falcon": Split(_by(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]")),
    "granite-embed-multi-97m": Split(_CASED_BY_THREE, whole_words=True),
    "modern-bert": Split(_byte_level(True), _NFC, separates=None),
    "qwen35": Split(
        _by(_WORDS.replace("DIGITS", "").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")),
        _NFC,
    ),
    "seed-coder": Split(_by(_WORDS.replace("DIGITS", "").replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"))),
    "tekken": Split(_by(_CASED.replace("ENDING", "").replace("DIGITS", "")), begins=True, whole_words=True),
    "viking": Split(_by(_NORDIC_WORDS, r"\p{N}")),
}  # fmt: skip


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
