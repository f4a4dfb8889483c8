"""Time and memory of a training op's two passes, from CUDA graphs over buffers that exceed the cache."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from machine import seconds
from norm_cases import Case, Function, Operands, as_tuple

BEYOND_L2 = 150 << 20  # bytes: three times an H100's
LEAST_SECONDS = 1e-3  # of what lies between two events
Run = Callable[[], Any]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Passes:
    forward: Run
    backward: Run


def operand_sets(case: Case, device: torch.device) -> list[Operands]:
    """As many as make a round of x alone exceed the cache."""
    count = max(2, math.ceil(BEYOND_L2 / case.tensor)) if device.type == "cuda" else 2
    return [case.make() for _ in range(count)]


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A stream that can be recorded, for everything: autograd's nodes belong to the stream on which they were made, and
    a recording that waits for another's fails."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def record(calls: Sequence[Run], device: torch.device, keep: bool = True) -> Run:
    """All calls, one after another. On a GPU a CUDA graph, which lives with the tensors that the calls read. Where it
    keeps the results, every call writes memory of its own, since memory that is written again and again stays in the
    cache."""
    if device.type != "cuda":
        return lambda: [call() for call in calls]
    calls[0]()  # what is compiled or made once
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        for call in calls:
            results.append(call())
            if not keep:
                results.clear()

    def replay() -> None:
        graph.replay()
        _ = results, calls  # their memory has to stay

    return replay


def record_passes(function: Function, sets: Sequence[Operands], device: torch.device) -> Passes:
    """Forward as in training, with what it keeps; backward of graphs made before."""
    made = [as_tuple(function(*operands.inputs)) for operands in sets]
    forward = [partial(function, *operands.inputs) for operands in sets]
    backward = [partial(operands.backward, outputs) for operands, outputs in zip(sets, made, strict=True)]
    return Passes(record(forward, device), record(backward, device))


def record_copies(sets: Sequence[Operands], device: torch.device) -> Run:
    """Of x, into as many targets."""
    pairs = [(torch.empty_like(operands.inputs[0]), operands.inputs[0].detach()) for operands in sets]
    return record([partial(target.copy_, source) for target, source in pairs], device)


def in_turns(runs: dict[Key, Run], device: torch.device, rounds: int) -> dict[Key, float]:
    """Median seconds of each."""
    repeats = {}
    for name, run in runs.items():
        run()
        least = LEAST_SECONDS if device.type == "cuda" else 0.0
        repeats[name] = max(1, math.ceil(least / max(busy_seconds(run, device), 1e-6)))
    times: dict[Key, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(busy_seconds(run, device, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def busy_seconds(run: Run, device: torch.device, repeats: int = 1) -> float:
    """Of one run. On a GPU behind another of the same, which covers the launch and leaves its own data in the cache."""
    if device.type != "cuda":
        return seconds(run, device, repeats)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    run()
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def flushed_seconds(calls: dict[str, Run], device: torch.device, rounds: int) -> dict[str, float]:
    """Median seconds of single calls in turns, each behind a kernel that reads other data through the cache, which is
    left with nothing of the call's and nothing to write back."""
    other = torch.ones(2 * BEYOND_L2 // 4, device=device) if device.type == "cuda" else None
    times: dict[str, list[Any]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if other is None:
                times[name].append(seconds(call, device))
                continue
            events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            other.sum()  # long enough that the next three are enqueued meanwhile
            events[0].record()
            call()
            events[1].record()
            times[name].append(events)
    if other is None:
        return {name: statistics.median(values) for name, values in times.items()}
    torch.cuda.synchronize(device)
    return {name: statistics.median(b.elapsed_time(e) / 1e3 for b, e in pairs) for name, pairs in times.items()}


def memory(function: Function, operands: Operands, device: torch.device) -> dict[str, int]:
    """Bytes above the leaves. kept: between the passes, with the outputs but without x, which nobody else holds;
    peak: of both passes, x counted, gradients too."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    before, _ = requested_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    wanted = [value for value in operands.inputs if value.requires_grad]
    # A norm's input is another op's result: a sum keeps nothing of it.
    inputs = [value + 0 if value.requires_grad and value.dim() > 1 else value for value in operands.inputs]
    outputs = as_tuple(function(*inputs))
    del inputs
    kept = requested_bytes(device)[0] - before
    gradients = torch.autograd.grad(outputs, wanted, operands.gradients)
    del outputs, gradients
    return {"kept_bytes": kept, "peak_bytes": requested_bytes(device)[1] - before}


def requested_bytes(device: torch.device) -> tuple[int, int]:
    """Now and at most since the peak was reset: what was asked for, without what the allocator rounds up."""
    found = torch.cuda.memory_stats(device)
    return found["requested_bytes.all.current"], found["requested_bytes.all.peak"]
