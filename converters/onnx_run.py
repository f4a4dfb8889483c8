"""Evaluates an ONNX graph in a process of its own: onnxruntime where it is installed, else onnx.reference.

A process, because a file from anywhere may make a runtime crash, loop for ever or ask for all memory: here that ends a
child with limits on its memory and its CPU time. 16-bit graphs are computed in float32, so that what differs is the
computation and not its rounding.

The folder given by the parent holds job.json and feeds.npz (`name` of run i as "i/name"). What comes back is done.json,
{"outputs": [name, ...], "error": ""}, and results.npz (output k of run i as "i/k").
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ftbert.converters.onnx_file import BFLOAT16, TYPES, constant, read_model
from ftbert.converters.onnx_fused import unfuse
from ftbert.converters.onnx_integers import fold_weights
from ftbert.converters.onnx_quantised import is_quantised, to_floats

_HALF = (10, BFLOAT16)
_IN_MEMORY = 1 << 10  # tensors of more bytes are handed over beside the graph, which is limited to 2 GB
_Run = Callable[[dict[str, np.ndarray]], list[np.ndarray]]


def main(folder: Path) -> None:
    """Writes done.json unless a limit ends the process."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (job["bytes"], job["bytes"]))
    resource.setrlimit(resource.RLIMIT_CPU, (job["seconds"], job["seconds"]))
    done: dict[str, Any] = {"error": ""}
    try:
        done |= _evaluate(folder, Path(job["path"]), job["values"], job["floats"])
    except MemoryError:
        done["error"] = f"it needs more than {job['bytes'] / 1e9:.1f} GB"
    except Exception as error:  # noqa: BLE001 (whatever a runtime raises, its first words are the answer)
        done["error"] = f"{type(error).__name__}: {str(error)[:500]}"
    (folder / "done.json").write_text(json.dumps(done), encoding="utf-8")


def _evaluate(folder: Path, path: Path, values: list[str], floats: bool) -> dict[str, Any]:
    """values: what else than the graph's outputs is asked for. floats: by products of floats, where it has others."""
    model = read_model(path)
    if floats and is_quantised(model):
        unfuse(model)
        to_floats(model)
        fold_weights(model, path)
    held = {one.name for one in model.graph.output}
    for name in values:
        if name not in held:
            model.graph.output.add().name = name
    outputs = [one.name for one in model.graph.output]
    weights = _to_float32(model, path)
    run = _runner(model, weights)
    with np.load(folder / "feeds.npz", allow_pickle=False) as file:
        runs: list[dict[str, np.ndarray]] = [{} for _ in range(1 + max(int(key.split("/")[0]) for key in file))]
        for key in file:
            number, _, name = key.partition("/")
            runs[int(number)][name] = file[key]
    found = {f"{i}/{k}": one for i, feed in enumerate(runs) for k, one in enumerate(run(feed))}
    np.savez(folder / "results.npz", **{key: np.asarray(one) for key, one in found.items()})  # type: ignore[arg-type]
    return {"outputs": outputs}


def _runner(model: Any, weights: dict[str, np.ndarray]) -> _Run:
    """Gives all outputs. weights: the initialisers that `model` only names."""
    try:
        import onnxruntime as runtime
    except ImportError:
        from onnx import numpy_helper
        from onnx.reference import ReferenceEvaluator
        from onnx.reference.op_run import OpRun

        class GatherElements(OpRun):  # onnx's own (1.23) fails where the data's rows are longer than the indices'
            def _run(self, data: Any, indices: Any, axis: int = 0) -> tuple[np.ndarray]:
                return (np.take_along_axis(data, indices, axis),)

        unfuse(model)
        for one in model.graph.initializer:
            if one.name in weights:
                one.CopyFrom(numpy_helper.from_array(weights[one.name], one.name))
        evaluator = ReferenceEvaluator(model, new_ops=[GatherElements])
        return lambda feed: evaluator.run(None, feed)  # type: ignore[return-value]
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = min(4, len(os.sched_getaffinity(0)))
    held = {name: runtime.OrtValue.ortvalue_from_numpy(value) for name, value in weights.items()}
    options.add_external_initializers(list(held), list(held.values()))
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, feed)


def _to_float32(model: Any, path: Path) -> dict[str, np.ndarray]:
    """Changes every 16-bit type of the graph; takes the large initialisers out and returns them."""
    weights = {}
    for proto in model.graph.initializer:
        values = _read(proto, path)
        if values.nbytes > _IN_MEMORY:
            weights[proto.name] = values
            _name_only(proto, values)
        else:
            _put(proto, values)
    for graph in _graphs(model.graph):
        del graph.value_info[:]
        for value in (*graph.input, *graph.output):
            kind = value.type.tensor_type
            if kind.elem_type in _HALF:
                kind.elem_type = 1
        tensors = [] if graph is model.graph else list(graph.initializer)
        for node in graph.node:
            for one in node.attribute:
                if one.type == one.TENSOR:
                    tensors.append(one.t)
                elif one.name in ("to", "dtype") and one.i in _HALF:
                    one.i = 1
        for proto in tensors:
            if proto.data_type in _HALF or proto.data_location == proto.EXTERNAL:
                _put(proto, _read(proto, path))
    return weights


def _graphs(graph: Any) -> Iterator[Any]:
    """The graph and those in its nodes."""
    todo = [graph]
    while todo:
        one = todo.pop()
        yield one
        for node in one.node:
            for attribute in node.attribute:
                todo += [attribute.g] if attribute.type == attribute.GRAPH else attribute.graphs


def _read(proto: Any, path: Path) -> np.ndarray:
    """ValueError for what is no tensor of a known type."""
    found = constant(proto, path)
    values = found.read()
    if found.type == BFLOAT16:
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(values.shape)
    return values.astype(np.float32) if found.type in _HALF else values


def _put(proto: Any, values: np.ndarray) -> None:
    from onnx import numpy_helper

    proto.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), proto.name))


def _name_only(proto: Any, values: np.ndarray) -> None:
    """A tensor whose data is handed over in memory: the graph has its name, type and shape."""
    name = proto.name
    proto.Clear()
    proto.name, proto.data_type, proto.data_location = name, TYPES[values.dtype], proto.EXTERNAL
    proto.dims.extend(values.shape)
    for key, value in (("location", "in memory"), ("offset", "0"), ("length", str(values.nbytes))):
        entry = proto.external_data.add()
        entry.key, entry.value = key, value
