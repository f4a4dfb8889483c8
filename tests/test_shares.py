"""Calls on the CPU: threads with sequences of their own (csrc/encoder.cpp) against threads that share all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compare import assert_close
from conftest import first_of, make_bert
from families import make_model

import ftbert
from ftbert.evaluation import random_sequences
from ftbert.padded_batches import padded

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 3}
# Sequences for two threads to share, for more, with empty ones at the cuts, of which one is too long for a fair share of
# two, and of so few tokens that a share is not worth it.
LENGTHS = [
    [32] * 8,
    [40, 17, 90, 3, 60, 31, 1, 77, 55, 20],
    [128] * 3,
    [0, 100, 30, 0, 0, 120, 12, 0],
    [120, 60, 60, 60, 5, 5],
    [30, 20, 128, 128],
    [110, 1],
    [128, 120, 100, 99] * 6,
]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def packed(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    ids = [token for one in random_sequences(120, lengths) for token in one]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.tensor(ids), ends.to(torch.int32), max(lengths)


# bf16: an activation of oneDNN's, and one that follows the product.
@pytest.mark.parametrize(("dtype", "activation"), [("fp32", "gelu"), ("bf16", "gelu"), ("bf16", "silu")])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_threads_alone_and_together(threads: None, lengths: list[int], dtype: str, activation: str) -> None:
    if dtype == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no bf16 products on this CPU")
    model = ftbert.load(make_bert(**SIZES, hidden_act=activation), dtype=dtype)
    call = packed(lengths)
    eps = 1e-5 if dtype == "fp32" else 2e-2
    for name in ("tokens", "first", "last"):
        torch.set_num_threads(1)
        want = model.forward_packed(*call, want=name)
        for count in (2, 3, 5):
            torch.set_num_threads(count)
            got = model.forward_packed(*call, want=name)
            assert_close(got, want, atol=eps, rtol=eps, what=f"{name}, {count} threads")
            assert torch.equal(model.forward_packed(*call, want=name), got), f"{name}, {count} threads"


@pytest.mark.parametrize("path", ["fused", "general"])
@pytest.mark.parametrize("family", ["bert", "roberta-prelayernorm", "mpnet", "deberta-v2"])
def test_equals_transformers(threads: None, family: str, path: str) -> None:
    """Also where LayerNorm comes first, and where attention has a bias."""
    reference = make_model(family, "encoder", 2, **SIZES, vocab_size=120, max_position_embeddings=140)
    ids, mask = padded(random_sequences(118, [100, 30, 128, 7, 90, 45, 64, 80]), "right", 1, torch.device("cpu"))
    ids = torch.where(mask.bool(), ids + 2, ids)
    model = ftbert.load(reference, attention=path)
    with torch.no_grad():
        want = reference(ids, attention_mask=mask, output_hidden_states=True)
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        kept = mask.bool()
        got = model.module(ids, mask)[0]
        assert_close(got[kept], want.last_hidden_state[kept], atol=1e-4, rtol=1e-4, what=f"{count} threads")
        first = first_of(model.module, ids, mask)[0]
        assert_close(first, want.last_hidden_state[:, 0], atol=1e-4, rtol=1e-4, what=f"first, {count} threads")
        states = torch.ops.ftbert.forward_batch(model.encoder, ids, mask, None, None, 0, ["hidden_states"])[0]
        assert_close(states[1][kept], want.hidden_states[1][kept], atol=1e-4, rtol=1e-4, what=f"{count} threads")


def test_with_nested_parallel_regions() -> None:
    """Threads that start threads of their own would write into each other's memory."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import torch, ftbert\n"
        "from conftest import make_bert\n"
        "from test_shares import SIZES, packed\n"
        "model, call = ftbert.load(make_bert(**SIZES)), packed([128] * 8)\n"
        "got = model.forward_packed(*call)\n"
        "threads = torch.get_num_threads()\n"
        "torch.set_num_threads(1)\n"
        "assert torch.allclose(got, model.forward_packed(*call), atol=1e-5) and threads == 2"
    )
    folders = [str(Path(__file__).parent), str(Path(ftbert.__file__).parent.parent)]
    nested = os.environ | {"OMP_NUM_THREADS": "2,8", "OMP_MAX_ACTIVE_LEVELS": "2"}
    subprocess.run([sys.executable, "-c", code, *folders], env=nested, check=True)
