"""encode and its kin against sentence-transformers on the same folder: settings, keywords, similarity."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantize_embeddings
from tokenizers_offline import TEXTS, sentence_folder

import ftbert
from ftbert.evaluation import SAMPLE_TEXTS

PROMPTS = {"query": "Query: ", "document": "Document: ", "other": "hello two "}


def both(folder: Path) -> tuple[Any, SentenceTransformer]:
    return ftbert.load(folder), SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours.shape == theirs.shape
    assert float(abs(ours - theirs).max()) < 5e-6 * max(1, float(abs(theirs).max()))


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "mean_sqrt_len_tokens", "lasttoken"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_and_pooling(tmp_path: Path, pooling: str, include_prompt: bool) -> None:
    ours, theirs = both(
        sentence_folder(
            tmp_path, pooling=pooling, include_prompt=include_prompt, prompts=PROMPTS, default_prompt_name="other"
        )
    )
    for given in ({}, {"prompt": "line: "}, {"prompt": ""}, {"prompt_name": "query"}):
        assert_same(ours.encode(TEXTS, normalize=None, **given), theirs.encode(TEXTS, **given))
    for name in ("encode_query", "encode_document"):
        assert_same(
            getattr(ours, name)(TEXTS), getattr(theirs, name)(TEXTS, normalize_embeddings=True)
        )  # normalised by default
    assert ours.prompts == theirs.prompts
    plain = ours.encode(TEXTS, normalize=None, prompt="")
    assert np.abs(plain - ours.encode(TEXTS, normalize=None)).max() > 1e-3  # the prompt counts


@pytest.mark.parametrize(("normalize", "width"), itertools.product([False, True], [None, 7, 64, 100]))
def test_width_and_length(tmp_path: Path, normalize: bool, width: int | None) -> None:
    ours, theirs = both(sentence_folder(tmp_path, normalize=normalize, truncate_dim=width, similarity_fn_name="dot"))
    for unit, given in itertools.product((False, True), ({}, {"truncate_dim": 5})):
        assert_same(
            ours.encode(TEXTS, normalize_embeddings=unit, **given),
            theirs.encode(TEXTS, normalize_embeddings=unit, **given),
        )
    vectors = ours.encode(TEXTS)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert ours.similarity_fn_name == theirs.similarity_fn_name == "dot"


@pytest.mark.parametrize(
    "given",
    [
        {"tokenizer": {"do_lower_case": False}},
        {"tokenizer": {"do_lower_case": True, "strip_accents": False, "truncation_side": "left"}},
        {"tokenizer": {"model_max_length": 9}},
        {"tokenizer": {"do_lower_case": False}, "sentence": {"do_lower_case": True, "max_seq_length": 8}},
        {"sentence": {"processor_kwargs": {"do_lower_case": False, "model_max_length": 6}, "max_seq_length": 8}},
        {"sentence": {"query_length": 6, "document_length": 11}},
        {"model_type": "CrossEncoder", "prompts": PROMPTS, "default_prompt_name": "query", "pooling": "cls"},
        {"bert": {"architectures": ["BertForCausalLM"]}, "model_type": "CrossEncoder"},
    ],
    ids=str,
)
def test_settings_of_the_folder(tmp_path: Path, given: dict[str, Any]) -> None:
    ours, theirs = both(sentence_folder(tmp_path, **given))
    for name in ("encode", "encode_query", "encode_document"):
        assert_same(getattr(ours, name)(TEXTS, normalize=None), getattr(theirs, name)(TEXTS))


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarity(tmp_path: Path, name: str) -> None:
    ours, theirs = both(sentence_folder(tmp_path, similarity_fn_name=name))
    one, other = np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32)
    for a, b in ((one, other), (one[0], other), (torch.from_numpy(one), other.tolist())):
        assert_same(ours.similarity(a, b), theirs.similarity(a, b))
    assert_same(ours.similarity_pairwise(one, other), theirs.similarity_pairwise(one, other))
    assert torch.equal(ours.similarity(one, list(torch.from_numpy(other))), ours.similarity(one, other))
    half = torch.from_numpy(one).half()
    assert_same(ours.similarity(half, half), theirs.similarity(half, half))
    if torch.cuda.is_available():
        assert_same(ours.similarity(torch.from_numpy(one).cuda(), one).cpu(), ours.similarity(one, one))


def test_forms_of_results_and_wrong_calls(tmp_path: Path) -> None:
    model = ftbert.load(sentence_folder(tmp_path, prompts=PROMPTS))
    vectors = model.encode(TEXTS)
    tensor = model.encode(TEXTS, convert_to_tensor=True)
    assert isinstance(tensor, torch.Tensor)
    assert torch.equal(tensor, torch.from_numpy(vectors))
    rows = model.encode(TEXTS, convert_to_numpy=False)
    assert isinstance(rows, list)
    assert torch.equal(torch.stack(rows), tensor)
    assert model.encode("hello", convert_to_tensor=True).shape == (64,)
    assert model.encode([], truncate_dim=8).shape == (0, 8)
    assert_same(model.encode(TEXTS, batch_size=3), vectors)
    assert_same(model.encode(TEXTS, max_length=48, pooling="mean"), vectors)
    with pytest.raises(TypeError, match="positional"):
        model.encode(TEXTS, 32)
    wrong: list[tuple[type[Exception], dict[str, Any], str]] = [
        (ValueError, {"precision": "int4"}, "precision must be one of float32, int8, .*; got 'int4'"),
        (ValueError, {"output_value": None}, "output_value must be 'sentence_embedding' or .*; got None"),
        (ValueError, {"sentences": "hello", "precision": "uint8"}, "takes the range of several vectors"),
        (TypeError, {"normalize": False, "normalize_embeddings": True}, "not both"),
        (TypeError, {"normalize": 32}, "normalize must be True, False or None; got 32"),
        (ValueError, {"prompt_name": "x"}, "prompt_name must be one of 'query', 'document', 'other'; got 'x'"),
        (ValueError, {"max_length": 49}, "maximum length of 49 is more than the model's 48"),
        (ValueError, {"max_length": 2.0}, "max_length must be a positive integer"),
        (ValueError, {"batch_size": 0}, "batch_size must be a positive integer"),
        (ValueError, {"truncate_dim": -1}, "truncate_dim must be a positive integer"),
        (ValueError, {"max_tokens": True}, "max_tokens must be a positive integer"),
        (TypeError, {"prompt": 3}, "prompt must be a str; got int"),
    ]
    for error, given, words in wrong:
        with pytest.raises(error, match=words):
            model.encode(given.pop("sentences", TEXTS), **given)
    with pytest.warns(UserWarning, match="prompt_name is ignored"):
        model.encode(TEXTS, prompt="a", prompt_name="query")


@pytest.mark.parametrize("width", [None, 13])
def test_precisions(tmp_path: Path, width: int | None) -> None:
    ours, theirs = both(sentence_folder(tmp_path, truncate_dim=width))
    vectors = ours.encode(TEXTS, normalize=False)
    for precision in ("float32", "int8", "uint8", "binary", "ubinary"):
        got = ours.encode(TEXTS, normalize=False, precision=precision)
        assert np.array_equal(got, quantize_embeddings(vectors, precision))
        want = theirs.encode(TEXTS, precision=precision)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert_same(vectors, theirs.encode(TEXTS))
    assert ours.encode("hello", precision="binary").shape == theirs.encode("hello", precision="binary").shape
    assert ours.encode([], precision="int8").dtype == np.int8
    assert ours.encode(TEXTS, precision="int8", convert_to_tensor=True).dtype == torch.int8


@pytest.mark.parametrize("include_prompt", [True, False])
def test_token_embeddings(tmp_path: Path, include_prompt: bool) -> None:
    ours, theirs = both(sentence_folder(tmp_path, prompts=PROMPTS, include_prompt=include_prompt, pooling="cls"))
    for given in ({}, {"prompt_name": "query"}):
        got = ours.encode(TEXTS, output_value="token_embeddings", **given)
        assert isinstance(got, list)
        for mine, other in zip(got, theirs.encode(TEXTS, output_value="token_embeddings", **given), strict=True):
            assert_same(mine, other.numpy())
    assert_same(ours.encode(TEXTS[0], output_value="token_embeddings"), ours.encode(TEXTS[:1], output_value="token_embeddings")[0])
    rows = ours.encode(TEXTS, output_value="token_embeddings", convert_to_tensor=True)
    assert all(isinstance(row, torch.Tensor) for row in rows)


def test_the_converted_folder_gives_the_same(tmp_path: Path) -> None:
    source = sentence_folder(
        tmp_path / "a", tokenizer={"do_lower_case": False, "truncation_side": "left"}, truncate_dim=9,
        prompts=PROMPTS, default_prompt_name="query", include_prompt=False, normalize=True,
    )  # fmt: skip
    from ftbert.converters.from_huggingface import convert

    copy = ftbert.load(convert(source, tmp_path / "b"))
    assert_same(copy.encode(TEXTS, normalize=None), SentenceTransformer(str(source), device="cpu").encode(TEXTS))


def test_the_real_model(minilm_folder: Path) -> None:
    ours, theirs = both(minilm_folder)
    theirs = theirs.float()
    samples = ["", *SAMPLE_TEXTS]
    assert np.abs(ours.encode(samples) - theirs.encode(samples)).max() < 2e-6
    texts = [text for text in TEXTS if len(text) < 120]
    for given in ({}, {"prompt": "query: "}, {"truncate_dim": 64}):
        assert_same(ours.encode(texts, normalize_embeddings=True, **given), theirs.encode(texts, normalize_embeddings=True, **given))
    assert_same(ours.similarity(ours.encode(texts), ours.encode(texts)), theirs.similarity(theirs.encode(texts), theirs.encode(texts)))
