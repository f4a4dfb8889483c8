"""encode and its kin against sentence-transformers on the same folder: settings, keywords, similarity."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import sentence_transformers
import torch
from compare import assert_same
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import quantize_embeddings
from tokenizers_offline import TEXTS, sentence_folder, unfit

import ftbert
from ftbert.evaluation import SAMPLE_TEXTS, check

PROMPTS = {"query": "Query: ", "document": "Document: ", "other": "hello two "}


def both(folder: Path) -> tuple[Any, SentenceTransformer]:
    return ftbert.load(folder), SentenceTransformer(str(folder), device="cpu", local_files_only=True)


@pytest.mark.parametrize("pooling", [*Pooling.POOLING_MODES, ["mean", "cls"], ["max", "weightedmean", "lasttoken", "mean"]])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_and_pooling(tmp_path: Path, pooling: str | list[str], include_prompt: bool) -> None:
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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("truncation", ["left", "right"])
def test_last_and_weighted_tokens_whatever_the_padding(tmp_path: Path, side: str, truncation: str) -> None:
    """sentence-transformers pads; a decoder's tokenizer on the left, where places of tokens begin later."""
    from ftbert.files import embed_file

    given = {"padding_side": side, "truncation_side": truncation}
    ours, theirs = both(sentence_folder(tmp_path, pooling=["lasttoken", "weightedmean"], tokenizer=given, truncate_dim=100))
    assert theirs.tokenizer.padding_side == side
    want = np.concatenate([theirs.encode([text]) for text in TEXTS])  # alone, so that nothing is padded
    assert_same(ours.encode(TEXTS, normalize=None), want)
    if side == "right":  # its positions of BERT move with the padding on the left, in sentence-transformers' own batch
        assert_same(ours.encode(TEXTS, normalize=None), theirs.encode(TEXTS))
    lines = [text for text in TEXTS if text.strip() and text.isprintable()]
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    embed_file(ours, tmp_path / "texts.txt", tmp_path / "out.npy", normalize=None, truncate_dim=33)
    assert_same(np.load(tmp_path / "out.npy"), ours.encode(lines, normalize=None)[:, :33])


TANH, GELU, NONE = (f"torch.nn.modules.{name}" for name in ("activation.Tanh", "activation.GELU", "linear.Identity"))
WIDE = {"in_features": 64, "out_features": 80, "activation_function": GELU}
SQUARE = {"in_features": 64, "out_features": 64, "bias": True, "activation_function": TANH}


