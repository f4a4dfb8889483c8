"""Texts of more tokens than the model takes: counted, truncated as ever, or read in windows whose vectors are averaged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stub_model import StubModel
from tokenizers_offline import FAMILIES, TEXTS, sentence_folder, write

import ftbert
from ftbert.files import embed_file
from ftbert.text import TextSettings, Tokenizer, tokenizer_of
from ftbert.text.long_texts import tokenise
from ftbert.text.options import TextOptions

LONG = ["a b c d e f g h " * 9, "the cat sat on the mat", "", "dog " * 30, "cat " * 11, "mat " * 10]


def normalised(vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)  # type: ignore[no-any-return]


def by_hand(model: Any, text: str, length: int, prompt: str, include_prompt: bool, pooling: str) -> np.ndarray[Any, Any]:
    """From the token vectors of each window, with the ids of the whole text from the tokenizer itself."""
    tokenizer = tokenizer_of(model)
    whole = tokenizer.encode_batch([prompt + text], max_length=10_000)[0].tolist()
    head = 1 + (len(tokenizer.encode_batch([prompt])[0]) - 2 if prompt else 0)
    own, room = whole[head:-1], length - head - 1
    pieces = [own[i : i + room] for i in range(0, len(own), room)] if len(whole) > length else [own]
    vectors = []
    for piece in pieces:
        ids = torch.tensor([*whole[:head], *piece, whole[-1]])
        cu = torch.tensor([0, len(ids)], dtype=torch.int32)
        hidden = model.forward_packed(ids, cu, len(ids)).numpy()
        hidden = hidden if include_prompt else hidden[head:]
        vectors.append({"mean": hidden.mean(0), "max": hidden.max(0), "cls": hidden[0]}[pooling])
    return np.average(vectors, axis=0, weights=[max(len(piece), 1) for piece in pieces])  # type: ignore[no-any-return]


@pytest.mark.parametrize("prompt", ["", "the cat "])
@pytest.mark.parametrize("pooling", ["mean", "max", "cls"])
def test_the_mean_of_windows_is_that_by_hand(stub: StubModel, prompt: str, pooling: str) -> None:
    options: dict[str, Any] = {"max_length": 12, "prompt": prompt, "pooling": pooling, "long_texts": "mean"}
    want = np.stack([by_hand(stub, text, 12, prompt, True, pooling) for text in LONG])
    assert np.allclose(stub.encode(LONG, normalize=False, **options), want, atol=1e-6)
    assert np.allclose(stub.encode(LONG, **options), normalised(want), atol=1e-6)
    assert np.allclose(stub.encode(LONG, truncate_dim=5, **options), normalised(want[:, :5]), atol=1e-6)
    assert np.allclose(stub.encode(LONG, max_tokens=13, batch_size=1, **options), normalised(want), atol=1e-6)
    assert np.array_equal(stub.encode(LONG[3], **options), stub.encode(LONG, **options)[3])
    assert stub.encode([], **options).shape == (0, 16)


def test_a_prompt_that_is_not_pooled_stands_before_each_window(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path, normalize=True, bert={"max_position_embeddings": 24})
    (folder / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 64, "include_prompt": false}')
    model = ftbert.load(folder)
    texts = [text for text in TEXTS if text.strip()] + ["hello world " * 40]
    got = model.encode(texts, prompt="hello ", long_texts="mean", normalize=None)
    want = np.stack([by_hand(model, text, model_length(model), "hello ", False, "mean") for text in texts])
    assert np.abs(got - normalised(want)).max() < 2e-6
    truncated = model.encode(texts, prompt="hello ", long_texts="mean", normalize=None, truncate_dim=7)
    assert np.abs(truncated - normalised(want)[:, :7]).max() < 2e-6  # the folder's Normalize sees the whole vector


def model_length(model: Any) -> int:
    return tokenizer_of(model).max_length


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_truncation_is_the_tokenizers_and_is_counted(tmp_path: Path, family: str, side: str) -> None:
    tokenizer = Tokenizer(write(tmp_path, family, truncation_side=side), TextSettings(), 512)
    texts = [*TEXTS, *(text * 40 for text in TEXTS)]
    for length in (4, 9, 50):
        for prompt in ("", "hello "):
            how = TextOptions.choose(tokenizer, 64, max_length=length, prompt=prompt)
            got = tokenise(tokenizer, texts, how)
            assert [row.tolist() for row in got.rows()] == [
                row.tolist() for row in tokenizer.encode_batch(texts, prompt, length)
            ]
            whole = tokenizer.encode_batch(texts, prompt, 100_000)
            assert got.cut == sum(len(row) > length for row in whole) > 0
            assert tokenise(tokenizer, [], how).cut == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_hold_every_token_once(tmp_path: Path, family: str) -> None:
    tokenizer = Tokenizer(write(tmp_path, family), TextSettings(), 512)
    texts = [*TEXTS, *(text * 40 for text in TEXTS)]
    how = TextOptions.choose(tokenizer, 64, max_length=11, long_texts="mean")
    found = tokenise(tokenizer, texts, how)
    rows, (before, behind) = [row.tolist() for row in found.rows()], tokenizer.ends("")
    assert max(map(len, rows)) <= 11 and found.pieces is not None and sum(found.pieces.counts) == len(rows)
    place = 0
    for count, whole in zip(found.pieces.counts, tokenizer.encode_batch(texts, max_length=100_000), strict=True):
        mine, place = rows[place : place + count], place + count
        ends = [(row[:before], row[len(row) - behind :]) for row in (*mine, whole.tolist())]
        assert all(one == ends[-1] for one in ends)
        inside = [token for row in mine for token in row[before : len(row) - behind]]
        assert inside == whole.tolist()[before : len(whole) - behind]
        assert all(len(row) == 11 for row in mine[:-1])


def test_how_many_were_cut_is_said(stub: StubModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ftbert"):
        stub.encode(LONG, max_length=12)
        stub.encode(LONG * 200, max_length=12, long_texts="mean")
        stub.encode(LONG[1:3], max_length=12)
    assert [record.getMessage().split(" texts")[0] for record in caplog.records] == ["3 of 6", "600 of 1200"]
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in LONG))
    for mode in ("truncate", "mean"):
        stub.fail_at, stub.error = 2, RuntimeError()
        stub.calls.clear()
        with pytest.raises(RuntimeError):
            embed_file(stub, tmp_path / "in.txt", tmp_path / "out.npy", max_length=12, long_texts=mode, batch_records=2)
        stub.fail_at = -1
        if mode == "mean":
            with pytest.raises(ValueError, match="another long_texts"):
                embed_file(stub, tmp_path / "in.txt", tmp_path / "out.npy", max_length=12, batch_records=2)
        stats = embed_file(stub, tmp_path / "in.txt", tmp_path / "out.npy", max_length=12, long_texts=mode, batch_records=2)
        assert stats.cut == 3 and stats.resumed > 0
        assert np.allclose(np.load(tmp_path / "out.npy"), stub.encode(LONG, max_length=12, long_texts=mode), atol=1e-6)


def test_wrong_calls(stub: StubModel) -> None:
    with pytest.raises(ValueError, match="long_texts must be one of truncate, mean; got 'max'"):
        stub.encode(["a"], long_texts="max")
    with pytest.raises(ValueError, match="'mean' is of pooled vectors alone; .* output_value='token_embeddings'"):
        stub.encode(["a"], long_texts="mean", output_value="token_embeddings")
    with pytest.raises(ValueError, match="a maximum length of 5 leaves no room beside 5 special and prompt's tokens"):
        stub.encode(["a"], long_texts="mean", prompt="the cat sat", max_length=5)
