"""Rerankers and classifiers as ONNX graphs: scores against onnxruntime on the file and against the model exported."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from families import make_model
from onnx_models import export, quantise, ragged
from tokenizers_offline import write as write_tokenizer
from transformers import AutoTokenizer

import ftbert
from ftbert.converters import convert

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
SEQUENCE, TOKENS = "sequence_classification", "token_classification"
# Family, task, and whether a config.json lies beside the graph. Without one a family is what the graph shows.
HEADS = [
    ("bert", SEQUENCE, True), ("electra", SEQUENCE, True), ("mpnet", SEQUENCE, True), ("albert", SEQUENCE, True),
    ("roberta", TOKENS, True), ("roberta", SEQUENCE, False), ("distilbert", SEQUENCE, False), ("bert", TOKENS, False),
]  # fmt: skip


def same(model: ftbert.Model, path: Path, reference: Any, limit: float = 2e-5) -> None:
    ids, mask = ragged(model.config.vocab, model.config.padding_id)
    got = model(ids, attention_mask=mask).logits
    kept = mask.bool() if got.dim() == 3 else torch.ones(len(ids), dtype=torch.bool)
    with torch.no_grad():
        theirs = reference(input_ids=ids, attention_mask=mask).logits
    assert float(theirs.std()) > 0.01
    assert_close(got[kept], theirs[kept], atol=limit, what="against transformers")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (graphs,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    assert_close(got[kept], torch.from_numpy(graphs)[kept], atol=limit, what="against onnxruntime")


@pytest.mark.parametrize(("family", "task", "config"), HEADS)
def test_scores(family: str, task: str, config: bool, tmp_path: Path) -> None:
    reference = make_model(family, task, 0)
    if config:
        reference.config.save_pretrained(tmp_path)
    path = export(reference, tmp_path / "model.onnx", dynamo=False)
    model = ftbert.load(path)
    assert model.tasks == [task] and bool(model.config.pooler) == (family in ("bert", "albert") and task == SEQUENCE)
    same(model, path, reference)
    same(ftbert.load(convert(path, tmp_path / "ours")), path, model.reference())


def test_a_reranker_of_pairs(tmp_path: Path) -> None:
    """A cross-encoder's folder as it is shipped, with its config under onnx/ or above."""
    reference = make_model("bert", SEQUENCE, 0, vocab_size=300, num_labels=1)
    write_tokenizer(tmp_path, "bert")
    reference.config.save_pretrained(tmp_path)
    (tmp_path / "onnx").mkdir()
    plain = export(reference, tmp_path / "onnx" / "model.onnx", dynamo=False, types=True)
    pairs = [("hello world", text) for text in ("the end", "hello", "a b c the world")]
    batch = AutoTokenizer.from_pretrained(tmp_path)(pairs, padding=True, return_tensors="pt")
    with torch.no_grad():
        wanted = reference(**batch).logits[:, 0].sigmoid()
    for path, limit in ((plain, 1e-5), (quantise(plain, tmp_path / "onnx" / "model_int8.onnx"), 0.05)):
        scores = ftbert.load(path).predict(pairs)
        assert_close(torch.from_numpy(scores), wanted, atol=limit)


def _other_weight(graph: Any) -> None:
    """What is added to the scores is doubled once more: no part of a head."""
    add = next(node for node in reversed(graph.node) if "hidden" in node.output)
    name = add.output[0]
    add.output[0] = "before"
    graph.node.append(onnx.helper.make_node("Mul", ["before", "before"], [name]))


def test_what_is_no_head_is_left_out_with_a_word(tmp_path: Path) -> None:
    path = export(make_model("bert", SEQUENCE, 0), tmp_path / "m.onnx", dynamo=False)
    model = onnx.load(path)
    _other_weight(model.graph)
    onnx.save(model, path)
    with pytest.warns(UserWarning, match=r"m\.onnx: its outputs 'hidden' \[8, 3\] are left out"):
        assert ftbert.load(path).tasks == []


def test_a_class_that_is_not_the_graphs(tmp_path: Path) -> None:
    """Half of one thing and half of another: another activation than the class has, and a class without this head."""
    reference = make_model("electra", SEQUENCE, 0)
    reference.classifier.activation = torch.nn.Tanh()
    path = export(reference, tmp_path / "model.onnx", dynamo=False)
    reference.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model.onnx: .*sequence_classification: its class has activation gelu, the graph tanh"):
        ftbert.load(path)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["ElectraForMaskedLM"]}))
    with pytest.warns(UserWarning, match="its outputs 'hidden' .* are left out"):
        assert ftbert.load(path).tasks == []


class _Pooled(torch.nn.Module):
    """The encoder with a pooled output beside its tokens, or alone."""

    def __init__(self, model: Any, how: str, alone: bool) -> None:
        super().__init__()
        self.model, self.how, self.alone, self.config = model, how, alone, model.config

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        hidden, mask = self.model(input_ids=input_ids, attention_mask=attention_mask)[0], attention_mask[..., None]
        vectors = hidden[:, 0] if self.how == "cls" else (hidden * mask).sum(1) / mask.sum(1)
        vectors = torch.nn.functional.normalize(vectors)
        return (vectors,) if self.alone else (hidden, vectors)


@pytest.mark.parametrize(("how", "alone"), [("mean", True), ("cls", False), ("cls", True)])
def test_pooled_outputs(how: str, alone: bool, tmp_path: Path) -> None:
    """They are computed; where encode would pool in another way, and nothing says how, a warning says it."""
    write_tokenizer(tmp_path, "bert")
    reference = make_model("bert", "encoder", 0, vocab_size=300)
    reference.config.save_pretrained(tmp_path)
    path = export(_Pooled(reference, how, alone), tmp_path / "model.onnx", dynamo=False, pooler=not alone)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = ftbert.load(path)
    told = [str(one.message) for one in said if "pooled by" in str(one.message)]
    assert len(told) == (how == "cls") and not any("left out" in str(one.message) for one in said)
    assert not told or "is pooled by 'cls', and no modules.json says so: pass pooling='cls' to encode" in told[0]
    batch = AutoTokenizer.from_pretrained(tmp_path)(["hello world"], return_tensors="pt")
    with torch.no_grad():
        wanted = _Pooled(reference, how, True)(batch["input_ids"], batch["attention_mask"])[0]
    assert_close(torch.from_numpy(model.encode(["hello world"], pooling=how)), wanted, atol=1e-5)
