"""Texts that come and go between the steps of one generation: each has the tokens that it has alone."""

from __future__ import annotations

import copy
import inspect
import random
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import pytest
import torch
from conftest import Place
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import FAMILIES, loaded
from language_models import made as reference

import ftbert
from ftbert import decoding
from ftbert.decoding import Generation, Request, Rules, Sampling, Token
from ftbert.decoding.decoder import decoder_of
from ftbert.decoding.slots import common_length

POSITIONS = 64
CPU = Place("cpu", torch.float32)


@pytest.fixture
def model(place: Place) -> ftbert.Model:
    if place.dtype != torch.float32:
        pytest.skip("in 16 bits products of other sizes round differently")
    return loaded("llama", place)


class Counted:
    """A decoder, and the tokens of its calls."""

    def __init__(self, model: ftbert.Model, slots: int) -> None:
        self._decoder, self.sizes = decoder_of(model, slots, POSITIONS), list[int]()

    def forward(self, ids: torch.Tensor, *rest: Any) -> Any:
        self.sizes.append(len(ids))
        return self._decoder.forward(ids, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def made(model: ftbert.Model, slots: int, decoder: Any = None, **how: Any) -> Generation:
    return Generation(decoder or decoder_of(model, slots, POSITIONS), slots, model.config.vocab, model.device, **how)


def all_of(generation: Generation) -> dict[int, list[Token]]:
    found: dict[int, list[Token]] = {}
    while tokens := generation.step():
        for one in tokens:
            found.setdefault(one.place, []).append(one)
    return found


def ids_of(tokens: list[Token]) -> list[int]:
    return [one.id for one in tokens]


def alone(model: ftbert.Model, request: Request) -> list[int]:
    generation = made(model, 1, reuse=False)
    place = generation.add(request)
    return ids_of(all_of(generation)[place])


def prompt(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 90), k=count)


# ---- texts that come and go -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """A text that comes after so many steps, and is cancelled after so many tokens; its prompt continues another's."""

    request: Request
    after: int
    cancelled: int | None


def sampled() -> st.SearchStrategy[Sampling]:
    drawn = st.builds(
        Sampling, st.sampled_from([0.7, 1.5]), st.sampled_from([None, 5, 30]), st.sampled_from([None, 0.8, 1.0]),
        st.integers(0, 9), st.sampled_from([None, 0.1]),
    )  # fmt: skip
    return st.one_of(st.just(Sampling()), drawn)


def ruled() -> st.SearchStrategy[Rules]:
    some = st.builds(
        Rules, repetition_penalty=st.sampled_from([1.0, 1.3]), presence_penalty=st.sampled_from([0.0, 0.4]),
        frequency_penalty=st.sampled_from([0.0, 0.3]), no_repeat_ngram_size=st.sampled_from([0, 2]),
        min_new_tokens=st.sampled_from([None, 4]), logit_bias=st.sampled_from([(), ((5, 3.0), (9, -2.0))]),
        bad_words_ids=st.sampled_from([(), ((11,), (12, 13))]), begin_suppress_tokens=st.sampled_from([(), (40, 41)]),
        ends=st.sampled_from([frozenset(), frozenset(range(3, 20))]),
    )  # fmt: skip
    return st.one_of(st.just(Rules()), some)


@st.composite
def histories(draw: Any) -> list[Event]:
    found: list[Event] = []
    for _ in range(draw(st.integers(1, 6))):
        ids = prompt(draw(st.integers(0, 5)), draw(st.integers(1, 30)))
        if found and draw(st.booleans()):  # a chat's next turn, or the same prompt again
            before = list(draw(st.sampled_from(found)).request.prompt)
            ids = (before[: draw(st.integers(1, len(before)))] + ids[: draw(st.integers(0, 8))])[:30]
        request = Request(ids, draw(st.integers(1, 12)), draw(sampled()), draw(ruled()), draw(st.sampled_from([None, 0, 3])))
        found.append(Event(request, draw(st.integers(0, 12)), draw(st.one_of(st.none(), st.integers(0, 5)))))
    return found


