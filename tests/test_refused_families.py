"""Models that are refused, with the reason; what may be left over of a checkpoint; the table of families in docs."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import randomise
from families import CASES, make_config, make_model
from safetensors.torch import load_file, save_file

import ftbert
from ftbert.converters.families import FAMILIES, find_family
from ftbert.converters.from_huggingface import convert
from ftbert.converters.head_tables import rows_of
from ftbert.converters.left_out import outside
from ftbert.converters.refused import REFUSED


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small to share: waiting for a second thread takes longer than what it would do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_head_that_is_not_known_is_named(tmp_path: Path) -> None:
    """Also after a conversion; not where no head is wanted."""
    reference = make_model("bert", "sequence_classification", 0)
    reference.classifier = randomise(torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Linear(48, 3)))
    reference.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    for source in (reference, tmp_path / "theirs", tmp_path / "ours"):
        left = r"left out \(classifier.0.*\): it is none that ftbert knows for BertForSequenceClassification"
        with pytest.warns(UserWarning, match=left):
            assert ftbert.load(source).tasks == []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ftbert.load(source, heads=False)


def test_an_incomplete_head_is_named(tmp_path: Path) -> None:
    reference = make_model("roberta", "sequence_classification", 0)
    reference.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["classifier.dense.bias"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing classifier\.dense\.bias"):
        ftbert.load(tmp_path)
    assert ftbert.load(reference, heads=False).tasks == []


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("albert", {"inner_group_num": 2}, "inner_group_num 2 is not supported: only 1"),
        ("bert", {"is_decoder": True}, "this checkpoint is a decoder"),
        ("bert", {"is_causal": True}, "this checkpoint is a decoder"),
        ("roberta", {"position_embedding_type": "relative_key"}, "'relative_key' is not supported: only 'absolute'"),
        ("bert", {"hidden_act": "mish"}, "unknown activation 'mish'; supported: gelu"),
        ("mpnet", {"relative_attention_num_buckets": 8}, "relative_attention_num_buckets 8"),
    ],
)
def test_what_is_refused(family: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        ftbert.load(make_model(family, "encoder", 0, **settings))


def test_other_architectures_are_refused_with_the_reason() -> None:
    from transformers import ElectraForMultipleChoice, GPT2Config, GPT2Model, XmodConfig, XmodModel

    for model, words in (
        (XmodModel(XmodConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)),
         "model type 'xmod' is not supported: its layers hold an adapter for each language"),
        (GPT2Model(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)), "'gpt2' is not supported: it is a decoder: .*: albert"),
        (ElectraForMultipleChoice(make_config("electra", 0, summary_type="mean")), "needs summary_type 'first'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            ftbert.load(model)


@pytest.mark.parametrize("kind", ["nvembed", "jina_embeddings_v4"])
def test_a_type_that_nobody_knows(tmp_path: Path, kind: str) -> None:
    entries = {"AutoModel": "modeling.AnyModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": entries}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"model type '{kind}' is not supported: no table says which"):
        ftbert.load(tmp_path)


def test_every_text_encoder_of_transformers_runs_or_has_a_reason() -> None:
    from transformers.models.auto import modeling_auto as auto

    named = {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES}
    named |= {*auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES, *auto.MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES}
    assert named - FAMILIES.keys() - REFUSED.keys() == set() and not FAMILIES.keys() & REFUSED.keys()
    for kind in [*REFUSED, "neverheardof"]:
        with pytest.raises(ValueError, match=f"model type '{kind}' is not supported: (?!supported).+; supported: albert"):
            find_family({"model_type": kind})


def test_a_folder_of_a_refused_family_says_so_whatever_weights_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlnet"}))
    for name in ("notes.txt", "tf_model.h5", "pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(b"no weights")
        with pytest.raises(ValueError, match="config.json: model type 'xlnet' is not supported: its attention"):
            ftbert.load(tmp_path)


def test_a_family_can_lack_a_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its checkpoints' tensors are then no head's; without `lacks` they would be taken for one."""
    reference = make_model("bert", "token_classification", 0)
    assert ftbert.load(reference).tasks == ["token_classification"]
    lacking = dataclasses.replace(FAMILIES["bert"], lacks=("token_classification", "multiple_choice"))
    monkeypatch.setitem(FAMILIES, "bert", lacking)
    assert not {"token_classification", "multiple_choice"} & {row.task for row in rows_of("bert")}
    assert {"token_classification", "multiple_choice"} <= {row.task for row in rows_of("ernie")}
    with pytest.warns(UserWarning, match="none that ftbert knows for BertForTokenClassification"):
        assert ftbert.load(reference).tasks == []


INSIDE = ("encoder.layer.{n}.output.dense.weight", "encoder.layer.0.adapter.down.weight", "embeddings.extra.weight",
          "encoder.layer.0.attention.self.distance_embedding.weight")  # fmt: skip


@pytest.mark.parametrize("task", ["encoder", "sequence_classification"])
@pytest.mark.parametrize("name", INSIDE)
def test_nothing_is_left_over_inside_the_encoder(tmp_path: Path, task: str, name: str) -> None:
    reference = make_model("bert", task, 0)
    reference.save_pretrained(tmp_path)
    inside = ("" if task == "encoder" else "bert.") + name.format(n=reference.config.num_hidden_layers)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {inside: torch.ones(3), "linear.weight": torch.ones(3)}, path)
    with pytest.raises(ValueError, match=f"(?s)do not fit the config.*extra {re.escape(inside)}"):
        ftbert.load(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_knows_its_inside(tmp_path: Path, family: str) -> None:
    """Each tensor of the encoder is inside, with and without a head around it, where the family has any."""
    for task in [task for name, task in CASES if name == family][:2]:
        found = {name: tuple(value.shape) for name, value in make_model(family, task, 0).state_dict().items()}
        table = find_family(make_config(family, 0).to_dict())
        bare = task in ("encoder", "pooled")  # the class without a head makes the pooled output
        prefix = "" if bare else table.base + "."
        assert outside(table, prefix, found | {"linear.weight": (3, 3)}) == {"linear.weight"}


def test_the_wrong_prefix_is_seen_in_the_message(tmp_path: Path) -> None:
    reference = make_model("bert", "encoder", 0)
    reference.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({f"module.{name}": value for name, value in load_file(path).items()}, path)
    with pytest.raises(ValueError, match=r"(?s)missing embeddings.word.*extra module\.embeddings\.word"):
        ftbert.load(tmp_path)


def test_the_table_of_models_is_fresh() -> None:
    script = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "make_models.py"))
    assert script["TARGET"].read_text(encoding="utf-8") == script["render"](), "run python docs/make_models.py"
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert f"\n{len(FAMILIES)} families, with {len(script['_TASKS']) - 1} kinds of heads" in readme


def test_a_tick_is_a_case_that_pytest_runs() -> None:
    script = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "make_models.py"))
    assert script["tested"]() == set(CASES)
