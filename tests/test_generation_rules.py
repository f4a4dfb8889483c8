"""What generation_config.json and penalties make of texts: transformers' tokens, each text with its own history."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Place
from language_models import loaded, made
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

import ftbert
from ftbert.converters import convert
from ftbert.decoding.decoder import decoder_of
from ftbert.decoding.generation import Generation
from ftbert.decoding.requests import Request
from ftbert.decoding.rules import Rules
from ftbert.decoding.stated import stated

PROMPTS = [[int(one) for one in torch.randint(3, 90, (n,), generator=torch.Generator().manual_seed(n))] for n in (12, 1, 5, 20)]
MOST = 20


def theirs(reference: Any, how: dict[str, Any] | None = None) -> list[list[int]]:
    """Text by text, without the token that ends it."""
    found = []
    ends = reference.generation_config.eos_token_id
    for ids in PROMPTS:
        given = {"do_sample": False, "pad_token_id": 0, **({"max_new_tokens": MOST} if how is None else how)}
        text = reference.generate(torch.tensor([ids]), **given)[0, len(ids) :].tolist()
        found.append(text[:-1] if text and text[-1] in (ends if isinstance(ends, list) else [ends]) else text)
    return found


def saying(**settings: Any) -> Any:
    """A random Llama whose generation_config says this too. Its greedy texts repeat themselves, and end early."""
    reference = copy.deepcopy(made("llama"))
    free = reference.generate(torch.tensor(PROMPTS[:1]), do_sample=False, max_new_tokens=MOST, eos_token_id=[], pad_token_id=0)
    settings.setdefault("eos_token_id", [2, int(free[0, len(PROMPTS[0]) + 3])])
    for name, value in settings.items():
        setattr(reference.generation_config, name, value)
    return reference


@functools.cache
def without_rules(ends: bool) -> list[list[int]]:
    return theirs(saying() if ends else saying(eos_token_id=2))


SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3, "repetition_penalty": 0.8},
    {"min_new_tokens": 9},
    {"min_length": 16},
    {"min_length": 30, "min_new_tokens": 9},
    {"suppress_tokens": "common", "min_new_tokens": 2},
    {"begin_suppress_tokens": "common"},
    {"bad_words_ids": "pairs"},
    {"sequence_bias": "biases", "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: "-".join(one))
def test_texts_are_those_of_transformers(settings: dict[str, Any], place: Place) -> None:
    if place.dtype != torch.float32:
        pytest.skip("in 16 bits other tokens are the most likely")
    texts = without_rules(ends=False)
    often = [one for one, _ in Counter(sum(texts, [])).most_common(3)]
    pairs = [list(row[i : i + 2]) for row in texts for i in (0, 3) if len(row) > 5]
    known = {"common": often, "pairs": [*pairs, [often[0]]], "biases": [[pairs[0], -30.0], [pairs[1], -9.5], [[often[1]], 2.0]]}
    reference = saying(**{name: known.get(value, value) if isinstance(value, str) else value for name, value in settings.items()})
    want = theirs(reference)
    assert want != without_rules(ends=True)
    model = ftbert.load(reference, device=place.device)
    for batch_size in (1, 3):
        assert model.generate_ids(PROMPTS, max_new_tokens=MOST, batch_size=batch_size) == want


class Counted(LogitsProcessor):
    """OpenAI's penalties, of tokens after the prompt."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in zip(scores, input_ids[:, self.prompt :].tolist(), strict=True):
            for token, count in Counter(ids).items():
                row[token] -= self.frequency * count + self.presence
        return scores


