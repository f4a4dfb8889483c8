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

from ftbert.evaluation.gates import Gate, least_cosine, within
from ftbert.input_file import read_json_object
from ftbert.model import Model
from ftbert.own_classes import in_transformers_words
from ftbert.pooled_rows import pooled
from ftbert.sentence_modules import transformer_folder
from ftbert.text import (
    OtherVectors,
    TextOptions,
    Tokenizer,
    dense_of,
    filling,
    load_tokenizer,
    text_options,
    tokenizer_of,
)

# What settings of a tokenizer show in: case, accents, Chinese characters, control characters, nothing at all.
SETTLING_TEXTS = (
    "Hello World", "Na\u00efve CAF\u00c9, cafe\u0301", "\u4e2d\u6587\u5b57\u7b26", "", "  two\tspaces\x07\u200b",
    "long " * 600 + "end",
)  # fmt: skip


_SHOWN, _LOWEST = 60, 3  # letters of a text, texts


@dataclass(frozen=True)
class LowText:
    """A text, or which sequence it is, and the cosine of its vector with that of float32."""

    text: str
    cosine: float


@dataclass(frozen=True)
class TextResult:
    """peer: what was compared with. different_ids: texts whose ids are not AutoTokenizer's. max_abs_diff: of vectors of
    length 1. An allowed number that is None is not asked for. worst: the text with the largest difference. lowest: in 8
    bits, where cosines are of the given texts alone, those with the least. reason: why the peer computed nothing, or
    ""."""

    peer: str
    texts: int
    different_ids: int
    max_abs_diff: float
    max_abs_diff_allowed: float | None
    mean_cosine: float
    mean_cosine_allowed: float | None
    min_cosine: float
    min_cosine_allowed: float
    worst: str
    passed: bool
    lowest: tuple[LowText, ...] = ()
    reason: str = ""

    @classmethod
    def failed(cls, texts: int, reason: str) -> TextResult:
        """Where the peer cannot be had, or refuses the texts."""
        nan = float("nan")
        return cls("", texts, 0, nan, None, nan, None, nan, nan, "", passed=False, reason=reason)

    def __str__(self) -> str:
        if self.reason:
            return f"texts   {self.texts:>8}  FAILED: {self.reason}"
        line = table_row("texts", self.texts, self)
        ids = f"; {self.different_ids} texts have other ids than AutoTokenizer's" if self.different_ids else ""
        return f"{line}  (encode against {self.peer}{ids})" + ("" if self.passed else f"; worst: {self.worst!r}")


def table_head(result: Any) -> str:
    """Of the table whose rows are like that of `result`."""
    mean = "" if result.mean_cosine_allowed is None else f"{'mean cosine':>13}{'allowed':>9}"
    return f"{'mask':<8}{'tokens':>8}{'max abs diff':>15}{'allowed':>11}{mean}{'min cosine':>13}{'allowed':>9}"


def table_row(name: str, count: int, result: Any) -> str:
    """A line of the table that `ftbert check` prints, of a TextResult or a MaskResult."""
    allowed = "-" if result.max_abs_diff_allowed is None else f"{result.max_abs_diff_allowed:.2e}"
    mean, least = "", f"{result.min_cosine_allowed:.5f}".rstrip("0")
    if result.mean_cosine_allowed is not None:
        mean = f"{result.mean_cosine:>13.7f}{result.mean_cosine_allowed:>9}"
    return (
        f"{name:<8}{count:>8}{result.max_abs_diff:>15.2e}{allowed:>11}{mean}"
        f"{result.min_cosine:>13.7f}{least:>9}  {'ok' if result.passed else 'FAILED'}"
    )


def lowest_of(texts: Sequence[str], cosines: Sequence[float]) -> tuple[LowText, ...]:
    """The texts with the least cosines, NaN first."""
    ordered = sorted(zip(texts, cosines, strict=True), key=lambda one: -2.0 if np.isnan(one[1]) else one[1])
    return tuple(LowText(text[:_SHOWN], cosine) for text, cosine in ordered[:_LOWEST])


