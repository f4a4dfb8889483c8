"""The vocabulary in a GGUF file: tokens, what kind each is, and which are special."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ftbert.converters.gguf_file import GgufFile
from ftbert.converters.gguf_metadata import Metadata

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # types of tokens
SPACE = "\u2581"
_SPECIAL = {
    "bos": "bos", "eos": "eos", "unknown": "unk", "seperator": "sep", "padding": "pad", "cls": "cls", "mask": "mask",
}  # fmt: skip
_PREFIX = "tokenizer.ggml."
# Special tokens after which a text, a turn or a message is complete, and tokens that are spelled as such are in the
# vocabularies of common models: llama.cpp's list, which counts whatever the type of a token and the metadata say.
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SPELLED_ENDS = frozenset(
    {
        "</s>", "<eos>", "[EOS]", "<EOT>", "< EOT >", "_<EOT>", "[EOT]", "<|EOT|>", "<|eot_id|>", "<|eom_id|>",
        "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<turn|>",
        "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>",
        "<|repo_name|>", "<fim-repo>", "<reponame>", "<|file_sep|>",
    }
)  # fmt: skip
# Where both tokens of a pair are there, <|end|> ends a message and not the answer.
_END_OF_MESSAGE = "<|end|>"
_ANSWERS_END = ({"<|return|>", "<|call|>"}, {"<|call|>", "<|flush|>"}, {"<|calls|>", "<|flush|>"})


def spelled_ends(tokens: Sequence[Any]) -> dict[int, bool]:
    """Ids of the tokens that are spelled as ends are, and whether a text ends with each."""
    found = {i: token for i, token in enumerate(tokens) if isinstance(token, str) and token in _SPELLED_ENDS}
    answers = any(pair <= set(found.values()) for pair in _ANSWERS_END)
    return {i: not (answers and token == _END_OF_MESSAGE) for i, token in found.items()}


def end_ids(file: GgufFile, said: Metadata) -> list[int]:
    """Of the tokens that end a text, those that the metadata name and those that are spelled so."""
    tokens, known = file.metadata.get(f"{_PREFIX}tokens"), said.rows("token_embd")
    stated = {end for name in _ENDS if (end := said.token(name)) is not None}
    spelled = spelled_ends(tokens if isinstance(tokens, list) else [])
    return sorted(stated.union(i for i, ends in spelled.items() if ends and i < known))


class Vocabulary:
    """tokens by id; types: of each; special: ids by transformers' names ("bos"). ValueError where they do not fit."""

    def __init__(self, file: GgufFile, said: Metadata) -> None:
        self.where = str(file.path)
        self.said = {k.removeprefix(_PREFIX): v for k, v in file.metadata.items() if k.startswith(_PREFIX)}
        self.tokens: list[str] = self.listed("tokens", str)
        if not self.tokens:
            raise ValueError(f"{_PREFIX}tokens is no list of texts")
        self.types: list[int] = self.listed("token_type", int) or [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, and types of {len(self.types)}")
        for i, ends in spelled_ends(self.tokens).items():
            self.types[i] = CONTROL if ends else USER
        ids = {name: said.token(key) for key, name in _SPECIAL.items()}
        self.special = {name: i for name, i in ids.items() if i is not None and i < len(self.tokens)}

    def listed(self, key: str, *kinds: type) -> list[Any]:
        """The list of that name, empty where there is none. ValueError where something in it is not of these kinds."""
        value: Any = self.said.get(key)
        found = list(value.tolist()) if hasattr(value, "tolist") else value if isinstance(value, list) else []
        if not all(isinstance(one, kinds) for one in found):
            raise ValueError(f"{_PREFIX}{key}: expected {' or '.join(kind.__name__ for kind in kinds)} alone")
        return found

    def flag(self, key: str, default: bool) -> bool:
        value = self.said.get(key)
        return value if isinstance(value, bool) else default

    def scores(self) -> list[float]:
        found = self.listed("scores", int, float)
        if len(found) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, and scores of {len(found)}")
        if not all(map(math.isfinite, found)):
            raise ValueError(f"{_PREFIX}scores: expected finite numbers")
        return [float(score) for score in found]

    def name(self, name: str, usual: str) -> None:
        """Where the file does not say which token is special as `name`: the one that is spelled `usual`, if any."""
        if name not in self.special and usual in self.tokens:
            self.special[name] = self.tokens.index(usual)

    def token(self, name: str) -> str | None:
        return self.tokens[self.special[name]] if name in self.special else None

    def ids(self) -> dict[str, int]:
        """Of used tokens, of equal ones the first."""
        found = dict[str, int]()
        for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != UNUSED:
                found.setdefault(token, i)
        return found

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before all else."""
        special = {CONTROL: True, UNKNOWN: True, USER: False}
        return [
            {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": special[kind]}
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)) if kind in special and token
        ]  # fmt: skip

    def around(self, before: str, after: str, between: str, second: int = 0) -> dict[str, Any]:
        """A post-processor that puts special tokens around a text, and `between` before the second of two. Names as in
        `special`; those without a token are left out. second: the token type of the other text."""

        def mark(name: str, kind: int = 0) -> list[dict[str, Any]]:
            token = self.token(name)
            return [] if token is None else [{"SpecialToken": {"id": token, "type_id": kind}}]

        single = [*mark(before), {"Sequence": {"id": "A", "type_id": 0}}, *mark(after)]
        other = [*mark(between, second), {"Sequence": {"id": "B", "type_id": second}}, *mark(after, second)]
        used = {token: self.special[name] for name in (before, after, between) if (token := self.token(name))}
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single + other,
            "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in used.items()},
        }
