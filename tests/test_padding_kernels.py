"""Kernels around padding, against their float64 references, on every device and dtype."""

from __future__ import annotations

import pytest
import reference
import torch
from conftest import Place

ops = torch.ops.ftbert


def random(*shape: int, place: Place, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(place.dtype).to(place.device)


def masks(batch: int, seq: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch * 1000 + seq)
    lengths = torch.randint(0, seq + 1, (batch,), generator=generator)
    right = (torch.arange(seq)[None] < lengths[:, None]).long()
    return {
        "right": right, "left": right.flip(1), "holes": torch.randint(0, 2, (batch, seq), generator=generator),
        "ones": torch.ones_like(right), "zeros": torch.zeros_like(right),
    }  # fmt: skip


@pytest.mark.parametrize("batch,seq", [(1, 1), (3, 7), (9, 300), (0, 5), (4, 0), (4099, 3), (1, 5000), (2000, 129)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float32], ids=str)
def test_padding(device: str, batch: int, seq: int, dtype: torch.dtype) -> None:
    for kind, mask in masks(batch, seq).items():
        cu, token_index, packed_index, info = ops.padding(mask.to(dtype).to(device))
        flat = mask.reshape(-1)
        kept = flat.nonzero().reshape(-1)
        assert cu.tolist() == [0, *mask.sum(1).cumsum(0).tolist()], kind
        assert torch.equal(token_index[: len(kept)].cpu(), kept) and not token_index[len(kept) :].any(), kind
        expected = torch.where(flat > 0, flat.cumsum(0) - 1, torch.tensor(-1)).int()
        assert torch.equal(packed_index.cpu(), expected), kind
        assert info.tolist()[:3] == [len(kept), int(mask.sum(1).max()) if batch else 0, 0], kind


@pytest.mark.parametrize("batch,seq", [(3, 9), (40, 300), (1, 4096), (5, 33)])
def test_padding_positions(device: str, batch: int, seq: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4, (batch, seq), generator=generator)
    for kind, mask in masks(batch, seq).items():
        cu, token_index, _, info = ops.padding(mask.to(device))
        tokens = int(info[0])
        kept = mask.bool()
        columns = torch.arange(seq).expand(batch, seq)[kept].int()
        real = ids.ne(1).int()  # from_padding: transformers' create_position_ids_from_input_ids
        for how, expected in (("absolute", columns), ("from_padding", (real.cumsum(1) * real + 1)[kept].int())):
            got = ops.padding_positions(ids.to(device), token_index, cu, tokens, how, 1)
            assert torch.equal(got.cpu(), expected), kind
            more = ops.padding_positions(ids.to(device), token_index, cu, batch * seq, how, 1)
            assert torch.equal(more[:tokens], got) and not more[tokens:].any(), kind
    lengths = [4, 0, 200, 1]
    packed = torch.randint(0, 4, (sum(lengths),), generator=generator)
    for kind in ("absolute", "from_padding"):
        got = ops.padding_positions(packed.to(device), None, reference.offsets(lengths, device), sum(lengths), kind, 1)
        parts = [
            torch.arange(len(p)) if kind == "absolute" else p.ne(1).cumsum(0) * p.ne(1) + 1
            for p in packed.split(lengths)
        ]
        assert torch.equal(got.cpu(), torch.cat(parts).int()), kind


@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (3, 50), (40, 9)])
def test_padding_stage(device: str, batch: int, seq: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids, types = torch.randint(1, 99, (2, batch, seq), generator=generator).to(device)
    for kind, mask in masks(batch, seq).items():
        kept = mask.bool().to(device)
        cu, token_index, _, info = ops.padding(mask.to(device))
        tokens = int(info[0])
        for padded in (True, False):
            source = (ids, types, token_index) if padded else (ids[kept], types[kept], None)
            most = batch * seq if padded else tokens  # as much as can be known before the mask is counted
            for most_tokens, most_batch, with_types in ((most, batch, True), (most + 700, batch + 5, False)):
                given = source[1] if with_types else None
                got = ops.padding_stage(source[0], given, source[2], cu, most, most_tokens, most_batch)
                what = f"{kind}, padded={padded}, {tokens} of {most_tokens}"
                assert torch.equal(got[0][:tokens], ids[kept]) and not got[0][tokens:].any(), what
                assert torch.equal(got[1][:tokens], types[kept] * with_types) and not got[1][tokens:].any(), what
                columns = torch.arange(seq).expand(batch, seq)[mask.bool()].int()
                if not padded:
                    columns = torch.cat([torch.arange(n).int() for n in mask.sum(1)])
                assert torch.equal(got[2][:tokens].cpu(), columns) and not got[2][tokens:].any(), what
                assert torch.equal(got[3][: batch + 1], cu) and (got[3][batch:] == tokens).all(), what


@pytest.mark.parametrize("cols", [1, 3, 8, 312, 768])
def test_restore_padding(place: Place, cols: int) -> None:
    for batch, seq in ((1, 1), (7, 33)):
        for kind, mask in masks(batch, seq).items():
            x = random(batch * seq, cols, place=place)
            packed_index = ops.padding(mask.to(place.device))[2]
            restored = ops.restore_padding(x[mask.reshape(-1).bool().to(place.device)], packed_index)
            assert torch.equal(restored, x * mask.reshape(-1, 1).to(place.device)), kind


@pytest.mark.parametrize("cols", [1, 3, 8, 312, 768])
def test_gather_rows(place: Place, cols: int) -> None:
    lengths = [0, 4, 1, 0, 300, 0]
    x, cu = random(sum(lengths) + 3, cols, place=place), reference.offsets(lengths, place.device)
    parts, zero = x[: sum(lengths)].split(lengths), x.new_zeros(cols)
    for kind, at in (("first", 0), ("last", -1)):
        expected = torch.stack([part[at] if len(part) else zero for part in parts])
        assert torch.equal(ops.gather_rows(x, cu, kind), expected), kind
    index = torch.tensor([304, 0, 0, 7, 3], device=place.device)
    assert torch.equal(ops.gather_rows(x, cu, "any", index), x[index])
    assert ops.gather_rows(x, cu, "any", index[:0]).shape == (0, cols)
    if place.device == "cuda":
        outside = ops.gather_rows(x, cu, "any", torch.tensor([305, 1, -1, 2**40], device="cuda"))
        assert outside[[0, 2, 3]].isnan().all() and torch.equal(outside[1], x[1])
