"""Whether ftbert computes what an ONNX graph computes: both are run on random ids under every kind of mask, and each
input of the graph is changed by itself to see what depends on it.

Which constant is which weight is read off the graph's structure, and a graph may do more than that: scores with a bias
of its own, positions from another place, a mask that is not used. So its numbers decide.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftbert.checkpoint import MODULES, Checkpoint, warn_caller
from ftbert.converters.onnx_encoder import Encoder
from ftbert.converters.onnx_file import OnnxFile, data_files
from ftbert.converters.onnx_head import GraphHead, scores

# Of the largest value that the graph computes, by the ONNX type of its weights. Rounding makes 1.2e-6 (all-MiniLM-L6-v2
# at 512 tokens). A 16-bit graph is evaluated in float32 too, but its constants, the scores' scale and GELU's among
# them, have been rounded to 16 bits: by up to 2^-12 and 2^-9 of their size, some of them one after the other.
_LIMITS = {10: 1e-3, 16: 8e-3}
_LIMIT = 2e-5
# Least cosine between hidden states of a quantised graph as it is written and by products of floats. Rounding what is
# multiplied, by the range of a whole batch, leaves .994 in three layers (paraphrase-MiniLM-L3-v2).
_NEAR = 0.9
_SEQ, _LONG, _MOST_TOKENS = 12, 512, 16384
_KINDS = ("full", "right-padded", "left-padded", "holed")
_NUMPY = {1: "f4", 2: "u1", 3: "i1", 6: "i4", 7: "i8", 9: "?", 10: "f4", 11: "f8", 16: "f4"}
_USUAL = "mean"
_POOLS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "mean": lambda one, mask: (one * mask).sum(1) / mask.sum(1),
    "cls": lambda one, mask: one[:, 0],
    "max": lambda one, mask: np.where(mask, one, -np.inf).max(1),
}
_ROOT = str(Path(__file__).absolute().parents[2])  # where ftbert is imported from
_CHILD = """
import sys
sys.path[:] = sys.argv[2:]  # before any other import: the current folder is on it, and not to be trusted
from pathlib import Path
from ftbert.converters.onnx_run import main
main(Path(sys.argv[1]))
"""


@dataclass(frozen=True)
class _Batch:
    """kinds: of mask, one for each row. ids, mask, types: int64 [batch, seq]."""

    kinds: list[str]
    ids: np.ndarray
    mask: np.ndarray
    types: np.ndarray


def check_graph(file: OnnxFile, encoder: Encoder, head: GraphHead | None, checkpoint: Checkpoint) -> None:
    """ValueError names the file and says by how much and where the two differ, or why the graph cannot be evaluated.

    Outputs that are neither the last hidden state, nor the pooler's, nor a pooling of the former are named in a
    warning.
    """
    try:
        batches = _batches(file, encoder, checkpoint)
        feeds = [_feed(file, encoder, batch) for batch in batches]
        base, changed = _probes(file, encoder, checkpoint, batches[0].ids.shape)
        feeds += changed.values()
        pooler = checkpoint.config.encoder.pooler
        runs = _evaluate(file, feeds, [encoder.hidden, *([encoder.pooled] if encoder.pooled and pooler else [])])
        probed = dict(zip(changed, (run[encoder.hidden] for run in runs[len(batches) :]), strict=True))
        _check_effects(encoder, base.mask == 1, probed)
        runs = runs[: len(batches)]
        ours = _compute(checkpoint, batches)
        scored = {} if head is None else {head.output: _scores(head, checkpoint, ours)}
        left_out, pooled_by = _compare(file, encoder, pooler, scored, batches, runs, ours)
        if file.quantised:
            as_written = _evaluate(file, feeds[: len(batches)], [encoder.hidden], floats=False)
            _expect_near(encoder.hidden, batches, as_written, ours)
    except (ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"{file.path}: {error}") from error
    if left_out:
        names = ", ".join(left_out[:8]) + (f" and {len(left_out) - 8} more" if len(left_out) > 8 else "")
        warn_caller(
            f"{file.path}: its outputs {names} are left out; the encoder, the pooler and a head of scores are read",
        )
    folder = checkpoint.folder
    for name, pooling in pooled_by.items():
        if pooling not in ("", _USUAL) and (folder is None or not (folder / MODULES).exists()):
            warn_caller(
                f"{file.path}: its output {name!r} is pooled by {pooling!r}, and no {MODULES} says so: pass "
                f"pooling={pooling!r} to encode, which takes {_USUAL!r}"
            )
    if not encoder.mask:
        warn_caller(f"{file.path}: takes no mask and attends to padding; ftbert attends to none")


def _batches(file: OnnxFile, encoder: Encoder, checkpoint: Checkpoint) -> list[_Batch]:
    """Short rows with all kinds of masks, and a long one: a window or a distance may show in that alone."""
    config, rng = checkpoint.config.encoder, np.random.default_rng(0)
    sides = next(one for one in file.inputs if one.name == encoder.tables.ids).sides
    if len(sides) != 2:
        raise ValueError(f"its input {encoder.tables.ids!r} has {len(sides)} dimensions, not [batch, seq]")
    longest = config.max_seq if config.positions.kind != "none" or config.relative_bias else _LONG
    rows, seq = (side if isinstance(side, int) else 0 for side in sides)
    if seq > longest or rows * seq > _MOST_TOKENS:
        raise ValueError(f"its inputs are [{rows}, {seq}]; expected at most {longest} columns, {_MOST_TOKENS} tokens")
    # Of tokens that are counted only rows with padding on the right are what the mask says.
    kinds = list(_KINDS[:2] if file.counted else _KINDS) if encoder.mask else ["full"]
    short = kinds if rows else kinds * 2
    rows = rows or len(short)
    short += short[: -len(short) % rows]
    plan = [(short[at : at + rows], seq or min(_SEQ, longest)) for at in range(0, len(short), rows)]
    if not seq and longest > _SEQ:
        plan.append((kinds[-1:] * (rows if isinstance(sides[0], int) else 1), min(_LONG, longest)))
    types = _token_types(encoder, checkpoint)
    return [_batch(some, columns, config, types, rng) for some, columns in plan]


def _token_types(encoder: Encoder, checkpoint: Checkpoint) -> int:
    return max(1, checkpoint.config.encoder.token_types if encoder.tables.types else 0)


def _batch(kinds: list[str], seq: int, config: Any, types: int, rng: np.random.Generator) -> _Batch:
    shape = (len(kinds), seq)
    ids, mask = rng.integers(0, config.vocab, shape), np.ones(shape, np.int64)
    for row, kind in enumerate(kinds):
        length = int(rng.integers(1, max(2, seq)))
        if kind == "right-padded":
            mask[row, length:] = 0
        elif kind == "left-padded":
            mask[row, : seq - length] = 0
        elif kind == "holed":
            mask[row, 1:] = rng.integers(0, 2, seq - 1)
        if "padded" in kind:  # under holes any ids
            ids[row, mask[row] == 0] = config.padding_id
    return _Batch(kinds, ids, mask, rng.integers(0, types, shape))


def _feed(file: OnnxFile, encoder: Encoder, batch: _Batch) -> dict[str, np.ndarray]:
    """Every input; what is none of ids, mask and types varies too."""
    rng = np.random.default_rng(1)
    sides = next(one for one in file.inputs if one.name == encoder.tables.ids).sides
    sizes: dict[int | str, int] = dict(zip(sides, batch.ids.shape, strict=True))
    known = {encoder.tables.ids: batch.ids, encoder.tables.types: batch.types, encoder.mask: batch.mask}
    found = {}
    for one in file.inputs:
        if one.type not in _NUMPY:
            raise ValueError(f"its input {one.name!r} is of ONNX type {one.type}")
        value = known.get(one.name)
        if value is None:
            shape: list[int] = []
            for i, side in enumerate(one.sides):
                chosen = sizes[side] if side in sizes else batch.ids.shape[i > 0]
                shape.append(side if isinstance(side, int) else int(chosen))
            if min(shape, default=1) < 0 or math.prod(shape) > _MOST_TOKENS:
                raise ValueError(f"its input {one.name!r} has the shape {shape}")
            value = rng.integers(0, 2, shape)
        found[one.name] = value.astype(_NUMPY[one.type])
    return found


def _probes(
    file: OnnxFile, encoder: Encoder, checkpoint: Checkpoint, shape: tuple[int, ...]
) -> tuple[_Batch, dict[str, dict[str, np.ndarray]]]:
    """A padded batch of that shape, and feeds of it: "" as it is, and by an input's name with that one changed."""
    (rows, seq), types = shape, _token_types(encoder, checkpoint)
    # On the left: under a causal mask no token would see padding on the right.
    base = _batch(["left-padded"] * rows, seq, checkpoint.config.encoder, types, np.random.default_rng(2))
    feed = _feed(file, encoder, base)
    changed = {"": feed}
    for name, value in feed.items():
        if name == encoder.mask and seq > 1:
            changed[name] = feed | {name: np.ones_like(value)}
        elif name not in (encoder.tables.ids, encoder.tables.types, encoder.mask):
            changed[name] = feed | {name: (1 - value.astype(np.int64)).astype(value.dtype)}
    return base, changed


