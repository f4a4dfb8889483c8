"""Late chunking against its definition: transformers' states of the whole text, the mean of each span's tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_same
from sentence_transformers import SentenceTransformer
from tokenizers_offline import TEXTS, sentence_folder, write
from torch.nn.functional import normalize
from transformers import AutoTokenizer

import ftbert
from ftbert.pooled_rows import pooled

DOCUMENT = "Hello world the end. naïve CAFÉ document, two spaces here! the line 🙂 mid strasse"
SPANS = [(0, 20), (21, 40), (40, 57), (58, len(DOCUMENT)), (6, 30)]  # the last overlaps others


def states(folder: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(str(folder), add_pooling_layer=False).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0]


def expected(folder: Path, text: str, spans: list[tuple[int, int]], mode: str) -> np.ndarray:
    """By the offsets of transformers' tokenizer, token by token."""
    made = AutoTokenizer.from_pretrained(str(folder))(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    hidden, rows = states(folder, made["input_ids"]), []
    special = made["special_tokens_mask"]
    for start, end in spans:
        kept = []
        for i, (_, stop) in enumerate(made["offset_mapping"]):
            leading = special[i] and not any(special[j] == 0 for j in range(i))
            kept.append(start < stop <= end if not special[i] else (start == 0 if leading else end == len(text)))
        rows.append(pooled(hidden[torch.tensor(kept)], mode, 0))
    return normalize(torch.stack(rows)).numpy()


@pytest.mark.parametrize("mode", ["mean", "cls", "max", "last", "weightedmean"])
def test_spans_of_a_text(tmp_path: Path, mode: str) -> None:
    names = {"last": "lasttoken"}
    folder = sentence_folder(tmp_path, pooling=names.get(mode, mode), bert={"max_position_embeddings": 128})
    model = ftbert.load(folder)
    found = model.encode([DOCUMENT, "hello world"], chunks=[SPANS, [(0, 11), (0, 5)]])
    assert [one.shape for one in found] == [(5, 64), (2, 64)]
    assert_same(found[0], expected(folder, DOCUMENT, SPANS, mode))
    assert_same(found[1], expected(folder, "hello world", [(0, 11), (0, 5)], mode))
    apart = model.encode([DOCUMENT[start:end] for start, end in SPANS])
    assert np.abs(apart - found[0]).max() > 1e-3  # a span's tokens see the rest of the text


def test_one_span_is_the_text(tmp_path: Path) -> None:
    """With a prompt that is pooled or not, Dense, truncation, and whatever the folder normalises."""
    dense: dict[str, Any] = {"in_features": 64, "out_features": 32, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
    for include in (True, False):
        folder = sentence_folder(tmp_path / str(include), include_prompt=include, behind=[dense], bert={"max_position_embeddings": 256})
        model = ftbert.load(folder)
        texts = [text for text in TEXTS if text]
        for options in ({}, {"normalize": None}, {"prompt": "query: ", "truncate_dim": 9}, {"prompt": "hello "}):
            whole = [[(0, len(text))] for text in texts]
            found = np.concatenate(model.encode(texts, chunks=whole, **options))
            assert_same(found, model.encode(texts, **options))
            alone = np.concatenate([model.encode(text, chunks=spans, **options) for text, spans in zip(texts, whole, strict=True)])
            assert_same(found, alone)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_spans_of_so_many_tokens(tmp_path: Path, family: str) -> None:
    from families import make_model

    write(tmp_path, family)
    make_model(family, "encoder", 2, vocab_size=400, max_position_embeddings=400, pad_token_id=1).save_pretrained(tmp_path)
    model = ftbert.load(tmp_path)
    texts = [*TEXTS, DOCUMENT]
    for size in (1, 3, 1000):
        spans = model.chunk_spans(texts, size)
        for text, of_text in zip(texts, spans, strict=True):
            assert "".join(text[start:end] for start, end in of_text) == text
            assert all(start < end for start, end in of_text)
        found = model.encode(texts, chunk_tokens=size)
        for mine, listed in zip(found, model.encode(texts, chunks=spans), strict=True):
            assert np.array_equal(mine, listed)
        assert [len(one) for one in found] == [len(one) for one in spans]
        for text, mine in zip(texts, found, strict=True):  # whatever else is in the batch
            assert np.array_equal(model.encode(text, chunk_tokens=size), mine)
    tokens = len(model.tokenizer(DOCUMENT, add_special_tokens=False)["input_ids"])
    assert len(model.chunk_spans(DOCUMENT, 3)) <= -(-tokens // 3) and len(model.chunk_spans(DOCUMENT, tokens)) == 1


def test_windows_of_a_long_text(tmp_path: Path) -> None:
    """Of 18 tokens, 16 of them its own: a token's state is that of the window in whose middle it stands."""
    folder = sentence_folder(tmp_path, bert={"max_position_embeddings": 48})
    model, text = ftbert.load(folder), " ".join(["hello world the end"] * 12)
    ids = model.tokenizer(text)["input_ids"]
    own, room, step = len(ids) - 2, 16, 12
    firsts = [*range(0, own - room, step), own - room]
    windows = [states(folder, [ids[0], *ids[1 + first : 1 + first + room], ids[-1]]) for first in firsts]
    best = []
    for token in range(own):
        inside = [i for i, first in enumerate(firsts) if first <= token < first + room]
        edges = [min(token - firsts[i] if i else room, firsts[i] + room - 1 - token if i < len(firsts) - 1 else room) for i in inside]
        window = inside[int(np.argmax(edges))]
        best.append(windows[window][1 + token - firsts[window]])
    spans = model.chunk_spans(text, 5)
    found = model.encode(text, chunk_tokens=5, max_length=room + 2, normalize=False)
    for place in range(1, len(spans) - 1):  # without the special tokens
        assert_same(found[place], torch.stack(best[5 * place : 5 * place + 5]).mean(0).numpy())
    assert_same(found[0], torch.stack([windows[0][0], *best[:5]]).mean(0).numpy())


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"chunks": [[(0, 99)]]}, ValueError, r"chunks\[0\]\[0\]: a span within the text's 5 characters, start before end; got 0, 99"),
        ({"chunks": [[(0, 2), (3, 3)]]}, ValueError, r"chunks\[0\]\[1\].*got 3, 3"),
        ({"chunks": [[(-1, 2)]]}, ValueError, "got -1, 2"),
        ({"chunks": [[5]]}, TypeError, r"chunks\[0\]\[0\] must be \(start, end\), places of characters; got 5"),
        ({"chunks": [7]}, TypeError, r"chunks\[0\] must be a list of \(start, end\); got int"),
        ({"chunks": []}, ValueError, "a list of spans for each of 1 texts; got 0 lists"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens must be a positive integer; got 0"),
        ({"chunk_tokens": 2, "chunks": [[(0, 1)]]}, TypeError, "give chunks.*or chunk_tokens"),
        ({"chunk_tokens": 2, "long_texts": "mean"}, ValueError, "windows stand in for long_texts"),
        ({"chunk_tokens": 2, "precision": "int8"}, ValueError, "in float32"),
    ],
)  # fmt: skip
def test_spans_that_are_none(tmp_path: Path, given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ftbert.load(sentence_folder(tmp_path)).encode(["hello"], **given)


def test_whose_tokens_see_nothing(tmp_path: Path) -> None:
    from test_static import static_folder

    with pytest.raises(ValueError, match="pool tokens which see their text; this one is a table"):
        ftbert.load(static_folder(tmp_path)).encode(["hello"], chunk_tokens=2)
    assert SentenceTransformer(str(tmp_path / "made"), device="cpu").encode("hello").shape == (40,)


def test_a_server(tmp_path: Path) -> None:
    """Parts of one text, as in Jina's API; several requests in a batch."""
    from concurrent.futures import ThreadPoolExecutor

    from served import in_thread

    folder = sentence_folder(
        tmp_path, prompts={"query": "hello two "}, include_prompt=False, normalize=True, bert={"max_position_embeddings": 64}
    )
    model = ftbert.load(folder)
    parts = [["Hello world", "the end. ", "naïve CAFÉ", "\nmid"], ["one"], ["hello two", "a"]]
    joined = ["Hello world the end. naïve CAFÉ\nmid", "one", "hello two a"]
    spans = [[(0, 11), (11, 21), (21, 31), (31, 35)], [(0, 3)], [(0, 9), (9, 11)]]
    with in_thread(("m", folder)) as server:

        def vectors(some: list[str], **fields: Any) -> np.ndarray:
            found = server.post("/v1/embeddings", {"input": some, "late_chunking": True, **fields})["data"]
            return np.array([one["embedding"] for one in found])

        for fields, options in (({}, {}), ({"prompt_name": "query"}, {"prompt_name": "query"}), ({"dimensions": 5}, {"truncate_dim": 5})):
            want = model.encode(joined, chunks=spans, **options)
            with ThreadPoolExecutor(3) as pool:
                for got, one in zip(pool.map(partial(vectors, **fields), parts * 3), want * 3, strict=True):
                    assert_same(got, one)
        for asked, words in (
            (["hello", ""], "each input needs a token of its own"),
            ([[5, 6]], "is for texts: parts of one; got token ids"),
            (["hello " * 80, "world"], "must have less than 65 tokens"),
        ):
            refused = server.call("POST", "/v1/embeddings", {"input": asked, "late_chunking": True})
            assert refused.status == 422 and words in refused.body.decode()


def test_a_server_of_a_table(tmp_path: Path) -> None:
    from served import in_thread
    from test_static import static_folder

    with in_thread(("m", static_folder(tmp_path))) as server:
        refused = server.call("POST", "/v1/embeddings", {"input": ["a", "b"], "late_chunking": True})
        assert refused.status == 422 and b"this model's tokens do not see their text" in refused.body


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_file(tmp_path: Path, name: str) -> None:
    """Rows that say which span of the text each vector is of, record by record, over several parts of the file."""
    import json

    import pyarrow.parquet as pq

    from ftbert.files import embed_file

    model = ftbert.load(sentence_folder(tmp_path, bert={"max_position_embeddings": 48}))
    texts = ["hello world the end " * 20, DOCUMENT, "one"] * 3
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    stats = embed_file(model, tmp_path / "in.jsonl", tmp_path / name, chunk_tokens=7, batch_records=2)
    assert (stats.records, stats.hidden, stats.cut) == (9, 64, 3)
    made = pq.read_table(tmp_path / name).to_pylist() if name.endswith("parquet") else [
        json.loads(line) for line in (tmp_path / name).read_text().splitlines()
    ]  # fmt: skip
    want, spans = model.encode(texts, chunk_tokens=7), model.chunk_spans(texts, 7)
    for i, row in enumerate(made):
        assert row["id"] == i and row["text"] == texts[i]
        assert [tuple(span) for span in row["embedding"]["spans"]] == spans[i]
        assert_same(np.array(row["embedding"]["values"], dtype=np.float32), want[i])
    for target, given, words in (
        ("out.npy", {}, "a .npy holds one vector a text"), ("o.jsonl", {"long_texts": "mean"}, "stand in for long_texts"),
        ("o.jsonl", {"vectors": "sparse"}, "goes with dense vectors"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            embed_file(model, tmp_path / "in.jsonl", tmp_path / target, chunk_tokens=7, **given)
