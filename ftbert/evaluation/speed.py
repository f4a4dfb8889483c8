"""A short benchmark against transformers: same machine, same run, interleaved, outputs checked first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ftbert.dtypes import told_dtype
from ftbert.evaluation.errors import Difference
from ftbert.evaluation.gates import GATES
from ftbert.evaluation.reference_model import base_of, in_dtype, pad_id, peer_dtype, reference_of
from ftbert.evaluation.sequences import ragged_lengths, random_sequences, sequences_of
from ftbert.model import Model
from ftbert.padded_batches import padded

_EACH = 8  # batches of a replica in one run of all of them, so that threads and the last batch count little


class _Way(NamedTuple):
    """One way of computing a batch, or several that are alike. run: some of the results, [batch, seq, hidden] where
    padded, else [valid tokens, hidden], row by row."""

    run: Callable[[], list[torch.Tensor]]
    padded: bool = True
    batches: int = 1


@dataclass(frozen=True)
class Timing:
    """One way of computing one batch."""

    name: str
    milliseconds: float  # median
    tokens_per_second: float  # valid tokens
    speed_up: float  # over transformers on the padded batch
    max_abs_diff: float  # to transformers in float32, at valid tokens


@dataclass(frozen=True)
class BatchResult:
    """One batch. fill: valid tokens / (batch * longest)."""

    name: str
    batch: int
    longest: int
    tokens: int
    fill: float
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class BenchResult:
    """What `bench` measured."""

    device: str
    dtype: str
    threads: int
    torch: str
    rounds: int
    batches: tuple[BatchResult, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.device} {self.dtype}, {self.threads} threads, torch {self.torch}, median of {self.rounds}"]
        for b in self.batches:
            lines.append(f"\n{b.name}: {b.batch} x {b.longest}, {b.tokens} valid tokens, fill {b.fill:.2f}")
            lines.append(f"  {'':<32}{'ms':>10}{'tokens/s':>12}{'speed-up':>10}{'max diff':>11}")
            lines += [
                f"  {t.name:<32}{t.milliseconds:>10.2f}{t.tokens_per_second:>12,.0f}{t.speed_up:>9.2f}x"
                f"{t.max_abs_diff:>11.1e}"
                for t in b.timings
            ]
        return "\n".join(lines)


@torch.inference_mode()
def bench(
    model: Model,
    *,
    texts: Sequence[str] | None = None,
    batch: int = 32,
    longest: int = 128,
    rounds: int = 7,
    against: str | Path | torch.nn.Module | None = None,
) -> BenchResult:
    """Times `model` against transformers (padded, sdpa) and transformers one by one without padding. Of several
    replicas the first is timed so; what all of them compute together is a row of its own.

    texts: the first `batch` of them make the ragged batch; else random ids a third full. The full batch
    is always random ids. against: as of `check`. RuntimeError when a peer's output differs from the float32 reference.
    Beside a model in fp8 transformers computes in 16 bits, beside one in int8 in float32.
    """
    if batch < 1 or longest < 3 or rounds < 1:
        raise ValueError(f"batch, rounds must be at least 1 and longest 3; got {batch}, {rounds}, {longest}")
    longest = min(longest, model.config.max_seq)
    if texts is None:
        ragged = random_sequences(model.config.vocab, ragged_lengths(batch, longest))
    else:
        if not texts:
            raise ValueError("there is no text to measure with; expected at least one")
        ragged = sequences_of(model, texts[:batch], longest)
    full = random_sequences(model.config.vocab, [longest] * batch)
    reference = base_of(reference_of(model, against)).to(model.device)
    peer = in_dtype(reference, peer_dtype(model))
    batches = tuple(
        _measure(model, reference, peer, name, sequences, rounds)
        for name, sequences in (("ragged", ragged), ("full", full))
    )
    return BenchResult(
        device=", ".join(str(one.device) for one in model.replicas),
        dtype=told_dtype(model.dtype),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        rounds=rounds,
        batches=batches,
    )


def _measure(
    model: Model, reference: Any, peer: Any, name: str, sequences: Sequence[torch.Tensor], rounds: int
) -> BatchResult:
    ids, mask = padded(sequences, "right", pad_id(reference), model.device)
    valid = mask.bool()
    alone = [sequence[None].to(model.device) for sequence in sequences]

    def one_by_one() -> list[torch.Tensor]:
        return [torch.cat([peer(input_ids=one).last_hidden_state[0] for one in alone])]

    def ours() -> list[torch.Tensor]:
        made: Any = model(ids, attention_mask=mask)
        return [made.last_hidden_state]

    # What is timed ends at last_hidden_state; taking the valid rows out is part of the check only.
    ways = {
        "transformers": _Way(lambda: [peer(input_ids=ids, attention_mask=mask).last_hidden_state]),
        "transformers, one by one": _Way(one_by_one, padded=False),
        "ftbert": _Way(ours),
    }
    if (count := len(model.replicas)) > 1:
        places = {one.device: (ids.to(one.device), mask.to(one.device)) for one in model.replicas}
        together = partial(_on_replicas, model, places, _EACH * count)
        ways[f"ftbert, {count} replicas, per batch"] = _Way(together, batches=_EACH * count)
    want = reference(input_ids=ids, attention_mask=mask).last_hidden_state[valid]
    differences = {}
    for name_of_way, way in ways.items():
        if model.device.type == "cuda":
            way.run()  # the second call of a size may still record
        found = Difference()
        for got in way.run():
            got = got.to(model.device)
            found.add(got[valid] if way.padded else got, want)
        differences[name_of_way] = found.largest
        if not found.relative <= GATES[model.dtype].bench_error:
            raise RuntimeError(
                f"{name_of_way} differs from transformers in float32 by {found.relative:.1e} of its size, so its time "
                "means nothing; run `ftbert check` on this model"
            )
    times = _interleaved(ways, rounds, model.device)
    tokens = int(valid.sum())
    base = times["transformers"]
    return BatchResult(
        name=name,
        batch=len(sequences),
        longest=ids.shape[1],
        tokens=tokens,
        fill=tokens / valid.numel(),
        timings=tuple(Timing(one, 1e3 * t, tokens / t, base / t, differences[one]) for one, t in times.items()),
    )


def _on_replicas(
    model: Model, places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]], batches: int
) -> list[torch.Tensor]:
    """Computes so many batches, each by whichever replica is free; one last_hidden_state of each device. places: ids
    and mask there."""

    @torch.inference_mode()
    def launch(replica: Any, _: int) -> Callable[[], torch.Tensor]:
        made: torch.Tensor = replica(*places[replica.device]).last_hidden_state
        done = torch.cuda.current_stream(replica.device).record_event() if made.is_cuda else None

        def fetch() -> torch.Tensor:
            if done is not None:
                done.synchronize()
            return made

        return fetch

    found: dict[torch.device, torch.Tensor] = {}
    with model.workers(launch) as workers:
        for number in range(batches):
            found |= {made.device: made for _, made in workers.put(number)}
        while computed := workers.rest():
            found |= {made.device: made for _, made in computed}
    return list(found.values())


def _interleaved(ways: dict[str, _Way], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds a batch of each. Taking turns gives every way the same share of whatever disturbs."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            _wait(device)
            began = time.perf_counter()
            way.run()
            _wait(device)
            seconds[name].append((time.perf_counter() - began) / way.batches)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
