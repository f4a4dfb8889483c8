"""predict and rerank against sentence-transformers' CrossEncoder and transformers on the same folder."""

from __future__ import annotations

import itertools
import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder
from stub_model import threads_left
from tokenizers_offline import TEXTS, folder_of

import ftbert

WORDS = ["hello", "world", "the", "end", "naive", "cafe", "query", "document", "two", "spaces", "null", "emoji", "中文"]


def sentences(count: int, most: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(0, most))) for _ in range(count)]


def assert_close(ours: Any, theirs: Any) -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, np.float32)
    assert np.abs(ours - theirs).max(initial=0) < 2e-5 * max(1, np.abs(theirs).max(initial=0))


@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "distilbert", "mpnet", "xlm-roberta"])
@pytest.mark.parametrize("labels", [1, 3])
def test_pairs_as_crossencoder(tmp_path: Path, family: str, labels: int) -> None:
    folder = folder_of(tmp_path, family, labels=labels)
    ours, theirs = ftbert.load(folder), CrossEncoder(str(folder), device="cpu", local_files_only=True)
    pairs = list(zip(sentences(60, 60), sentences(60, 90, 1), strict=True)) + [("hello", "")]
    pairs += [("", "")] if family != "albert" else []  # its template for pairs, as made here, has no special tokens
    want = theirs.predict(pairs)
    assert_close(ours.predict(pairs), want)
    assert_close(ours.predict(np.array(pairs)), want)
    assert_close(ours.predict([list(pair) for pair in pairs], max_tokens=100), want)
    assert_close(ours.predict(pairs, activation_fn=torch.nn.Identity()), theirs.predict(pairs, activation_fn=torch.nn.Identity()))
    # Of one label some releases of sentence-transformers take the softmax, others the sigmoid.
    softmax = want if labels == 1 else theirs.predict(pairs, apply_softmax=True)
    assert_close(ours.predict(pairs, apply_softmax=True), softmax)
    assert_close(ours.predict(pairs, prompt="query: "), theirs.predict(pairs, prompt="query: "))
    one = ours.predict(pairs[0])
    assert one.shape == (() if labels == 1 else (labels,))
    assert np.allclose(one, want[0], atol=1e-5)
    if labels == 1:
        documents = sentences(30, 40, 2)
        for given in ({}, {"top_k": 5}, {"return_documents": True}):
            got, expected = ours.rerank("hello world", documents, **given), theirs.rank("hello world", documents, **given)
            assert [one.keys() for one in got] == [one.keys() for one in expected]
            assert [one["corpus_id"] for one in got] == [one["corpus_id"] for one in expected]
            assert [one.get("text") for one in got] == [one.get("text") for one in expected]
            assert np.allclose([one["score"] for one in got], [one["score"] for one in expected], atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"truncation_side": "left"}, {"model_max_length": 9}])
