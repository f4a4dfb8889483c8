"""Masks with gaps: positions past the table, and distances past the table of a relative bias."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import Place
from families import make_model

import ftbert
from ftbert.converters.families import FAMILIES

COUNTED = [name for name, family in FAMILIES.items() if family.fixed.get("positions.kind") == "from_padding"]


def holed(columns: int, pad: int, kept: list[int], filler: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [1, columns] with ordinary ones at `kept` and `filler` (the padding id) between, and the mask of `kept`."""
    ids = torch.full((1, columns), pad if filler is None else filler)
    mask = torch.zeros_like(ids)
    ids[0, kept] = torch.arange(len(kept)) + 5
    mask[0, kept] = 1
    return ids, mask


@pytest.mark.parametrize("columns", [30, 3000])
@pytest.mark.parametrize("family", COUNTED)
def test_positions_past_the_table(place: Place, family: str, columns: int) -> None:
    """Masked ids that are not padding take a position, too."""
    reference = make_model(family, "encoder", 0)
    pad = reference.config.pad_token_id
    reference = make_model(family, "encoder", 0, max_position_embeddings=21 + pad)
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    ids, mask = holed(columns, pad, [0, columns - 1], filler=5)
    other = torch.full_like(ids, pad)  # a neighbour that stays right
    other[0, :7] = 6
    ids, mask = torch.cat([ids, other]).to(place.device), torch.cat([mask, (other != pad).long()]).to(place.device)
    if place.device == "cpu":
        with pytest.raises(RuntimeError, match=rf"at \[0, {columns - 1}\] is number {columns} .* positions for 20"):
            model(ids, mask)
        ids[0, 1:-1] = pad
        hidden = model(ids, mask).last_hidden_state
        with torch.no_grad():
            expected = reference(ids, attention_mask=mask).last_hidden_state
        assert_close(hidden[mask.bool()], expected[mask.bool()], atol=3e-5)
        return
    for given in (mask, mask.cpu()):
        hidden = model(ids, given).last_hidden_state
        assert hidden[0, -1].isnan().all() and not hidden[1].isnan().any()
        alone = model(ids[1:, :7]).last_hidden_state
        assert_close(hidden[1, :7], alone[0], atol=32 * place.eps)


@pytest.mark.parametrize("path", ["auto", "general"])
@pytest.mark.parametrize("columns", [40, 400, 1000])
@torch.no_grad()
def test_a_relative_bias_over_gaps(place: Place, columns: int, path: str) -> None:
    """By the original columns, however far apart; in a short table, a long one, and one filled to its last place."""
    generator = torch.Generator().manual_seed(columns)
    for positions in (22, 402):
        reference = make_model("mpnet", "encoder", 2, max_position_embeddings=positions)
        model = ftbert.load(reference, device=place.device, dtype=place.dtype, attention=path)
        pad = reference.config.pad_token_id
        middle = torch.randperm(columns - 2, generator=generator)[: positions - 4].sort().values + 1
        for kept in ([0, columns - 1], [0, *middle.tolist(), columns - 1], list(range(20))):
            ids, mask = (x.to(place.device) for x in holed(columns, pad, [k for k in kept if k < columns][: positions - 2]))
            ids = torch.where(mask.bool(), 5 + ids % 90, pad)
            got = model(ids, mask).last_hidden_state[mask.bool()]
            theirs: Any = copy.deepcopy(reference).to(place.device)
            expected = theirs(ids, attention_mask=mask).last_hidden_state[mask.bool()]
            assert_close(got, expected, atol=max(3e-5, 128 * place.eps), rtol=0 if place.eps < 1e-6 else 64 * place.eps)


@pytest.mark.parametrize("path", ["auto", "general"])
def test_a_relative_bias_without_positions(place: Place, path: str) -> None:
    """No table of positions bounds the length; past the span the bias stays what it is."""
    from ftbert.checkpoint import PositionConfig, RelativeBiasConfig
    from ftbert.converters import open_checkpoint

    checkpoint = open_checkpoint(make_model("mpnet", "encoder", 2))
    span = 9
    heads = checkpoint.config.encoder.layers[0].attention.heads
    short_config, long_config = (
        replace(checkpoint.config.encoder, positions=PositionConfig("none", most), relative_bias=RelativeBiasConfig(some, heads))
        for some, most in ((span, 64), (300, 200))
    )
    shapes = short_config.weight_shapes()
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) / (shape[-1] ** 0.5) for name, shape in shapes.items()}
    ends = torch.arange(-299, 300).clamp(1 - span, span - 1) + span - 1
    both = [
        torch.classes.ftbert.Encoder({k: v.to(place.device, place.dtype) for k, v in given.items()}, config.text(), path)
        for config, given in (
            (short_config, weights),
            (long_config, {**weights, "attention.relative_bias": weights["attention.relative_bias"][:, ends]}),
        )
    ]
    ids = torch.randint(5, 90, (2, 200), generator=generator).to(place.device)
    short, long = (encoder.forward(ids)[0] for encoder in both)
    assert_close(short, long, atol=0)
