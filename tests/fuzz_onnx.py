"""Mutated ONNX files: each must compute what onnxruntime computes, or be refused by a ValueError that names it.

python tests/fuzz_onnx.py --count 2500 --seed 0

Each file is loaded in a child of its own with 20 s and 4 GB. Exit code 1 where one was not right and not refused.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import isolated
import numpy as np
import torch

import ftbert

_SPARE_OPS = ("Add", "Sub", "Mul", "Div", "MatMul", "Softmax", "Tanh", "Transpose", "Identity", "Gather", "Erf", "Relu",
              "Where", "Reshape", "Concat", "Loop", "Neg", "Sqrt", "Cast")  # fmt: skip


def make_files(folder: Path) -> list[Path]:
    """What is mutated: small exports of several families."""
    from conftest import make_bert
    from onnx_models import MODELS, export, quantise

    found = []
    for i, (name, how) in enumerate((("bert", {"pooler": True, "types": True}), ("roberta", {}), ("mpnet", {}),
                                     ("albert", {}), ("megatron-bert", {"attention": "eager"}))):  # fmt: skip
        model = make_bert(num_hidden_layers=1) if name == "bert" else MODELS[name]()
        found.append(export(model, folder / f"base{i}.onnx", dynamo=False, **how))  # type: ignore[arg-type]
    return [*found, quantise(found[0], folder / "quantised.onnx", per_channel=True)]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to three changes of the graph, or of the bytes."""
    how = rng.random()
    if how < 0.05:
        return data[: rng.randrange(len(data))]
    if how < 0.2:
        broken = bytearray(data)
        for _ in range(rng.choice((1, 1, 3, 30))):
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        return bytes(broken)
    import onnx

    model = onnx.ModelProto.FromString(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        with suppress(ValueError, TypeError, IndexError):  # the change before has left nothing to change
            rng.choice(_CHANGES)(model.graph, rng)
    return model.SerializeToString()


def _attribute(graph: Any, rng: random.Random) -> None:
    one = rng.choice([one for node in graph.node for one in node.attribute])
    one.i = rng.choice((0, 1, 2, -1, 7, 10, 1 << 40))
    one.f *= rng.choice((0.5, 2.0, -1.0, 1e30))
    for i in range(len(one.ints)):
        one.ints[i] = rng.choice((0, 1, 2, 3, -1, one.ints[i]))


def _number(graph: Any, rng: random.Random) -> None:
    """A small constant is another one."""
    from onnx import numpy_helper

    tensors = [one.t for node in graph.node for one in node.attribute if one.type == one.TENSOR]
    tensors += [one for one in graph.initializer if len(one.raw_data) <= 1024]
    one = rng.choice(tensors)
    values = numpy_helper.to_array(one)
    if values.dtype.kind in "if":
        changed = np.array(rng.choice((values * 2, values + 1, -values, values * 0, values * 1.01)), values.dtype)
        one.CopyFrom(numpy_helper.from_array(changed.reshape(values.shape), one.name))


def _dims(graph: Any, rng: random.Random) -> None:
    one = rng.choice(graph.initializer)
    if one.dims:
        if rng.random() < 0.3:
            one.dims.reverse()
        else:
            one.dims[rng.randrange(len(one.dims))] = rng.choice((0, 1, 2, -1, 1 << 29, 1 << 62))


def _swap(graph: Any, rng: random.Random) -> None:
    """Two initialisers, of one shape if there are such."""
    one = rng.choice(graph.initializer)
    alike = [other for other in graph.initializer if other.dims == one.dims and other is not one]
    other = rng.choice(alike or list(graph.initializer))
    one.name, other.name = other.name, one.name


def _rewire(graph: Any, rng: random.Random) -> None:
    node = rng.choice([node for node in graph.node if node.input])
    names = [name for other in graph.node for name in other.output] + [one.name for one in graph.initializer]
    node.input[rng.randrange(len(node.input))] = rng.choice(names)


def _twice(graph: Any, rng: random.Random) -> None:
    """A node is run once more on its own output, which then takes its place."""
    at = rng.randrange(len(graph.node))
    node = graph.node[at]
    again = copy.deepcopy(node)
    if node.input and node.output:
        node.output[0] += "_first"
        again.input[0] = node.output[0]
    graph.node.insert(at + 1, again)


def _without(graph: Any, rng: random.Random) -> None:
    """A node hands its input on."""
    node = rng.choice([node for node in graph.node if node.input])
    node.op_type = "Identity"
    del node.input[1:], node.output[1:], node.attribute[:]


def _other_op(graph: Any, rng: random.Random) -> None:
    rng.choice(graph.node).op_type = rng.choice(_SPARE_OPS)


def _order(graph: Any, rng: random.Random) -> None:
    node = rng.choice(graph.node)
    if len(node.input) > 1:
        node.input[0], node.input[1] = node.input[1], node.input[0]


_CHANGES = (_attribute, _number, _dims, _swap, _rewire, _twice, _without, _other_op, _order)


def _read(path: Path, seed: int) -> str:
    """"right" or what was wrong; raises what `load` raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ftbert.load(path)
    return _wrong(model, path, seed, [str(one.message) for one in caught]) or "right"


def _wrong(model: Any, path: Path, seed: int, said: list[str]) -> str:
    """By how much ftbert and onnxruntime differ on other inputs than those that `load` looked at."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(seed)
    seq = min(17, model.config.max_seq)
    ids = torch.randint(0, model.config.vocab, (5, seq), generator=generator)
    mask = torch.randint(0, 2, (5, seq), generator=generator)
    mask[:2], mask[2, seq // 2 :], mask[3, : seq // 2] = 1, 0, 0
    mask[:, seq // 2] = 1
    types = torch.randint(0, max(1, model.config.token_types), (5, seq), generator=generator)
    feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    named = {one.name: feed[one.name].numpy() for one in session.get_inputs()}
    results = dict(zip([one.name for one in session.get_outputs()], session.run(None, named), strict=True))
    given = types if "token_type_ids" in named and model.config.token_types else None
    hidden = model(ids, attention_mask=mask, token_type_ids=given).last_hidden_state
    kept, quantised = mask.bool(), b"DynamicQuantizeLinear" in path.read_bytes()
    for name, value in results.items():
        if value.shape == tuple(hidden.shape) and not any(repr(name) in one for one in said):
            theirs = torch.from_numpy(value)[kept]
            error, size = float((hidden[kept] - theirs).abs().max()), float(theirs.square().mean().sqrt())
            if not error <= (0.3 if quantised else 1e-3) * size:
                return f"{name!r}: {error:.3g} of {size:.3g}"
    return ""


def cases(folder: Path, count: int, seed: int) -> Iterator[isolated.Case]:
    """A file that is not mutated is read here first, with all that reading imports: children then need not."""
    paths = make_files(folder)
    if (found := _read(paths[0], 0)) != "right":
        raise AssertionError(f"not mutated, {found}")
    bases = [path.read_bytes() for path in paths]
    for number in range(seed * 1_000_000, seed * 1_000_000 + count):
        path = folder / f"case{number}.onnx"
        path.write_bytes(mutate(bases[number % len(bases)], random.Random(number)))
        yield path.name, path, partial(_read, path, number)
        path.unlink()


def fuzz(count: int, seed: int, tell: isolated.Tell) -> Counter[str]:
    ftbert.load_library()  # once for all children
    torch.set_num_threads(1)  # a child that was forked beside OpenMP's threads would wait for them
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        return isolated.count_cases(cases(Path(folder), count, seed), tell, seconds=60)


if __name__ == "__main__":
    sys.exit(isolated.main(__doc__, fuzz, 100))
