"""What a folder with a table of token vectors says about texts: model2vec, and StaticEmbedding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ftbert.input_file import exists, read_json_object
from ftbert.sentence_modules import STATIC, Module
from ftbert.text.checks import length_in
from ftbert.text.tokens import Tokens
from ftbert.text.vector_modules import NOTHING, read_behind

_MODEL_TYPE = "static_embedding"  # of a converted folder
_MODEL2VEC = "model2vec"
_MODEL2VEC_LENGTH = 512


@dataclass(frozen=True)
class StaticSettings:
    """Texts get no special tokens. model2vec: they are read as `Model2vecReading` says, too."""

    model2vec: bool = False


@dataclass(frozen=True)
class Model2vecReading:
    """Which of a text model2vec reads. unknown: the id of the token that counts for nothing, if there is one.
    characters: of a text, for each token of the maximum length: the vocabulary's median."""

    unknown: int | None
    characters: int

    @classmethod
    def of(cls, fast: Any) -> Model2vecReading:
        """fast: a `tokenizers.Tokenizer`."""
        if hasattr(fast.model, "unk_token"):
            token = fast.model.unk_token
            unknown = None if token is None else fast.token_to_id(token)
        else:  # Unigram, which the package does not ask
            unknown = json.loads(fast.to_str())["model"].get("unk_id")
        return cls(unknown, int(np.median([len(token) for token in fast.get_vocab()])))

    def cut(self, texts: Sequence[str], length: int) -> list[str]:
        return [text[: length * self.characters] for text in texts]

    def kept(self, tokens: Tokens) -> Tokens:
        """Without the unknown token, of texts that were truncated with it."""
        known = tokens.ids != self.unknown
        if self.unknown is None or known.all():
            return tokens
        before = np.concatenate([[0], np.cumsum(known)])
        return replace(tokens, ids=tokens.ids[known], starts=before[tokens.starts])


def is_static(modules: Sequence[Module], config: Any) -> bool:
    """config: of the folder, or what a converted one keeps of it."""
    kind = config.get("model_type") if isinstance(config, dict) else None
    return kind in (_MODEL2VEC, _MODEL_TYPE) or (bool(modules) and modules[0].kind == STATIC)


def read_static(where: Path, home: Path, modules: Sequence[Module], config: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of `TextSettings`. where: modules.json; home: of the table and its tokenizer. ValueError for modules
    behind the table that are not computed."""
    behind = [module for module in modules[1:] if module.kind not in NOTHING]
    for module in behind:
        if module.kind not in ("Dense", "LayerNorm", "Normalize"):
            raise ValueError(
                f"{where}: module {module.full!r} is not supported behind {STATIC}; expected Dense, LayerNorm or "
                "Normalize"
            )
    dense, normalize = read_behind(behind, "sentence_embedding")
    made = {"static": StaticSettings(), "pooling": "mean", "dense": dense, "normalize": normalize, "stated": True}
    if _MODEL2VEC in (config.get("model_type"), config.get("of")):
        length = {"max_length": config.get("max_length", _MODEL2VEC_LENGTH)}
        made |= {
            "static": StaticSettings(model2vec=True),
            "max_length": length_in(home / "config.json", length, "max_length"),
            "normalize": normalize or bool(config.get("normalize", False)),
        }
        return made
    return {**made, "max_length": _truncation(home / "tokenizer.json")}


def _truncation(path: Path) -> int | None:
    """The length to which a tokenizer.json truncates by itself, which StaticEmbedding leaves on."""
    found = read_json_object(path).get("truncation") if exists(path) else None
    return length_in(path, found, "max_length") if isinstance(found, dict) else None
