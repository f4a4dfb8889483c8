"""How much of a prompt a step computes: by the seconds that steps take, whatever the machine."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import Place
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import loaded

from ftbert.decoding import Generation, Request
from ftbert.decoding import generation as module
from ftbert.decoding.decoder import decoder_of
from ftbert.decoding.pace import Pace

WAIT = 0.05


@settings(max_examples=200, deadline=None)
@given(
    token=st.floats(1e-6, 0.02), alone=st.floats(1e-4, 0.3), fixed=st.floats(0, 0.002), noise=st.floats(0, 0.1),
    most=st.sampled_from([64, 8192]),
)  # fmt: skip
def test_steps_take_as_long_as_allowed(token: float, alone: float, fixed: float, noise: float, most: int) -> None:
    """Of machines of any speed: after the first steps a step with a piece is neither longer than allowed, nor shorter
    than half of that where the prompt has tokens for more."""
    pace, shake = Pace(WAIT, most), 1 + noise
    for _ in range(3):
        pace.took(alone, 0)
    allowed = max(WAIT, alone)
    for step in range(30):
        size = pace.size
        seconds = alone + fixed + size * token * (shake if step % 2 else 1 / shake)
        if step > 15:
            assert seconds - alone <= 1.3 * allowed or size == 1
            assert size in (most, 1) or seconds - alone >= 0.4 * allowed
        pace.took(seconds, size)
    assert 1 <= pace.size <= most and int(f"{pace.size:b}"[4:] or "0") == 0


def test_without_a_bound_all_of_a_step_is_allowed() -> None:
    pace = Pace(None, 8192)
    assert pace.size == 8192 and not pace.bounded


def test_short_prompts_tell_nothing_about_long_ones() -> None:
    pace = Pace(WAIT, 8192)
    for _ in range(20):
        pace.took(0.01, pace.size)
    long = pace.size
    for _ in range(20):
        pace.took(0.02, 3)  # a step's fixed time
    assert pace.size == long == 8192
    for _ in range(6):
        pace.took(0.5, 100)  # but where they take too long
    assert pace.size < 20


def test_pieces_grow_again_where_every_step_takes_longer() -> None:
    """Other work came while a prompt was computed: steps without it are as long now."""
    pace = Pace(WAIT, 8192)
    for late in (0.0, 0.1):
        for _ in range(80):
            tokens = 0 if pace.rests else pace.size
            pace.took(0.02 + late + 1e-3 * tokens, tokens)
        assert 0.8 * max(WAIT, 0.02 + late) < 1e-3 * pace.size < 1.2 * max(WAIT, 0.02 + late)


def test_other_work_on_the_machine_makes_pieces_no_shorter() -> None:
    """Half of the steps take 0.2 s longer; then the machine really is as slow."""
    pace, shake, sizes = Pace(WAIT, 8192), random.Random(0), []
    for _ in range(300):
        late = 0.2 * shake.randint(0, 1)
        tokens = 0 if pace.rests else pace.size
        pace.took(0.02 + 1e-3 * tokens + late, tokens)
        sizes.append(pace.size)
    assert sum(size >= 32 for size in sizes) > 240
    for _ in range(12):
        pace.took(0.02 + 1e-2 * pace.size, pace.size)
    assert pace.size <= 7


@pytest.mark.parametrize("seconds", [1e-5, 1e-3, 2e-2])
def test_a_growing_text_does_not_wait_for_a_prompt(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on with the tokens computed."""
    model, now = loaded("llama", Place("cpu", torch.float32)), [0.0]

    class Timed:
        def __init__(self, decoder: Any) -> None:
            self._decoder = decoder

        def forward(self, ids: torch.Tensor, *rest: Any) -> Any:
            now[0] += 1e-3 + seconds * len(ids)
            return self._decoder.forward(ids, *rest)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._decoder, name)

    class Watch(module.Stopwatch):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device, lambda: now[0])

    monkeypatch.setattr(module, "Stopwatch", Watch)
    generation = Generation(Timed(decoder_of(model, 2, 96)), 2, model.config.vocab, model.device, wait_seconds=WAIT, reuse=False)
    for i in range(3):  # what a token takes is known from here on
        place = generation.add(Request([5 + i] * 90, 2))
        while generation.step():
            pass
    growing = generation.add(Request([3], 80))
    generation.step()
    generation.step()
    generation.add(Request([9] * 90, 4))
    waits, computed = [], False
    while made := generation.step():
        waits.append(now[0])
        computed |= any(one.place not in (growing, place) for one in made)
    assert computed
    longest = max(b - a for a, b in zip(waits, waits[1:], strict=False))
    assert longest <= 1.5 * max(WAIT, 1e-3 + 2 * seconds) + 1e-3 + 2 * seconds