@pytest.mark.parametrize("ahead", [False, True])
def test_penalties_are_of_the_callers_too(ahead: bool, place: Place) -> None:
    """Also where the next step is launched before a token is read, and a slot has several texts one after the other."""
    if place.dtype != torch.float32:
        pytest.skip("in 16 bits other tokens are the most likely")
    reference = made("llama")
    how: dict[str, Any] = {"presence_penalty": 0.4, "frequency_penalty": 0.3}
    want = []
    for ids in PROMPTS:
        rules = LogitsProcessorList([Counted(len(ids), 0.4, 0.3)])
        given = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": MOST, "eos_token_id": [], "repetition_penalty": 1.1}
        want.append(reference.generate(torch.tensor([ids]), logits_processor=rules, **given)[0, len(ids) :].tolist())
    model = loaded("llama", place)
    generation = Generation(decoder_of(model, 2, 64), 2, model.config.vocab, model.device, step_tokens=6, ahead=ahead)
    for ids in PROMPTS:
        generation.add(Request(ids, MOST, rules=Rules(repetition_penalty=1.1, **how)))
    got: list[list[int]] = [[] for _ in PROMPTS]
    while step := generation.step():
        for place_of, token, *_ in step:
            got[place_of].append(token)
    assert got == want
    ended = [row[: row.index(2)] if 2 in row else row for row in want]
    assert model.generate_ids(PROMPTS, max_new_tokens=MOST, repetition_penalty=1.1, **how) == ended


def test_the_caller_goes_before_the_file(place: Place) -> None:
    if place.dtype != torch.float32:
        pytest.skip("in 16 bits other tokens are the most likely")
    model = ftbert.load(saying(repetition_penalty=1.3, min_new_tokens=9), device=place.device)
    assert model.generate_ids(PROMPTS, max_new_tokens=MOST, repetition_penalty=1.0, min_new_tokens=0) == without_rules(ends=True)
    want = theirs(saying(repetition_penalty=1.2, min_new_tokens=4))
    assert model.generate_ids(PROMPTS, max_new_tokens=MOST, repetition_penalty=1.2, min_new_tokens=4) == want


@pytest.mark.parametrize("settings", [{"no_repeat_ngram_size": 2}, {"suppress_tokens": [*range(3, 40)]}, {"bad_words_ids": [[5], [7, 8]]}])
def test_rules_of_transformers_are_arguments(settings: dict[str, Any], place: Place) -> None:
    if place.dtype != torch.float32:
        pytest.skip("in 16 bits other tokens are the most likely")
    model = loaded("llama", place)
    assert model.generate_ids(PROMPTS, max_new_tokens=MOST, **settings) == theirs(saying(**settings, eos_token_id=2))


@pytest.mark.parametrize("limits", [{"max_new_tokens": 5}, {"max_length": 22}, {"max_new_tokens": 6, "max_length": 21}])
def test_lengths_of_the_file_are_defaults(limits: dict[str, int], tmp_path: Path) -> None:
    """Also of a converted folder."""
    reference = saying(**limits, eos_token_id=2)
    reference.save_pretrained(tmp_path / "theirs")
    for folder in (tmp_path / "theirs", convert(tmp_path / "theirs", tmp_path / "ours")):
        model = ftbert.load(folder)
        assert model.generate_ids(PROMPTS) == theirs(reference, {})
        assert model.generate_ids(PROMPTS, max_new_tokens=MOST) == theirs(reference)
    if "max_new_tokens" not in limits:
        with pytest.raises(ValueError, match=r"prompt 0 has 22 tokens, .* allows texts of 22 \(max_length\) .* pass max_new_tokens"):
            model.generate_ids([[5] * 22])


