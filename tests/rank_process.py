"""A process of test_process_ranks.py: one rank of a model, over gloo on the CPU and NCCL on GPUs.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... rank_process.py families | killed [cpu | cuda]

families: each family with every mask equals the model of one process; then a decoder's texts. killed: after one call the
last rank ends by SIGKILL in the middle of calls, and the others print in which words they learned of it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compare import assert_close  # noqa: E402
from conftest import make_bert  # noqa: E402
from families import make_batch, masks_of  # noqa: E402
from language_models import FAMILIES as DECODERS  # noqa: E402
from language_models import made, texts  # noqa: E402
from ranks import FAMILIES, shared_model, task_of  # noqa: E402

import ftbert  # noqa: E402


def families(device: str) -> None:
    for family in FAMILIES:
        reference = shared_model(family)
        alone, shared = ftbert.load(reference, device), ftbert.load(reference, device, parallel="tensor")
        for mask in masks_of(reference):
            batch = {key: value.to(device) for key, value in make_batch(reference, task_of(family), mask).items()}
            want, got = alone(**batch), shared(**batch)
            for name, value in want.items():
                assert_close(got[name], value, atol=2e-5, rtol=2e-5, what=f"{family} {mask} {name}")
            assert_close(shared(**batch).last_hidden_state, got.last_hidden_state, atol=0, what=f"{family}: run to run")
    prompts = [one.tolist() for one in texts(DECODERS[0])]
    alone, shared = ftbert.load(made(DECODERS[0]), device), ftbert.load(made(DECODERS[0]), device, parallel="tensor")
    assert shared.generate_ids(prompts, max_new_tokens=8) == alone.generate_ids(prompts, max_new_tokens=8)
    print(f"rank {distributed.get_rank()}: {len(FAMILIES)} families")


def killed(device: str) -> None:
    model = ftbert.load(make_bert(num_attention_heads=4), device, parallel="tensor")
    ids = torch.ones(2, 30, dtype=torch.int64, device=device)
    model(ids)
    if distributed.get_rank() == distributed.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while time.monotonic() - began < 60:
            model(ids)
    except RuntimeError as error:
        print(f"{time.monotonic() - began:.1f} s: {error}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, device = sys.argv[1], (sys.argv[2:] or ["cpu"])[0]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=30))
    {"families": families, "killed": killed}[what](device)
