"""An ONNX file as plain data: nodes, constants (not yet read), inputs and outputs.

The onnx package reads the protobuf. It is imported when the first file is opened. Nothing here imports torch, since the
process that evaluates graphs (onnx_run.py) starts in a fraction of the time that torch takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftbert.converters.onnx_fused import unfuse
from ftbert.converters.onnx_quantised import to_floats

# TensorProto.DataType of weights and shapes: numpy's type as stored, and the field that holds values outside raw_data.
DTYPES: dict[int, tuple[str, str]] = {
    1: ("<f4", "float_data"), 2: ("u1", "int32_data"), 3: ("i1", "int32_data"), 6: ("<i4", "int32_data"),
    7: ("<i8", "int64_data"), 9: ("?", "int32_data"), 10: ("<f2", "int32_data"), 11: ("<f8", "double_data"),
    16: ("<i2", "int32_data"),
}  # fmt: skip
BFLOAT16 = 16
TYPES = {np.dtype(code): kind for kind, (code, _) in DTYPES.items() if kind != BFLOAT16}
_FLOATS = (1, 10, 11, BFLOAT16)


@dataclass
class Constant:
    """A tensor of the file, or one that was computed from others (values)."""

    name: str = ""
    shape: tuple[int, ...] = ()
    type: int = 0
    problem: str = ""  # why its data cannot be read, "" where it can; an error only when it is needed
    proto: Any = None  # TensorProto
    path: Path | None = None  # external data
    start: int = 0
    values: np.ndarray | None = None

    @property
    def is_float(self) -> bool:
        return self.type in _FLOATS

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self) -> np.ndarray:
        """Of `shape`; bfloat16 as the int16 of its bits. ValueError says what is wrong with it."""
        if self.problem:
            raise ValueError(f"{self.name}: {self.problem}")
        if self.values is not None:
            return self.values
        code, inline = DTYPES[self.type]
        if self.path is not None:
            found = np.fromfile(self.path, code, self.size, offset=self.start)
            if found.size != self.size:
                raise ValueError(f"{self.path}: ends within {self.name}")
        elif self.proto.HasField("raw_data"):
            found = np.frombuffer(self.proto.raw_data, code)
        elif self.type in (10, BFLOAT16):  # inline, half precision is stored as its bits
            found = np.array(self.proto.int32_data, np.int32).astype(np.int16).view(code)
        else:
            found = np.array(getattr(self.proto, inline)).astype(code)
        return found.reshape(self.shape)


def computed(name: str, values: np.ndarray) -> Constant:
    """A constant that no file holds. values: float32, float16, float64, int64, int32 or bool."""
    return Constant(name, values.shape, TYPES[values.dtype], values=values)


@dataclass
class Node:
    type: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Input:
    """type: TensorProto.DataType. sides: a number, or the name ("" without one) of a side that the caller chooses."""

    name: str
    type: int
    sides: tuple[int | str, ...]


@dataclass
class OnnxFile:
    path: Path
    nodes: list[Node]
    constants: dict[str, Constant]
    inputs: list[Input]
    outputs: list[str]
    producer: str
    quantised: bool  # whether it multiplies or stores integers; nodes are then those of floats (onnx_quantised.py)
    counted: bool = False  # whether it attends to the first tokens of a row, so many as are masked in (onnx_fused.py)


def read_model(path: Path) -> Any:
    """The file's onnx.ModelProto without external data. ValueError names the file; FileNotFoundError if there is none;
    ImportError where the onnx package is missing."""
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise ImportError(
            f"{path}: an ONNX file needs the package onnx. Type: pip install onnx, or install ftbert[onnx]", name="onnx"
        ) from error
    try:
        model = onnx.ModelProto.FromString(path.read_bytes())
        for text in _texts(model):
            if not isinstance(text, str):  # protobuf gives bytes for what is no UTF-8
                raise ValueError(f"a name in it is no text: {text[:40]!r}")
    except (DecodeError, ValueError, MemoryError) as error:
        raise ValueError(f"{path}: not a complete ONNX file ({error})") from error
    if not model.graph.node:
        raise ValueError(f"{path}: not a complete ONNX file (no graph in it)")
    return model


def _texts(model: Any) -> Iterator[Any]:
    """Every name in the graph."""
    graph = model.graph
    yield model.producer_name
    for node in graph.node:
        yield from (node.op_type, *node.input, *node.output, *(one.name for one in node.attribute))
    yield from (one.name for part in (graph.initializer, graph.input, graph.output) for one in part)


def read_onnx(path: Path) -> OnnxFile:
    """As `read_model`, as plain data. ValueError for products of integers that are read as none of floats, too."""
    model = read_model(path)
    graph = model.graph
    try:
        counted = unfuse(model)
        quantised = to_floats(model)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        nodes = [
            Node(node.op_type, [*node.input], [*node.output], {it.name: _attribute(it, path) for it in node.attribute})
            for node in graph.node
        ]
        constants = {one.name: constant(one, path) for one in graph.initializer}
        inputs = [_input(one) for one in graph.input if one.name not in constants]
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: not a complete ONNX file ({error})") from error
    outputs = [one.name for one in graph.output]
    return OnnxFile(path, nodes, constants, inputs, outputs, model.producer_name, quantised, counted)


def _attribute(entry: Any, path: Path) -> Any:
    """Numbers, strings, tensors and lists of numbers; None for what no encoder needs (subgraphs, types)."""
    if entry.type == entry.STRING:
        return entry.s.decode("utf-8", "replace")
    if entry.type == entry.TENSOR:
        return constant(entry.t, path)
    names = {entry.FLOAT: "f", entry.INT: "i", entry.FLOATS: "floats", entry.INTS: "ints"}
    value: Any = getattr(entry, names[entry.type]) if entry.type in names else None
    return list(value) if entry.type in (entry.FLOATS, entry.INTS) else value


def _input(entry: Any) -> Input:
    kind = entry.type.tensor_type
    sides = (side.dim_value if side.HasField("dim_value") else side.dim_param for side in kind.shape.dim)
    return Input(entry.name, kind.elem_type, tuple(sides))


def constant(proto: Any, path: Path) -> Constant:
    """Of a TensorProto in the file at `path`; its data is looked for, not read."""
    found = Constant(proto.name, tuple(proto.dims), proto.data_type, proto=proto)
    if found.type not in DTYPES:
        found.problem = f"stored as ONNX type {found.type}, which ftbert does not read"
    elif any(side < 0 for side in found.shape):
        found.problem = f"impossible shape {list(found.shape)}"
    elif proto.data_location == proto.EXTERNAL:
        _locate(found, {entry.key: entry.value for entry in proto.external_data}, path)
    elif proto.HasField("raw_data"):
        _expect(found, len(proto.raw_data))
    else:
        have = len(getattr(proto, DTYPES[found.type][1]))
        found.problem = "" if have == found.size else f"{have} values for the shape {list(found.shape)}"
    return found


def _expect(found: Constant, size: int) -> None:
    if size != found.size * np.dtype(DTYPES[found.type][0]).itemsize:
        found.problem = f"{size} bytes for the shape {list(found.shape)}"


def _locate(found: Constant, external: dict[str, str], model: Path) -> None:
    """Data in a file beside the model. A path that leads out of the model's folder is not followed."""
    location = external.get("location", "")
    folder = model.parent.resolve()
    try:
        path = (folder / location).resolve()
        start = int(external.get("offset", 0))
        have = path.stat().st_size if path.is_file() else -1
        size = int(external.get("length", have - start))
    except (ValueError, OSError, RuntimeError) as error:  # no number, a zero byte in a path, links in a circle
        found.problem = f"its external data cannot be found ({error})"
        return
    if not location or folder not in path.parents:
        found.problem = f"its data is said to be in {location!r}, outside the model's folder"
    elif have < 0:
        found.problem = f"its data is in {path}, and there is no such file"
    elif start < 0 or size < 0 or start + size > have:
        found.problem = f"its data is {size} bytes at {start} of {path}, which has {have}: is it complete?"
    else:
        found.path, found.start = path, start
        _expect(found, size)


def data_files(constants: Iterable[Constant]) -> list[Path]:
    """The files beside the model that hold its external data."""
    return sorted({one.path for one in constants if one.path is not None})
