"""The packed peers of benchmarks compute what transformers does: on the CPU, not compiled, with another attention."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_no_worse
from families import make_model

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from encoder_peers import PackedEsm, PackedEsmWhole  # noqa: E402
from modern_peers import PackedModern, PackedModernWhole  # noqa: E402
from peers import Batch, PackedGraph, PackedGraphAnySize, RecordedPacked  # noqa: E402

LENGTHS = [31, 1, 17, 24]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(RecordedPacked, "prepare", prepared)
    with torch.compiler.set_stance("force_eager"):
        yield


def prepared(peer: Any, batch: Batch) -> Any:
    """RecordedPacked.prepare without a graph."""
    if peer.compiles_each_point:
        peer.compile()
    positions = torch.cat([torch.arange(n) for n in batch.lengths])
    return lambda: peer.forward(batch.packed, positions, batch.cu_seqlens, max(batch.lengths))


def attended(peer: Any) -> Any:
    """Its attention, text by text."""

    def attend(q: Any, k: Any, v: Any, cu: Any, longest: int, window: int = -1) -> Any:  # noqa: ARG001
        texts = []
        for begin, end in zip(cu[:-1], cu[1:], strict=True):
            at = torch.arange(end - begin)
            one = [x[begin:end].repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (q, k, v)]
            apart = (at[:, None] - at).abs()
            seen = apart <= window if window >= 0 else apart >= 0
            seen &= (at[:, None] >= at) if getattr(peer, "causal", False) else True
            texts.append(torch.nn.functional.scaled_dot_product_attention(*one, attn_mask=seen))
        return torch.cat(texts, 1).transpose(0, 1)

    return attend


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("kind", "family"), [
    (PackedModern, "modernbert"), (PackedModern, "qwen3"), (PackedModernWhole, "modernbert"), (PackedModernWhole, "qwen3"),
    (PackedEsm, "esm"), (PackedEsmWhole, "esm"), (PackedGraph, "bert"), (PackedGraphAnySize, "bert"),
])  # fmt: skip
@torch.no_grad()
def test_a_peers_layers(kind: Any, family: str) -> None:
    published = {"hidden_act": "silu"} if family == "qwen3" else {}
    reference = make_model(family, "encoder", 0, **published)
    mask = (torch.arange(31)[None] < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(5, 96, (4, 31), generator=torch.Generator().manual_seed(0)) * mask
    want = reference(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
    peer = kind(reference, torch.device("cpu"), torch.bfloat16, 1)
    peer.attend = attended(peer)
    got = peer.prepare(Batch(ids, mask, LENGTHS))()
    theirs = reference.bfloat16()(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert_no_worse(got, theirs, want)
