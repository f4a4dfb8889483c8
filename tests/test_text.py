"""encode: order, packing, overlap, single texts, and every way to be called wrongly."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from stub_model import WORDS, StubModel, threads_left, write_tokenizer
from tokenizers_offline import folder_of

import ftbert
from ftbert.text import TextSettings, Tokenizer


class Frame:
    """As a data frame of pandas: its items are the names of its columns, its length is that of a column."""

    ndim = 2

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[str]:
        return iter(["text"])

    def __getitem__(self, where: slice) -> list[str]:
        return ["a", "b", "c", "d", "e"][where]


def ragged(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS[4:], size=rng.integers(0, 40))) for _ in range(count)]


def test_the_tokenizer_files_own_limits_do_not_leak_in(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    tokenizer = Tokenizer(folder, TextSettings(max_length=30), 512)
    short, long = tokenizer.encode_batch(["cat", "cat " * 100])
    assert short.tolist() == [2, WORDS.index("cat"), 3]
    assert len(long) == 30
    assert (long[0], long[-1]) == (2, 3)
    assert len(Tokenizer(folder, TextSettings(max_length=30), 12).encode_batch(["cat " * 100])[0]) == 12


@pytest.mark.parametrize("config", [{"model_type": "bert"}, {"huggingface": {"model_type": "bert"}}])
def test_a_vocabulary_alone_is_enough(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = Tokenizer(tmp_path, TextSettings(), 512).encode_batch(["the cat sat"])[0]
    assert ids.tolist() == [2, *(WORDS.index(word) for word in ("the", "cat", "sat")), 3]


def test_a_model_loads_its_tokenizer_once(tmp_path: Path) -> None:
    """For vectors, for scores and for prompts."""
    from ftbert.decoding.prompts import tokenizer_for
    from ftbert.text import tokenizer_of

    model = StubModel(write_tokenizer(tmp_path / "a"))
    loaded = [tokenizer_of(model, scores=scores).loaded for scores in (False, True)]
    assert loaded[0] is loaded[1] is tokenizer_for(model) is not StubModel(model.folder).tokenizer


def test_unusable_tokenizers_are_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer here; expected tokenizer\.json"):
        Tokenizer(tmp_path, TextSettings(), 512)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be used as a tokenizer"):
        Tokenizer(tmp_path, TextSettings(), 512)
    with pytest.raises(ValueError, match="maximum length of 2 leaves no room"):
        Tokenizer(write_tokenizer(tmp_path), TextSettings(max_length=2), 512)
    for name in ("tokenizer_config.json", "added_tokens.json"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=f"{name}: expected a file, it is a named pipe"):
            Tokenizer(tmp_path, TextSettings(), 512)
        (tmp_path / name).unlink()


def test_order_is_restored_and_batch_equals_single(stub: StubModel) -> None:
    texts = ragged(1500)  # more than one window
    vectors = stub.encode(texts, max_tokens=300)
    assert (vectors.shape, vectors.dtype) == ((1500, 16), np.float32)
    for index in range(0, 1500, 37):
        assert np.array_equal(vectors[index], stub.encode([texts[index]])[0])


def test_packs_by_the_token_budget_longest_first(stub: StubModel) -> None:
    texts = ragged(400)
    stub.encode(texts, max_tokens=100)
    assert all(sum(call) <= 100 for call in stub.calls)
    assert sum(map(sum, stub.calls)) == sum(len(text.split()) + 2 for text in texts)  # no padding
    flat = [length for call in stub.calls for length in call]
    assert flat == sorted(flat, reverse=True)
    stub.calls.clear()
    stub.encode(["cat " * 50, "cat"], max_tokens=10)  # one over the budget goes alone
    assert stub.calls == [[52], [3]]


def test_a_single_text_gives_one_vector(stub: StubModel) -> None:
    assert stub.encode("cat").shape == (16,)
    assert np.array_equal(stub.encode("cat"), stub.encode(["cat"])[0])


def test_nothing_and_the_empty_string(stub: StubModel) -> None:
    assert stub.encode([]).shape == (0, 16)
    assert stub.encode([]).dtype == np.float32
    vector = stub.encode("", normalize=False)
    assert np.allclose(vector, stub.table[[2, 3]].mean(0))


@pytest.mark.parametrize(
    ("texts", "error", "words"),
    [
        (["a", 3], TypeError, r"texts\[1\] must be a str; got int"),
        (["a", None], TypeError, r"texts\[1\] must be a str; got NoneType"),
        (["a", float("nan")], TypeError, r"texts\[1\] must be a str; got float \(NaN, a missing value\)"),
        ({"a"}, TypeError, "a list of str; got set"),
        (pa.table({"text": ["a"]}), TypeError, "a list of str; got Table; pass one of its columns"),
        (pa.array(["a", None]), TypeError, r"texts\[1\] must be a str; got NoneType"),
        (np.array(["a", np.nan], object), TypeError, r"texts\[1\] must be a str; got float \(NaN"),
        (iter(["a", b"b"]), TypeError, r"texts\[1\] must be a str; got bytes"),
        (7, TypeError, "a list of str; got int"),
        (b"abc", TypeError, "a list of str; got bytes"),
        ({"a": 1}, TypeError, "a list of str; got dict"),
        (np.array([["a"], ["b"]]), TypeError, "a list of str; got ndarray"),
        (np.array("a"), TypeError, "a list of str; got ndarray"),
        (Frame(), TypeError, "a list of str; got Frame"),
        (["a", "b", "\ud800"], ValueError, r"texts\[2\] is not valid Unicode"),
    ],
)
def test_wrong_texts(stub: StubModel, texts: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        stub.encode(texts)
    assert stub.calls == []


class Series:
    """As a column of pandas: its labels are no places."""

    ndim, shape = 1, (3,)

    def __getitem__(self, label: str) -> str:
        raise KeyError(label)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def __len__(self) -> int:
        return 3

    def tolist(self) -> list[str]:
        return ["a cat", "the dog", ""]


COLUMNS: dict[str, Callable[[list[str]], Any]] = {
    "numpy str": np.array, "numpy object": lambda t: np.array(t, object), "pyarrow": pa.array,
    "pyarrow chunks": lambda t: pa.chunked_array([t[:1], t[1:]]), "pyarrow large": lambda t: pa.array(t, pa.large_string()),
    "pyarrow dictionary": lambda t: pa.array(t).dictionary_encode(), "generator": lambda t: (one for one in t),
    "map": lambda t: map(str, t), "dict values": lambda t: dict(enumerate(t)).values(), "tuple": tuple,
    "pandas-like": lambda t: Series(),
}  # fmt: skip


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_and_iterators_are_lists_of_texts(stub: StubModel, kind: str) -> None:
    texts = ["a cat", "the dog", ""]
    assert np.array_equal(stub.encode(COLUMNS[kind](texts)), stub.encode(texts))
    assert np.array_equal(stub.encode_query(COLUMNS[kind](texts)), stub.encode(texts))


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_columns_of_data_frames(stub: StubModel, package: str) -> None:
    frames = pytest.importorskip(package)
    texts = ["a cat", "the dog", ""]
    frame = frames.DataFrame({"text": texts, "n": [1, 2, 3]})
    assert np.array_equal(stub.encode(frame["text"]), stub.encode(texts))
    with pytest.raises(TypeError, match="got DataFrame; pass one of its columns"):
        stub.encode(frame)
    with pytest.raises(TypeError, match=r"texts\[1\] must be a str; got "):
        stub.encode(frames.Series(["a", None]))


def test_similarity_takes_columns_of_vectors(stub: StubModel) -> None:
    vectors = stub.encode(["a cat", "the dog"])
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    want = stub.similarity(vectors, vectors)
    for given in (column, pa.chunked_array([column]), iter(vectors), (torch.from_numpy(v) for v in vectors)):
        assert torch.equal(stub.similarity(given, vectors), want)


def test_scores_of_columns_and_iterators(tmp_path: Path) -> None:
    texts = ["hello world", "the second", "a third text"]
    one = ftbert.load(folder_of(tmp_path / "1", "bert"))
    tags = ftbert.load(folder_of(tmp_path / "t", "bert", "token_classification", labels=3))
    for given in (pa.array(texts), np.array(texts), (text for text in texts)):
        assert np.array_equal(one.predict(given), one.predict(texts))
    assert one.rerank("hello", iter(texts)) == one.rerank("hello", pa.array(texts)) == one.rerank("hello", texts)
    pairs = [("hello", text) for text in texts]
    for given in (zip(["hello"] * 3, texts, strict=True), np.array(pairs), pa.array(pairs), iter(pairs)):
        assert np.array_equal(one.predict(given), one.predict(pairs))
    assert tags.token_classify(pa.array(texts)) == tags.token_classify(iter(texts)) == tags.token_classify(texts)
    with pytest.raises(TypeError, match="a list of str; got bytes"):
        tags.token_classify(b"abc")
    with pytest.raises(TypeError, match="a list of str; got Frame"):
        one.predict(Frame())


def test_wrong_options(stub: StubModel) -> None:
    with pytest.raises(ValueError, match="pooling must be one of cls, .*mean.*got 'avg'"):
        stub.encode(["a"], pooling="avg")
    with pytest.raises(ValueError, match="max_tokens must be a positive integer; got 0"):
        stub.encode(["a"], max_tokens=0)
    with pytest.raises(ValueError, match="task must be 'query', 'document' or None; got 'retrieval'"):
        stub.encode(["a"], task="retrieval")
    with pytest.raises(ValueError, match="no folder with a tokenizer"):
        StubModel(None).encode(["a"])


def test_a_tokenizer_of_another_model_is_refused(stub: StubModel) -> None:
    stub.config.vocab = 10
    with pytest.raises(ValueError, match="the model's vocabulary has 10 entries"):
        stub.encode(["mat"])
    assert threads_left() == 0


def test_a_failing_model_leaves_no_thread(stub: StubModel) -> None:
    stub.fail_at = 2
    with pytest.raises(RuntimeError, match="stub failed"):
        stub.encode(ragged(5000), max_tokens=50)
    assert threads_left() == 0


def test_several_threads_share_a_model(stub: StubModel) -> None:
    texts = ragged(600)
    want = stub.encode(texts)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(stub.encode, [texts] * 4))
    assert all(np.array_equal(want, one) for one in got)


def test_the_progress_bar_is_for_terminals(stub: StubModel, capsys: pytest.CaptureFixture[str]) -> None:
    stub.encode(["cat"])
    assert capsys.readouterr().err == ""
    stub.encode(["cat"], show_progress_bar=True)
    assert "tokens/s" in capsys.readouterr().err