@settings(max_examples=25, deadline=None)
@given(
    events=histories(), slots=st.integers(1, 4), step_tokens=st.sampled_from([1, 7, 8192]), reuse=st.booleans(), ahead=st.booleans()
)  # fmt: skip
def test_texts_that_come_and_go_are_those_alone(
    events: list[Event], slots: int, step_tokens: int, reuse: bool, ahead: bool
) -> None:
    model = loaded("llama", CPU)
    generation = made(model, slots, step_tokens=step_tokens, reuse=reuse, ahead=ahead)
    place_of: dict[int, int] = {}
    got: dict[int, list[Token]] = {i: [] for i in range(len(events))}
    step = 0
    while len(place_of) < len(events) or generation.waiting or generation.running:
        for i, event in enumerate(events):
            if i not in place_of.values() and event.after <= step:
                place_of[place := generation.add(event.request)] = i
                if event.cancelled == 0:
                    generation.end(place)
        step += 1
        for token in generation.step():
            i = place_of[token.place]
            assert not (got[i] and got[i][-1].end) and len(got[i]) != events[i].cancelled, "a token behind the end"
            got[i].append(token)
            if len(got[i]) == events[i].cancelled:
                generation.end(token.place)
    assert generation.step() == []
    for i, event in enumerate(events):
        want = alone(model, event.request)
        assert ids_of(got[i]) == want[: event.cancelled], event
        if event.cancelled is None:
            ends = event.request.rules.ends
            assert [one.end for one in got[i]] == [""] * (len(want) - 1) + ["eos" if want[-1] in ends else "length"]
        assert all((one.logprob is None) == (event.request.logprobs is None) for one in got[i])
        assert all(len(one.top) == (event.request.logprobs or 0) for one in got[i])


def test_other_threads_add_and_end(model: ftbert.Model) -> None:
    """While one steps: no text is lost, those that were not cancelled are whole."""
    requests = [Request(prompt(i, 1 + i % 9), 3 + i % 5, Sampling(1.0, seed=i)) for i in range(24)]
    generation, places = made(model, 3), dict[int, int]()

    def come(first: int) -> None:
        for i in range(first, len(requests), 4):
            places[i] = generation.add(requests[i])
            if i % 5 == 0:
                generation.end(places[i])

    threads = [Thread(target=come, args=(first,)) for first in range(4)]
    for one in threads:
        one.start()
    got: dict[int, list[int]] = {}
    while generation.waiting or generation.running or any(one.is_alive() for one in threads):
        for token in generation.step():
            got.setdefault(token.place, []).append(token.id)
    for one in threads:
        one.join()
    for token in generation.step():
        got.setdefault(token.place, []).append(token.id)
    assert sorted(places.values()) == list(range(24))
    for i, place in places.items():
        if i % 5:
            assert got[place] == alone(model, requests[i])


def test_an_end_of_what_has_ended_is_nothing(model: ftbert.Model) -> None:
    generation = made(model, 1)
    first, second = (generation.add(Request(prompt(i, 4), 2)) for i in range(2))
    assert generation.waiting == 2 and generation.running == 0
    for place in (second, second, 77):
        generation.end(place)
    assert list(all_of(generation)) == [first]
    generation.end(first)
    assert generation.step() == [] and generation.waiting == generation.running == 0


def test_reset_after_an_error(model: ftbert.Model) -> None:
    """Of the decoder's, in the middle of texts: what comes after is whole."""

    class Failing(Counted):
        def forward(self, ids: torch.Tensor, *rest: Any) -> Any:
            if len(self.sizes) == 3:
                self.sizes.append(0)
                raise RuntimeError("out of memory")
            return super().forward(ids, *rest)

    generation = made(model, 2, Failing(model, 2))
    requests = [Request(prompt(i, 7), 6) for i in range(3)]
    for one in requests:
        generation.add(one)
    with pytest.raises(RuntimeError, match="out of memory"):
        all_of(generation)
    generation.reset()
    assert generation.step() == [] and generation.waiting == generation.running == 0
    places = [generation.add(one) for one in requests]
    got = all_of(generation)
    assert [ids_of(got[place]) for place in places] == [alone(model, one) for one in requests]


def test_a_text_without_finite_logits_ends_alone(place: Place) -> None:
    """Those beside it, and the next one in its slot, are whole."""
    of = copy.deepcopy(reference("llama"))
    with torch.no_grad():
        of.model.embed_tokens.weight[50] = torch.nan
    broken = ftbert.load(of, device=place.device, dtype=place.dtype)
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        generation = made(broken, 2)
        asked = [Request([3, 50, 4], 5, sampling), Request([5, 6], 5, sampling), Request([3, 7], 5, sampling, logprobs=1)]
        places = [generation.add(one) for one in asked]
        got = all_of(generation)
        (wrong,) = got[places[0]]
        assert wrong.end == "error" and wrong.id == -1
        assert all(len(got[place]) == 5 and got[place][-1].end == "length" for place in places[1:])
        if place.dtype == torch.float32:
            assert [ids_of(got[place]) for place in places[1:]] == [alone(broken, one) for one in asked[1:]]