def test_truncated_pairs(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = folder_of(tmp_path, "bert", labels=2, **settings)
    ours, theirs = ftbert.load(folder), CrossEncoder(str(folder), device="cpu", local_files_only=True)
    pairs = [("hello", "world the " * 300), ("two spaces " * 300, "end"), ("hello " * 200, "the end " * 99), ("a", "b")]
    assert_close(ours.predict(pairs), theirs.predict(pairs))
    theirs.max_seq_length = 12
    assert_close(ours.predict(pairs, max_length=12), theirs.predict(pairs))


def test_token_types_count(tmp_path: Path) -> None:
    model = ftbert.load(folder_of(tmp_path, "bert", labels=2))
    pair, swapped = model.predict([("hello world", "the end"), ("the end", "hello world")])
    assert np.abs(pair - swapped).max() > 1e-3
    narrow = ftbert.load(folder_of(tmp_path / "narrow", "bert", config={"type_vocab_size": 1}))
    with pytest.raises(ValueError, match="gave token type 1, but the model knows 1"):
        narrow.predict([("a", "b")])
    assert narrow.predict(["a", "b"]).shape == (2,)


@pytest.mark.parametrize("labels", [1, 4])
def test_single_texts_as_the_pipeline(tmp_path: Path, labels: int) -> None:
    names = {i: f"name {i}" for i in range(labels)}
    folder = folder_of(tmp_path, "bert", labels=labels, config={"id2label": names, "label2id": {v: k for k, v in names.items()}})
    ours = ftbert.load(folder)
    theirs = transformers.pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    got = ours.predict(TEXTS, apply_softmax=True).reshape(len(TEXTS), labels)
    assert ours.id2label == names
    for row, found in zip(got, theirs(TEXTS, truncation=True), strict=True):
        expected = {one["label"]: one["score"] for one in found}
        assert np.allclose(row, [expected[names[i]] for i in range(labels)], atol=1e-5)


@pytest.mark.parametrize("pairs", [False, True])
def test_token_classification(tmp_path: Path, pairs: bool) -> None:
    folder = folder_of(tmp_path, "bert", "token_classification", 5)
    model = ftbert.load(folder)
    texts: list[Any] = list(zip(TEXTS, reversed(TEXTS), strict=True)) if pairs else TEXTS
    got = model.predict(texts, max_tokens=70)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    reference = transformers.AutoModelForTokenClassification.from_pretrained(str(folder)).eval()
    for text, ours in zip(texts, got, strict=True):
        batch = tokenizer(*([one] for one in (text if pairs else [text])), truncation=True, max_length=64, return_tensors="pt")
        with torch.no_grad():
            assert_close(ours, reference(**batch).logits[0].numpy())
    assert_close(model.predict(texts[0]), got[0])
    assert np.allclose(model.predict(texts, apply_softmax=True)[3].sum(-1), 1, atol=1e-6)
    assert model.predict([]) == []


def test_order_batches_and_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ftbert.load(folder_of(tmp_path, "bert", labels=3))
    texts: list[Any] = sentences(1500, 20)
    texts[::3] = zip(texts[::3], texts[1::3], strict=True)  # texts and pairs in one call
    calls: list[list[int]] = []
    packed = model.logits_packed
    monkeypatch.setattr(model, "logits_packed", lambda ids, cu, *rest: calls.append(cu.diff().tolist()) or packed(ids, cu, *rest))
    together = model.predict(texts, max_tokens=300)
    assert max(map(sum, calls)) <= 300
    assert len(calls) < 120  # filled
    for place in range(0, 1500, 101):
        assert np.abs(model.predict(texts[place]) - together[place]).max() < 1e-6
    assert model.predict([]).shape == (0, 3)
    assert model.predict(texts[:2], batch_size=1).shape == (2, 3)
    tensor = model.predict(texts, convert_to_tensor=True)
    assert torch.equal(tensor, torch.from_numpy(model.predict(texts)))
    assert torch.equal(torch.stack(model.predict(texts, convert_to_numpy=False)), tensor)
    calls.clear()
    model.predict(["hello " * 60, "a"], max_tokens=8)
    assert [len(call) for call in calls] == [1, 1]  # one over the budget goes alone
    assert threads_left() == 0


def test_settings_of_a_saved_crossencoder(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "a", "bert")
    theirs = CrossEncoder(str(source), device="cpu", local_files_only=True, prompts={"q": "query: "}, default_prompt_name="q", activation_fn=torch.nn.Tanh(), max_length=20)
    theirs.save_pretrained(str(tmp_path / "b"))
    theirs = CrossEncoder(str(tmp_path / "b"), device="cpu", local_files_only=True)
    pairs = list(zip(sentences(20, 30), sentences(20, 30, 1), strict=True))
    ours = ftbert.load(tmp_path / "b")
    assert_close(ours.predict(pairs), theirs.predict(pairs))
    assert_close(ours.predict(pairs, prompt=""), theirs.predict(pairs, prompt=""))
    assert np.abs(ours.predict(pairs) - ours.predict(pairs, prompt="")).max() > 1e-4
    assert_close(ours.predict(pairs, prompt_name="q"), theirs.predict(pairs))
    from ftbert.converters.from_huggingface import convert

    assert_close(ftbert.load(convert(tmp_path / "b", tmp_path / "c")).predict(pairs), theirs.predict(pairs))


@pytest.mark.parametrize("labels", [1, 3])
def test_scores_of_pooled_vectors(tmp_path: Path, labels: int) -> None:
    """A CrossEncoder whose head is made of modules, and the server's answers."""
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
    from tokenizers_offline import sentence_folder

    torch.manual_seed(0)
    norm, scores = LayerNorm(48), Dense(48, labels, activation_function=torch.nn.Identity(), module_output_name="scores")
    torch.nn.init.normal_(norm.norm.weight)
    torch.nn.init.normal_(norm.norm.bias)
    modules = [Transformer(str(sentence_folder(tmp_path / "a"))), Pooling(64, "mean"), Dense(64, 48, activation_function=torch.nn.GELU()), norm, scores]
    CrossEncoder(modules=modules, device="cpu", prompts={"q": "query: "}).save_pretrained(str(tmp_path / "b"))
    ours, theirs = ftbert.load(tmp_path / "b"), CrossEncoder(str(tmp_path / "b"), device="cpu", local_files_only=True)
    pairs = list(zip(sentences(20, 30), sentences(20, 30, 1), strict=True))
    for options in ({}, {"prompt_name": "q"}, {"activation_fn": torch.nn.Identity()}):
        assert_close(ours.predict(pairs, **options), theirs.predict(pairs, **options))
    assert list(ours.id2label) == list(range(labels))
    served = pytest.importorskip("served")
    with served.in_thread(("m", tmp_path / "b")) as server:
        if labels == 1:
            got = server.post("/rerank", {"query": "hello", "texts": WORDS})
            want = ours.predict([("hello", word) for word in WORDS])
            assert np.allclose([one["score"] for one in sorted(got, key=lambda one: one["index"])], want, atol=1e-5)
        else:
            got = server.post("/predict", {"inputs": ["hello", "the end"], "raw_scores": True})
            want = ours.predict([("hello", "the end")], activation_fn=torch.nn.Identity())[0]
            assert np.allclose([one["score"] for one in got], sorted(want, reverse=True), atol=1e-5)


SENTENCE: list[dict[str, Any]] = [
    {"max_seq_length": 9},
    {"do_lower_case": True},
    {"do_lower_case": True, "max_seq_length": 30, "processor_kwargs": {"truncation_side": "left"}},
    {"tokenizer_args": {"truncation_side": "left", "do_lower_case": False}, "max_seq_length": 12},
    {"processor_kwargs": {"model_max_length": 11, "strip_accents": False}, "max_seq_length": 40},
    {"query_length": 5, "document_length": 6, "unpad_inputs": False},
]


@pytest.mark.parametrize("subfolder", ["", "0_Transformer"])
def test_the_settings_of_a_crossencoders_transformer(tmp_path: Path, subfolder: str) -> None:
    """sentence_bert_config.json, wherever the Transformer is; on the first call and from a converted folder."""
    from ftbert.converters.from_huggingface import convert

    source = folder_of(tmp_path / "a", "bert", labels=2, do_lower_case=False)
    saved = tmp_path / "b"
    CrossEncoder(str(source), device="cpu", local_files_only=True, prompts={"q": "Query: "}, default_prompt_name="q").save_pretrained(str(saved))
    home = saved / subfolder
    if subfolder:
        home.mkdir()
        for path in saved.iterdir():
            if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
                path.rename(home / path.name)
        modules = json.loads((saved / "modules.json").read_text())
        modules[0]["path"] = subfolder
        (saved / "modules.json").write_text(json.dumps(modules))
    written = json.loads((home / "sentence_bert_config.json").read_text())
    pairs = [("Hello World", "naïve CAFÉ Hello " * 9), ("two spaces " * 20, "The END"), *zip(TEXTS, reversed(TEXTS), strict=True)]
    seen = []
    for settings in SENTENCE:
        (home / "sentence_bert_config.json").write_text(json.dumps(written | settings))
        want = CrossEncoder(str(saved), device="cpu", local_files_only=True).predict(pairs)
        assert_close(ftbert.load(saved).predict(pairs), want)
        seen.append(want)
    assert all(np.abs(one - other).max() > 1e-4 for one, other in itertools.pairwise(seen))  # each of them counts
    (home / "sentence_bert_config.json").write_text(json.dumps(written | SENTENCE[2]))
    assert_close(ftbert.load(convert(saved, tmp_path / "c")).predict(pairs), seen[2])


def test_the_server_reads_a_crossencoders_settings(tmp_path: Path) -> None:
    served = pytest.importorskip("served")
    source = folder_of(tmp_path / "a", "bert", do_lower_case=False)
    CrossEncoder(str(source), device="cpu", local_files_only=True).save_pretrained(str(tmp_path / "b"))
    path = tmp_path / "b" / "sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_seq_length": 9, "do_lower_case": True}))
    texts = ["naïve CAFÉ Hello " * 9, "The END", "hello world"]
    want = CrossEncoder(str(tmp_path / "b"), device="cpu", local_files_only=True).predict([("Hello", text) for text in texts])
    with served.in_thread(("m", tmp_path / "b")) as server:
        ranked = server.post("/rerank", {"query": "Hello", "texts": texts, "truncate": True})
    scores = {one["index"]: one["score"] for one in ranked}
    assert np.allclose([scores[place] for place in range(3)], want, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"processing_kwargs": {"text": {"max_length": 8}}}, "processing_kwargs is not supported"),
        ({"transformer_task": "text-generation"}, "'text-generation' is not supported; expected sequence-classification"),
        ({"processor_kwargs": {"vocab_file": "/a"}}, "tokenizer are not supported: vocab_file"),
        ({"config_kwargs": {"hidden_act": "relu"}}, "config are not supported: hidden_act"),
    ],
)
def test_what_a_crossencoder_folder_may_not_ask_for(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    folder = folder_of(tmp_path, "bert")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder"}))
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.base.modules.Transformer", "path": "", "name": "0"}]))
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"sentence_bert_config\.json: .*" + words):
        ftbert.load(folder).predict(["a"])


