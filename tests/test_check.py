"""check must pass what is right and fail what is wrong; bench must not time a wrong peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Place, has_bf16
from families import make_model
from stub_model import Mirror
from tokenizers_offline import sentence_folder

import ftbert
from ftbert.evaluation import bench, check
from ftbert.evaluation.gates import GATES, least_cosine
from ftbert.padded_batches import padded


def add_at_one_token(amount: float) -> Any:
    def spoil(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden[3, int(mask[3].nonzero()[-1]), 5] += amount
        return hidden

    return spoil


def write_into_padding(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    hidden[mask == 0] = 1e-9
    return hidden


def test_passes_what_is_equal() -> None:
    result = check(Mirror())
    assert result.passed
    assert [m.mask for m in result.masks] == ["right", "left", "holes"]
    assert result.masks[0].tokens == result.masks[1].tokens > result.masks[2].tokens
    assert "passed" in str(result)
    assert result.as_dict()["masks"][0]["max_abs_diff"] == 0


@pytest.mark.parametrize(
    "spoil",
    [add_at_one_token(3e-5), add_at_one_token(float("nan")), write_into_padding],
    ids=["over the gate", "not a number", "padding not zero"],
)
def test_fails_what_is_not(spoil: Any) -> None:
    result = check(Mirror(spoil))
    assert not result.passed
    assert "FAILED" in str(result)


def test_half_precision_is_held_against_transformers_in_half() -> None:
    def rounded(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return hidden.bfloat16().float()

    model = Mirror(rounded, torch.bfloat16)
    result = check(model)
    assert result.passed
    assert result.masks[0].max_abs_diff_allowed > 1e-3
    assert next(model.hf.parameters()).dtype == torch.float32  # the reference is not touched
    assert not check(Mirror(add_at_one_token(1.0), torch.bfloat16)).passed


@has_bf16
def test_cosines_are_held_against_transformers_too(place: Place) -> None:
    """A random UMT5 loses more to bfloat16 than the usual cosine allows, in transformers as here."""
    dtype = torch.bfloat16 if place.device == "cpu" else place.dtype
    result = check(ftbert.load(make_model("umt5", "encoder", 0), device=place.device, dtype=dtype))
    assert result.passed, str(result)
    assert dtype != torch.bfloat16 or all(mask.min_cosine_allowed < 0.999 for mask in result.masks)
    gate = GATES[torch.bfloat16]
    assert least_cosine(gate, 0.999, 0.9995) == least_cosine(gate, 0.999, float("nan")) == 0.999
    assert least_cosine(gate, 0.999, 0.99) == pytest.approx(1 - 1.5625 * 0.01)
    assert least_cosine(GATES[torch.float32], 0.999, 0.5) == 0.999


@pytest.mark.parametrize("family", ["modernbert", "modernbert-decoder", "mistral", "gemma3_text"])
def test_windows_are_of_kept_tokens(device: str, family: str) -> None:
    """As in transformers' flash attention: its other attention is compared where no mask has holes."""
    model = ftbert.load(make_model(family, "encoder", 0), device=device)
    result = check(model)
    assert result.passed, str(result)
    ids, mask = padded([torch.arange(5, 45) % model.config.vocab], "holes", 0, torch.device("cpu"))
    with torch.inference_mode():
        theirs = model.reference()(input_ids=ids, attention_mask=mask).last_hidden_state
        ours = model(ids.to(device), mask.to(device)).last_hidden_state.cpu()
    assert (theirs - ours)[mask.bool()].abs().max() > 0.1


def test_no_texts() -> None:
    with pytest.raises(ValueError, match="texts is empty"):
        check(Mirror(), texts=[])
    with pytest.raises(ValueError, match="no text to measure"):
        bench(Mirror(), texts=[])


def test_bench_measures_and_refuses_wrong_outputs() -> None:
    result = bench(Mirror(), batch=4, longest=16, rounds=2)
    ragged, full = result.batches
    assert full.fill == 1.0
    assert 0.2 < ragged.fill < 0.7
    assert ragged.timings[0].speed_up == 1.0
    assert "tokens/s" in str(result)
    with pytest.raises(RuntimeError, match="ftbert differs from transformers"):
        bench(Mirror(add_at_one_token(1.0)), batch=4, longest=16, rounds=2)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("lower", [False, True])
def test_texts_are_compared_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: bool, lower: bool
) -> None:
    from ftbert.converters.from_huggingface import convert
    from ftbert.text import tokenizer_of

    folder = sentence_folder(
        tmp_path / "a", tokenizer={"do_lower_case": False}, sentence={"do_lower_case": lower}, truncate_dim=20,
        prompts={"query": "two "}, default_prompt_name="query", include_prompt=False,
    )  # fmt: skip
    model = ftbert.load(convert(folder, tmp_path / "b") if converted else folder)
    result = check(model)
    assert result.passed, str(result)
    assert result.texts is not None
    assert result.texts.peer == ("transformers" if converted else "sentence-transformers")
    # Another tokenizer, as one that lost a setting: found, and the worst text is named.
    tokenizer = tokenizer_of(model)
    right = tokenizer.encode_batch
    monkeypatch.setattr(
        tokenizer, "encode_batch", lambda texts, *more, **other: right([t.swapcase() for t in texts], *more, **other)
    )
    wrong = check(model)
    if not lower:
        assert not wrong.passed
        assert wrong.texts.different_ids > 0
        assert "FAILED" in str(wrong)
        assert "other ids than AutoTokenizer's" in str(wrong)


def test_a_peer_that_refuses_the_texts_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftbert.evaluation import text_parity as check_texts

    def refuse(*_: Any) -> None:
        raise ValueError("its words")

    monkeypatch.setattr(check_texts, "_by_sentence_transformers", refuse)
    result = check(ftbert.load(sentence_folder(tmp_path / "a")))
    assert not result.passed
    assert "FAILED: its words" in str(result)


def test_a_text_without_a_token(tmp_path: Path) -> None:
    """As of decoders, whose tokenizers add none: its vector is 0 on both sides."""
    import json

    folder = sentence_folder(tmp_path / "a")
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["post_processor"] = None
    path.write_text(json.dumps(document), encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")
    (folder / "modules.json").unlink()  # so that the peer is transformers
    model = ftbert.load(folder)
    assert not model.encode([""]).any()
    result = check(model)
    assert result.passed, str(result)
    assert result.texts is not None
    assert result.texts.peer == "transformers"
