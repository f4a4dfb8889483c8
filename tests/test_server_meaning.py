"""What an answer of the server means: scores, activations, prompts and limits, each beside `predict`, `encode`,
transformers or the tokenizer itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from served import Served, in_thread
from server_models import TEXTS, as_crossencoder, close, described, headed, in_order

import ftbert
from ftbert.server.activations import ACTIVATIONS, choose_activation

QUERY = "word1 cat"
IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"


@pytest.mark.parametrize(("name", "theirs"), [
    ("Sigmoid", torch.sigmoid), ("Tanh", torch.tanh), ("ReLU", torch.relu), ("Identity", torch.nn.Identity()),
    ("Softmax", torch.nn.Softmax(-1)),
])  # fmt: skip
def test_activations_lose_nothing_on_either_side(name: str, theirs: Callable[..., torch.Tensor]) -> None:
    logits = torch.linspace(-80, 80, 1602).reshape(-1, 2)
    with np.errstate(all="raise", under="ignore"):
        got = ACTIVATIONS[name](logits.numpy())
    assert got.dtype == np.float32
    want = theirs(logits.double()).numpy()
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-37)
    for column in (0, 1) if name != "Softmax" else ():
        assert (np.diff(got[:, column]) >= 0).all()  # what an order by the logits needs


@pytest.mark.parametrize("bias", [-40.0, -12.0, 40.0])
def test_the_order_is_that_of_the_logits(tmp_path: Path, tiny_bert: Callable[..., Path], bias: float) -> None:
    """Where scores are next to 0, or all 1 in float32."""
    folder = headed(tmp_path, tiny_bert, bias=bias)
    logits = ftbert.load(folder).predict([(QUERY, text) for text in TEXTS], activation_fn=torch.nn.Identity())
    best, want = np.argsort(-logits).tolist(), 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert best != sorted(best)  # the order given would not pass
    with in_thread(("m", folder)) as server:
        for path, key, field, results in (("/rerank", "texts", "score", None), ("/v1/rerank", "documents", "relevance_score", "results")):
            found = server.post(path, {"query": QUERY, key: TEXTS})
            found = found[results] if results else found
            assert [one["index"] for one in found] == best
            np.testing.assert_allclose(in_order(found, field), want, rtol=1e-4)
        one = server.post("/predict", {"inputs": [[QUERY, TEXTS[0]]]})[0][0]
        np.testing.assert_allclose(one["score"], want[0], rtol=1e-4)


def test_classes_are_in_the_order_of_their_logits(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    folder = headed(tmp_path, tiny_bert, 3)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.classifier.bias.copy_(torch.tensor([-300.0, -200.0, 0.0]))  # two of the probabilities are 0
    model.save_pretrained(folder)
    with in_thread(("m", folder)) as server:
        found = server.post("/predict", {"inputs": "word1"})
    assert [one["label"] for one in found] == ["LABEL_2", "LABEL_1", "LABEL_0"] and found[1]["score"] == 0


@pytest.mark.parametrize(("labels", "config", "apply"), [
    (3, {}, torch.nn.Softmax(-1)), (1, {}, torch.sigmoid),
    (3, {"problem_type": "multi_label_classification"}, torch.sigmoid),
    (3, {"problem_type": "single_label_classification"}, torch.nn.Softmax(-1)),
    (1, {"problem_type": "regression"}, torch.nn.Identity()), (3, {"problem_type": "regression"}, torch.nn.Identity()),
])  # fmt: skip
def test_classify_has_the_activation_of_the_problem(
    tmp_path: Path, tiny_bert: Callable[..., Path], labels: int, config: dict[str, Any], apply: Callable[..., Any]
) -> None:
    """As transformers' pipeline applies it; /predict keeps TEI's rule."""
    folder = headed(tmp_path, tiny_bert, labels, **config)
    pipeline = transformers.pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    theirs = [{one["label"]: one["score"] for one in row} for row in pipeline(TEXTS)]
    raw = torch.from_numpy(ftbert.load(folder).predict(TEXTS, activation_fn=torch.nn.Identity()).reshape(len(TEXTS), labels))
    with in_thread(("m", folder)) as server:
        found = server.post("/classify", {"input": TEXTS})["data"]
        names = [f"LABEL_{i}" for i in range(labels)]
        close([one["probs"] for one in found], [[row[name] for name in names] for row in theirs])
        close([one["probs"] for one in found], apply(raw))
        assert [one["label"] for one in found] == [names[i] for i in raw.argmax(-1).tolist()]
        close([one["probs"] for one in server.post("/classify", {"input": TEXTS, "use_activation": False})["data"]], raw)
        teis = server.post("/predict", {"inputs": [[text] for text in TEXTS]})
        by_name = [{one["label"]: one["score"] for one in row} for row in teis]
        usual = torch.sigmoid(raw) if labels == 1 else torch.softmax(raw, -1)
        close([[row[name] for name in names] for row in by_name], usual)


@pytest.mark.parametrize("where", ["config", "old config", "crossencoder"])
@pytest.mark.parametrize("activation", [IDENTITY, TANH])
def test_score_and_rerank_have_the_folders_activation(
    tmp_path: Path, tiny_bert: Callable[..., Path], where: str, activation: str
) -> None:
    """As Model.predict applies it; TEI's /rerank stays a probability."""
    config: dict[str, Any] = {
        "config": {"sentence_transformers": {"activation_fn": activation}},
        "old config": {"sbert_ce_default_activation_function": activation}, "crossencoder": {},
    }[where]  # fmt: skip
    folder = headed(tmp_path, tiny_bert, **config)
    if where == "crossencoder":
        as_crossencoder(folder, activation_fn=activation)
    model, pairs = ftbert.load(folder), [(QUERY, text) for text in TEXTS]
    want, raw = model.predict(pairs), model.predict(pairs, activation_fn=torch.nn.Identity())
    usual = 1 / (1 + np.exp(-raw))
    assert np.abs(want - usual).max() > 0.05
    with in_thread(("m", folder)) as server:
        body = {"queries": QUERY, "documents": TEXTS}
        close([one["score"] for one in server.post("/score", body)["data"]], want)
        close([one["score"] for one in server.post("/score", body | {"use_activation": False})["data"]], raw)
        close(in_order(server.post("/rerank", {"query": QUERY, "documents": TEXTS})["results"], "relevance_score"), want)
        ranked = server.post("/v2/rerank", {"query": QUERY, "documents": TEXTS, "use_activation": False})["results"]
        close(in_order(ranked, "relevance_score"), raw)
        assert [one["index"] for one in ranked] == [one["corpus_id"] for one in model.rerank(QUERY, TEXTS)]
        close(in_order(server.post("/rerank", {"query": QUERY, "texts": TEXTS}), "score"), usual)