def _check_effects(encoder: Encoder, kept: np.ndarray, found: dict[str, np.ndarray]) -> None:
    """found: the last hidden state for each of `_probes`. kept: bool [batch, seq]. ValueError for a mask that changes
    nothing, and for an input of no known meaning that changes something."""
    for name, value in found.items():
        same = np.array_equal(value[kept], found[""][kept])
        if name == encoder.mask and same and name:
            raise ValueError(
                f"its input {name!r} has no effect: the graph attends to padding, which ftbert never does. Export the "
                "model with its mask in use, or without that input where texts are never padded"
            )
        if name not in (encoder.mask, "") and not same:
            raise ValueError(
                f"its input {name!r} changes the result, and is neither token ids nor token types nor the mask "
                f"({encoder.mask or 'none'}); export the model without it"
            )


def _evaluate(
    onnx: OnnxFile, feeds: list[dict[str, np.ndarray]], values: list[str], floats: bool = True
) -> list[dict[str, np.ndarray]]:
    """What the graph's outputs and `values` are in each run. floats: without the rounding of what is multiplied by
    integers. ValueError says why there are none."""
    size = sum(path.stat().st_size for path in {onnx.path, *data_files(onnx.constants.values())})
    tokens = sum(next(iter(feed.values())).size for feed in feeds)
    # A core computes some 10^9 products of a weight and a token in a second, a slow one with numpy alone a tenth.
    seconds = 10 + round((size if onnx.quantised else size / 4) * tokens / 3e8)
    limits = {"bytes": (3 << 30) + 6 * size, "seconds": seconds}
    with tempfile.TemporaryDirectory(prefix="ftbert.onnx.") as name:
        folder = Path(name)
        job = {"path": str(onnx.path.absolute()), "values": values, "floats": floats, **limits}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        named = {f"{i}/{key}": value for i, feed in enumerate(feeds) for key, value in feed.items()}
        np.savez(folder / "feeds.npz", **named)  # type: ignore[arg-type]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        # What is relative would lead into the current folder, whatever that is now.
        places = [_ROOT, *filter(os.path.isabs, sys.path)]
        command = [sys.executable, "-c", _CHILD, name, *places]
        try:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60 + 20 * seconds,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ValueError("its graph does not come to an end") from None
        if not (folder / "done.json").is_file():
            last = done.stderr.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
            ended = f"signal {-done.returncode}" if done.returncode < 0 else last
            raise ValueError(f"its graph was evaluated and the process ended ({ended}); it has {seconds} s of CPU time")
        said = json.loads((folder / "done.json").read_text(encoding="utf-8"))
        if said["error"]:
            raise ValueError(f"its graph cannot be evaluated: {said['error']}")
        with np.load(folder / "results.npz", allow_pickle=False) as file:
            return [{name: file[f"{i}/{k}"] for k, name in enumerate(said["outputs"])} for i in range(len(feeds))]