# ---- what slots keep ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chats_next_turn_computes_what_is_new(family: str, place: Place) -> None:
    """Also with another chat in between, in the other slot; past windows."""
    if place.dtype != torch.float32:
        pytest.skip("in 16 bits products of other sizes round differently")
    model = loaded(family, place)
    decoder = Counted(model, 2)
    generation = made(model, 2, decoder)
    history: dict[int, list[int]] = {0: prompt(0, 20), 1: prompt(1, 17)}
    for turn in range(3):
        for chat, ids in history.items():
            request = Request(list(ids), 5)
            decoder.sizes.clear()
            text = generation.add(request)
            tokens = all_of(generation)[text]
            # All but the last token of the answer is in the cache, and that and the new turn are not.
            assert tokens[0].cached == (0 if turn == 0 else len(ids) - 4 - 1)
            assert decoder.sizes == [len(ids) - tokens[0].cached, 1, 1, 1, 1]
            assert ids_of(tokens) == alone(model, request)
            ids += [*ids_of(tokens), *prompt(10 * turn + chat, 4)]


def test_the_slot_that_was_used_least_lately_is_given_up(model: ftbert.Model) -> None:
    generation = made(model, 2)

    def cached(ids: list[int]) -> int:
        place = generation.add(Request(ids, 1))
        return all_of(generation)[place][0].cached

    a, b, c = (prompt(i, 20) for i in range(3))
    assert [cached(one) for one in (a, b, a, c, a, b)] == [0, 0, 19, 0, 19, 0]
    generation, template = made(model, 3), prompt(4, 40)  # a copied beginning counts as a use
    assert [cached(one) for one in (template, a, b, [*template[:18], 5], c, template)] == [0, 0, 0, 18, 0, 39]


def test_texts_of_one_prompt_compute_it_once(model: ftbert.Model) -> None:
    decoder, ids = Counted(model, 4), prompt(3, 40)
    generation = made(model, 4, decoder)
    asked = [Request(ids, 6, Sampling(1.0, seed=i)) for i in range(4)]
    places = [generation.add(one) for one in asked]
    got = all_of(generation)
    assert [ids_of(got[place]) for place in places] == [alone(model, one) for one in asked]
    assert decoder.sizes[:2] == [40, 1 + 3] and sum(decoder.sizes) == 40 + 3 + 4 * 5
    assert [got[place][0].cached for place in places] == [0, 39, 39, 39]


def test_a_copied_beginning_leaves_its_source(model: ftbert.Model) -> None:
    """A short beginning in common with a long chat: that chat's slot keeps all of it."""
    generation, chat = made(model, 2), prompt(0, 50)
    requests = [Request(chat, 3), Request([*chat[:18], *prompt(1, 3)], 3), Request([*chat, 5], 3)]
    cached = []
    for one in requests:
        place = generation.add(one)
        tokens = all_of(generation)[place]
        cached.append(tokens[0].cached)
        assert ids_of(tokens) == alone(model, one)
    assert cached == [0, 18, 50]


@settings(max_examples=200, deadline=None)
@given(one=st.lists(st.integers(0, 1)), other=st.lists(st.integers(0, 1)), both=st.lists(st.integers(0, 3)))
def test_common_length(one: list[int], other: list[int], both: list[int]) -> None:
    one, other = both + one, both + other
    want = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_length(one, other) == want


