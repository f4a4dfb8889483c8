"""Texts end to end: what encode makes of them against the libraries that read the folder as it is."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftbert.input_file import read_json_object
from ftbert.pooled_rows import pooled
from ftbert.sentence_modules import transformer_folder
from ftbert.text import (
    OtherVectors,
    TextOptions,
    TextSettings,
    dense_of,
    load_tokenizer,
    text_options,
    tokenizer_of,
)

# What settings of a tokenizer show in: case, accents, Chinese characters, control characters, nothing at all.
SETTLING_TEXTS = (
    "Hello World", "Na\u00efve CAF\u00c9, cafe\u0301", "\u4e2d\u6587\u5b57\u7b26", "", "  two\tspaces\x07\u200b",
    "long " * 600 + "end",
)  # fmt: skip


@dataclass(frozen=True)
class TextResult:
    """peer: what was compared with. different_ids: texts whose ids are not AutoTokenizer's. max_abs_diff: of vectors
    of length 1. worst: the text with the largest difference. reason: why the peer computed nothing, or ""."""

    peer: str
    texts: int
    different_ids: int
    max_abs_diff: float
    max_abs_diff_allowed: float
    min_cosine: float
    min_cosine_allowed: float
    worst: str
    passed: bool
    reason: str = ""

    @classmethod
    def failed(cls, texts: int, reason: str) -> TextResult:
        """Where the peer cannot be had, or refuses the texts."""
        nan = float("nan")
        return cls("", texts, 0, nan, nan, nan, nan, "", passed=False, reason=reason)

    def __str__(self) -> str:
        if self.reason:
            return f"texts   {self.texts:>8}  FAILED: {self.reason}"
        line = table_row("texts", self.texts, self)
        ids = f"; {self.different_ids} texts have other ids than AutoTokenizer's" if self.different_ids else ""
        return f"{line}  (encode against {self.peer}{ids})" + ("" if self.passed else f"; worst: {self.worst!r}")


def table_row(name: str, count: int, result: Any) -> str:
    """A line of the table that `ftbert check` prints, of a TextResult or a MaskResult."""
    return (
        f"{name:<8}{count:>8}{result.max_abs_diff:>15.2e}{result.max_abs_diff_allowed:>11.2e}"
        f"{result.min_cosine:>13.7f}{result.min_cosine_allowed:>9}  {'ok' if result.passed else 'FAILED'}"
    )


def compare_texts(
    model: Any, reference: Any, texts: Sequence[str], allowed: float, cosine: float
) -> TextResult | None:
    """None for a model without a tokenizer, or one that encode is not for. reference: its transformers encoder in
    float32, on its device."""
    try:
        tokenizer = tokenizer_of(model)
        how = text_options(model, normalize=None)
    except (FileNotFoundError, OtherVectors):
        return None
    listed = [*texts, *SETTLING_TEXTS]
    wanted_ids = _ids(Path(model.folder), tokenizer.settings, listed, how)
    got_ids = tokenizer.encode_batch(listed, how.prompt, how.max_length)
    different = [got.tolist() != want for got, want in zip(got_ids, wanted_ids, strict=True)]
    peer = "sentence-transformers"
    wanted = _by_sentence_transformers(model, listed)
    if wanted is None:
        peer, wanted = "transformers", np.stack([_vector(model, reference, ids, how) for ids in wanted_ids])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="this model scores texts")  # its vectors are compared all the same
        got, wanted = _unit(model.encode(listed, normalize=None, show_progress_bar=False)), _unit(wanted)
    differences = np.abs(got - wanted).max(axis=1)
    cosines = (got.astype(np.float64) * wanted).sum(axis=1)
    largest, lowest = float(differences.max()), float(cosines.min())
    worst = listed[int(np.argmax(np.where(np.isnan(differences), np.inf, differences) + 10 * np.array(different)))]
    return TextResult(
        peer=peer,
        texts=len(listed),
        different_ids=sum(different),
        max_abs_diff=largest,
        max_abs_diff_allowed=allowed,
        min_cosine=lowest,
        min_cosine_allowed=cosine,
        worst=worst[:60],
        passed=not any(different) and largest <= allowed and lowest >= cosine,  # False for NaN as well
    )


def _ids(folder: Path, settings: TextSettings, texts: Sequence[str], how: TextOptions) -> list[list[int]]:
    """Of a fresh tokenizer, called as transformers documents it."""
    whole = [how.prompt + text for text in texts]
    made = load_tokenizer(folder, settings)(whole, truncation=True, max_length=how.max_length)
    found: list[list[int]] = made["input_ids"]
    return found


def _by_sentence_transformers(model: Any, texts: list[str]) -> Any:
    """None where it is not installed, or the folder is not one that it reads, or not with the ids of tokenizer.json."""
    folder = Path(model.folder)
    home = transformer_folder(folder)
    read = (folder / "modules.json").exists() and "model_type" in read_json_object(home / "config.json")
    if not read or find_spec("sentence_transformers") is None:
        return None
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(str(folder), device=str(model.device), local_files_only=True).float()
    if type(peer.tokenizer) is not type(load_tokenizer(folder, tokenizer_of(model).settings)):
        return None
    peer.max_seq_length = text_options(model).max_length  # beyond the positions it would fail
    return peer.encode(texts, show_progress_bar=False)


def _vector(model: Any, reference: Any, ids: list[int], how: TextOptions) -> Any:
    """One text at a time: no padding, so no mask."""
    hidden = reference(input_ids=torch.tensor([ids], device=reference.device)).last_hidden_state[0].float()
    vector = pooled(hidden, how.pooling, how.unpooled_tokens)[None]
    for dense in dense_of(model):
        vector = dense(vector.to(model.device))
    return vector[0, : how.truncate_dim].cpu().numpy()


def _unit(vectors: Any) -> Any:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