@pytest.mark.parametrize("given", [{"0": "A", "7": "B"}, {"2": "C", "0": "A", "1": "B"}])
def test_labels_are_those_of_predict(tmp_path: Path, tiny_bert: Callable[..., Path], given: Any) -> None:
    folder = headed(tmp_path, tiny_bert, 3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"id2label": given, "label2id": {}}))
    model = ftbert.load(folder)
    with in_thread(("m", folder)) as server:
        found = server.post("/predict", {"inputs": "word1 a"})
    names = list(model.id2label.values())
    assert [one["label"] for one in found] == [names[i] for i in np.argsort(-model.predict("word1 a"), kind="stable")]


def test_an_activation_without_a_name_here_is_refused_at_the_start(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    folder = headed(tmp_path, tiny_bert, sentence_transformers={"activation_fn": "torch.nn.modules.activation.GELU"})
    with pytest.raises(ValueError, match="activation GELU is not served"):
        described(folder)
    with pytest.raises(ValueError, match="activation GELU is not served; expected one of Identity"):
        choose_activation("GELU", None, 1)


def test_pairs_have_the_folders_prompt(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    """And --default-prompt's, and a named one: before the first text, as in predict."""
    prompts = {"q": "word5 word6: ", "other": "word9 "}
    folder = as_crossencoder(headed(tmp_path, tiny_bert), prompts=prompts, default_prompt_name="q")
    model, pairs = ftbert.load(folder), [(QUERY, text) for text in TEXTS]
    want = model.predict(pairs)
    assert np.abs(want - model.predict(pairs, prompt="")).max() > 1e-3

    def scored(server: Served, want: Any, **more: Any) -> None:
        close(in_order(server.post("/rerank", {"query": QUERY, "texts": TEXTS, **more}), "score"), want)
        close([server.post("/predict", {"inputs": list(pair), **more})[0]["score"] for pair in pairs], want)
        if not more:
            close([one["score"] for one in server.post("/score", {"text_1": QUERY, "text_2": TEXTS})["data"]], want)
            found = server.post("/v1/rerank", {"query": QUERY, "documents": TEXTS})["results"]
            close(in_order(found, "relevance_score"), want)

    with in_thread(("m", folder)) as server:
        scored(server, want)
        scored(server, model.predict(pairs, prompt_name="other"), prompt_name="other")
        assert server.call("POST", "/rerank", {"query": "a", "texts": ["b"], "prompt_name": "query"}).status == 422
        close(server.post("/predict", {"inputs": "word1"})[0]["score"], model.predict("word1"))
        assert server.call("GET", "/info").json()["prompts"] == prompts
    with in_thread(("m", folder), default_prompt="word7 ") as server:
        scored(server, model.predict(pairs, prompt="word7 "))
    with in_thread(("m", folder), default_prompt_name="other") as server:
        scored(server, model.predict(pairs, prompt_name="other"))
    with pytest.raises(ValueError, match="default-prompt-name must be one of 'q', 'other'; got 'document'"):
        described(folder, default_prompt_name="document")
