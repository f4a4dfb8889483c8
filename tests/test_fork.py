"""Forked children: their parent's threads are not there, and their calls end all the same, with the same numbers."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

SECONDS = 60

# Before each case: what the parent does, which leaves threads in its pools. `batch` takes two threads everywhere.
SETUP = """
import copy, os, pickle, sys, warnings
import torch
sys.path[:0] = [{root!r}, {tests!r}]
import ftbert, isolated
from families import make_model
torch.set_num_threads(2)
model = make_model({family!r}, "encoder", 2, hidden_size=128, num_attention_heads=4, intermediate_size=512)
ids = torch.randint(5, 90, (40, 50), generator=torch.Generator().manual_seed(0))

def in_child(work):
    def call():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            value = work()
        return value, [str(one.message) for one in seen], torch.get_num_threads()

    kind, found = isolated.run(call, {seconds})
    return found if kind == "done" else (repr((kind, found)), [], 0)
"""


def run(script: str, family: str = "bert") -> Any:
    """What the script leaves in `result`; a process group of its own, so that what hangs can be ended whole."""
    here = Path(__file__).resolve().parent
    setup = SETUP.format(root=str(here.parent), tests=str(here), family=family, seconds=SECONDS)
    last = "\nsys.stdout.buffer.write(b'RESULT' + pickle.dumps(result)); sys.stdout.flush(); os._exit(0)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", setup + textwrap.dedent(script) + last],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        pytest.fail(f"no end within {SECONDS} s")
    assert b"RESULT" in out, errors.decode()[-2000:]
    return pickle.loads(out[out.index(b"RESULT") + 6 :])


# Each way in turn. What a child is forked from has threads in its pools from the calls before it.
CALLS = """
ways = {
    "load": lambda: ftbert.load(model),
    "general": lambda: ftbert.load(model, attention="general"),
    "optimize": lambda: ftbert.optimize(copy.deepcopy(model)),
    "child loads": lambda: lambda ids: ftbert.load(model)(ids),  # packing weights is a call, too
}
result = {}
for how, make in ways.items():
    fast = make()
    def call():
        with torch.no_grad():
            first, second = (fast(ids).last_hidden_state for _ in range(2))
        return first.numpy().copy()
    mine = call()
    theirs, warned, threads = in_child(call)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    parent = (torch.get_num_threads(), [str(one.message) for one in said])
    result[how] = (abs(mine - theirs).max() if not isinstance(theirs, str) else theirs, warned, threads, parent)
"""


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_a_forked_child_computes_the_same(family: str) -> None:
    found = run(CALLS, family)
    assert len(found) == 4
    for how, (error, warned, threads, parent) in found.items():
        assert not isinstance(error, str) and error <= 1e-5, (how, error)
        assert [one for one in warned if "forked" in one] == warned and len(warned) == 1, (how, warned)
        assert threads == 1 and parent == (2, []), f"{how}: the parent keeps its threads"


def test_replicas_in_a_forked_child() -> None:
    """Their threads are the child's own."""
    error, warned = run(
        """
        from ftbert.replicas import replicate

        model = replicate(ftbert.load(model), [torch.device("cpu")])
        cu = torch.tensor([0, 50], dtype=torch.int32)
        def launch(replica, row):
            made = replica.forward_packed(ids[row], cu, 50)
            return lambda: made
        def call():
            found = []
            with torch.inference_mode(), model.workers(launch) as workers:
                for row in range(len(ids)):
                    found += workers.put(row)
                while more := workers.rest():
                    found += more
            return torch.stack([made for _, made in sorted(found, key=lambda one: one[0])]).numpy().copy()
        mine = call()
        theirs, warned, _ = in_child(call)
        result = (abs(mine - theirs).max() if not isinstance(theirs, str) else theirs, warned)
        """
    )
    assert not isinstance(error, str) and error <= 1e-5, error
    assert [one for one in warned if "forked" in one] == warned and len(warned) <= 1, warned


def test_workers_of_a_data_loader() -> None:
    """Each is a fork that torch itself holds to one thread, so that nothing need be warned of."""
    error, warned = run(
        """
        fast = ftbert.load(model)
        mine = fast(ids).last_hidden_state

        class Embedded(torch.utils.data.Dataset):
            def __len__(self):
                return len(ids)
            def __getitem__(self, i):
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    return fast(ids[i : i + 1]).last_hidden_state[0], len(seen)

        loader = torch.utils.data.DataLoader(Embedded(), batch_size=10, num_workers=2, multiprocessing_context="fork")
        parts = list(loader)
        result = ((torch.cat([part for part, _ in parts]) - mine).abs().max().item(), sum(int(n.sum()) for _, n in parts))
        """
    )
    assert error <= 1e-5 and warned == 0