# ---- what is asked for ----------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_models_logits(model: ftbert.Model) -> None:
    """Whatever the rules and the temperature; each text as many as it asks for."""
    ids = prompt(0, 9)
    rules = Rules(logit_bias=((7, 50.0),), repetition_penalty=1.2)
    asked = [Request(ids, 4, Sampling(0.7, seed=3), rules, 5), Request(ids, 4), Request(ids, 4, logprobs=0), Request(ids, 4, logprobs=2)]
    generation = made(model, 4)
    places = [generation.add(one) for one in asked]
    got = all_of(generation)
    for place, request in zip(places, asked, strict=True):
        text = [*ids, *ids_of(got[place])]
        with torch.no_grad():
            logits = reference("llama")(torch.tensor([text])).logits[0].log_softmax(-1)
        for i, token in enumerate(got[place]):
            want = logits[len(ids) - 1 + i]
            if request.logprobs is None:
                assert token.logprob is None and token.top == ()
                continue
            assert token.logprob == pytest.approx(float(want[token.id]), abs=1e-4)
            values, order = want.topk(request.logprobs)
            assert [one for one, _ in token.top] == order.tolist()
            assert [value for _, value in token.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert got[places[0]][0].id == 7


def test_a_bias_is_added_to_its_logit(model: ftbert.Model) -> None:
    ids = [prompt(0, 5)]
    assert model.generate_ids(ids, max_new_tokens=3, logit_bias={8: 1e3}) == [[8, 8, 8]]
    free = model.generate_ids(ids, max_new_tokens=3)
    assert model.generate_ids(ids, max_new_tokens=3, logit_bias={}) == free
    assert free[0][0] not in model.generate_ids(ids, max_new_tokens=3, logit_bias={free[0][0]: -1e3})[0]


def test_rules_are_each_texts_own(model: ftbert.Model) -> None:
    """Texts of one prompt side by side, each with a rule that changes it, and would change the others."""
    ids = prompt(5, 9)
    free = alone(model, Request(ids, 12))
    first, second, third = free[:3]
    rules = [
        Rules(bad_words_ids=((first, second),)), Rules(sequence_bias=(((first, second), -30.0),)),
        Rules(bad_words_ids=((second,),)), Rules(sequence_bias=(((third,), -30.0),)),
        Rules(begin_suppress_tokens=(first,)), Rules(suppress_tokens=(first, third)),
        Rules(logit_bias=((first, -30.0), (5, 2.0))), Rules(presence_penalty=2.0), Rules(frequency_penalty=1.5),
        Rules(repetition_penalty=1.7), Rules(no_repeat_ngram_size=1), Rules(no_repeat_ngram_size=2),
        *(Rules(min_new_tokens=n, ends=frozenset(range(90))) for n in (0, 3, 4, 7)),
        *(Rules(min_length=n, ends=frozenset(free)) for n in (10, 12)),
    ]  # fmt: skip
    want = [alone(model, Request(ids, 12, rules=one)) for one in rules]
    assert all(text != free for text in want)
    assert [len(text) for text in want[-6:-2]] == [1, 4, 5, 8]
    for ahead in (False, True):
        generation = made(model, len(rules) + 1, ahead=ahead)
        places = [generation.add(Request(ids, 12, rules=one)) for one in (*rules, Rules())]
        got = all_of(generation)
        assert [ids_of(got[place]) for place in places] == [*want, free]


def test_no_token_ends_a_text_that_ignores_ends(model: ftbert.Model) -> None:
    ids = [prompt(0, 5)]
    want = model.generate_ids(ids, max_new_tokens=6, logit_bias={2: 1e3}, ignore_eos=True)
    assert want == [[2] * 6] and model.generate_ids(ids, max_new_tokens=6, logit_bias={2: 1e3}) == [[]]


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ("prompt has no tokens", {"prompt": []}),
        ("prompt: expected token ids from 0 to 95; got 96 at place 1", {"prompt": [3, 96]}),
        ("prompt: expected token ids from 0 to 95; got -1 at place 0", {"prompt": [-1]}),
        ("prompt has 60 tokens, and 5 may follow; the cache has 64 positions", {"prompt": [3] * 60, "most": 5}),
        ("most must be a positive integer; got 0", {"most": 0}),
        ("most must be a positive integer; got True", {"most": True}),
        ("logprobs must be an integer from 0 to 20; got 21", {"logprobs": 21}),
        ("logprobs must be an integer from 0 to 20; got -1", {"logprobs": -1}),
        ("logit_bias: expected ids from 0 to 95; got 96", {"rules": Rules(logit_bias=((3, 1.0), (96, 1.0)))}),
    ],
)
def test_requests_that_cannot_be(model: ftbert.Model, words: str, how: dict[str, Any]) -> None:
    generation = made(model, 1)
    with pytest.raises(ValueError, match=words):
        generation.add(replace(Request([3, 4], 2), **how))
    assert generation.waiting == 0 and generation.step() == []


def test_names_of_the_face_are_no_modules() -> None:
    assert not [name for name in decoding.__all__ if inspect.ismodule(getattr(decoding, name))]


def test_biases_that_mean_nothing(model: ftbert.Model) -> None:
    for words, bias in [
        ("logit_bias: expected ids from 0 to 95; got 400", {400: 1.0}),
        ("logit_bias: expected token ids and numbers from -1e.09 to 1e.09; got 'a': 1", {"a": 1}),
        ("logit_bias: expected token ids and numbers from -1e.09 to 1e.09; got 3: nan", {3: float("nan")}),
        ("logit_bias: expected token ids and numbers, as a dict; got 5", 5),
    ]:
        with pytest.raises(ValueError, match=words):
            model.generate_ids([[3]], logit_bias=bias)
    with pytest.raises(ValueError, match="ignore_eos must be True or False; got 3"):
        model.generate_ids([[3]], ignore_eos=3)
