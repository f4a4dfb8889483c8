"""ftbert.optimize: what a user of transformers and sentence-transformers gets is what they got before."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import Place, have_gpu, make_bert
from families import CASES
from optimized import check_same, fallbacks, make, run, some_inputs

import ftbert
from ftbert.converters.head_tables import rows_of
from ftbert.optimization import patched_forward


@pytest.mark.parametrize(("family", "task"), CASES)
def test_every_family_and_head(family: str, task: str) -> None:
    model = make(family, task)
    inputs = some_inputs(model)
    states: dict[str, Any] = {"output_hidden_states": True}
    calls = [{}, {"attention_mask": None}, states, {"return_dict": False}, {"return_dict": False, **states}]
    if task == "encoder":
        # sentence-transformers puts its results into the dict of features, which a second call passes on.
        calls.append({"token_embeddings": torch.randn(4, 30, 64), "sentence_embedding": torch.randn(4, 64), "foo": 1})
    expected = [run(model, **(inputs | call)) for call in calls]
    assert ftbert.optimize(model) is model
    for call, one in zip(calls, expected, strict=True):
        mask = (inputs | call)["attention_mask"]
        check_same(run(model, **(inputs | call)), one, None if mask is None else mask.flatten(0, -2))
    assert not fallbacks(model)


def test_hooks_inside_are_called() -> None:
    model = make("bert", "sequence_classification")
    inputs = some_inputs(model)
    ftbert.optimize(model)
    handle = model.bert.encoder.layer[0].register_forward_hook(lambda *_: torch.zeros(4, 30, model.config.hidden_size))
    with pytest.warns(UserWarning, match="forward hooks"):
        got = run(model, **inputs).logits
    handle.remove()
    expected = run(model, **inputs).logits
    assert fallbacks(model) == {"forward hooks on modules inside": 1}
    assert (got - expected).abs().max() > 1e-2
    seen: list[int] = []
    model.bert.register_forward_hook(lambda *_: seen.append(1))  # outside: called as ever
    run(model, **inputs)
    assert seen == [1] and len(fallbacks(model)) == 1


def test_on_every_place(place: Place) -> None:
    model = make("bert", "sequence_classification").to(place.device)
    inputs = {key: value.to(place.device) for key, value in some_inputs(model).items()}
    expected = run(model, **inputs).logits
    ftbert.optimize(model, dtype=place.dtype)
    got = run(model, **inputs).logits
    assert got.dtype == torch.float32 and model.bert.forward.info()["device"].startswith(place.device)
    assert_close(got, expected, atol=1e-4 if place.dtype == torch.float32 else 100 * place.eps)
    if place.device == "cuda":  # moved afterwards: built again there, and fp16 is nothing for a CPU
        settings = {} if place.dtype == torch.float32 else {"dtype": "fp32"}
        got = run(ftbert.optimize(model, device="cpu", **settings), **some_inputs(model)).logits
        assert_close(got, expected.cpu(), atol=1e-4)


def test_token_types_and_default_positions_are_computed() -> None:
    model = make_bert()
    more = {"token_type_ids": torch.randint(0, 2, (4, 30)), "position_ids": torch.arange(30)[None]}
    inputs = some_inputs(model) | more
    expected = run(model, **inputs)
    ftbert.optimize(model)
    with torch.no_grad():
        for got in (model(**inputs), model(*inputs.values())):
            check_same(got, expected, inputs["attention_mask"])
    assert not fallbacks(model)


def test_holes_in_windows_that_count_columns() -> None:
    model = make("modernbert")
    inputs = some_inputs(model)
    inputs["attention_mask"][0, 5:9] = 0
    inputs["attention_mask"][0, 9] = 1
    expected = run(model, **inputs)
    with pytest.warns(UserWarning, match="with holes, in windows that count columns"):
        check_same(run(ftbert.optimize(model), **inputs), expected, None, atol=0)
    assert list(fallbacks(model).values()) == [1]


def test_padding_that_a_head_reads_by_its_id() -> None:
    model = make("llama", "sequence_classification")
    inputs = some_inputs(model)
    inputs["input_ids"][1, -1], inputs["attention_mask"][1, -3:] = 7, 0
    expected = run(model, **inputs)
    with pytest.warns(UserWarning, match="padding by the mask whose ids are not config.pad_token_id"):
        check_same(run(ftbert.optimize(model), **inputs), expected, None, atol=0)
    assert list(fallbacks(model).values()) == [1]


NOT_COMPUTED: dict[str, dict[str, Any]] = {
    "attentions": {"output_attentions": True},
    "config": {},
    "inputs_embeds": {"inputs_embeds": torch.randn(4, 30, 64), "input_ids": None},
    "position_ids": {"position_ids": torch.arange(30).flip(0)[None]},
    "mask 4-D": {"attention_mask": torch.ones(4, 1, 30, 30, dtype=torch.bool).tril()},
    "column 0": {},
    "encoder_hidden_states": {"encoder_hidden_states": torch.randn(4, 30, 64)},
    "chosen layers": {"output_hidden_states": [1]},
}


@pytest.mark.parametrize("reason", NOT_COMPUTED)
def test_what_is_not_computed_runs_the_original(reason: str) -> None:
    model = make("bert", "sequence_classification") if reason == "column 0" else make_bert(attn_implementation="eager")
    inputs = {**some_inputs(model), **NOT_COMPUTED[reason]}
    model.config.output_attentions = reason == "config"
    if reason == "column 0":
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    expected = run(model, **inputs)
    ftbert.optimize(model)
    with pytest.warns(UserWarning, match="ftbert: .*BertModel of transformers computes such calls"):
        check_same(run(model, **inputs), expected, None, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        run(model, **inputs)
    assert list(fallbacks(model).values()) == [2]


@pytest.mark.parametrize(
    ("family", "task"),
    # SigLIP reads the last column, and is padded on the left in the other tests (test_clip.py).
    [
        case
        for case in CASES
        if case[1] in ("encoder", "token_classification", "masked_lm", "sequence_classification")
        and not case[0].startswith("siglip")
    ],
)
def test_padding_on_the_left(family: str, task: str) -> None:
    """Fast where nobody reads column 0, equal to transformers everywhere; a bare encoder's pooler says what it reads."""
    model = make(family, task)
    inputs = some_inputs(model)
    inputs = {name: tensor.flip(1) for name, tensor in inputs.items()}
    mask = inputs["attention_mask"]
    inputs["input_ids"][mask == 0] = model.config.pad_token_id
    expected = run(model, **inputs)
    ftbert.optimize(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = run(model, **inputs)
    heads = [row.reads(model.config.to_dict()) for row in rows_of(family) if row.task == task]
    assert bool(fallbacks(model)) == (heads in (["first"], ["pooler"]))
    if getattr(model, "pooler", None) is not None and "pooler_output" in got:
        hidden = got.last_hidden_state
        first = hidden[torch.arange(4), mask.argmax(1)][:, None]
        assert_close(got.pooler_output, patched_forward._pool(model, first), atol=1e-6)
        expected.pooler_output = got.pooler_output
        assert "first kept token" in str(said[0].message)
    check_same(got, expected, mask)


def test_training_is_refused_and_gradients_stop() -> None:
    model = make("bert", "sequence_classification")
    inputs = some_inputs(model)
    with pytest.raises(ValueError, match=r"training mode.*model.eval\(\) first"):
        ftbert.optimize(model.train())
    ftbert.optimize(model.eval())
    model(**inputs).logits.sum().backward()
    assert model.classifier.weight.grad is not None, "heads stay trainable"
    assert model.bert.embeddings.word_embeddings.weight.grad is None
    with pytest.raises(RuntimeError, match=r"training mode; call model.eval\(\), or ftbert.undo"):
        model.train()(**inputs)
    ftbert.undo(model)(**inputs).logits.sum().backward()
    assert model.bert.embeddings.word_embeddings.weight.grad is not None


def test_undo_and_twice() -> None:
    model = make("bert", "masked_lm")
    inputs = some_inputs(model)
    before, names = run(model, **inputs), set(vars(model.bert))
    assert ftbert.undo(model) is model, "undo of what was never optimized does nothing"
    first = ftbert.optimize(model).bert.forward
    assert ftbert.optimize(model).bert.forward is first
    assert ftbert.optimize(model, attention="general").bert.forward is not first
    check_same(run(model, **inputs), before, inputs["attention_mask"])
    ftbert.undo(model)
    check_same(run(model, **inputs), before, None, atol=0)
    assert set(vars(model.bert)) == names


def test_changed_weights_are_noticed() -> None:
    model, other = make_bert(), make_bert(seed=1)
    inputs = some_inputs(model)
    ftbert.optimize(model)
    run(model, **inputs)

    def drop_layer(target: Any) -> Any:
        target.encoder.layer, target.config.num_hidden_layers = target.encoder.layer[:1], 1
        return target

    small = drop_layer(copy.deepcopy(other))
    changes: list[tuple[Callable[[Any], Any], Any]] = [
        (lambda m: m.load_state_dict(other.state_dict()), other),
        (lambda m: m.load_state_dict(make_bert(seed=2).state_dict(), assign=True), make_bert(seed=2)),
        (lambda m: m.load_state_dict(other.state_dict()), other),
        (drop_layer, small),
    ]
    for change, expected in changes:
        change(model)
        check_same(run(model, **inputs), run(expected, **inputs), inputs["attention_mask"])
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[3, 4] += 10
        small.encoder.layer[0].output.dense.weight[3, 4] += 10
    check_same(run(model, **inputs), run(small, **inputs), inputs["attention_mask"])
    model.resize_token_embeddings(200)
    assert run(model, input_ids=torch.full((1, 3), 199)).last_hidden_state.isfinite().all()
    assert model.forward.built() is model.forward.built()
    model.encoder.layer[0].intermediate.intermediate_act_fn = torch.nn.ReLU()  # no weight tells
    with pytest.warns(UserWarning, match="differs from BertModel's own"):
        mine = run(model, **inputs)
    check_same(mine, run(ftbert.undo(model), **inputs), inputs["attention_mask"])


def test_weights_of_other_dtypes_on_the_cpu() -> None:
    """16 bits compute in fp32; what is not computed runs the original."""
    model = make("bert", "token_classification")
    inputs = some_inputs(model)
    kept = inputs["attention_mask"].bool()
    rounded = run(copy.deepcopy(model).bfloat16().float(), **inputs).logits
    ftbert.optimize(model)
    expected = run(model, **inputs).logits
    model.double()
    with pytest.warns(UserWarning, match="expected fp32, fp16, bf16, fp8, int8 or q8_0"):
        got = run(model, **inputs).logits
    assert got.dtype == torch.float64 and list(fallbacks(model).values()) == [1]
    assert_close(got[kept], expected[kept], atol=1e-4)
    assert_close(run(model.float(), **inputs).logits, expected, atol=1e-6)
    got = run(model.bfloat16(), **inputs).logits
    assert got.dtype == torch.bfloat16 and list(fallbacks(model).values()) == [1]
    assert_close(got[kept], rounded[kept], atol=0.05, rtol=0.02)
    with pytest.raises(ValueError, match="dtype: expected fp32, fp16, bf16, fp8, int8 or q8_0, got torch.float64"):
        ftbert.optimize(ftbert.undo(model).double())


def test_the_rest_of_the_model_is_as_before(tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    model = make("bert", "masked_lm")
    untouched = copy.deepcopy(model)
    inputs = some_inputs(model)
    ftbert.optimize(model)
    assert type(model) is BertForMaskedLM and model.device.type == "cpu" and model.dtype == torch.float32
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in untouched.named_parameters()]
    assert model.config.to_dict() == untouched.config.to_dict()
    model.save_pretrained(tmp_path)
    check_same(run(BertForMaskedLM.from_pretrained(tmp_path).eval(), **inputs), run(untouched, **inputs), None, atol=0)
    shared = model.bert.forward.built().encoder.weights()["embeddings.word"]
    assert shared.data_ptr() == model.bert.embeddings.word_embeddings.weight.data_ptr(), "embeddings are not doubled"


def saved_and_loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded])
def test_copies_are_optimized_and_independent(twin_of: Callable[[Any], Any]) -> None:
    model = ftbert.optimize(make("bert", "sequence_classification"))
    inputs = some_inputs(model)
    expected = run(model, **inputs)
    twin = twin_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    check_same(run(twin, **inputs), expected, None, atol=0)
    assert not fallbacks(twin) and not run(model, **inputs).logits.any()


