"""Tables of token vectors without a network, against model2vec and sentence-transformers on the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_same
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from served import in_thread
from tokenizers import Tokenizer
from tokenizers_offline import TEXTS, write

import ftbert
from ftbert.converters import convert
from ftbert.evaluation import SAMPLE_TEXTS, check
from ftbert.files import embed_file

WIDTH = 40
LONG = [*TEXTS, "hello world 漢 " * 300, "[UNK] hello", "漢 漢", "hello" + " " * 400 + "world"]


def tokenizer_of(folder: Path, family: str = "bert") -> Tokenizer:
    """With special tokens, truncation and padding of its own."""
    found = Tokenizer.from_file(str(write(folder, family) / "tokenizer.json"))
    found.enable_padding()
    return found


def static_folder(folder: Path, family: str = "bert", truncated: int | None = None, behind: Any = (), **settings: Any) -> Path:
    tokenizer = tokenizer_of(folder / "source", family)
    if truncated:
        tokenizer.enable_truncation(truncated)
    torch.manual_seed(0)
    modules = [StaticEmbedding(tokenizer, embedding_dim=WIDTH), *behind]
    SentenceTransformer(modules=modules, device="cpu", **settings).save(str(folder / "made"))
    return folder / "made"


def model2vec_folder(folder: Path, family: str = "bert", form: str = "plain", **settings: Any) -> Path:
    """As StaticModel.save_pretrained writes one. form: of its tensors."""
    tokenizer = tokenizer_of(folder / "source", family)
    generator, vocab = torch.Generator().manual_seed(0), tokenizer.get_vocab_size()
    rows = 23 if "mapping" in form else vocab
    tensors = {"embeddings": torch.randn(rows, WIDTH, generator=generator)}
    if "mapping" in form:
        tensors["mapping"] = torch.randint(0, rows, (vocab,), generator=generator)
    if "weights" in form:
        tensors["weights"] = torch.rand(vocab, generator=generator, dtype=torch.float64)
    if "int8" in form:
        tensors["embeddings"] = (tensors["embeddings"] * 30).to(torch.int8)
    made = folder / "made"
    made.mkdir()
    tokenizer.save(str(made / "tokenizer.json"))
    save_file(tensors, made / "model.safetensors")
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "hidden_dim": WIDTH, "normalize": False, **settings}
    (made / "config.json").write_text(json.dumps(config))
    modules = [{"idx": 0, "name": "0", "path": ".", "type": "sentence_transformers.models.StaticEmbedding"}]
    if config["normalize"]:
        modules.append({"idx": 1, "name": "1", "path": "1_Normalize", "type": "sentence_transformers.models.Normalize"})
    (made / "modules.json").write_text(json.dumps(modules))
    return made


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize(
    ("form", "settings"),
    [("plain", {}), ("int8", {"max_length": 7}), ("mapping", {"normalize": True}), ("mapping weights", {"max_length": None})],
)
def test_model2vec(tmp_path: Path, family: str, form: str, settings: dict[str, Any]) -> None:
    """Unknown tokens count for nothing, and long texts lose characters before they lose tokens."""
    peer = pytest.importorskip("model2vec").StaticModel
    folder = model2vec_folder(tmp_path, family, form, **settings)
    ours, theirs = ftbert.load(folder), peer.from_pretrained(folder)
    assert_same(ours.encode(LONG, normalize=None), theirs.encode(LONG))
    assert_same(ours.encode(LONG), theirs.encode(LONG, normalize=True))
    assert_same(ours.encode(LONG, normalize=None, max_length=3), theirs.encode(LONG, max_length=3))
    states = ours.encode(LONG[:4], output_value="token_embeddings", max_length=512)  # there without the model's own
    for mine, other in zip(states, theirs.encode_as_sequence(LONG[:4]), strict=True):
        assert_same(mine, other)
    (folder / "modules.json").unlink()  # older folders have none
    assert np.array_equal(ftbert.load(folder).encode(LONG, normalize=None), ours.encode(LONG, normalize=None))


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_static_embedding(tmp_path: Path, family: str) -> None:
    behind = [Dense(WIDTH, 24), Normalize()] if family == "bert" else [Normalize()] if family == "roberta" else []
    settings = {"prompts": {"query": "hello "}, "truncate_dim": 20 if family == "bert" else None}
    folder = static_folder(tmp_path, family, 9 if family == "roberta" else None, behind, **settings)
    ours, theirs = ftbert.load(folder), SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    want = theirs.encode(LONG)
    assert_same(ours.encode(LONG, normalize=None), want)
    assert_same(ours.encode_query(LONG, normalize=None), theirs.encode_query(LONG))
    assert_same(ours.similarity(want, want[:2]), theirs.similarity(want, want[:2]))
    assert ours.get_embedding_dimension() == theirs.get_embedding_dimension()
    assert check(ours, texts=SAMPLE_TEXTS[:3]).passed
    copy = ftbert.load(convert(folder, tmp_path / "copy"))
    assert np.array_equal(copy.encode(LONG), ours.encode(LONG))
    lines = [text for text in TEXTS if text.strip() and text.isprintable()]
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    embed_file(copy, tmp_path / "texts.txt", tmp_path / "out.npy", normalize=None)
    assert_same(np.load(tmp_path / "out.npy"), theirs.encode(lines))


def test_a_text_is_the_same_in_any_batch(tmp_path: Path) -> None:
    model = ftbert.load(model2vec_folder(tmp_path))
    whole = model.encode(LONG)
    assert np.array_equal(whole, np.stack([model.encode(text) for text in LONG]))
    assert np.array_equal(whole, model.encode(LONG, max_tokens=5))
    assert not whole[LONG.index("")].any()  # no token, and no special ones
    copy = ftbert.load(convert(tmp_path / "made", tmp_path / "copy"))
    assert np.array_equal(copy.encode(LONG), whole)
    assert check(copy, texts=["hello 漢 world"]).passed
    pooled = model.encode(LONG, normalize=None, pooling="max")
    assert_same(pooled[0], model.encode(LONG[0], output_value="token_embeddings").max(0))


def test_a_server(tmp_path: Path) -> None:
    for folder in (model2vec_folder(tmp_path / "a", max_length=7), static_folder(tmp_path / "b", behind=[Normalize()])):
        want = ftbert.load(folder).encode(LONG[-4:])
        with in_thread(("static", folder)) as server:
            assert_same(np.array(server.post("/embed", {"inputs": LONG[-4:], "truncate": True})), want)
            found = server.post("/v1/embeddings", {"input": LONG[-1]})["data"][0]["embedding"]
            assert_same(np.array(found), want[-1])


def _tensors(folder: Path, **changed: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changed
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: _tensors(f, mapping=torch.full((300,), 23)), r"model.safetensors: (expected a table|mapping must hold rows of embeddings, which has 23)"),
        (lambda f: _tensors(f, weights=torch.ones(7)), r"one entry a token beside it; got embeddings \[23, 40\], mapping \[\d+\], weights \[7\]"),
        (lambda f: _tensors(f, embeddings=torch.ones(7)), r"expected a table \[rows, width\]"),
        (lambda f: _tensors(f, other=torch.ones(7)), "alone or embeddings with mapping and weights where there are any; got other"),
        (lambda f: _tensors(f, embeddings=None), "expected a table of token vectors"),
        (lambda f: (f / "config.json").write_text('{"model_type": "bert"}'), "config.json: model_type 'bert', where modules.json names .*StaticEmbedding.* parts of two models"),
        (lambda f: (f / "config.json").write_text('{"model_type": "model2vec", "max_length": "x"}'), "config.json: max_length must be a positive integer; got .x."),
        (lambda f: (f / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer"}]'), "where modules.json names .*Transformer: expected StaticEmbedding"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer here; expected tokenizer.json"),
    ],
)  # fmt: skip
def test_bad_folders(tmp_path: Path, spoil: Any, words: str) -> None:
    folder = model2vec_folder(tmp_path, form="mapping weights")
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        ftbert.load(folder).encode("hello")


def test_modules_that_are_not_computed_behind_a_table(tmp_path: Path) -> None:
    folder = static_folder(tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"idx": 1, "name": "1", "path": "", "type": "own.Module"}]))
    with pytest.raises(ValueError, match="'own.Module' is not supported behind StaticEmbedding"):
        ftbert.load(folder).encode("hello")