@pytest.mark.parametrize("model_type", ["CrossEncoder", "SentenceTransformer"])
@pytest.mark.parametrize("modules", [True, False])
def test_whose_settings_count(tmp_path: Path, model_type: str, modules: bool) -> None:
    """Those of a CrossEncoder with modules.json; an activation there goes before the one in config.json."""
    folder = folder_of(tmp_path, "bert", config={"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.ReLU"}})
    head = {"model_type": model_type, "prompts": {"q": "query: "}, "default_prompt_name": "q", "activation_fn": "torch.nn.modules.activation.Tanh"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(head))
    written = {"transformer_task": "sequence-classification", "module_output_name": "scores", "max_seq_length": 9,
               "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}}  # fmt: skip
    (folder / "sentence_bert_config.json").write_text(json.dumps(written))
    if modules:
        kind = "sentence_transformers.base.modules.transformer.Transformer"
        (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
    pairs = list(zip(sentences(20, 30), sentences(20, 30, 1), strict=True))
    assert_close(ftbert.load(folder).predict(pairs), CrossEncoder(str(folder), device="cpu", local_files_only=True).predict(pairs))


def test_encode_of_a_crossencoder_warns_once(tmp_path: Path) -> None:
    from ftbert.files import embed_file

    folder = folder_of(tmp_path / "a", "bert")
    (tmp_path / "texts.txt").write_text("hello\n")
    model, bare = ftbert.load(folder), ftbert.load(folder, heads=False)
    for call in (lambda: model.encode("hello"), lambda: embed_file(bare, tmp_path / "texts.txt", tmp_path / "out.npy")):
        with pytest.warns(UserWarning, match="scores texts.*use predict or rerank") as seen:
            call()
        assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.encode("hello")
        model.predict("hello")
        ftbert.load(folder).encode("hello", output_value="token_embeddings")
        ftbert.load(folder_of(tmp_path / "b", "bert", "token_classification")).encode("hello")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, None),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}}, None),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.GELU"}, "sbert_ce_default_activation_function": "torch.nn.Tanh"}, None),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.PReLU"}}, r"config\.json: activation_fn .*PReLU' is not supported"),
        ({"sentence_transformers": {"activation_fn": "evil.Sigmoid"}}, "is not supported"),
    ],
)  # fmt: skip
def test_activations_of_older_folders(tmp_path: Path, config: dict[str, Any], words: str | None) -> None:
    folder = folder_of(tmp_path, "bert", config=config)
    ours, texts = ftbert.load(folder), [("hello", "world"), ("the", "end")]
    if words:
        with pytest.raises(ValueError, match=words):
            ours.predict(texts)
        return
    assert_close(ours.predict(texts), CrossEncoder(str(folder), device="cpu", local_files_only=True).predict(texts))