def test_a_config_says_what_no_file_of_generation_does(tmp_path: Path) -> None:
    """As configs did before there was that file."""
    made("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "repetition_penalty": 1.3}))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reference.generation_config.repetition_penalty == 1.3
    assert ftbert.load(tmp_path).generate_ids(PROMPTS, max_new_tokens=MOST) == theirs(reference)


def test_a_converted_live_model_says_what_it_said(tmp_path: Path) -> None:
    reference = saying(repetition_penalty=1.3, sequence_bias={(5,): 2.0, (7, 8): -30.0})
    model = ftbert.load(convert(reference, tmp_path / "ours"))
    assert model.generate_ids(PROMPTS, max_new_tokens=MOST) == theirs(reference)


def test_texts_with_rules_go_on_where_inference_mode_has_ended() -> None:
    model = loaded("llama", Place("cpu", torch.float32))
    with torch.inference_mode():
        generation = Generation(decoder_of(model, 1, 40), 1, model.config.vocab, model.device)
        generation.add(Request(PROMPTS[0], MOST, rules=Rules(repetition_penalty=1.3)))
        got = [token.id for token in generation.step()]
    while step := generation.step():
        got += [token.id for token in step]
    assert got == theirs(saying(repetition_penalty=1.3, eos_token_id=[]))[0]


def test_logits_that_are_not_finite_are_of_the_models_dtype(place: Place) -> None:
    of = copy.deepcopy(made("llama"))
    with torch.no_grad():
        of.lm_head.weight[5] = torch.inf
    with pytest.raises(RuntimeError, match=f"not finite in {place.dtype}"):
        ftbert.load(of, device=place.device, dtype=place.dtype).generate_ids(PROMPTS, repetition_penalty=1.2)


def test_what_is_not_computed_is_named_once() -> None:
    neutral = {"num_beams": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "use_cache": True}
    model = ftbert.load(saying(**neutral))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.generate_ids(PROMPTS, max_new_tokens=MOST) == without_rules(ends=True)
    model = ftbert.load(saying(num_beams=4, exponential_decay_length_penalty=[3, 1.5]))
    with pytest.warns(UserWarning, match=r"generation_config: num_beams=4, exponential_decay_length_penalty=\[3, 1.5\]: not computed"):
        model.generate_ids(PROMPTS[:1], max_new_tokens=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate_ids(PROMPTS[:1], max_new_tokens=1)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0, at most 1e.09; got 0.0"),
        ({"repetition_penalty": "high"}, "repetition_penalty: expected a number; got 'high'"),
        ({"suppress_tokens": 3}, "suppress_tokens: expected a list of token ids; got 3"),
        ({"bad_words_ids": [3]}, r"bad_words_ids: expected lists of token ids; got \[3\]"),
        ({"sequence_bias": [[3]]}, "sequence_bias: expected pairs"),
        ({"min_new_tokens": -1}, "min_new_tokens: expected an integer of at least 0; got -1"),
        ({"max_length": 1.5}, "max_length: expected an integer of at least 0; got 1.5"),
        ({"sequence_bias": [[[3], float("nan")]]}, "sequence_bias: expected pairs"),
        ({"stop_strings": [""]}, "stop_strings: expected a text or several"),
        ({"stop_strings": 5}, "stop_strings: expected a text or several, none empty; got 5"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected an integer or several; got '</s>'"),
    ],
)
def test_a_file_that_means_nothing(said: dict[str, Any], words: str, tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=f"generation_config.json: {words}"):
        stated(ftbert.load(tmp_path))


def test_words_that_the_model_does_not_have(place: Place) -> None:
    model = ftbert.load(saying(bad_words_ids=[[5, 400]]), device=place.device)
    with pytest.raises(ValueError, match=r"sequence_bias, bad_words_ids: expected ids from 0 to 95; got \[5, 400\]"):
        model.generate_ids(PROMPTS)


def test_values_that_mean_nothing(place: Place) -> None:
    model = loaded("llama", place)
    for words, how in [
        ("repetition_penalty must be a number above 0, at most 1e.09; got 0", {"repetition_penalty": 0}),
        ("repetition_penalty must be a number above 0, at most 1e.09; got '1.1'", {"repetition_penalty": "1.1"}),
        ("repetition_penalty must be a number .*; got 1e-300", {"repetition_penalty": 1e-300}),
        ("temperature must be a number of at least 0; got '0.5'", {"temperature": "0.5"}),
        ("top_p must be above 0 and at most 1; got '0.5'", {"top_p": "0.5"}),
        ("presence_penalty must be a number from -1e.09 to 1e.09; got nan", {"presence_penalty": float("nan")}),
        ("frequency_penalty must be a number .*; got inf", {"frequency_penalty": float("inf")}),
        ("frequency_penalty must be a number .*; got 1e.300", {"frequency_penalty": 1e300}),
        ("logit_bias: expected token ids and numbers .*; got 5: 1e.39", {"logit_bias": {5: 1e39}}),
        ("min_new_tokens must be an integer of at least 0; got -1", {"min_new_tokens": -1}),
        ("min_p must be from 0 to 1; got 2", {"min_p": 2}),
    ]:
        with pytest.raises(ValueError, match=words):
            model.generate_ids([[1]], **how)  # type: ignore[arg-type]