def compare_texts(
    model: Model, reference: Any, texts: Sequence[str], gate: Gate, rounded: Any = None
) -> TextResult | None:
    """None for a model without a tokenizer, or one that encode is not for. reference: its transformers encoder in
    float32, on its device; rounded: the same in the dtype of `model`, where the gate asks for its error."""
    try:
        tokenizer = tokenizer_of(model)
        how = text_options(model, normalize=None)
    except (FileNotFoundError, OtherVectors):
        return None
    listed = [*texts, *SETTLING_TEXTS]
    assert model.folder is not None  # else it has no tokenizer
    wanted_ids = _ids(model.folder, tokenizer, listed, how)
    got_ids = tokenizer.encode_batch(listed, how.prompt, how.max_length)
    different = [got.tolist() != want for got, want in zip(got_ids, wanted_ids, strict=True)]
    peer = "sentence-transformers"
    wanted = _by_sentence_transformers(model, model.folder, listed)
    if wanted is None:
        peer, wanted = "transformers", np.stack([_vector(model, reference, ids, how) for ids in wanted_ids])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="this model scores texts")  # its vectors are compared all the same
        got, wanted = _unit(model.encode(listed, normalize=None, show_progress_bar=False)), _unit(wanted)
    differences = np.abs(got - wanted).max(axis=1)
    cosines = (got.astype(np.float64) * wanted).sum(axis=1)
    cosines[~got.any(axis=1) & ~wanted.any(axis=1)] = 1.0  # of texts without a token
    judged = cosines if gate.unusual is None else cosines[: len(texts)]
    largest, least, mean = float(differences.max()), float(judged.min()), float(judged.mean())
    # Vectors of length 1 have entries far below 1: in less than 32 bits their direction is what counts.
    allowed = None if gate.max_abs_diff is None else gate.max_abs_diff[model.device.type]
    least_allowed = gate.min_cosine
    if rounded is not None and least < least_allowed:
        theirs = _unit(np.stack([_vector(model, rounded, ids, how) for ids in wanted_ids])).astype(np.float64)
        least_allowed = least_cosine(gate, least_allowed, float((theirs * wanted).sum(axis=1)[got.any(axis=1)].min()))
    near = least >= least_allowed and (gate.mean_cosine is None or mean >= gate.mean_cosine)  # False for NaN as well
    near = near and (gate.unusual is None or bool(cosines.min() >= gate.unusual[1]))
    worst = listed[int(np.argmax(np.where(np.isnan(differences), np.inf, differences) + 10 * np.array(different)))]
    return TextResult(
        peer=peer,
        texts=len(listed),
        different_ids=sum(different),
        max_abs_diff=largest,
        max_abs_diff_allowed=allowed,
        mean_cosine=mean,
        mean_cosine_allowed=gate.mean_cosine,
        min_cosine=least,
        min_cosine_allowed=least_allowed,
        worst=worst[:_SHOWN],
        passed=not any(different) and within(largest, allowed) and near,
        lowest=lowest_of(texts, judged.tolist()) if gate.by_text else (),
    )


def _ids(folder: Path, tokenizer: Tokenizer, texts: Sequence[str], how: TextOptions) -> list[list[int]]:
    """Of a fresh tokenizer, called as transformers documents it."""
    whole = [how.prompt + text for text in texts]
    if tokenizer.reading is not None:
        whole = tokenizer.reading.cut(whole, how.max_length)
    made = load_tokenizer(folder, tokenizer.settings)(whole, truncation=True, max_length=how.max_length)
    found: list[list[int]] = made["input_ids"]
    if tokenizer.reading is None:
        return found
    return [[one for one in row if one != tokenizer.reading.unknown] for row in found]


def reads_texts(model: Model) -> bool:
    """Whether it has a tokenizer, whatever its vectors are."""
    if model.folder is None:
        return False
    try:
        return tokenizer_of(model, scores=True) is not None
    except FileNotFoundError:
        return False


def pooling_of(model: Model) -> str:
    """How encode pools, "mean" where it is not for this model."""
    if model.folder is None:
        return "mean"
    try:
        return text_options(model).pooling
    except (FileNotFoundError, OtherVectors):
        return "mean"


def _by_sentence_transformers(model: Model, folder: Path, texts: list[str]) -> Any:
    """None where it is not installed, or the folder is not one that it reads, or not with the ids of tokenizer.json."""
    home = transformer_folder(folder)
    if tokenizer_of(model).settings.static is not None:
        return None  # model2vec reads texts otherwise, and has no file of settings
    document = read_json_object(home / "config.json")
    read = (folder / "modules.json").exists() and "model_type" in document
    read = read and in_transformers_words(document) == document  # it would not run code of the folder's own
    if not read or find_spec("sentence_transformers") is None:
        return None
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(str(folder), device=str(model.device), local_files_only=True).float()
    if type(peer.tokenizer) is not type(load_tokenizer(folder, tokenizer_of(model).settings)):
        return None
    peer.max_seq_length = text_options(model).max_length  # beyond the positions it would fail
    return peer.encode(texts, show_progress_bar=False)


def _vector(model: Model, reference: Any, ids: list[int], how: TextOptions) -> Any:
    """One text at a time: no padding, so no mask. A text without a token is pooled to zeros."""
    if fill := filling(model):
        ids = ids + [fill[1]] * (fill[0] - len(ids))
    if ids:
        hidden = reference(input_ids=torch.tensor([ids], device=reference.device)).last_hidden_state[0].float()
        vector = pooled(hidden, how.pooling, how.unpooled_tokens)[None]
    else:
        vector = torch.zeros(1, model.config.hidden * len(how.pooling.split("+")))
    for dense in dense_of(model):
        vector = dense(vector.to(model.device))
    return vector[0, : how.truncate_dim].cpu().numpy()


def _unit(vectors: Any) -> Any:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