def _compute(checkpoint: Checkpoint, batches: list[_Batch]) -> list[tuple[np.ndarray, np.ndarray]]:
    """ftbert's last hidden state and pooled output for each batch, in float32."""
    weights = {name: tensor for name, tensor in checkpoint.items() if not name.startswith("heads.")}
    encoder = torch.classes.ftbert.Encoder(weights, checkpoint.config.encoder.text(), "auto")
    types = checkpoint.config.encoder.token_types > 0
    found = []
    for batch in batches:
        ids, mask, kinds = (torch.from_numpy(one) for one in (batch.ids, batch.mask, batch.types))
        hidden, pooled = torch.ops.ftbert.forward_batch(
            encoder, ids, mask, kinds if types else None, None, 0, ["tokens", "pooled"]
        )
        found.append((hidden.numpy(), pooled.numpy()))
    return found


def _scores(
    head: GraphHead, checkpoint: Checkpoint, ours: list[tuple[np.ndarray, np.ndarray]]
) -> list[np.ndarray]:
    """What the checkpoint's head makes of our results for each batch."""
    prefix = f"heads.{head.task}."
    names = [name for name in checkpoint.tensors if name.startswith(prefix)]
    weights = {name.removeprefix(prefix): checkpoint.read(name).float().numpy() for name in names}
    return [scores(head, weights, hidden, pooled) for hidden, pooled in ours]


