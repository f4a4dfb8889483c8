"""A model shared by processes of torch.distributed, as torchrun starts them: over gloo here, NCCL on GPUs."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import have_gpu
from rank_process import rank_process

_CONTEXT = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Each is forked from a process that has imported what all import, and has not computed yet."""
    _CONTEXT.set_forkserver_preload(["rank_process"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # Python 3.11 does not give it sys.path
        forkserver.ensure_running()


@pytest.fixture(params=["cpu", "cuda"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not (have_gpu() and torch.cuda.device_count() > 1):
        pytest.skip("needs two GPUs")
    return str(request.param)


def run(folder: Path, ranks: int, what: str, parallel: str, device: str) -> list[tuple[int | None, str]]:
    """Of each rank the exit code and what it said."""
    processes, ends = [], []
    for rank in range(ranks):
        here, there = _CONTEXT.Pipe(duplex=False)
        given = (rank, ranks, str(folder / "store"), what, parallel, device, there)
        processes.append(_CONTEXT.Process(target=rank_process, args=given))
        ends.append(here)
        processes[-1].start()
        there.close()
    try:
        for process in processes:
            process.join(300)
        return [(process.exitcode, last_words(end)) for process, end in zip(processes, ends, strict=True)]
    finally:
        for process in processes:
            process.kill()


def last_words(end: Any) -> str:
    try:
        return str(end.recv())
    except EOFError:
        return ""


def assert_done(found: list[tuple[int | None, str]], words: str) -> None:
    for code, said in found:
        assert code == 0 and re.fullmatch(words, said)


@pytest.mark.parametrize(("parallel", "ranks"), [("tensor", 2), ("tensor", 4), ("pipeline", 2)])
def test_every_family(kind: str, parallel: str, ranks: int, tmp_path: Path) -> None:
    if kind == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    assert_done(run(tmp_path, ranks, "families", parallel, kind), r"\d\d families")


def test_every_call_of_stages(kind: str, tmp_path: Path) -> None:
    """Three: one receives and sends."""
    if kind == "cuda" and torch.cuda.device_count() < 3:
        pytest.skip("needs 3 GPUs")
    assert_done(run(tmp_path, 3, "calls", "pipeline", kind), r"\d\d calls")


OTHERS = {
    "weights": "rank 1 differs from rank 0 in the weights of .*and \\d+ more",
    "config": r"config\.encoder\.layer.*inter \(256, there 1024\)",
    "missing": "rank 1 has failed: FileNotFoundError|expected a model folder",
    "dtype": "fp7",  # of the last rank its own error, of the others "rank 1 has failed"
    "path": r"rank 1 differs from rank 0 in attention \(general, there auto\)",
    "number": r"rank 1 differs from rank 0 in the weights of layers\.0\.ffn\.up\.weight \(\w+, there \w+\)$",
}
STRAYS = {
    "length": r"input_ids: Long \[2, 29\] on c\w+, contents \w+, where rank 0 has input_ids: Long \[2, 30\]",
    "batch": r"input_ids: Long \[1, 30\]",
    "ids": r"than rank 0: input_ids: Long \[2, 30\] on c\w+, contents (\w+), where .*\[2, 30\] on c\w+, contents (?!\1)\w+\.",
    "mask": r"than rank 0: attention_mask: Long \[2, 30\] on c\w+, contents \w+, where rank 0 has attention_mask: none\.",
    "type": r"input_ids: Int \[2, 30\]", "model": r"model: the 2\. of .*, where rank 0 has model: the 1\.",
    "want": "want: hidden_states, pooled, tokens, where rank 0 has want: tokens, pooled", "packed": r"cu_seqlens: Int \[3\]",
    "wrong": r"input_ids: Long \[2\]", "prompt": r"next tokens: Long \[\d+\] on c\w+, contents",
}  # fmt: skip


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
@pytest.mark.parametrize(("what", "expected"), [("loads", OTHERS), ("strays", STRAYS)])
def test_a_rank_that_does_something_else(
    kind: str, what: str, expected: dict[str, str], parallel: str, tmp_path: Path
) -> None:
    """Every rank says which, in what, and goes on."""
    found = run(tmp_path, 2, what, parallel, kind)
    assert [code for code, _ in found] == [0, 0], found
    for _, said in found:
        words = dict(line.split(": ", 1) for line in said.splitlines())
        assert words.keys() >= expected.keys() - {"number", "prompt"} and len(words) >= len(expected) - 1
        for name, one in words.items():
            assert re.search(expected[name], one), f"{name}: {one}"


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
@pytest.mark.parametrize(("what", "exit_code"), [("killed", -9), ("raising", 1)])
def test_a_rank_that_leaves_ends_the_others(what: str, exit_code: int, parallel: str, tmp_path: Path) -> None:
    (code, said), (other, _) = run(tmp_path, 2, what, parallel, "cpu")
    assert (code, other) == (0, exit_code)
    took = re.match(r"([\d.]+) s: rank 0 of 2: rank 1 has ended or failed", said)
    assert took and float(took[1]) < 10
