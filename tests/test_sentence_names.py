"""Every public name and argument of sentence-transformers: ours with its value, or an answer that says what else."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_same
from conftest import has_bf16
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SimilarityFunction,
    SparseEncoder,
)
from tokenizers_offline import TEXTS, folder_of, sentence_folder

import ftbert
from ftbert.load_arguments import ANSWERS, SAME
from ftbert.text.elsewhere import ARGUMENTS, ARGUMENTS_OF_TOKENS, ELSEWHERE, INPUTS
from ftbert.text.sentence_names import EMBEDDINGS

PROMPTS = {"query": "Query: ", "document": "Document: ", "other": "hello two "}
THEIRS = (SentenceTransformer, CrossEncoder)


def theirs_of(kind: type, folder: Path, **given: Any) -> Any:
    return kind(str(folder), device="cpu", local_files_only=True, **given)


def test_every_name_is_there_or_answered(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    ours = ftbert.load(folder)
    names = {name for kind in THEIRS for name in [*dir(kind), *vars(theirs_of(kind, folder))]}
    names |= {name for kind in (SparseEncoder, MultiVectorEncoder) for name in dir(kind)}
    for name in sorted(name for name in names if not name.startswith("_")):
        if hasattr(type(ours), name) or name in vars(ours):
            assert name not in ELSEWHERE
            continue
        assert not hasattr(ours, name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}': .*[a-z]{{3}}"):
            getattr(ours, name)
        if name in ELSEWHERE:
            with pytest.raises(AttributeError, match=f"no attribute '{name}': "):
                setattr(ours, name, None)
    with pytest.raises(AttributeError, match="no attribute 'similarty'$") as caught:
        ours.similarty  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("similarty", ours)  # Python then says: did you mean similarity?


def test_an_attribute_error_of_a_property_is_its_own() -> None:
    class Broken(ftbert.Model):
        def __init__(self) -> None:
            self.folder = None

        @property
        def prompts(self) -> Any:
            raise AttributeError("the reason")

    with pytest.raises(AttributeError, match="the reason"):
        Broken().prompts  # noqa: B018


@pytest.mark.parametrize(
    ("theirs", "ours", "known"),
    [
        (SentenceTransformer.encode, [ftbert.Model.encode], {**ARGUMENTS, **INPUTS}),
        (SentenceTransformer.encode_query, [ftbert.Model.encode_query, ftbert.Model.encode], {**ARGUMENTS, **INPUTS}),
        (CrossEncoder.predict, [ftbert.Model.predict], {**ARGUMENTS, **INPUTS}),
        (CrossEncoder.rank, [ftbert.Model.rank, ftbert.Model.predict], ARGUMENTS),
        (SparseEncoder.encode, [ftbert.Model.encode_sparse], {**ARGUMENTS, **INPUTS}),
        (MultiVectorEncoder.encode, [ftbert.Model.encode_multi_vector], {**ARGUMENTS_OF_TOKENS, **INPUTS}),
        (SentenceTransformer, [ftbert.load], {**ANSWERS, **SAME}),
        (SparseEncoder, [ftbert.load], {**ANSWERS, **SAME}),
        (CrossEncoder, [ftbert.load], {**ANSWERS, **SAME}),
        (SentenceTransformer.similarity, [ftbert.Model.similarity], EMBEDDINGS),
        (SentenceTransformer.preprocess, [ftbert.Model.preprocess], {}),
    ],
)
def test_every_argument_is_there_or_answered(
    theirs: Callable[..., Any], ours: list[Callable[..., Any]], known: dict[str, Any]
) -> None:
    have = {name for one in ours for name in inspect.signature(one).parameters} | set(known)
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    wanted = [one for one in inspect.signature(theirs).parameters.values() if one.kind not in kinds]
    assert {one.name for one in wanted} <= have


def test_arguments_of_calls(tmp_path: Path) -> None:
    model = ftbert.load(sentence_folder(tmp_path))
    want = model.encode(TEXTS)
    for same in ({"pool": None, "device": None}, {"device": "cpu", "chunk_size": 7}, {"device": ["cpu"]}, {"device": torch.device("cpu")}):
        assert np.array_equal(model.encode(sentences=TEXTS, **same), want)
    assert np.array_equal(model.encode(inputs=TEXTS), want)
    for error, given, words in [
        (TypeError, {"normalise": True}, "encode has no argument 'normalise'; nearest: normalize"),
        (TypeError, {"zzz": 1}, "encode has no argument 'zzz'; it has texts, "),
        (TypeError, {"pool": {}}, "encode has no argument 'pool': .*ftbert.load"),
        (TypeError, {"inputs": TEXTS}, "inputs and texts are one argument"),
        (ValueError, {"device": "cuda"}, "lies on cpu, and device asks for cuda: model.to"),
        (ValueError, {"device": ["cpu", "cpu"]}, "lies on cpu, and device asks for cpu, cpu"),
    ]:  # fmt: skip
        with pytest.raises(error, match=words):
            model.encode(texts=TEXTS, **given)
        with pytest.raises(error, match=words.replace("encode", "encode_query")):
            model.encode_query(texts=TEXTS, **given)
    assert np.array_equal(model.encode_query(inputs=TEXTS, device="cpu"), model.encode_query(TEXTS))


def test_rank(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    ours, theirs = ftbert.load(folder), theirs_of(CrossEncoder, folder)
    rows = ours.preprocess([("hello world", text) for text in TEXTS])["input_ids"].tolist()
    documents = list({tuple(row): text for row, text in zip(rows, TEXTS, strict=True)}.values())  # no two score the same
    for more in ({}, {"top_k": 3}, {"return_documents": True, "prompt": "query: "}, {"batch_size": 2, "device": "cpu"}):
        got, want = (model.rank("hello world", documents, **more) for model in (ours, theirs))
        scores = np.array([[one.pop("score") for one in some] for some in (got, want)])
        assert got == want
        assert np.abs(scores[0] - scores[1]).max() < 2e-5
    assert ours.rank("a", documents, apply_softmax=True, convert_to_numpy=True, convert_to_tensor=False) == ours.rank("a", documents)
    with pytest.raises(TypeError, match="rerank gives scores as float"):
        ours.rank("a", documents, convert_to_tensor=True)
    assert ours.rank(query="a", documents=documents, top_k=1) == ours.rerank("a", documents=documents, top_k=1)
    assert (ours.num_labels, ours.max_seq_length) == (theirs.num_labels, theirs.max_seq_length)
    with pytest.raises(TypeError, match="has no argument 'topk'; nearest: top_k"):
        ours.rank("a", documents, topk=3)


def test_lengths_that_are_set(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "a", sentence={"max_seq_length": 20, "query_length": 9})
    ours, theirs = ftbert.load(folder), theirs_of(SentenceTransformer, folder)
    assert ours.max_seq_length == ours.get_max_seq_length() == theirs.max_seq_length == 20
    for length in (7, 30):
        ours.max_seq_length = theirs.max_seq_length = length
        for name in ("encode", "encode_query", "encode_document"):
            assert_same(getattr(ours, name)(TEXTS, normalize=None), getattr(theirs, name)(TEXTS))
    assert ours.tokenizer.model_max_length == 30
    for other in (ours.to("cpu"), pickle.loads(pickle.dumps(ours))):
        assert other.max_seq_length == 30
    ours.max_seq_length = None
    assert ours.max_seq_length == 20
    for wrong, words in ((49, "49 is more than the model's 48"), (2, "no room"), (0, "positive"), ("9", "positive")):
        with pytest.raises(ValueError, match=words):
            ours.max_seq_length = wrong
    scores = folder_of(tmp_path / "b")
    ours, theirs = ftbert.load(scores, max_length=9), theirs_of(CrossEncoder, scores, max_length=9)
    pairs = [("hello " * 20, "the end " * 30), ("a", "b")]
    for length in (9, 12):
        ours.max_length = theirs.max_length = length
        assert ours.max_length == ours.max_seq_length == theirs.max_seq_length == length
        assert np.abs(ours.predict(pairs) - theirs.predict(pairs)).max() < 2e-5


def test_widths_and_similarities_that_are_set(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path, truncate_dim=30, similarity_fn_name="dot")
    ours, theirs = ftbert.load(folder, truncate_dim=20), theirs_of(SentenceTransformer, folder, truncate_dim=20)
    for width in (20, 7, None, 100):
        ours.truncate_dim = theirs.truncate_dim = width
        assert ours.truncate_dim == width
        assert ours.get_embedding_dimension() == theirs.get_embedding_dimension() == ours.get_sentence_embedding_dimension()
        assert_same(ours.encode(TEXTS, normalize_embeddings=False), theirs.encode(TEXTS))
    with pytest.raises(KeyError), ours.truncate_embeddings(9), theirs.truncate_embeddings(9):
        assert_same(ours.encode(TEXTS, normalize_embeddings=False), theirs.encode(TEXTS))
        raise KeyError
    assert ours.truncate_dim == theirs.truncate_dim == 100
    assert ftbert.load(folder).get_embedding_dimension() == 30
    one, other = ours.encode(TEXTS[:4], normalize=False), ours.encode(TEXTS[4:8], normalize=False)
    for name in ("euclidean", SimilarityFunction.MANHATTAN, "cosine", "dot"):
        ours.similarity_fn_name = theirs.similarity_fn_name = name
        assert ours.similarity_fn_name == theirs.similarity_fn_name
        assert_same(ours.similarity(one, other), theirs.similarity(one, other))
        assert_same(ours.similarity_pairwise(one, other), theirs.similarity_pairwise(one, other))
    with pytest.raises(ValueError, match="must be one of cosine, dot, .*; got 'maxsim'"):
        ours.similarity_fn_name = "maxsim"
    ours.similarity_fn_name = None
    assert ours.similarity_fn_name == "dot"
    assert ftbert.load(folder, similarity_fn_name="cosine").similarity_fn_name == "cosine"


def test_similarities_of_sparse_vectors(tmp_path: Path) -> None:
    theirs_of(SparseEncoder, folder_of(tmp_path / "a", task="masked_lm")).save(str(tmp_path / "b"))
    ours, theirs = ftbert.load(tmp_path / "b"), theirs_of(SparseEncoder, tmp_path / "b")
    assert ours.similarity_fn_name == theirs.similarity_fn_name == "dot"
    one, other = ours.encode_sparse(TEXTS[:4]), ours.encode_sparse(TEXTS[4:8])
    assert ours.get_embedding_dimension() == one.shape[1] == 400
    rows = ours.encode_sparse(TEXTS[:4], convert_to_tensor=False)
    assert_same(torch.stack(rows).to_dense(), one.to_dense())
    for name in ("dot", "cosine", "euclidean", "manhattan"):
        ours.similarity_fn_name = name
        dense = ours.similarity(one.to_dense(), other.to_dense())
        assert_same(ours.similarity(one, other), dense)
        assert_same(ours.similarity_pairwise(one, other), dense.diagonal())
        assert_same(ours.similarity(one[0], other), dense[:1])
        assert_same(ours.similarity(one, other.to_dense()), dense)
    ours.similarity_fn_name = None
    assert_same(ours.similarity(one, other), theirs.similarity(one, other).to_dense())


def test_prompts_that_are_set(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path, prompts=PROMPTS)
    given = {"prompts": {"query": "q: ", "mine": "hello "}, "default_prompt_name": "mine"}
    ours, theirs = ftbert.load(folder, **given), theirs_of(SentenceTransformer, folder, **given)
    assert ours.prompts == theirs.prompts
    assert ours.default_prompt_name == theirs.default_prompt_name == "mine"
    for name in ("encode", "encode_query", "encode_document"):
        assert_same(getattr(ours, name)(TEXTS, normalize=None), getattr(theirs, name)(TEXTS))
    ours.prompts = theirs.prompts = {"mine": "end "}
    assert_same(ours.encode(TEXTS, normalize=None), theirs.encode(TEXTS))
    for name, value in (("prompts", {"a": 3}), ("prompts", ["a"]), ("default_prompt_name", "nothing")):
        with pytest.raises(ValueError, match="prompt"):
            setattr(ours, name, value)


@pytest.mark.parametrize("side", ["left", "right"])
def test_preprocess(tmp_path: Path, side: str) -> None:
    folder = sentence_folder(tmp_path / "a", tokenizer={"padding_side": side}, sentence={"do_lower_case": True, "max_seq_length": 12})
    ours, theirs = ftbert.load(folder), theirs_of(SentenceTransformer, folder)
    plain = ours.encode(TEXTS)
    pairs = list(zip(TEXTS, TEXTS[1:], strict=False))
    for texts, more in ((TEXTS, {}), (TEXTS, {"prompt": "query: "}), (pairs, {})):
        want = {name: value for name, value in theirs.preprocess(texts, **more).items() if isinstance(value, torch.Tensor)}
        for got in (ours.preprocess(texts, **more), ours.tokenize(texts, **more)):
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want)
    assert ours(**ours.preprocess(TEXTS)).last_hidden_state.shape[:2] == (len(TEXTS), 12)
    assert torch.equal(ours.tokenizer(TEXTS[:3], padding="max_length", max_length=9, truncation=True, return_tensors="pt")["input_ids"],
                       theirs.tokenizer(TEXTS[:3], padding="max_length", max_length=9, truncation=True, return_tensors="pt")["input_ids"])  # fmt: skip
    assert np.array_equal(ours.encode(TEXTS), plain)  # padding and truncation of the caller's copy are not encode's
    assert ours.processor is ours.tokenizer
    with pytest.raises(AttributeError, match="cannot be set"):
        ours.tokenizer = theirs.tokenizer
    live = ftbert.load(ours.reference())
    assert live.get_embedding_dimension() == 64
    for name in ("tokenizer", "max_seq_length", "prompts"):
        with pytest.raises(ValueError, match="no folder with a tokenizer"):
            getattr(live, name)


@has_bf16
def test_arguments_of_load(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path)
    usual = {"trust_remote_code": False, "backend": "torch", "cache_folder": None, "local_files_only": False}
    ours = ftbert.load(folder, **usual, model_kwargs={"torch_dtype": torch.float32, "attn_implementation": "sdpa", "device_map": None})
    assert ours.dtype == torch.float32
    assert ftbert.load(folder, model_kwargs={"dtype": "bfloat16", "low_cpu_mem_usage": True}).dtype == torch.bfloat16
    assert ftbert.load(folder, torch_dtype="bf16").dtype == torch.bfloat16
    for error, given, words in [
        (TypeError, {"trust_remote_code": True}, "never runs a folder's code"),
        (TypeError, {"dtyp": "fp16"}, "load has no argument 'dtyp'; nearest: dtype"),
        (TypeError, {"backend": "onnx"}, "the .onnx file itself"),
        (TypeError, {"dtype": "bf16", "model_kwargs": {"dtype": "float32"}}, "give one of them"),
        (ValueError, {"model_kwargs": {"attn_implementation": "mine"}}, "attn_implementation: expected one of .*got 'mine'"),
        (TypeError, {"model_kwargs": {"device_map": "auto"}}, "device_map: ftbert.load"),
        (TypeError, {"model_kwargs": {"low_cpu_mem": True}}, "nearest: low_cpu_mem_usage"),
        (ValueError, {"model_kwargs": {"dtype": "float13"}}, "dtype: expected fp32"),
        (ValueError, {"truncate_dim": 0}, "truncate_dim must be a positive integer"),
    ]:  # fmt: skip
        with pytest.raises(error, match=words):
            ftbert.load(folder, **given)


@has_bf16
def test_warnings_name_the_callers_line(tmp_path: Path) -> None:
    prompts = {"query": "q: "}
    scores = ftbert.load(folder_of(tmp_path / "a"))
    vectors = ftbert.load(sentence_folder(tmp_path / "b", prompts=prompts))
    for call in (
        lambda: ftbert.load(scores.reference(), dtype="bf16").to(dtype="fp32"),
        lambda: scores.encode("a"),
        lambda: vectors.encode("a", prompt="b", prompt_name="query"),
        lambda: vectors.encode_query("a", prompt="b", prompt_name="query"),
    ):
        with pytest.warns(UserWarning, match="rounded to|scores texts|prompt_name is ignored") as caught:
            call()
        assert {one.filename for one in caught} == {__file__}


def test_the_real_model(minilm_folder: Path) -> None:
    ours, theirs = ftbert.load(minilm_folder, truncate_dim=128), theirs_of(SentenceTransformer, minilm_folder, truncate_dim=128)
    for name in ("max_seq_length", "similarity_fn_name", "truncate_dim", "prompts", "default_prompt_name"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.get_embedding_dimension() == theirs.get_embedding_dimension() == 128
    texts = [text for text in TEXTS if len(text) < 120]
    got, want = ours.preprocess(texts), theirs.preprocess(texts)
    assert all(torch.equal(one, want[name]) for name, one in got.items())
    ours.max_seq_length = theirs.max_seq_length = 5
    assert_same(ours.encode(texts, normalize_embeddings=False), theirs.float().encode(texts))