def _compare(
    file: OnnxFile,
    encoder: Encoder,
    pooler: bool,
    scored: dict[str, list[np.ndarray]],
    batches: list[_Batch],
    runs: list[dict[str, np.ndarray]],
    ours: list[tuple[np.ndarray, np.ndarray]],
) -> tuple[list[str], dict[str, str]]:
    """The graph's outputs that ftbert does not compute, and how others are pooled. scored: by name, those of the head.
    ValueError where a value that it computes is another one."""
    hidden, pooled = [one for one, _ in ours], [one for _, one in ours]

    limit = _LIMITS.get(encoder.tables.word.type, _LIMIT)

    def differ(name: str, expected: list[np.ndarray]) -> str:
        return _difference(name, batches, [run[name] for run in runs], expected, limit)

    problem = differ(encoder.hidden, hidden)
    if not problem and pooler and encoder.pooled:
        problem = differ(encoder.pooled, pooled)
    for name, expected in scored.items():
        problem = problem or differ(name, expected)
    if problem:
        raise ValueError(problem)
    left_out, similar, pooled_by = [], {}, dict[str, str]()
    vectors = list(_vectors(batches, hidden, pooled))
    for name in (name for name in file.outputs if name not in scored):
        theirs = [run[name] for run in runs]
        if [one.shape for one in theirs] == [one.shape for one in hidden]:
            similar[name] = differ(name, hidden)
        elif (how := next((how for how, one in vectors if not differ(name, one)), None)) is None:
            left_out.append(f"{name!r} {list(theirs[0].shape)}")
        else:
            pooled_by[name] = how
    # Of the outputs that look like it one must be the last hidden state; others may be those of earlier layers.
    if similar and all(similar.values()):
        raise ValueError(next(iter(similar.values())))
    return [repr(name) for name, problem in similar.items() if problem] + left_out, pooled_by


def _expect_near(
    hidden: str, batches: list[_Batch], runs: list[dict[str, np.ndarray]], ours: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    """runs: of the graph as it is written, with what it multiplies rounded to 8 bits. ValueError where a row is not
    near ours."""
    for batch, run, (expected, _) in zip(batches, runs, ours, strict=True):
        kept = (batch.mask == 1)[..., None]
        theirs, mine = (
            np.where(kept, one, 0).reshape(len(kept), -1).astype(np.float64) for one in (run[hidden], expected)
        )
        size = np.linalg.norm(theirs, axis=1) * np.linalg.norm(mine, axis=1)
        cosines = (theirs * mine).sum(1) / np.maximum(size, 1e-30)
        row = int(np.argmin(cosines))
        if not cosines[row] >= _NEAR:
            raise ValueError(
                f"its graph in 8 bits is far from its weights in floats: of {hidden!r} the cosine is "
                f"{cosines[row]:.3f} in a {batch.kinds[row]} row of {kept.shape[1]} columns, expected {_NEAR}"
            )


def _vectors(
    batches: list[_Batch], hidden: list[np.ndarray], pooled: list[np.ndarray]
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """What a graph may make of the last hidden state [batch, seq, hidden], one vector for each row, and the name of the
    pooling; "" of the pooler's output."""
    yield "", pooled
    for name, pool in _POOLS.items():
        rows = [pool(one, batch.mask[..., None] == 1) for batch, one in zip(batches, hidden, strict=True)]
        yield name, rows
        yield name, [one / np.linalg.norm(one, axis=1, keepdims=True).clip(1e-12) for one in rows]


def _difference(
    name: str, batches: list[_Batch], theirs: list[np.ndarray], ours: list[np.ndarray], limit: float
) -> str:
    """Where and by how much they differ, "" where they do not. Tokens that are not masked count; of vectors those of
    rows that keep their first token, since ftbert pools the first one that is kept."""
    if [one.shape for one in theirs] != [one.shape for one in ours]:
        return f"{name!r} is {list(theirs[0].shape)}, expected {list(ours[0].shape)}"
    kept = [batch.mask == 1 if ours[0].ndim == 3 else batch.mask[:, 0] == 1 for batch in batches]
    scale = max(float(np.abs(one[rows]).max(initial=0.0)) for one, rows in zip(theirs, kept, strict=True))
    worst, where = 0.0, ""
    for batch, one, other, rows in zip(batches, theirs, ours, kept, strict=True):
        for row, kind in enumerate(batch.kinds):
            error = np.abs(one[row].astype(np.float64) - other[row])[rows[row]]
            found = float(error.max()) if error.size else 0.0
            if not found <= worst:
                worst, where = found, f"a {kind} row of {batch.ids.shape[1]} columns"
                if not np.isfinite(found):
                    return f"its graph or ftbert computes no finite {name!r} in {where}"
    if worst <= limit * scale:
        return ""
    return (
        f"its graph computes something else than the encoder that was read from it: {name!r} differs by up to "
        f"{worst:.2g}, {worst / scale if scale else np.inf:.2g} of its largest value, in {where}"
    )
