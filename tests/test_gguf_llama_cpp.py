"""GGUF files against llama.cpp itself: token ids by every way of splitting, vectors of embedders, scores of rerankers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers_offline
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import ftbert
from ftbert.converters import convert
from ftbert.converters.gguf_file import read_gguf
from ftbert.converters.gguf_metadata import Metadata
from ftbert.converters.gguf_splits import _SPLITS, USUAL
from ftbert.converters.gguf_tokenizer import tokenizer_files

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")
from gguf_models import all_as, make, vocabulary, write  # noqa: E402
from llama_cpp_server import Llama  # noqa: E402

# Composed, as llama.cpp normalises nothing; every kind of character that a split tells apart.
TEXTS = [
    "Hello, World!  It's 2024-11-29; wasn't IT'S $1234567.89?", "the\tend\r\n\r\n  of   it \n", "camelCaseWords HTTPServer iPhone15",
    "na\u00efve \u00dcber Stra\u00dfe \u0394\u03b5\u03bb\u03c4\u03b1 \u041c\u043e\u0441\u043a\u0432\u0430", "\u4e2d\u6587 12345 \u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8\uff01",
    "def f(x): return x**2 + [1, 2]  # ...!?/\n\n\n\tpass", "a  b   c    d", "\U0001f600\U0001f680 emoji, 3rd \u00bd \u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940", " lead 00123 \u00a0x",
    "\u2018quoted\u2019 \u2026 \u201cwords\u201d\u3002 don'T WE'LL", "x\n\n", "1", " ", "a/b/c//\n/d \u20ac5", "`tick` ^~|<=>+",
]  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A byte-level vocabulary whose merges cross what the ways of splitting tell apart: trained without any split."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=8, show_progress=False)
    made.train_from_iterator([text[at : at + n] for text in TEXTS for n in (2, 3, 4, 7) for at in range(len(text))], trainer)
    folder = tmp_path_factory.mktemp("words")
    made.save(str(folder / "tokenizer.json"))
    return vocabulary(folder, "gpt2", bos="<s>", eos="</s>")


def read(path: Path) -> Tokenizer:
    """The tokenizer of a file, without the model."""
    file = read_gguf(path)
    return Tokenizer.from_str(json.dumps(tokenizer_files(file, Metadata(file), 512)["tokenizer.json"]))


@pytest.fixture(scope="module")
def decoder(words: dict[str, Any]) -> Any:
    return make("llama", vocab_size=len(words["tokenizer.ggml.tokens"]), num_hidden_layers=1)


# llama.cpp counts a mark that is combined with a letter as none of a word here; the published expressions do.
APART = ("gpt-4o", "llama4", "kanana2", "tekken")


NAMES = {names[0]: names for one in {id(one): one for one in _SPLITS.values()}.values() if (names := [n for n in _SPLITS if _SPLITS[n] is one])}


@pytest.mark.parametrize("first", NAMES)
def test_ids_by_every_way_of_splitting(first: str, words: dict[str, Any], decoder: Any, tmp_path: Path) -> None:
    texts = [text for text in TEXTS if first not in APART or "\u094d" not in text]
    for pre in NAMES[first]:
        path = write(decoder, tmp_path / "m.gguf", "llama", extra=words | {"tokenizer.ggml.pre": pre})
        ours = read(path)
        with Llama(path) as llama:
            for text in (*(texts if pre == first else ()), " ".join(texts)):
                assert ours.encode(text).ids == llama.tokens(text), (pre, text)


def test_a_file_that_names_no_split(words: dict[str, Any], decoder: Any, tmp_path: Path) -> None:
    path = write(decoder, tmp_path / "m.gguf", "llama", extra=words)
    with pytest.warns(UserWarning, match=rf"m.gguf: tokenizer.ggml.pre is missing: texts are split as by '{USUAL}'"):
        ours = read(path)
    with Llama(path) as llama:
        assert all(ours.encode(text).ids == llama.tokens(text) for text in TEXTS)


# ---- vectors and scores ---------------------------------------------------------------------------------------------

# llama.cpp looks GELU up in a table of fp16, and rounds nothing else of a file in F32.
CLOSE = {"bert": 2e-3, "modern-bert": 2e-3, "gemma": 2e-3, "gemma-embedding": 2e-3}
POOLED = {"bert": [1, 2], "nomic-bert": [1, 2], "modern-bert": [1, 2], "qwen3": [1, 3], "qwen2": [3], "smollm3": [1, 3], "gemma": [3], "gemma-embedding": [1]}
SOME = ["hello world", "the end", "a b c d e f g hello the world of the end"]


def vocabulary_of(arch: str, folder: Path) -> dict[str, Any]:
    if arch in ("bert", "nomic-bert", "gemma-embedding"):
        special = {"cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]"}
        return vocabulary(tokenizers_offline.write(folder, "bert"), "bert", bos="[CLS]", eos="[SEP]", **special)
    found = vocabulary(tokenizers_offline.write(folder, "roberta"), "gpt2", bos="<s>", eos="</s>", seperator="</s>", padding="<pad>")
    flags = dict.fromkeys(("add_bos_token", "add_eos_token", "add_sep_token"), True) if arch == "modern-bert" else {"add_eos_token": True}
    pre = {"modern-bert": "modern-bert"}.get(arch, "qwen2")
    return found | {"tokenizer.ggml.pre": pre} | {f"tokenizer.ggml.{key}": value for key, value in flags.items()}


@pytest.mark.parametrize(("arch", "pooling"), [(arch, kind) for arch, kinds in POOLED.items() for kind in kinds])
def test_vectors_of_embedders(arch: str, pooling: int, tmp_path: Path) -> None:
    said = vocabulary_of(arch, tmp_path / "t")
    reference = make(arch, vocab_size=len(said["tokenizer.ggml.tokens"]))
    path = write(reference, tmp_path / "m.gguf", arch, extra=said | {f"{arch}.pooling_type": pooling})
    ours = ftbert.load(path).encode(SOME)
    with Llama(path) as llama:
        theirs = np.array(llama.vectors(SOME))
    assert np.abs(ours - theirs).max() < CLOSE.get(arch, 1e-4)


def ranker(arch: str, labels: list[str] | None, rng: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """More of a reranker's metadata, and its head as llama.cpp's converter writes it."""
    rows = 2 if arch == "qwen3" else 1
    tensors = {"cls.output.weight": rng.normal(size=(rows, 96)).astype(np.float32) / 5}
    if arch != "qwen3":
        tensors |= {"cls.output.bias": np.full(rows, 0.25, np.float32), "cls.weight": rng.normal(size=(96, 96)).astype(np.float32) / 9}
    if arch == "bert":
        tensors["cls.bias"] = rng.normal(size=96).astype(np.float32)
    if arch == "modern-bert":
        tensors["cls.norm.weight"] = 1 + rng.random(96).astype(np.float32)
    return {f"{arch}.pooling_type": 4, f"{arch}.classifier.output_labels": labels}, tensors


TEMPLATE = "Judge {the document}\n<Query>: {query}\n<Document>: {document}\n\"it's\" so:"


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("arch", ["bert", "modern-bert", "qwen3"])
def test_scores_of_rerankers(arch: str, kind: str, tmp_path: Path) -> None:
    """llama.cpp gives logits, of the language model the share of its first word. It takes one token type alone."""
    said = vocabulary_of(arch, tmp_path / "t")
    more, tensors = ranker(arch, ["yes", "no"] if arch == "qwen3" else None, np.random.default_rng(1))
    if arch == "qwen3":
        more |= {"tokenizer.chat_template.rerank": TEMPLATE, "tokenizer.chat_templates": ["rerank"], "tokenizer.ggml.add_eos_token": False}
    types = {"type_vocab_size": 1} if arch == "bert" else {}
    reference = make(arch, vocab_size=len(said["tokenizer.ggml.tokens"]), max_position_embeddings=128, **types)
    path = write(reference, tmp_path / "m.gguf", arch, all_as(kind), extra=said | more, tensors=tensors)
    # [CLS] a [SEP] b [SEP], as these models were trained; what their files say makes another sequence in llama.cpp.
    more |= {} if arch == "qwen3" else {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.add_sep_token": False}
    other = write(reference, tmp_path / "other.gguf", arch, all_as(kind), extra=said | more, tensors=tensors)
    model = ftbert.load(path, dtype="fp32")
    ours = model.predict([("hello world", text) for text in SOME], activation_fn=None if arch == "qwen3" else torch.nn.Identity())
    with Llama(other, rank=True) as llama:
        theirs = llama.scores("hello world", SOME)
    assert np.ptp(ours) > 0.02
    np.testing.assert_allclose(ours, theirs, atol={"F32": 3e-3, "Q8_0": 6e-2}[kind])  # of Q8_0 it rounds what it multiplies, too
    assert [one["corpus_id"] for one in model.rerank("hello world", SOME)] == np.argsort(-np.array(ours)).tolist()
    copy = ftbert.load(convert(path, tmp_path / "copy"), dtype="fp32")
    np.testing.assert_allclose(copy.predict([("hello world", text) for text in SOME]), model.predict([("hello world", text) for text in SOME]), atol=1e-6)


WRONG: dict[str, tuple[str, dict[str, Any], list[str], str]] = {
    "without a product": ("bert", {}, ["cls.weight"], r"pooling_type 4, rank\) without cls.weight: .* load the HuggingFace folder"),
    "without a norm": ("modern-bert", {}, ["cls.norm.weight"], "without cls.norm.weight"),
    "other words": ("qwen3", {"qwen3.classifier.output_labels": ["no", "yes"]}, [], "output_labels a list of 2: expected yes and no"),
    "without a bias": ("bert", {}, ["cls.output.bias"], "without cls.output.bias"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_heads_that_are_not_whole(what: str, tmp_path: Path) -> None:
    arch, said, missing, words = WRONG[what]
    more, tensors = ranker(arch, None, np.random.default_rng(1))
    path = write(make(arch), tmp_path / "m.gguf", arch, extra=more | said, tensors={k: v for k, v in tensors.items() if k not in missing})
    with pytest.raises(ValueError, match=f"m.gguf: .*{words}"):
        ftbert.load(path)


def test_labels_of_a_classifier(tmp_path: Path) -> None:
    said, tensors = ranker("bert", ["bad", "good"], np.random.default_rng(1))
    tensors |= {"cls.output.weight": np.ones((2, 96), np.float32), "cls.output.bias": np.zeros(2, np.float32)}
    extra = said | vocabulary_of("bert", tmp_path / "t")
    model = ftbert.load(write(make("bert", vocab_size=300), tmp_path / "m.gguf", "bert", extra=extra, tensors=tensors))
    assert model.id2label == {0: "bad", 1: "good"} and model.predict(SOME).shape == (3, 2)
