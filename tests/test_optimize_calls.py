"""Every way to call an optimized encoder: what the original gives, or the original itself."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from families import CASES
from optimized import TEXTS, check_same, fallbacks, make, run, some_inputs
from torch.nn import functional

import ftbert
from ftbert.converters.families import FAMILIES
from ftbert.converters.head_tables import rows_of
from ftbert.optimization import PatchedForward

LENGTHS = [7, 1, 30, 12]
HAND_ON = ("t5", "mt5", "umt5", "roformer", "alibi_bert", "neobert")  # without flash attention


def packed_call(model: Any, lengths: list[int] = LENGTHS) -> dict[str, Any]:
    """What DataCollatorWithFlattening makes, with the positions that sentence-transformers gives to the family."""
    generator = torch.Generator().manual_seed(5)
    config, tokens = model.config, sum(lengths)
    first = config.pad_token_id + 1 if ftbert.load(model, heads=False).config.positions.kind == "from_padding" else 0
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    call = {
        "input_ids": torch.randint(5, config.vocab_size, (1, tokens), generator=generator),
        "position_ids": torch.cat([first + torch.arange(length) for length in lengths])[None],
        "seq_idx": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int()[None],
        "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets.clone(),
        "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip
    if "token_type_ids" in inspect.signature(model.forward).parameters and config.type_vocab_size > 1:
        call["token_type_ids"] = torch.randint(0, 2, (1, tokens), generator=generator)
    return call


def each_text(call: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """The texts of a packed call, one call each."""
    lengths = call["cu_seq_lens_q"].diff().tolist()
    rows = {name: call[name].split(lengths, 1) for name in ("input_ids", "token_type_ids") if name in call}
    return [{name: parts[i] for name, parts in rows.items()} for i in range(len(lengths))]


@pytest.mark.parametrize(("family", "task"), [case for case in CASES if case[1] != "multiple_choice" and case[0] != "new"])
def test_packed_texts_are_kept_apart(family: str, task: str) -> None:
    """Each token as of its text alone. Whoever reads the row's first token gets the first text's, whoever reads its
    last token the last text's."""
    model = make(family, task)
    read = "pooled" if task == "encoder" else task
    head = next((row.reads(model.config.to_dict()) for row in rows_of(family) if row.task == read), "")
    call = packed_call(model) | {"output_hidden_states": True}
    alone = [run(model, **text, output_hidden_states=True) for text in each_text(call)]
    in_one = run(model, **call)
    ftbert.optimize(model)
    hands_on = model._supports_flash_attn or family in HAND_ON
    if task not in ("encoder", "pooled") and not hands_on:  # such a head does not hand the offsets on
        with pytest.warns(UserWarning, match="position_ids other than the default"):
            check_same(run(model, **call), in_one, None, atol=0)
        return
    with pytest.warns(UserWarning, match="kept apart"):  # sdpa is no varlen attention
        got = run(model, **call)
    assert not fallbacks(model)
    assert list(got) == list(alone[0])
    for name, value in got.items():
        parts = [one[name] for one in alone]
        if isinstance(value, tuple):
            for layer, of_layer in zip(value, zip(*parts, strict=True), strict=True):
                assert_close(layer, torch.cat(of_layer, 1), atol=1e-4)
        elif value.shape[:2] == call["input_ids"].shape:
            assert_close(value, torch.cat(parts, 1), atol=1e-4)
        elif head not in ("mean", "late", "end"):  # of the whole row
            assert_close(value, parts[-1 if head == "last" else 0], atol=1e-4)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "too few tokens": lambda call: call["cu_seq_lens_q"][-1].sub_(1) and call["cu_seq_lens_k"][-1].sub_(1),
    "not from 0": lambda call: call["cu_seq_lens_q"][0].add_(1) and call["cu_seq_lens_k"][0].add_(1),
    "decreasing": lambda call: [call[f"cu_seq_lens_{x}"].__setitem__(1, 20) for x in "qk"],
    "other keys": lambda call: call["cu_seq_lens_k"][1].sub_(1),
    "fewer keys": lambda call: call.update(cu_seq_lens_k=call["cu_seq_lens_k"][[0, -1]]),
    "longest too short": lambda call: call.update(max_length_q=29, max_length_k=29),
    "other longest": lambda call: call.update(max_length_k=31),
    "longest is a tensor": lambda call: call.update(max_length_q=torch.tensor(30), max_length_k=torch.tensor(30)),
    "no longest": lambda call: call.pop("max_length_q"),
    "positions run on": lambda call: call.update(position_ids=call["position_ids"][0, 0] + torch.arange(50)[None]),
    "positions from 1 more": lambda call: call["position_ids"].add_(1),
    "no positions": lambda call: call.pop("position_ids"),
    "a mask": lambda call: call.update(attention_mask=torch.ones(1, 50).long()),
    "two rows": lambda call: [call.update({x: call[x].repeat(2, 1)}) for x in ("input_ids", "position_ids")],
    "padding in a text": lambda call: call["input_ids"][0, 10].fill_(1),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("family", ["distilbert", "roberta"])
