"""/token_classify and /fill_mask: the answers of transformers' pipelines, the bodies of HuggingFace's Inference API."""

from __future__ import annotations

from typing import Any

import numpy as np

from ftbert.server.app import Asked, Made, computes
from ftbert.server.description import Description
from ftbert.server.errors import validation
from ftbert.server.inputs import check_count, side
from ftbert.server.job import BEST, Kind
from ftbert.server.json_bodies import to_json
from ftbert.server.memory import filled
from ftbert.server.schemas import FillMask, TokenClassify
from ftbert.server.settings import Settings
from ftbert.server.text_encoder import Encoded
from ftbert.text import IGNORED, STRATEGIES, TokenLabels

_LONGEST_TARGET = 200  # characters
_BEFORE_PUNCTUATION = (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re")


def _texts(body: TokenClassify | FillMask, settings: Settings) -> list[str]:
    """A text, or a list of texts; each of those may be a list of one, as in TEI's batches."""
    inputs = body.inputs
    if isinstance(inputs, str):
        return [inputs]
    check_count(inputs, settings)
    if any(isinstance(one, list) and len(one) != 1 for one in inputs):
        raise validation("`inputs` must be a text or a list of texts: this model reads no pairs")
    return [one if isinstance(one, str) else one[0] for one in inputs]


@computes(TokenClassify, "predict", "token_classifier", texts=_texts)
async def token_classify(asked: Asked[TokenClassify]) -> Made:
    body, model, texts = asked.body, asked.model, asked.texts
    how = body.parameters or body
    if (strategy := how.aggregation_strategy) not in STRATEGIES:
        raise validation(f"`aggregation_strategy` must be one of {', '.join(STRATEGIES)}; got {strategy[:40]!r}")
    if how.stride is not None:
        raise validation("`stride` is not supported: texts that are too long are truncated")
    ignored = frozenset(IGNORED if how.ignore_labels is None else how.ignore_labels)
    encoder, truncate = model.encoder(), model.truncates(body.truncate)
    where = side("truncation_direction", body.truncation_direction)
    size = sum(map(len, texts))
    done = await model.compute(
        asked.request, Kind.TOKEN_LOGITS, size, lambda: encoder.encode_with_places(texts, truncate, where)
    )

    def run() -> bytes:
        reader = TokenLabels(encoder.whole, model.about.text.unknown_id, model.about.scores.labels)
        offsets = done.encoded.offsets.tolist()
        found = [
            reader.entities(text, encoding, done.rows[start:stop], strategy, ignored)
            for text, encoding, start, stop in zip(
                texts, done.encoded.encodings, offsets[:-1], offsets[1:], strict=True
            )
        ]
        return to_json(found[0] if isinstance(body.inputs, str) else found)

    return done, await model.in_thread(asked.request, size, run)


@computes(FillMask, "predict", "fill_mask", texts=_texts)
async def fill_mask(asked: Asked[FillMask]) -> Made:
    body, model, texts = asked.body, asked.model, asked.texts
    how, about, encoder = body.parameters or body, model.about, model.encoder()
    if not 1 <= how.top_k <= BEST:
        raise validation(f"`top_k` must be from 1 to {BEST}; got {str(how.top_k)[:20]}")
    targets = None if how.targets is None else _targets(how.targets, encoder.whole, about)
    where, truncate = side("truncation_direction", body.truncation_direction), model.truncates(body.truncate)

    def encode() -> Encoded:
        encoded = encoder.encode(texts, "", truncate, where)
        encoded.marked = np.flatnonzero(encoded.ids == about.text.mask_id).astype(np.int32)
        counts = np.diff(encoded.marked.searchsorted(encoded.offsets))
        if not counts.all():
            place, mask = int(counts.argmin()), encoder.whole.id_to_token(about.text.mask_id)
            raise validation(f"`inputs` must have the mask token {mask} in every text; text {place} has none")
        encoded.targets = targets
        return encoded

    size = sum(map(len, texts))
    done = await model.compute(asked.request, Kind.FILLED, size, encode, encoder.inline)
    most, encoded = how.top_k if targets is None else min(how.top_k, len(targets)), done.encoded
    assert encoded.marked is not None
    masks = np.diff(encoded.marked.searchsorted(encoded.offsets)).tolist()
    asked.app.memory.take(asked.request, filled(encoded.offsets.tolist(), masks, most), sum(masks), "masks")

    def run() -> bytes:
        found = _filled(done.encoded, done.rows, most, encoder.whole, about)
        return to_json(found[0] if isinstance(body.inputs, str) else found)

    return done, await model.in_thread(asked.request, size, run)


def _targets(given: str | list[str], whole: Any, about: Description) -> Any:
    """int32: the ids of words, of one that the vocabulary lacks its first token's."""
    names = [given] if isinstance(given, str) else given
    if not 1 <= len(names) <= BEST:
        raise validation(f"`targets` must be 1 to {BEST} words; got {len(names)}")
    if (longest := max(map(len, names))) > _LONGEST_TARGET:
        raise validation(f"`targets` must be words of at most {_LONGEST_TARGET} characters; got one of {longest}")
    found: dict[int, None] = {}  # in the order given
    for name in names:
        one = whole.token_to_id(name)
        ids = whole.encode(name, add_special_tokens=False).ids if one is None else [one]
        if ids and ids[0] < about.model.vocab:
            found[ids[0]] = None
    if not found:
        raise validation("`targets` must have a word that is in the vocabulary")
    return np.array(list(found), dtype=np.int32)


def _filled(encoded: Encoded, rows: Any, most: int, whole: Any, about: Description) -> list[Any]:
    """Of each text a list of what may stand in the place of its mask, best first; with several masks one list each."""
    found: list[Any] = []
    assert encoded.marked is not None
    firsts = encoded.marked.searchsorted(encoded.offsets).tolist()
    width = rows.shape[1] // 2
    order = np.argsort(-np.where(rows[:, width:] >= 0, rows[:, :width], -1), axis=1, kind="stable")[:, :most]
    scores = np.take_along_axis(rows[:, :width], order, 1)
    ids = np.take_along_axis(rows[:, width:], order, 1).astype(np.int64)
    for text in range(len(encoded.offsets) - 1):
        start, single = int(encoded.offsets[text]), firsts[text + 1] - firsts[text] == 1
        tokens = encoded.ids[start : int(encoded.offsets[text + 1])].tolist()
        masks = []
        for row in range(firsts[text], firsts[text + 1]):
            place = int(encoded.marked[row]) - start
            sequences = [[*tokens[:place], one, *tokens[place + 1 :]] for one in ids[row].tolist()]
            sequences = [[one for one in sequence if one != about.text.pad_id] for sequence in sequences]
            masks.append([
                {"score": float(score), "token": one, "token_str": word, "sequence": sequence}
                for score, one, word, sequence in zip(
                    scores[row], ids[row].tolist(), _decoded(whole, about, [[one] for one in ids[row].tolist()], False),
                    _decoded(whole, about, sequences, single), strict=True,
                )
            ])  # fmt: skip
        found.append(masks[0] if single else masks)
    return found


def _decoded(whole: Any, about: Description, rows: list[list[int]], skip_special: bool) -> list[str]:
    found: list[str] = whole.decode_batch(rows, skip_special_tokens=skip_special)
    for end in _BEFORE_PUNCTUATION if about.text.clean_up else ():
        found = [text.replace(f" {end}", end) for text in found]
    return found
