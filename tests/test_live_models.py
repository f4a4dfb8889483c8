"""Live models that were changed: load and optimize compute the change or refuse it, through the same check."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import make_bert, randomise
from families import make_batch, make_model
from torch import nn
from torch.nn.utils import prune
from transformers.activations import ACT2FN

import ftbert


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def swap(path: str, make: Callable[[Any], nn.Module]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))

    return change


def with_weights_of(old: Any, new: nn.Module) -> nn.Module:
    new.load_state_dict(old.state_dict(), strict=False)
    return new


DENSE, NORM = "encoder.layer.1.intermediate.dense", "encoder.layer.1.output.LayerNorm"
CHANGES: dict[str, Callable[[Any], Any]] = {
    "activation": swap("encoder.layer.1.intermediate.intermediate_act_fn", lambda _: nn.ReLU()),
    "nearly the same activation": swap("encoder.layer.1.intermediate.intermediate_act_fn", lambda _: ACT2FN["gelu_new"]),
    "eps": swap(NORM, lambda old: with_weights_of(old, nn.LayerNorm(64, eps=1e-2))),
    "RMSNorm": swap(NORM, lambda old: with_weights_of(old, nn.RMSNorm(64))),
    "product": swap(DENSE, lambda old: with_weights_of(old, Doubled(64, 96))),
    "hook that changes": lambda model: model.get_submodule(DENSE).register_forward_hook(lambda m, i, out: 2 * out),
    "forward of an instance": lambda model: setattr(model.get_submodule(DENSE), "forward", lambda x: x.repeat(1, 1, 2)[..., :96]),
    "weight norm": lambda model: nn.utils.parametrizations.weight_norm(model.get_submodule(DENSE)),
    "pruned weights": lambda model: prune.random_unstructured(model.get_submodule(DENSE), "weight", 0.5),
    "quantised": swap("encoder", lambda old: torch.ao.quantization.quantize_dynamic(old, {nn.Linear})),
    "fewer heads": swap("encoder.layer.1.attention.self.query", lambda _: nn.Linear(64, 32)),
    "fewer layers": lambda model: model.encoder.layer.pop(1),
}  # fmt: skip


@pytest.mark.parametrize("entry", [ftbert.load, ftbert.optimize], ids=["load", "optimize"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_config_and_weights_do_not_say_is_refused(change: str, entry: Callable[[Any], Any]) -> None:
    model = make_bert(hidden_act="gelu")
    CHANGES[change](model)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"differs from BertModel's own|do not fit the config|quantized"
    ):
        entry(model)


@pytest.mark.parametrize("task", ["masked_lm", "sequence_classification", "multiple_choice"])
def test_a_head_that_computes_something_else_is_refused(task: str) -> None:
    model = make_model("roberta" if task == "sequence_classification" else "bert", task, 0)
    path = {"masked_lm": "cls.predictions.transform.transform_act_fn", "multiple_choice": "bert.pooler.activation"}
    swap(path.get(task, "classifier.dropout"), lambda _: nn.Tanhshrink())(model)
    with pytest.raises(RuntimeError, match="differs from .*'s own by"):
        ftbert.load(model)
    ftbert.load(model, heads=False) if task != "multiple_choice" else None


def test_16_bits_are_judged_by_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a real decoder's largest entries bf16 holds little else: its results, transformers' too, are far off."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no instructions for bf16")
    for where in ("live_check", "optimization.patched_forward"):
        monkeypatch.setattr(f"ftbert.{where}.tolerance", lambda *_: 1e-7)
    for heads in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.warns(UserWarning, match="shows in float32 alone"):
                ftbert.load(make_model("bert", "token_classification", 0).to(dtype), dtype="bf16", heads=heads)
    with pytest.warns(UserWarning, match="shows in float32 alone"):
        ftbert.optimize(make_bert(), dtype="bf16")
    wrong = make_bert()
    swap(DENSE, lambda old: with_weights_of(old, Doubled(old.in_features, old.out_features)))(wrong)
    for dtype in ("bf16", "fp32"):
        with pytest.raises(RuntimeError, match="computes something that its config does not say"):
            ftbert.load(wrong, dtype=dtype)
        with pytest.raises(RuntimeError, match="does not say"):
            ftbert.optimize(wrong, dtype=dtype)


def test_hooks_that_only_look_are_named() -> None:
    model = make_bert()
    model.register_forward_hook(lambda *_: None)  # outside: nobody expects that load calls it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ftbert.load(model)
    model.encoder.layer[0].register_forward_pre_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="does not call the forward hooks on modules inside this BertModel"):
        ftbert.load(model)


def test_classes_of_somebody_else() -> None:
    from transformers import BertForSequenceClassification, BertModel

    class Renamed(BertModel):
        pass

    class TwiceTheEncoder(BertModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.last_hidden_state = 2 * out.last_hidden_state
            return out

    class OtherHead(BertForSequenceClassification):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.classifier(self.bert(input_ids)[0].mean(1))  # type: ignore[no-any-return]

    config = make_bert().config
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ftbert.load(randomise(Renamed(config)))
    with pytest.raises(RuntimeError, match="differs from TwiceTheEncoder's own by"):
        ftbert.load(randomise(TwiceTheEncoder(config)))
    with pytest.warns(UserWarning, match="OtherHead has a forward that is not transformers' own"):
        ftbert.load(randomise(OtherHead(config)))


@pytest.mark.parametrize("task", ["encoder", "token_classification"])
def test_the_check_leaves_the_model_as_it_was(task: str) -> None:
    """A model that is being trained may be loaded; its dropout does not count, and stays on."""
    model = make_model("bert", task, 0)
    batch = make_batch(model, task, "right")
    kept = batch["attention_mask"].bool()
    with torch.no_grad():
        want = model(**batch)
    model.train()
    model.base_model.pooler and model.base_model.pooler.eval()
    modes = [part.training for part in model.modules()]
    got = ftbert.load(model)(**batch)
    field = "last_hidden_state" if task == "encoder" else "logits"
    assert_close(got[field][kept], want[field][kept], atol=3e-5)
    assert [part.training for part in model.modules()] == modes and sum(modes) > 1