def test_what_cannot_be_optimized_says_why() -> None:
    from transformers import GPT2Config, GPT2Model

    wrong: list[tuple[Any, type[Exception], str]] = [
        (GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=1)).eval(), ValueError, "'gpt2' is not supported: it is a decoder.*bert"),
        (make_bert(is_decoder=True), ValueError, "decoder"),
        (torch.nn.Linear(1, 1), TypeError, "transformers model"),
        (object(), TypeError, "transformers model"),
    ]
    for model, error, words in wrong:
        with pytest.raises(error, match=words):
            ftbert.optimize(model)
    patched = make_bert()
    patched.encoder.layer[1].intermediate.intermediate_act_fn = torch.nn.ReLU()
    with pytest.raises(RuntimeError, match="computes something that its config does not say"):
        ftbert.optimize(patched)
    assert "forward" not in vars(patched)
    patched = make_bert()
    patched.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match=r"something else has replaced BertModel.forward"):
        ftbert.optimize(patched)


# ---- what people call ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_what_the_host_must_read_while_the_caller_records(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("bert")
    ids = some_inputs(model)["input_ids"]
    inputs = {"input_ids": ids, name: torch.ones_like(ids) if name == "attention_mask" else torch.arange(30)[None]}
    want = run(model, **inputs)
    ftbert.optimize(model)
    monkeypatch.setattr("ftbert.optimization.patched_forward._is_recording", lambda ids: True)
    with pytest.warns(UserWarning, match="while a CUDA graph is recorded"):
        assert torch.equal(run(model, **inputs).last_hidden_state, want.last_hidden_state)
    run(model, input_ids=ids)
    assert list(fallbacks(model).values()) == [1]


@pytest.mark.skipif(not have_gpu(), reason="no GPU")
def test_the_caller_records_on_the_gpu() -> None:
    """With a mask the original, which must have run before, as all that is recorded; without one, ftbert."""
    model = make("bert").to("cuda", torch.float16)
    inputs = {name: tensor.cuda() for name, tensor in some_inputs(model).items()}
    ids = {"input_ids": inputs["input_ids"]}
    ftbert.optimize(model)
    with torch.no_grad():
        theirs = model.forward.original(**inputs).last_hidden_state
    ours = run(model, **ids).last_hidden_state
    for given, want in ((inputs, theirs), (ids, ours)):
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(record=True) as said, torch.cuda.graph(graph):
            out = run(model, **given).last_hidden_state
        graph.replay()
        assert_close(out, want, atol=16 * torch.finfo(torch.float16).eps)
        assert sum("is recorded" in str(one.message) for one in said) == (given is inputs)
        assert sum(fallbacks(model).values()) == 1