def test_packed_calls_that_do_not_fit_run_the_original(family: str, wrong: str) -> None:
    model = make(family)
    call = packed_call(model)
    call.pop("token_type_ids", None)
    WRONG[wrong](call)
    expected = run(model, **call)
    ftbert.optimize(model)
    if wrong == "padding in a text" and family == "distilbert":  # counts positions whatever the ids are
        with pytest.warns(UserWarning, match="kept apart"):
            run(model, **call)
        assert not fallbacks(model)
        return
    with pytest.warns(UserWarning, match="do not say how input_ids"):
        check_same(run(model, **call), expected, None, atol=0)
    assert list(fallbacks(model).values()) == [1]


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """transformers' own flash attention, its two kernels in plain torch; counts the calls of the varlen one."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils

    calls: list[int] = []

    def dense(q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False,
              window_size: tuple[int, int] = (-1, -1)) -> Any:  # fmt: skip
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        left, right = (q.shape[2] if side < 0 else side for side in window_size)
        distance = torch.arange(q.shape[2]) - torch.arange(q.shape[2])[:, None]
        seen = (distance >= -left) & (distance <= (0 if causal else right))
        shared = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale).transpose(1, 2)

    def varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
               softmax_scale: float | None = None, causal: bool = False,
               window_size: tuple[int, int] = (-1, -1)) -> Any:  # fmt: skip
        calls.append(len(cu_seqlens_q) - 1)
        rows = zip(*(x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)), strict=True)
        return torch.cat([dense(*(x[None] for x in row), softmax_scale, causal, window_size)[0] for row in rows])

    parts = (
        dense,
        varlen,
        None,
        modeling_flash_attention_utils._pad_input,
        modeling_flash_attention_utils._unpad_input,
    )
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *_, **__: parts)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    return calls


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_texts_as_flash_attention_computes_them(family: str, flash_attention: list[int]) -> None:
    tokens = (family, "token_classification")  # a head over them, where the family has one
    model = make(*tokens) if tokens in CASES else make(family)
    if not model._supports_flash_attn or family == "siglip_text_model":  # which does not hand the offsets on
        pytest.skip(f"transformers has no flash attention of packed texts for {family}")
    model.set_attn_implementation("flash_attention_2")
    calls = [packed_call(model), packed_call(model) | {"return_dict": False, "output_hidden_states": True}]
    expected = [run(model, **call) for call in calls]
    assert flash_attention == [4] * (2 * ftbert.load(model, heads=False).config.depth)
    ftbert.optimize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call, one in zip(calls, expected, strict=True):
            check_same(run(model, **call), one, None)
    assert not fallbacks(model)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken", "weightedmean"])
def test_sentence_transformer_without_padding(
    pooling: str, tiny_bert: Callable[..., Path], tmp_path: Path, flash_attention: list[int]
) -> None:
    parts = pytest.importorskip("sentence_transformers", minversion="6.0")
    from sentence_transformers import models

    folder = str(tiny_bert(tmp_path))
    words = models.Transformer(folder, model_kwargs={"attn_implementation": "flash_attention_2"})
    model = parts.SentenceTransformer(modules=[words, models.Pooling(64, pooling_mode=pooling)], device="cpu")
    features = model.preprocess(TEXTS)
    with torch.no_grad():
        expected = torch.as_tensor(model.encode(TEXTS)), model(dict(features))["token_embeddings"]
    assert words.can_flatten_inputs and flash_attention == [len(TEXTS)] * 4
    ftbert.optimize(model)
    flash_attention.clear()
    with torch.no_grad():
        got = torch.as_tensor(model.encode(TEXTS)), model(dict(features))["token_embeddings"]
    assert got[1].shape == (*features["input_ids"].shape, 64)
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, atol=1e-5)
    assert words.auto_model.forward.fallbacks == {} and not flash_attention


def keywords_of(model: Any) -> list[str]:
    """All that the code behind a forward could read: parameters of any forward in the file of the model and of
    attention, keys that are taken out of **kwargs."""
    from transformers import AttentionInterface
    from transformers.utils import TransformersKwargs, generic, output_capturing

    file = sys.modules[type(model).__module__]
    classes = [part for part in vars(file).values() if inspect.isclass(part) and issubclass(part, torch.nn.Module)]
    functions = [part.forward for part in classes] + [*AttentionInterface().values()]
    names = {name for function in functions for name in inspect.signature(function).parameters}
    for source in map(inspect.getsource, (file, generic, output_capturing)):
        names |= set(re.findall(r"kwargs(?:\.get\(|\.pop\(|\[)\s*[\"'](\w+)[\"']", source))
    return sorted(
        {*names, *TransformersKwargs.__annotations__} - {"self", "input_ids", "attention_mask", "debug_io", "kwargs"}
    )


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"new", "neobert", "static_embedding"}))  # which transformers does not have
def test_no_keyword_is_wrong_without_a_word(family: str) -> None:
    """Where the original gives a result, the optimized one gives the same."""
    model = make(family)
    fast = ftbert.optimize(copy.deepcopy(model))
    ids = some_inputs(model)["input_ids"]
    names = keywords_of(model)
    assert {"is_causal", "output_attentions", "inputs_embeds", "cu_seq_lens_q", "num_items_in_batch"} <= set(names)
    refusals = TypeError, ValueError, AttributeError, RuntimeError, IndexError
    for name in names:
        for value in (True, torch.ones(4, 30, dtype=torch.long)):
            want = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with contextlib.suppress(*refusals):
                    want = run(model, input_ids=ids, **{name: value})
                try:
                    assert want is None or not check_same(run(fast, input_ids=ids, **{name: value}), want, None)
                except AssertionError as error:
                    raise AssertionError(f"{name}={value}") from error


def test_none_is_the_config_only_where_the_original_reads_it_so() -> None:
    for family in ("bert", "mpnet", "megatron-bert", "deberta-v2"):
        model = make(family)
        model.config.output_hidden_states = True
        fast = ftbert.optimize(copy.deepcopy(model))
        ids = some_inputs(model)["input_ids"]
        for keywords in ({}, {"output_hidden_states": None}, {"output_hidden_states": False}):
            check_same(run(fast, input_ids=ids, **keywords), run(model, input_ids=ids, **keywords), None)
        assert not fallbacks(fast)


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification", "masked_lm", "question_answering"])
def test_what_trainer_passes(task: str) -> None:
    """Trainer.evaluate and predict: labels, and the number of items that their losses are divided by in training."""
    model = make("bert", task)
    ids = some_inputs(model)["input_ids"]
    spans = task == "question_answering"
    shape = (4,) if spans or task == "sequence_classification" else ids.shape
    labels = torch.randint(0, 2, shape)
    named = {"start_positions": labels, "end_positions": labels} if spans else {"labels": labels}
    inputs = {"input_ids": ids, **named, "num_items_in_batch": torch.tensor(labels.numel())}
    expected = run(model, **inputs)
    check_same(run(ftbert.optimize(model), **inputs), expected, None)
    assert expected.loss > 0 and not fallbacks(model)


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification"])
def test_trainer_evaluates_and_predicts(task: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = make("bert", task)
    inputs = some_inputs(model)
    labels = torch.tensor([0, 1, 2, 1]) if task == "sequence_classification" else torch.randint(0, 3, (4, 30))
    if task == "token_classification":
        labels[inputs["attention_mask"] == 0] = -100
    rows = [{**{name: x[i] for name, x in inputs.items()}, "labels": labels[i]} for i in range(4)]
    trainer = Trainer(model, TrainingArguments(str(tmp_path), report_to=[], use_cpu=True), eval_dataset=rows)
    loss, logits = trainer.evaluate()["eval_loss"], trainer.predict(rows).predictions
    ftbert.optimize(model)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, abs=1e-4)
    got = trainer.predict(rows).predictions
    kept = inputs["attention_mask"].bool() if task == "token_classification" else slice(None)
    assert_close(torch.from_numpy(got)[kept], torch.from_numpy(logits)[kept], atol=1e-4)
    assert not fallbacks(model)


@pytest.mark.parametrize("task", ["encoder", "sequence_classification"])
def test_what_traces_says_undo(task: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    torch.compiler.reset()  # graphs of other tests
    model = ftbert.optimize(make("bert", task))
    inputs = some_inputs(model)
    ids = (inputs["input_ids"],)
    traced: dict[str, Callable[[], Any]] = {
        "jit.trace": lambda: torch.jit.trace(model, example_kwarg_inputs=inputs, strict=False),
        "export": lambda: torch.export.export(model, (), inputs),
        "strict export": lambda: torch.export.export(model, ids, strict=True),
        "draft export": lambda: torch.export.draft_export(model, ids),
        "onnx": lambda: torch.onnx.export(model, ids, io.BytesIO(), dynamo=False),
        "make_fx": lambda: make_fx(lambda x: model(x)[0])(*ids),
        "fullgraph": lambda: run(torch.compile(model, fullgraph=True, backend="eager"), **inputs),
    }
    for name, trace in traced.items():
        with pytest.raises(Exception) as error:
            trace()
        assert "call ftbert.undo(model) first" in str(error.value), name
    expected = run(model, **inputs)
    check_same(run(torch.compile(model, backend="eager"), **inputs), expected, None, atol=0)
    torch.export.export(ftbert.undo(model), (), inputs)


def test_exporters_of_onnx_say_undo() -> None:
    pytest.importorskip("onnxscript")
    model = ftbert.optimize(make("bert"))
    with pytest.raises(Exception, match=r"call ftbert.undo\(model\) first"):
        torch.onnx.export(model, (some_inputs(model)["input_ids"],), io.BytesIO(), dynamo=True)


def test_transforms_and_tensors_without_data_run_the_original() -> None:
    model = make("bert", "sequence_classification")
    fast = ftbert.optimize(copy.deepcopy(model))
    ids = some_inputs(model)["input_ids"]

    def gradients(one: Any) -> Any:
        def loss(parameters: Any) -> Any:
            return torch.func.functional_call(one, parameters, (ids,)).logits.sum()

        return torch.func.grad(loss)(dict(one.named_parameters()))

    with pytest.warns(UserWarning, match="a transform of torch.func"):
        want, got = (torch.vmap(lambda row, m=m: m(row[None]).logits)(ids) for m in (model, fast))
    assert_close(got, want, atol=0)
    want, got = gradients(model), gradients(fast)
    assert all(torch.equal(got[name], want[name]) for name in want) and got["classifier.weight"].any()
    assert fallbacks(fast) == {"a transform of torch.func": 2}
    changed = {name: 2 * tensor for name, tensor in model.named_parameters()}
    want, got = (run(lambda m=m: torch.func.functional_call(m, changed, (ids,))) for m in (model, fast))
    check_same(got, want, None)
    bare = copy.deepcopy(fast).to("meta")
    with pytest.warns(UserWarning, match="tensors without data"):
        assert run(bare, input_ids=ids.to("meta")).logits.shape == (4, 3)


def test_a_replica_on_another_gpu_says_undo() -> None:
    place, first = ("cuda:0", [0]) if torch.cuda.is_available() else ("cpu", None)
    model = ftbert.optimize(make("bert", "sequence_classification").to(place))
    inputs = {name: tensor.to(place) for name, tensor in some_inputs(model).items()}
    check_same(run(torch.nn.DataParallel(model, device_ids=first), **inputs), run(model, **inputs), None, atol=0)
    if torch.cuda.device_count() > 1:
        with pytest.raises(RuntimeError, match=r"DataParallel.*ftbert.undo\(model\) first"):
            run(torch.nn.DataParallel(model), **inputs)
    forward = model.bert.forward
    assert isinstance(forward, PatchedForward)
    forward._built = dataclasses.replace(forward.built(), device=torch.device("cuda:1"))
    with pytest.raises(RuntimeError, match=r"on cuda:1.*DataParallel.*ftbert.undo\(model\) first"):
        run(model, **inputs)
