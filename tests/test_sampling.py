"""From logits to tokens: transformers' probabilities, draws that follow them, logits that are no numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import Place
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import made
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import ftbert
from ftbert._library import load_library
from ftbert.decoding.sampling import Sampling
from ftbert.decoding.step_sampling import StepSampling, draw, generator_of

load_library()


def step_of(sampling: Sampling, logits: torch.Tensor) -> StepSampling:
    return StepSampling([sampling] * len(logits), logits.device)


def probabilities(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    weights = step_of(sampling, logits).weights(logits)
    return weights / weights.sum(-1, keepdim=True)


def drawn(sampling: Sampling, logits: torch.Tensor) -> list[int]:
    """Each row with the numbers of a text of its own."""
    return list(step_of(sampling, logits).choose(logits, [one for i in range(len(logits)) if (one := generator_of(sampling.at(i)))]).tolist())


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(0.1, 3), top_k=st.one_of(st.none(), st.integers(2, 60)), top_p=st.one_of(st.none(), st.floats(0.05, 1)),
    min_p=st.one_of(st.none(), st.floats(0, 1)), seed=st.integers(0, 1000),
)  # fmt: skip
def test_probabilities_are_those_of_transformers(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, seed: int
) -> None:
    logits = 3 * torch.randn(4, 50 if seed % 2 else 2000, generator=torch.Generator().manual_seed(seed))
    want = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p is not None and top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    if min_p is not None:
        want = MinPLogitsWarper(min_p)(None, want)
    got = probabilities(Sampling(temperature, top_k, top_p, min_p=min_p), logits)
    torch.testing.assert_close(got.float(), want.softmax(-1), atol=1e-6, rtol=1e-5)


SAMPLINGS = st.builds(
    Sampling, st.sampled_from([0.0, 0.5, 1.3]), st.sampled_from([None, 1, 3, 700]), st.sampled_from([None, 0.3, 0.999, 1.0]),
    st.integers(0, 99), st.sampled_from([None, 0.0, 0.2]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(asked=st.lists(SAMPLINGS, min_size=1, max_size=6), vocab=st.sampled_from([1, 2, 50, 1100, 60_000]), scale=st.sampled_from([0.1, 4.0]))
def test_a_text_is_drawn_as_it_is_alone(asked: list[Sampling], vocab: int, scale: float) -> None:
    """Bit for bit, whatever those beside it leave out; greedy ones are drawn from nothing."""
    logits = scale * torch.randn(len(asked), vocab, generator=torch.Generator().manual_seed(vocab))
    found = StepSampling(asked, logits.device).choose(logits, [made for one in asked if (made := generator_of(one))])
    assert found.tolist() == [drawn(one, row[None])[0] for one, row in zip(asked, logits, strict=True)]
    some = [i for i, one in enumerate(asked) if not one.greedy]
    if some:
        together = StepSampling(asked, logits.device).weights(logits[some])
        for i, row in zip(some, together, strict=True):
            assert torch.equal(row, step_of(asked[i], logits[i : i + 1]).weights(logits[i : i + 1])[0])


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(20_000, 1)
    sampling = Sampling(temperature=0.7, top_k=3, seed=1)
    found = step_of(sampling, logits).choose(logits, [torch.Generator().manual_seed(1)] * len(logits))
    shares = found.bincount(minlength=4) / len(logits)
    assert float((shares - probabilities(sampling, logits[:1])[0]).abs().max()) < 0.015 and shares[3] == 0


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-300, 1e3)), min_size=1, max_size=12).filter(any),
    number=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])),
)
def test_a_draw_is_where_the_sum_passes_the_number(weights: list[float], number: float) -> None:
    likely = torch.tensor([weights], dtype=torch.float64)
    (found,) = draw(likely, torch.tensor([number], dtype=torch.float64)).tolist()
    sums = likely.cumsum(-1)[0]
    assert weights[found] > 0 and sums[found] > number * sums[-1] and (found == 0 or sums[found - 1] <= number * sums[-1])


@settings(max_examples=30, deadline=None)
@given(temperature=st.sampled_from([5e-324, 1e-300, 1e-40, 1e-9]), seed=st.integers(0, 99))
def test_the_smallest_temperatures_take_the_most_likely_token(temperature: float, seed: int) -> None:
    logits, sampling = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)), Sampling(temperature, seed=seed)
    assert drawn(sampling, logits) == logits.argmax(-1).tolist()


def test_a_seed_draws_alike_on_every_device(place: Place) -> None:
    logits = 2 * torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).to(place.dtype)
    sampling = Sampling(0.8, top_k=50, top_p=0.9, seed=4)
    found = [drawn(sampling, one) for one in (logits.float().cpu(), logits.to(place.device))]
    assert found[0] == found[1] and len(set(found[0])) > 20


def test_a_logit_of_minus_infinity_is_never_chosen(place: Place) -> None:
    logits = torch.full((200, 3), -torch.inf, dtype=place.dtype, device=place.device)
    logits[:, 1:] = 0
    assert set(drawn(Sampling(2.0, seed=0), logits)) == {1, 2}


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "seed": 0}, {"temperature": 0.7, "top_k": 5, "top_p": 0.5}])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite(place: Place, how: dict[str, Any], wrong: float) -> None:
    of = copy.deepcopy(made("llama"))
    with torch.no_grad():
        of.lm_head.weight[5:7] = wrong
    model = ftbert.load(of, device=place.device, dtype=place.dtype)
    with pytest.raises(RuntimeError, match=f"logits of the next token are not finite in {place.dtype}"):
        model.generate_ids([[3, 4], [5]], max_new_tokens=2, **how)