@pytest.mark.parametrize(
    "given",
    [
        {"behind": [SQUARE], "normalize": True, "pooling": "cls"},  # LaBSE
        {"behind": [SQUARE | {"out_features": 24, "binary": True}]},  # distiluse
        {"behind": [WIDE | {"bias": False, "activation_function": NONE}, WIDE | {"in_features": 80, "out_features": 64, "bias": False}], "normalize": True},
        {"behind": ["Dropout", {"in_features": 64, "out_features": 33}, "Normalize", "Dropout"], "truncate_dim": 7},
        {"behind": ["Normalize", WIDE, "Normalize", {"in_features": 80, "out_features": 5}]},
        {"behind": [SQUARE | {"use_residual": True}, WIDE | {"use_residual": True, "bias": False}], "pooling": "max"},
        {"behind": [WIDE | {"in_features": 192, "dtype": torch.float16}], "pooling": ["weightedmean", "cls", "mean"], "truncate_dim": 70},
        {"behind": [SQUARE], "transformer": "0_Transformer", "sentence": {"max_seq_length": 9, "do_lower_case": True}},
    ],
    ids=str,
)
def test_modules_behind_the_pooling(tmp_path: Path, given: dict[str, Any]) -> None:
    """From the folder, from the converted one and through `ftbert embed`."""
    from ftbert.converters.from_huggingface import convert
    from ftbert.files import embed_file

    given = {**given, "behind": [{**one} if isinstance(one, dict) else one for one in given["behind"]]}
    folder = sentence_folder(tmp_path / "a", prompts=PROMPTS, include_prompt=False, **given)
    ours, theirs = both(folder)
    want = theirs.encode(TEXTS)
    assert_same(ours.encode(TEXTS, normalize=None), want)
    assert_same(ours.encode(TEXTS, normalize_embeddings=True), theirs.encode(TEXTS, normalize_embeddings=True))
    for options in ({"truncate_dim": 4}, {"prompt_name": "query"}, {"prompt": "hello "}):
        assert_same(ours.encode(TEXTS, normalize=None, max_tokens=64, **options), theirs.encode(TEXTS, **options))
    for mine, other in zip(ours.encode(TEXTS, output_value="token_embeddings"), theirs.encode(TEXTS, output_value="token_embeddings"), strict=True):
        assert_same(mine, other.numpy())
    short = [text for text in TEXTS if len(text) < 8]  # what fits into one window is the same
    averaged = ours.encode([*short, "hello " * 200], normalize=None, long_texts="mean")
    assert_same(averaged[:-1], theirs.encode(short))
    assert np.isfinite(averaged[-1]).all()
    converted = ftbert.load(convert(folder, tmp_path / "b"))
    assert np.array_equal(converted.encode(TEXTS, normalize=None), ours.encode(TEXTS, normalize=None))
    assert check(converted, texts=SAMPLE_TEXTS[:3]).passed
    with pytest.raises(FileExistsError, match="exists already"):
        convert(folder, tmp_path / "b")
    convert(folder, tmp_path / "b", force=True)  # all of it is known as ours
    lines = [text for text in TEXTS if text.strip() and text.isprintable()]
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    stats = embed_file(converted, tmp_path / "texts.txt", tmp_path / "out.npy", normalize=None)
    assert stats.hidden == want.shape[1]
    assert_same(np.load(tmp_path / "out.npy"), theirs.encode(lines))


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(
    pooling=st.lists(st.sampled_from(Pooling.POOLING_MODES), min_size=1, max_size=4),
    widths=st.lists(st.integers(1, 90), max_size=3),
    names=st.lists(st.sampled_from([TANH, GELU, NONE, "torch.nn.modules.activation.SiLU", "torch.nn.ReLU"]), min_size=3, max_size=3),
    normalized=st.lists(st.booleans(), min_size=4, max_size=4),
    include_prompt=st.booleans(),
)  # fmt: skip
def test_any_chain(pooling: list[str], widths: list[int], names: list[str], normalized: list[bool], include_prompt: bool) -> None:
    behind: list[Any] = []
    width = 64 * len(pooling)
    for out, name, unit in zip(widths, names, normalized, strict=False):
        behind += ["Normalize"] * unit
        behind.append({"in_features": width, "out_features": out, "activation_function": name})
        width = out
    behind += ["Normalize"] * normalized[-1]
    texts = [text for text in TEXTS if len(text) < 120][:8]
    with tempfile.TemporaryDirectory() as place:
        ours, theirs = both(sentence_folder(Path(place), pooling=pooling, behind=behind, include_prompt=include_prompt))
        assert_same(ours.encode(texts, normalize=None, prompt="hello "), theirs.encode(texts, prompt="hello "))
        assert_same(ours.encode(texts, normalize=True), theirs.encode(texts, normalize_embeddings=True))


def test_dense_modules_that_do_not_fit(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "a", behind=[SQUARE], pooling=["cls", "mean"])
    with pytest.raises(ValueError, match=r"2_Dense: takes vectors of 64 entries, gets 128"):
        ftbert.load(folder).encode("a")
    assert ftbert.load(folder).encode("a", pooling="cls").shape == (64,)
    for entry, words in (({"activation_function": "evil.Tanh"}, "activation_function 'evil.Tanh' is not supported"), ({"bias": False}, "extra linear.bias"), ({"out_features": 63}, r"asks for \[63, 64\]")):
        (folder / "2_Dense/config.json").write_text(json.dumps(SQUARE | entry))
        with pytest.raises(ValueError, match=f"2_Dense.*(\n.*)*{words}"):
            ftbert.load(folder).encode("a", pooling="max")
    (folder / "2_Dense/model.safetensors").unlink()
    with pytest.raises(ValueError, match="2_Dense: no weights found"):
        ftbert.load(folder).encode("a", pooling="max")


