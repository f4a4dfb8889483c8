"""Products and what stands around them by whichever kernels the plans choose, against the same in parts and float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import reference
import torch
from conftest import Place, places_here
from heads import as_rotary, frequencies
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ftbert._library import load_library

load_library()
ops = torch.ops.ftbert
EPS, POSITIONS = 1e-5, 60
HERE = places_here()


@dataclass(frozen=True)
class Sentence:
    m: int
    n: int
    k: int
    q8: bool
    bias: bool
    kind: str  # of the norms
    before: bool
    ending: str  # an activation, "gate", "heads", or what is left of a residual sum: "sum", "norm", "beside"
    size: int  # of a head

    def numbers(self, place: Place) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.m + self.n + self.k)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(place.dtype)

        made = {"a": random(self.m, self.k), "weight": random(self.n, self.k) / math.sqrt(self.k), "bias": random(self.n)}
        made |= {"residual": random(self.m, self.n), "before": 1 + random(self.k) / 4, "after": 1 + random(self.n) / 4}
        if self.q8:
            made["weight"] = torch.randint(-127, 128, (self.n, self.k), generator=generator).to(torch.int8)
            made["scales"] = (torch.rand(self.n, self.k // 32, generator=generator) / (64 * math.sqrt(self.k))).half()
        made["positions"] = torch.randint(0, POSITIONS, (self.m,), generator=generator).int()
        return {name: one.to(place.device) for name, one in made.items()}


@st.composite
def sentences(draw: st.DrawFn) -> Sentence:
    ending = draw(st.sampled_from(["none", "gelu", "relu", "gate", "heads", "sum", "norm", "beside"]))
    size = draw(st.sampled_from([64, 128]))
    return Sentence(
        m=draw(st.one_of(st.integers(1, 9), st.integers(10, 300), st.sampled_from([1056, 2100]))),
        n=3 * size * draw(st.integers(1, 3)) if ending == "heads" else 64 * draw(st.integers(1, 12)),
        k=64 * draw(st.integers(1, 12)),
        q8=draw(st.booleans()),
        bias=draw(st.booleans()),
        kind=draw(st.sampled_from(["layer", "rms"])),
        before=draw(st.booleans()),
        ending=ending,
        size=size,
    )


def run(s: Sentence, x: dict[str, Tensor], table: Tensor, apart: bool) -> Tensor:
    summed = s.ending in ("sum", "norm", "beside")
    return ops.product(
        x["a"],
        x["weight"],
        x["bias"] if s.bias else None,
        "silu" if s.ending == "gate" else s.ending if s.ending in ("gelu", "relu") else "none",
        s.ending == "gate",
        x.get("scales"),
        x["before"] if s.before else None,
        x["residual"] if summed else None,
        x["after"] if s.ending in ("norm", "beside") else None,
        s.ending == "beside",
        s.kind,
        EPS,
        heads=s.n // (3 * s.size) if s.ending == "heads" else 0,
        positions=x["positions"] if s.ending == "heads" else None,
        table=table if s.ending == "heads" else None,
        apart=apart,
    )


def exact(s: Sentence, x: dict[str, Tensor], angles: Tensor) -> Tensor:
    def norm(rows: Tensor, gamma: Tensor) -> Tensor:
        of = reference.layernorm if s.kind == "layer" else reference.rmsnorm
        return of(rows, gamma.double(), 0.0, EPS)

    rows, weight = x["a"].double(), x["weight"].double()
    if s.q8:
        weight = weight * x["scales"].double().repeat_interleave(32, 1)
    made = (norm(rows, x["before"]) if s.before else rows) @ weight.T + (x["bias"].double() if s.bias else 0)
    if s.ending == "gate":
        return reference.gate(made, "silu")
    if s.ending == "heads":
        heads = s.n // (3 * s.size)
        return as_rotary(made, heads, heads, angles[x["positions"].long()], False, ("none", False, 0.0, False), [x["a"]] * 4)
    if s.ending in ("sum", "norm", "beside"):
        total = made + x["residual"].double()
        normed = total if s.ending == "sum" else norm(total, x["after"])
        return torch.stack([total, normed]) if s.ending == "beside" else normed
    return reference.activation(made, s.ending)


@settings(deadline=None, max_examples=60)
@given(place=st.sampled_from(HERE), s=sentences())
def test_every_route_is_right(place: Place, s: Sentence) -> None:
    if s.q8 and place.device == "cuda" and place.dtype == torch.float32:
        return  # of which there is no product
    x = s.numbers(place)
    of = frequencies(s.size).to(place.device)
    table, angles = ops.rotary_table(of, 1.0, POSITIONS), torch.arange(POSITIONS, device=place.device)[:, None] * of
    want = exact(s, x, angles)
    for apart in (True, False):
        got = run(s, x, table, apart).double()
        error = ((got - want).norm() / want.norm()).item()
        limit = 0.02 if s.q8 else max(4e-6, 4 * place.eps)  # rows are quantised to 8 bits too
        assert got.shape == want.shape and error <= limit, f"{s}, apart {apart}: error {error:.2g}"


@pytest.mark.parametrize(
    "words", [{"activation": "gelu", "residual": True}, {"after": True}, {"residual": True, "beside": True}], ids=str
)
def test_what_does_not_go_together_is_refused(words: dict[str, bool | str]) -> None:
    x = torch.ones(2, 64)
    given_ = {name: {"residual": x, "after": x[0]}.get(name, value) for name, value in words.items()}
    with pytest.raises(RuntimeError, match=r"residual: expected no activation|after, beside: expected"):
        ops.product(x, torch.ones(64, 64), **given_)
