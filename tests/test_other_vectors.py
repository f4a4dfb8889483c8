"""Sparse vectors and one vector for each token, against sentence-transformers on the same folder, and BGE-M3's formulas."""

from __future__ import annotations

import itertools
import json
import shutil
import string
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from compare import assert_same
from other_folders import QUERY, bge_m3, colbert_folder, routed_splade, splade_folder, stanford_folder
from safetensors.torch import save_file
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from tokenizers_offline import TEXTS, folder_of, sentence_folder

import ftbert
from ftbert.converters import convert
from ftbert.evaluation import SAMPLE_TEXTS, check
from ftbert.files import embed_file
from ftbert.text import TextSettings, sparse


def both(folder: Path, kind: Any = SparseEncoder) -> tuple[Any, Any]:
    return ftbert.load(folder, heads=False), kind(str(folder), device="cpu", local_files_only=True)


@pytest.mark.parametrize(
    ("family", "pooling"),
    [("bert", {}), ("roberta", {"pooling_strategy": "sum"}), ("distilbert", {"activation_function": "log1p_relu"}),
     ("albert", {"pooling_strategy": "sum", "activation_function": "log1p_relu"})],
)  # fmt: skip
def test_splade(tmp_path: Path, family: str, pooling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A few logits at a time give the same as all at once."""
    ours, theirs = both(splade_folder(tmp_path, family, **pooling))
    whole = ours.encode_sparse(TEXTS)
    assert whole.is_sparse and whole.is_coalesced() and whole.dtype == torch.float32
    for options in ({}, {"prompt_name": "query"}, {"prompt": "the ", "max_active_dims": 9}):
        want = theirs.encode(TEXTS, **options)
        for tokens in (7, 100_000):
            monkeypatch.setattr(sparse, "_LOGITS_AT_ONCE", 400 * tokens)
            got = ours.encode_sparse(TEXTS, max_tokens=60, **options)
            assert got.shape == want.shape
            assert_same(got.to_dense(), want.to_dense())
    assert_same(ours.encode_sparse(TEXTS, task="query").to_dense(), theirs.encode_query(TEXTS).to_dense())
    assert_same(ours.encode_sparse("hello").to_dense(), theirs.encode("hello").to_dense())
    assert torch.equal(ours.encode_sparse(TEXTS, convert_to_sparse_tensor=False), whole.to_dense())
    assert ours.encode_sparse([]).shape == (0, whole.shape[1])


@pytest.mark.parametrize("default", ["document", None])
def test_queries_by_a_table(tmp_path: Path, default: str | None) -> None:
    """None: the first route is for texts of no task, the table's."""
    folder = routed_splade(tmp_path, default)
    ours, theirs = both(folder)
    width = len(theirs.tokenizer.get_vocab())  # the table's; the model has more rows

    def same(got: torch.Tensor, want: torch.Tensor) -> None:
        assert got.shape[-1] == 400 and not got.to_dense()[:, want.shape[-1] :].any()
        assert_same(got.to_dense()[:, : want.shape[-1]], want.to_dense())

    for options in ({}, {"prompt": "the "}, {"max_active_dims": 4}):
        for task, call in ((None, theirs.encode), ("query", theirs.encode_query), ("document", theirs.encode_document)):
            same(ours.encode_sparse(TEXTS, task=task, **options), call(TEXTS, **options))
    want = theirs.encode_query(TEXTS)
    assert want.shape[-1] == width and ours.encode_sparse(TEXTS, task="query")._nnz() == want._nnz()
    copy = ftbert.load(convert(folder, tmp_path / "copy"))
    for task in ("query", "document"):
        assert torch.equal(copy.encode_sparse(TEXTS, task=task).to_dense(), ours.encode_sparse(TEXTS, task=task).to_dense())
    convert(folder, tmp_path / "copy", force=True)  # all of it is known as ours
    with pytest.raises(ValueError, match="call encode_sparse"):
        ours.encode("hello")


def test_a_server_with_a_table_for_queries(tmp_path: Path) -> None:
    from served import in_thread

    folder = routed_splade(tmp_path)
    model, texts = ftbert.load(folder), [text for text in TEXTS if text]
    with in_thread(("routed", folder)) as server:
        for name in ("query", "document", None):
            want = model.encode_sparse(texts, task=name).to_dense()
            asked = {"inputs": texts, "truncate": True} | ({"prompt_name": name} if name else {})
            made = torch.zeros_like(want)
            for row, entries in zip(made, server.post("/embed_sparse", asked), strict=True):
                row[[one["index"] for one in entries]] = torch.tensor([one["value"] for one in entries])
            assert_same(made, want)
        ids = model.tokenizer("hello world", add_special_tokens=False)["input_ids"]
        (found,) = server.post("/embed_sparse", {"inputs": [ids], "prompt_name": "query"})
        assert {one["index"] for one in found} <= set(ids)


def test_a_table_of_another_model(tmp_path: Path) -> None:
    folder = routed_splade(tmp_path)
    for spoiled in (torch.rand(401), torch.rand(400, 2)):
        save_file({"weight": spoiled}, folder / "query_0_SparseStaticEmbedding" / "model.safetensors")
        with pytest.raises(ValueError, match=r"(?s)query_0_SparseStaticEmbedding.*weight: the config asks for \[400\]"):
            ftbert.load(folder).encode_sparse("a", task="query")


def test_logits_are_made_for_some_tokens_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ftbert.load(splade_folder(tmp_path))
    rows: list[int] = []
    forward = ftbert.heads.Head.forward
    monkeypatch.setattr(ftbert.heads.Head, "forward", lambda self, x, word: rows.append(len(x)) or forward(self, x, word))
    monkeypatch.setattr(sparse, "_LOGITS_AT_ONCE", 400 * 10)
    model.encode_sparse(["hello " * 55, *["hello world"] * 9])
    assert max(rows) <= 10
    assert sum(rows) == 57 + 9 * 4
    assert len(rows) <= 6 + 5  # short texts share


def test_a_masked_language_model_alone(tmp_path: Path) -> None:
    ours, theirs = both(folder_of(tmp_path, "bert", "masked_lm"))
    assert_same(ours.encode_sparse(TEXTS).to_dense(), theirs.encode(TEXTS).to_dense())
    assert ours.encode(TEXTS[:2]).shape == (2, 64)  # it is not for that alone
    with pytest.raises(ValueError, match="no sparse vectors: its folder has neither"):
        ftbert.load(sentence_folder(tmp_path / "other")).encode_sparse("a")


def test_encode_names_what_gives_them(tmp_path: Path) -> None:
    model = ftbert.load(convert(splade_folder(tmp_path), tmp_path / "copy"))
    for call in (lambda: model.encode("a"), lambda: model.encode("a", output_value="token_embeddings")):
        with pytest.raises(ValueError, match=r"sparse vectors \(SPLADE\), and encode gives dense ones: call encode_sparse"):
            call()
    with pytest.raises(ValueError, match="no vectors of tokens to compare"):
        model.encode_multi_vector("a")
    for value in (0, -1, 1.5):
        with pytest.raises(ValueError, match="max_active_dims must be a positive integer"):
            model.encode_sparse("a", max_active_dims=value)
    result = check(model, texts=["hello"])  # the encoder itself is right
    assert result.passed and result.texts is None


def test_files_of_sparse_vectors(tmp_path: Path) -> None:
    model = ftbert.load(splade_folder(tmp_path), heads=False)
    texts = [text for text in TEXTS if text.strip() and text.isprintable()]
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    want = model.encode_sparse(texts).to_dense()
    for name in ("a.jsonl", "a.parquet"):
        stats = embed_file(model, tmp_path / "in.txt", tmp_path / name, batch_records=5)
        assert (stats.records, stats.hidden) == (len(texts), want.shape[1])
        if name == "a.jsonl":
            rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        else:
            rows = pq.read_table(tmp_path / name).to_pylist()
        assert [row["text"] for row in rows] == texts
        for row, dense in zip(rows, want, strict=True):
            made = torch.zeros_like(dense)
            made[row["embedding"]["indices"]] = torch.tensor(row["embedding"]["values"], dtype=torch.float32)
            assert_same(made, dense)
    with pytest.raises(ValueError, match=r"a \.npy holds dense vectors alone"):
        embed_file(model, tmp_path / "in.txt", tmp_path / "a.npy")
    for options in ({"normalize": False}, {"pooling": "cls"}, {"truncate_dim": 4}, {"long_texts": "mean"}, {"precision": "binary"}):
        with pytest.raises(ValueError, match="is for dense vectors, these are sparse ones"):
            embed_file(model, tmp_path / "in.txt", tmp_path / "b.jsonl", **options)
    with pytest.raises(ValueError, match="vectors must be one of dense, sparse, multi; got 'both'"):
        embed_file(model, tmp_path / "in.txt", tmp_path / "b.jsonl", vectors="both")


def test_the_server_gives_sparse_vectors(tmp_path: Path) -> None:
    served = pytest.importorskip("served")
    import msgspec

    from ftbert.server.schemas import SparseValue

    folder = splade_folder(tmp_path)
    want = ftbert.load(folder).encode_sparse(TEXTS).to_dense()
    with served.in_thread(("m", folder)) as server:
        for path in ("/embed_sparse", "/"):
            got = server.post(path, {"inputs": TEXTS})
            assert all([one["index"] for one in row] == sorted(one["index"] for one in row) for row in got)
            made = torch.zeros_like(want)
            for row, entries in zip(made, got, strict=True):
                row[[one["index"] for one in entries]] = torch.tensor([one["value"] for one in entries])
            assert_same(made, want)
        assert server.post("/embed_sparse", {"inputs": "hello", "prompt_name": "query"}) == server.post("/embed_sparse", {"inputs": QUERY + "hello"})
        msgspec.json.decode(server.call("POST", "/embed_sparse", {"inputs": "hello"}).body, type=list[list[SparseValue]])
        refused = server.call("POST", "/embed", {"inputs": "a"})
        assert refused.status == 424 and b"model is not an embedding model (it is: sparse)" in refused.body
        assert server.call("GET", "/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}


@pytest.mark.parametrize("copied", [False, True])
def test_three_outputs(tmp_path: Path, copied: bool) -> None:
    from transformers import AutoModel, AutoTokenizer

    folder, layers = bge_m3(tmp_path / "a")
    model = ftbert.load(convert(folder, tmp_path / "b") if copied else folder)
    tokenizer, reference = AutoTokenizer.from_pretrained(str(folder)), AutoModel.from_pretrained(str(folder)).eval()
    sparse_layer, multi_layer = layers["sparse_linear.pt"], layers["colbert_linear.pt"]
    left_out = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    dense, lexical, multi = model.encode(TEXTS), model.encode_sparse(TEXTS), model.encode_multi_vector(TEXTS)
    assert lexical.shape == (len(TEXTS), model.config.vocab)
    for place, text in enumerate(TEXTS):
        ids = tokenizer(text, truncation=True, max_length=64, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = reference(ids).last_hidden_state[0]
        assert_same(dense[place], torch.nn.functional.normalize(hidden[0], dim=0).numpy())
        weights: dict[int, float] = {}
        for token, weight in zip(ids[0].tolist(), (hidden @ sparse_layer["weight"].T + sparse_layer["bias"])[:, 0].relu().tolist(), strict=True):
            if token not in left_out and weight > 0:
                weights[token] = max(weight, weights.get(token, 0.0))
        got = lexical[place].coalesce()
        assert got.indices()[0].tolist() == sorted(weights)
        assert np.allclose(got.values(), [weights[token] for token in sorted(weights)], atol=1e-5)
        assert_same(multi[place], torch.nn.functional.normalize(hidden[1:] @ multi_layer["weight"].T + multi_layer["bias"], dim=1).numpy())
    for some, whole in zip(model.encode_sparse(TEXTS, max_active_dims=2).to_dense(), lexical.to_dense(), strict=True):
        largest = whole.topk(2).values
        assert_same(some[some > 0].sort(descending=True).values, largest[largest > 0])
    states = model.encode(TEXTS[:3], output_value="token_embeddings")  # sentence-transformers' meaning: hidden states
    assert states[0].shape[0] == multi[0].shape[0] + 1


def test_three_outputs_served_and_in_files(tmp_path: Path) -> None:
    served = pytest.importorskip("served")
    import msgspec

    from ftbert.server.schemas import PooledList

    folder, _ = bge_m3(tmp_path / "a")
    model, texts = ftbert.load(folder), ["hello world the end", "naive cafe hello hello"]
    want = model.encode_sparse(texts).to_dense()
    with served.in_thread(("m", folder)) as server:
        assert_same(np.array(server.post("/embed", {"inputs": texts})), model.encode(texts))
        made = torch.zeros_like(want)
        for row, entries in zip(made, server.post("/embed_sparse", {"inputs": texts}), strict=True):
            row[[one["index"] for one in entries]] = torch.tensor([one["value"] for one in entries])
        assert_same(made, want)
        data = server.post("/pooling", {"input": texts, "task": "token_embed"})["data"]
        for mine, other in zip(data, model.encode_multi_vector(texts), strict=True):
            assert_same(np.array(mine["data"], dtype=np.float32), other)
        states = model.encode(texts, output_value="token_embeddings", convert_to_numpy=False)
        for mine, other in zip(server.post("/embed_all", {"inputs": texts}), states, strict=True):
            assert_same(torch.tensor(mine), other)
        body = server.call("POST", "/pooling", {"input": texts, "task": "token_embed"}).body
        assert len(msgspec.json.decode(body, type=PooledList).data) == 2
        few = server.post("/pooling", {"input": texts, "task": "token_embed", "dimensions": 5})["data"]
        assert np.allclose(np.linalg.norm(few[0]["data"], axis=1), 1, atol=1e-5)
        assert_same(np.array([one["data"] for one in server.post("/pooling", {"input": texts})["data"]]), model.encode(texts))
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n")
    for kind, name in (("multi", "m.jsonl"), ("multi", "m.parquet"), ("sparse", "s.parquet"), ("dense", "d.parquet")):
        embed_file(model, tmp_path / "in.txt", tmp_path / name, vectors=kind)
    found = [pq.read_table(tmp_path / "m.parquet").to_pylist(), [json.loads(line) for line in (tmp_path / "m.jsonl").open()]]
    for rows in found:
        for row, vectors in zip(rows, model.encode_multi_vector(texts), strict=True):
            assert_same(np.array(row["embedding"], dtype=np.float32), vectors)
    assert pq.read_table(tmp_path / "s.parquet").to_pylist()[0]["embedding"]["indices"] == want[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weight": torch.ones(2, 64), "bias": torch.ones(1)}, r"weight: the config asks for \[1, 64\]"),
        ({"weight": torch.ones(1, 64)}, r"missing bias \[1\]"),
        ({"weight": 3}, "expected a state dict of tensors"),
        (b"nothing", "not a complete PyTorch weights file"),
    ],
)
def test_a_linear_layer_that_does_not_fit(tmp_path: Path, state: Any, words: str) -> None:
    folder, _ = bge_m3(tmp_path / "a")
    if isinstance(state, bytes):
        (folder / "sparse_linear.pt").write_bytes(state)
    else:
        torch.save(state, folder / "sparse_linear.pt")
    with pytest.raises(ValueError, match=rf"sparse_linear\.pt: (.|\n)*{words}"):
        ftbert.load(folder).encode_sparse("a")


def test_a_pickle_of_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    folder, _ = bge_m3(tmp_path / "a")
    torch.save({"weight": Evil()}, folder / "sparse_linear.pt")
    with pytest.raises(ValueError, match="not a complete PyTorch weights file"):
        ftbert.load(folder).encode_sparse("a")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("expansion", "mask"),
    [
        (None, {}),
        (None, {"skiplist_words": [".", "hello", "nosuchword"]}),
        (None, {"skiplist_words": ["hello"], "skiplist_tasks": ["query"]}),
        ({"strategy": "fixed", "attend": True, "length": 9}, {"skiplist_words": ["the"]}),
        ({"strategy": "min", "attend": True, "length": 6}, {}),
    ],
)
def test_colbert(tmp_path: Path, expansion: dict[str, Any] | None, mask: dict[str, Any]) -> None:
    folder = colbert_folder(tmp_path, expansion, **mask)
    ours, theirs = both(folder, MultiVectorEncoder)
    for model in (ours, ftbert.load(convert(folder, tmp_path / "copy"))):
        for got, want in (
            (model.encode(TEXTS, output_value="token_embeddings"), theirs.encode(TEXTS)),
            (model.encode_multi_vector(TEXTS, max_tokens=40), theirs.encode(TEXTS)),
            (model.encode_query(TEXTS, output_value="token_embeddings"), theirs.encode_query(TEXTS)),
            (model.encode_document(TEXTS, output_value="token_embeddings"), theirs.encode_document(TEXTS)),
        ):
            for mine, other in zip(got, want, strict=True):
                assert_same(mine, np.asarray(other))
    with pytest.raises(ValueError, match="encode_multi_vector, or encode with output_value='token_embeddings'"):
        ours.encode("a")


def test_the_server_gives_vectors_of_tokens(tmp_path: Path) -> None:
    served = pytest.importorskip("served")
    folder = colbert_folder(tmp_path, skiplist_words=["hello", "."])
    model = ftbert.load(folder)
    cases = [({}, None), ({"prompt_name": "query"}, "query"), ({"prompt_name": "document"}, "document")]
    with served.in_thread(("m", folder)) as server:
        for path, (asked, task) in itertools.product(("/embed_all", "/"), cases):
            got = server.post(path, {"inputs": TEXTS, **asked})
            for mine, other in zip(got, model.encode_multi_vector(TEXTS, task=task), strict=True):
                assert_same(np.array(mine, dtype=np.float32).reshape(-1, 24), other)
        data = server.post("/pooling", {"input": TEXTS})["data"]
        assert [len(one["data"]) for one in data] == [len(one) for one in model.encode_multi_vector(TEXTS)]
        for path, asked in (("/pooling", {"input": "a", "task": "embed"}), ("/pooling", {"input": "a", "dimensions": 25})):
            assert server.call("POST", path, asked).status == 422
        assert server.call("POST", "/embed", {"inputs": "a"}).status == 424


@pytest.mark.parametrize("strategy", ["fixed", "min"])
@pytest.mark.parametrize("length", [3, 9, 40])
def test_expansion_that_nobody_attends_to(tmp_path: Path, length: int, strategy: str) -> None:
    """Mask tokens behind a query attend to it and are not attended to; each text is as in a batch of its own."""
    folder = colbert_folder(tmp_path, {"strategy": strategy, "attend": False, "length": length}, skiplist_words=["."])
    ours, theirs = both(folder, MultiVectorEncoder)
    got = ours.encode_multi_vector(TEXTS, task="query", max_tokens=60)
    for mine, other, text in zip(got, theirs.encode_query(TEXTS), TEXTS, strict=True):
        assert_same(mine, np.asarray(other))
        assert_same(mine, ours.encode_multi_vector(text, task="query"))
        assert len(mine) >= length
    for mine, other in zip(ours.encode_multi_vector(TEXTS, task="document"), theirs.encode_document(TEXTS), strict=True):
        assert_same(mine, np.asarray(other))


@pytest.mark.parametrize("marker", ["[Q] ", "hello "])
def test_pylates_older_folders(tmp_path: Path, marker: str) -> None:
    """[Transformer, Dense] alone: PyLate adds prefixes, the punctuation that is skipped, and Normalize itself."""
    folder = sentence_folder(tmp_path / "a", behind=[{"in_features": 64, "out_features": 16, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}])
    shutil.move(folder / "2_Dense", folder / "1_Dense")
    (folder / "modules.json").write_text(json.dumps([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]))  # fmt: skip
    settings = {
        "model_type": "ColBERT", "query_prefix": marker, "document_prefix": "the ", "query_length": 10, "document_length": 14,
        "attend_to_expansion_tokens": True, "do_query_expansion": True,
    }  # fmt: skip
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    ours, theirs = both(folder, MultiVectorEncoder)
    texts = [*TEXTS, "hello, world. the end!"]
    for task in ("query", "document"):
        for mine, other in zip(ours.encode_multi_vector(texts, task=task), getattr(theirs, f"encode_{task}")(texts), strict=True):
            assert_same(mine, np.asarray(other))
    assert ours.encode_multi_vector(SAMPLE_TEXTS[:2], task="document")[0].shape[1] == 16
    # Before sentence-transformers wrote a model_type; which sentence-transformers does not take for PyLate's.
    del settings["model_type"]
    for entries, module in ((settings, "pylate.models.Dense.Dense"), (settings, "sentence_transformers.models.Dense"), ({}, "pylate.models.Dense.Dense")):
        (folder / "config_sentence_transformers.json").write_text(json.dumps(entries))
        modules = json.loads((folder / "modules.json").read_text())
        modules[1]["type"] = module
        (folder / "modules.json").write_text(json.dumps(modules))
        older = ftbert.load(folder)
        for mine, other in zip(older.encode_multi_vector(texts, task="document"), ours.encode_multi_vector(texts, task="document"), strict=True):
            assert entries == {} or np.array_equal(mine, other)
            assert np.abs(np.linalg.norm(mine, axis=1) - 1).max(initial=0) < 1e-6
    text = TextSettings.from_folder(folder)  # the file says nothing
    assert (text.query_length, text.document_length, text.prompts) == (32, 180, {"query": "[Q] ", "document": "[D] "})
    assert text.multi is not None and text.multi.skipped == tuple(string.punctuation)
    assert text.multi.expansion is not None and (text.multi.expansion.length, text.multi.expansion.attend) == (32, False)


@pytest.mark.parametrize("attend", [False, True])
def test_rerank_and_similarity_by_vectors_of_tokens(tmp_path: Path, attend: bool) -> None:
    folder = colbert_folder(tmp_path, {"strategy": "fixed", "attend": attend, "length": 9}, skiplist_words=["hello", "."])
    ours, theirs = both(folder, MultiVectorEncoder)
    texts = [*filter(None, TEXTS), *SAMPLE_TEXTS[:5]]
    queries, documents = ours.encode_multi_vector(texts[:3], task="query"), ours.encode_multi_vector(texts, task="document")
    want = theirs.similarity(theirs.encode_query(texts[:3]), theirs.encode_document(texts))
    assert ours.similarity_fn_name == "maxsim"
    got = ours.similarity(queries, documents)
    assert got.shape == (3, len(texts))
    assert_same(got.numpy(), want.numpy())
    pairs = theirs.similarity_pairwise(theirs.encode_query(texts[:3]), theirs.encode_document(texts[:3]))
    assert_same(ours.similarity_pairwise(queries, documents[:3]).numpy(), pairs.numpy())
    assert_same(ours.similarity(queries[0], documents).numpy(), want[:1].numpy())  # one query
    assert_same(ours.similarity(torch.tensor(np.stack(queries)), documents).numpy(), want.numpy())
    half = ours.similarity([torch.tensor(q).half() for q in queries], [torch.tensor(d).half() for d in documents])
    assert half.dtype == torch.float32 and (half - want).abs().max() < 2e-2
    for query in texts[:3]:
        ranked = ours.rerank(query, texts, top_k=4, return_documents=True, max_tokens=40)
        scores = want[texts.index(query)]
        assert [one["corpus_id"] for one in ranked] == scores.sort(descending=True, stable=True).indices[:4].tolist()
        for one in ranked:
            assert one["text"] == texts[one["corpus_id"]]
            assert abs(one["score"] - float(scores[one["corpus_id"]])) < 1e-4
    assert ours.rank(texts[0], texts) == ours.rerank(texts[0], iter(texts))
    assert ours.rerank("a", []) == []
    ours.similarity_fn_name = "meanmaxsim"
    assert_same(ours.similarity(queries, documents).numpy(), (want / torch.tensor([[len(q)] for q in queries])).numpy())
    for words, call in (
        ("no argument 'apply_softmax'", lambda: ours.rerank("a", texts, apply_softmax=True)),
        ("expected vectors of tokens", lambda: ours.similarity([queries[0][0]], documents)),
        ("must have one width; got 8, 24", lambda: ours.similarity([q[:, :8] for q in queries], documents)),
        ("as many documents as queries, 3; got 8", lambda: ours.similarity_pairwise(queries, documents[:8])),
        ("must be one of maxsim, meanmaxsim; got 'cosine'", lambda: setattr(ours, "similarity_fn_name", "cosine")),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()


@pytest.mark.parametrize(
    "metadata",
    [{}, {"attend_to_mask_tokens": True, "mask_punctuation": False}, {"query_token_id": "hello", "doc_token_id": "the", "query_maxlen": None}],
    ids=str,
)  # fmt: skip
def test_stanfords_folders(tmp_path: Path, metadata: dict[str, Any]) -> None:
    folder = stanford_folder(tmp_path / "colbert", **metadata)
    ours, theirs = both(folder, MultiVectorEncoder)
    texts = [*TEXTS, "hello, world. the end!"]
    for model in (ours, ftbert.load(convert(folder, tmp_path / "copy"))):
        for task in ("query", "document"):
            want = getattr(theirs, f"encode_{task}")(texts)
            for mine, other in zip(model.encode_multi_vector(texts, task=task), want, strict=True):
                assert_same(mine, np.asarray(other))
        scores = theirs.similarity(theirs.encode_query(["hello"]), theirs.encode_document(texts))[0]
        assert [one["corpus_id"] for one in model.rerank("hello", texts)] == scores.argsort(descending=True, stable=True).tolist()
    with pytest.raises(ValueError, match="one vector for each token .*call encode_multi_vector"):
        ours.encode("a")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"dim": 23}, r"is \[24, 64\], and the files beside it say \[23, 64\]"),
        ({"query_maxlen": 0}, "query_maxlen must be a positive integer; got 0"),
        ({"query_token_id": 7}, "query_token_id must be a token; got 7"),
        ({"mask_punctuation": "no"}, "mask_punctuation must be true or false; got 'no'"),
        ({"similarity": "l2"}, "similarity 'l2' is not supported; expected cosine"),
    ],
)
def test_stanfords_folders_that_do_not_fit(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    folder = stanford_folder(tmp_path / "colbert")
    said = json.loads((folder / "artifact.metadata").read_text())
    (folder / "artifact.metadata").write_text(json.dumps(said | metadata))
    with pytest.raises(ValueError, match=words):
        ftbert.load(folder).encode_multi_vector("a", task="query")


def test_the_server_ranks_by_vectors_of_tokens(tmp_path: Path) -> None:
    served = pytest.importorskip("served")
    expansion = {"strategy": "fixed", "attend": False, "length": 9}
    folder = colbert_folder(tmp_path, expansion, skiplist_words=["hello", "."])
    model, texts = ftbert.load(folder), [*filter(None, TEXTS), *SAMPLE_TEXTS[:5]]
    with served.in_thread(("m", folder)) as server:
        want = model.rerank(texts[0], texts)
        for path in ("/rerank", "/"):
            got = server.post(path, {"query": texts[0], "texts": texts})
            assert [one["index"] for one in got] == [one["corpus_id"] for one in want]
            assert np.allclose([one["score"] for one in got], [one["score"] for one in want], atol=1e-5)
        ranking = server.post("/v1/rerank", {"query": texts[0], "documents": texts, "top_n": 3})
        assert [one["index"] for one in ranking["results"]] == [one["corpus_id"] for one in want][:3]
        assert ranking["usage"]["total_tokens"] > 9
        with ThreadPoolExecutor(8) as pool:  # queries that share batches
            several = list(pool.map(lambda text: server.post("/rerank", {"query": text, "texts": texts}), texts))
        for text, got in zip(texts, several, strict=True):
            scores = {one["corpus_id"]: one["score"] for one in model.rerank(text, texts)}
            assert len(got) == len(texts) and all(abs(one["score"] - scores[one["index"]]) < 1e-4 for one in got)
        queries = server.post("/embed_all", {"inputs": TEXTS, "prompt_name": "query"})
        for mine, other in zip(queries, model.encode_multi_vector(TEXTS, task="query"), strict=True):
            assert_same(np.array(mine, dtype=np.float32).reshape(-1, 24), other)
        for path, asked in (
            ("/rerank", {"query": "a", "texts": ["b"], "prompt_name": "query"}),
            ("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 3}),
        ):
            assert server.call("POST", path, asked).status == 422
        assert server.call("POST", "/score", {"queries": "a", "documents": ["b"]}).status == 424