def test_the_server_computes_the_same(tmp_path: Path) -> None:
    served = pytest.importorskip("served")
    folder = sentence_folder(
        tmp_path, pooling=["cls", "weightedmean"], include_prompt=False, prompts=PROMPTS, default_prompt_name="query",
        behind=["Normalize", SQUARE | {"in_features": 128, "out_features": 40}], normalize=True, transformer="0_Transformer",
    )  # fmt: skip
    ours = ftbert.load(folder)
    texts = [text for text in TEXTS if text.strip()]
    with served.in_thread(("m", folder)) as server:
        assert_same(np.array(server.post("/embed", {"inputs": texts})), ours.encode(texts))
        assert_same(np.array(server.post("/embed", {"inputs": texts, "normalize": False})), ours.encode(texts, normalize=False))
        answer = server.post("/v1/embeddings", {"input": texts, "dimensions": 13})
        assert_same(np.array([one["embedding"] for one in answer["data"]]), ours.encode(texts, truncate_dim=13))
        assert len(server.post("/v1/embeddings", {"input": "a", "dimensions": 40})["data"][0]["embedding"]) == 40
        refused = server.call("POST", "/v1/embeddings", {"input": "a", "dimensions": 41})
        assert refused.status == 422 and b"from 1 to 40" in refused.body
        rows = ours.encode(texts[:1], output_value="token_embeddings")[0]
        for kept in (40, 64):  # of a token, whose vector goes through no Dense
            asked = {"input": texts[0], "task": "token_embed", "use_activation": False, "dimensions": kept}
            assert_same(np.array(server.post("/pooling", asked)["data"][0]["data"]), rows[:, :kept])


def test_the_server_tokenises_as_encode_where_the_class_does_not_fit(tmp_path: Path) -> None:
    served = pytest.importorskip("served")
    folder = sentence_folder(tmp_path / "a")
    unfit(tmp_path / "b", "minilm", model_max_length=30)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "b" / name, folder / name)
    with pytest.warns(UserWarning, match="AutoTokenizer gives other ids"):
        ours = ftbert.load(folder)
        want = ours.encode(TEXTS[:4])
    assert check(ours, texts=TEXTS[:4]).passed
    with served.in_thread(("m", folder)) as server:
        assert_same(np.array(server.post("/embed", {"inputs": TEXTS[:4]})), want)


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
        (ValueError, {"output_value": "cls"}, "output_value must be 'sentence_embedding', .* or None; got 'cls'"),
        (ValueError, {"output_value": None, "precision": "int8"}, "does not go with output_value=None"),
        (ValueError, {"output_value": None, "long_texts": "mean"}, "does not go with output_value=None"),
        (ValueError, {"output_value": None, "chunk_tokens": 3}, "chunks go with vectors of texts in float32"),
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


@pytest.mark.skipif(sentence_transformers.__version__.startswith("6.0."), reason="sentence-transformers 6.0 raises IndexError")
@pytest.mark.parametrize("given", [
    {}, {"prompt_name": "query"}, {"truncate_dim": 13}, {"convert_to_tensor": True}, {"convert_to_numpy": False},
])  # fmt: skip
@pytest.mark.parametrize("modules", [{"include_prompt": False}, {"normalize": True, "pooling": "lasttoken"}])
def test_every_output(tmp_path: Path, modules: dict[str, Any], given: dict[str, Any]) -> None:
    ours, theirs = both(sentence_folder(tmp_path, prompts=PROMPTS, **modules))
    for texts in (TEXTS, TEXTS[0], []):
        got = ours.encode(texts, output_value=None, normalize=None, **given)
        want = theirs.encode(texts, output_value=None, **given)
        assert type(got) is type(want)
        for mine, other in zip(*([one] if isinstance(one, dict) else one for one in (got, want)), strict=True):
            assert mine.keys() == other.keys()
            kept = other["attention_mask"].bool()
            for name, value in mine.items():
                expected = other[name]
                if isinstance(value, torch.Tensor):
                    expected = expected if name == "sentence_embedding" else expected[kept]
                    assert value.dtype == expected.dtype
                    assert_same(value.numpy(), expected.numpy())
                else:
                    assert value == expected


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
        outputs = (ours.encode(samples, output_value=None, normalize=None, **given), theirs.encode(samples, output_value=None, **given))
        for mine, other in zip(*outputs, strict=True):
            assert_same(mine["sentence_embedding"], other["sentence_embedding"])
            kept = other["attention_mask"].bool()
            assert mine["input_ids"].tolist() == other["input_ids"][kept].tolist()
            assert (mine["token_embeddings"] - other["token_embeddings"][kept]).abs().max() < 2e-5
    assert_same(ours.similarity(ours.encode(texts), ours.encode(texts)), theirs.similarity(theirs.encode(texts), theirs.encode(texts)))