def test_other_modules_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "bert")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder"}))
    kinds = [{"type": f"sentence_transformers.models.{kind}", "path": "", "name": kind} for kind in ("Transformer", "Dense")]
    (folder / "modules.json").write_text(json.dumps(kinds))
    with pytest.raises(ValueError, match=r"modules\.json: predict computes a Transformer.*got Transformer, Dense"):
        ftbert.load(folder).predict(["a"])


@pytest.mark.parametrize(
    ("texts", "error", "words"),
    [
        ([("a", "b"), ("a", 3)], TypeError, r"texts\[1\]\[1\] must be a str; got int"),
        ([("a", "b", "c")], TypeError, r"texts\[0\] must be a str or a pair of str; got 3 items"),
        (["a", None], TypeError, r"texts\[1\] must be a str or a pair of str; got NoneType"),
        ([{"text": "a"}], TypeError, r"texts\[0\] must be a str; got dict"),
        (7, TypeError, "a list of str; got int"),
        (b"a", TypeError, "a list of str; got bytes"),
        ([("a", "\ud800")], ValueError, r"texts\[0\]\[1\] is not valid Unicode"),
    ],
)
def test_wrong_texts(tmp_path: Path, texts: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ftbert.load(folder_of(tmp_path, "bert")).predict(texts)


def test_wrong_calls(tmp_path: Path) -> None:
    one, three = ftbert.load(folder_of(tmp_path / "1", "bert")), ftbert.load(folder_of(tmp_path / "3", "bert", labels=3))
    with pytest.raises(ValueError, match="rerank needs a head with one label, this one has 3"):
        three.rerank("a", ["b"])
    assert three.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    masked = ftbert.load(folder_of(tmp_path / "m", "bert", "masked_lm"))
    for call in (lambda: masked.predict(["a"]), lambda: masked.rerank("a", ["b"]), lambda: masked.id2label):
        with pytest.raises(ValueError, match="predict needs a head for .*; this model's heads: masked_lm"):
            call()
    with pytest.raises(TypeError, match="texts must be a list of str; got str"):
        one.rerank("a", "b")
    with pytest.raises(TypeError, match="query must be a str; got int"):
        one.rerank(3, ["b"])
    with pytest.raises(ValueError, match="top_k must be a positive integer; got 0"):
        one.rerank("a", ["b"], top_k=0)
    assert one.rerank("a", []) == []
    with pytest.raises(ValueError, match="a maximum length of 3 leaves no room beside 3 special tokens"):
        one.predict([("a", "b")], max_length=3)
    assert one.predict(["a"], max_length=3).shape == (1,)
    with pytest.raises(ValueError, match="activation_fn must keep the shape"):
        one.predict(["a"], activation_fn=lambda logits: logits.sum())
    with pytest.raises(ValueError, match="prompt_name must be one of those of the folder, which has none; got 'q'"):
        one.predict(["a"], prompt_name="q")
    with pytest.raises(ValueError, match="max_tokens must be a positive integer"):
        one.predict(["a"], max_tokens=0)
