"""What a process of test_process_ranks.py does: one rank of a model, over gloo on the CPU and NCCL on GPUs.

families: each family with every mask equals the model of one process; of shards then a decoder's texts, which stages
refuse. calls: so do calls of every kind, of which some are large and some wrong. killed, raising: after one call the
last rank ends by SIGKILL or an exception in the middle of calls, and every other rank prints its error. loads, strays:
the last rank asks for another model, or makes another call, than the others: an error in words on all of them, and what
follows is right.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import make_bert
from families import make_batch, masks_of
from language_models import FAMILIES as DECODERS
from language_models import made, texts
from ranks import FAMILIES, shared_model, task_of
from torch import distributed

import ftbert

WANTS = ["tokens", "packed_tokens", "cu_seqlens", "first", "last", "pooled", "hidden_states", "tokens"]


def families(parallel: str, device: str) -> str:
    for family in (name for name in FAMILIES if name != "static_embedding"):  # which has no layers to share
        reference = shared_model(family)
        alone, shared = ftbert.load(reference, device), ftbert.load(reference, device, parallel=parallel)
        for mask in masks_of(reference):
            batch = {key: value.to(device) for key, value in make_batch(reference, task_of(family), mask).items()}
            want, got = alone(**batch), shared(**batch)
            for name, value in want.items():
                assert_close(got[name], value, atol=2e-5, rtol=2e-5, what=f"{family} {mask} {name}")
            assert_close(shared(**batch).last_hidden_state, got.last_hidden_state, atol=0, what=f"{family}: run to run")
    prompts = [one.tolist() for one in texts(DECODERS[0])]
    alone, shared = (ftbert.load(made(DECODERS[0]), device, parallel=word) for word in (None, parallel))
    if parallel == "tensor":
        assert shared.generate_ids(prompts, max_new_tokens=8) == alone.generate_ids(prompts, max_new_tokens=8)
    else:
        with pytest.raises(RuntimeError, match="several processes generate no text"):
            shared.generate_ids(prompts, max_new_tokens=8)
    return f"{len(FAMILIES)} families"


def calls(parallel: str, device: str) -> str:
    reference = make_bert(num_attention_heads=4, num_hidden_layers=5, max_position_embeddings=512)
    alone, shared = (ftbert.load(reference, device, parallel=word) for word in (None, parallel))
    torch.manual_seed(3)
    lengths = [7, 300, 0, 512, 500, 512, 0, 3, 511, 512, 40, 350, 0]
    ids = torch.randint(5, 120, (sum(lengths),)).to(device)
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    rows = torch.tensor([0, 2000, 8, 3000]).to(device)
    mask = (torch.rand(9, 300) < torch.linspace(0, 1, 9)[:, None]).long().to(device)
    padded = ids[:2700].view(9, 300)
    of_calls: list[tuple[list[Any], list[str]]] = [
        ([ids, None, None, cu, 512], WANTS),
        ([padded, mask, None, None, 0], [*WANTS, "packed_index"]),
        ([ids, None, None, cu, 512, rows], ["rows"]),
        ([ids[:0], None, None, cu[:1].repeat(2), 0], ["first", "tokens", "hidden_states"]),
        *(([padded, None, None, None, 0], [want]) for want in WANTS),
    ]
    for call, wants in of_calls:
        made = (one.module.forward_batch(*call[:5], wants, *call[5:]) for one in (shared, alone))
        for got, want, name in zip(*made, wants, strict=True):
            assert got.dtype == want.dtype, f"{name} of {wants}"
            assert_close(got, want, atol=2e-5, rtol=2e-5, what=f"{name} of {wants}")
    wrong = [([padded, mask[:, 1:], None, None, 0], ["tokens"]), ([ids, None, None, cu, 512], ["packed_index"])]
    if device == "cpu":  # contents that nobody looks at on a GPU
        wrong += [([ids, None, None, cu, 512, rows + 9000], ["rows"]), ([ids + 9000, None, None, cu, 512], ["first"])]
    for call, wants in wrong:
        words = []
        for one in (alone, shared):
            try:
                one.module.forward_batch(*call[:5], wants, *call[5:])
            except RuntimeError as error:
                words.append(re.sub(r" on c\w+(:\d)?", "", str(error)))  # stages read masks on the CPU
        assert len(words) == 2 and words[0] == words[1], words
    return f"{len(of_calls)} calls"


def told(work: Callable[[], Any]) -> str:
    try:
        work()
    except (RuntimeError, ValueError, OSError) as error:
        return str(error)
    return "nothing"


def is_last() -> bool:
    return distributed.get_rank() == distributed.get_world_size() - 1


def loads(parallel: str, device: str) -> str:
    """What all ranks said of each, a line each."""
    model = make_bert(num_attention_heads=4, num_hidden_layers=4, intermediate_size=1024)
    other_config = make_bert(num_attention_heads=4, num_hidden_layers=4, intermediate_size=256)
    other_weights = copy.deepcopy(model)
    for tensor in other_weights.state_dict().values():
        tensor.mul_(1.01)
    one_number = copy.deepcopy(model)  # which no sample sees; of stages each reads its own
    one_number.encoder.layer[0].intermediate.dense.weight.data.view(-1)[2500] += 1
    tries: dict[str, tuple[Any, dict[str, Any]]] = {
        "weights": (other_weights, {}),
        "config": (other_config, {}), "missing": ("./nowhere", {}), "dtype": (model, {"dtype": "fp7"}), "path": (model, {"attention": "general"}),
        **({"number": (one_number, {})} if parallel == "tensor" else {}),
    }  # fmt: skip
    found = []
    for what, (source, given) in tries.items():
        mine, how = (source, given) if is_last() else (model, {})
        found.append(f"{what}: {told(lambda mine=mine, how=how: ftbert.load(mine, device, parallel=parallel, **how))}")  # type: ignore[misc]
    ids = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    wanted = ftbert.load(model, device)(ids).last_hidden_state
    assert_close(ftbert.load(model, device, parallel=parallel)(ids).last_hidden_state, wanted, atol=2e-5, rtol=2e-5)
    return "\n".join(found)


def strays(parallel: str, device: str) -> str:
    """What all ranks said of each, a line each."""
    reference = make_bert(num_attention_heads=4, num_hidden_layers=4)
    model, second = (ftbert.load(reference, device, parallel=parallel) for _ in range(2))
    ids = torch.randint(5, 100, (2, 30), generator=torch.Generator().manual_seed(0)).to(device)
    mask, cu = torch.ones_like(ids), torch.tensor([0, 30, 60], dtype=torch.int32, device=device)
    tries: dict[str, Callable[[], Any]] = {
        "length": lambda: model(ids[:, 1:]), "batch": lambda: model(ids[:1]), "ids": lambda: model(ids.flip(1)),
        "mask": lambda: model(ids, mask), "type": lambda: model(ids.int()), "model": lambda: second(ids),
        "want": lambda: model(ids, output_hidden_states=True),
        "packed": lambda: model.forward_packed(ids.view(-1), cu, 30), "wrong": lambda: model(ids[:, 0]),
    }  # fmt: skip
    wanted = ftbert.load(reference, device)(ids).last_hidden_state
    found = []
    for what, stray in tries.items():
        found.append(f"{what}: {told(stray if is_last() else lambda: model(ids))}")
        assert_close(model(ids).last_hidden_state, wanted, atol=2e-5, rtol=2e-5, what=f"behind {what}")
    if parallel == "tensor":
        speaker = ftbert.load(made(DECODERS[0]), device, parallel=parallel)
        prompts = [one.tolist() for one in texts(DECODERS[0])]
        other = [[*one[:-1], one[-1] ^ 1] for one in prompts] if is_last() else prompts
        found.append(f"prompt: {told(lambda: speaker.generate_ids(other, max_new_tokens=3))}")
    return "\n".join(found)


def killed(parallel: str, device: str) -> str:
    return until_the_last_leaves(lambda: os.kill(os.getpid(), signal.SIGKILL), parallel, device)


def raising(parallel: str, device: str) -> str:
    return until_the_last_leaves(lambda: sys.exit("of its own"), parallel, device)


def until_the_last_leaves(leave: Callable[[], None], parallel: str, device: str) -> str:
    model = ftbert.load(make_bert(num_attention_heads=4), device, parallel=parallel)
    ids = torch.ones(2, 30, dtype=torch.int64, device=device)
    model(ids)
    if distributed.get_rank() == distributed.get_world_size() - 1:
        leave()
    began = time.monotonic()
    try:
        while time.monotonic() - began < 60:
            model(ids)
    except RuntimeError as error:
        return f"{time.monotonic() - began:.1f} s: {error}"
    return "nothing"


def rank_process(rank: int, ranks: int, store: str, what: str, parallel: str, device: str, said: Any) -> None:
    """said: a connection that gets what it found, in words."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    if device == "cuda":
        os.environ["FTBERT_COMPARE_RANKS"] = "contents"
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    of = {
        "families": families, "calls": calls, "loads": loads, "strays": strays, "killed": killed, "raising": raising,
    }  # fmt: skip
    said.send(of[what](parallel, device))
