"""An ONNX file as plain data: nodes, constants (not yet read), inputs. Field numbers are those of onnx.proto."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftbert.converters.onnx_wire import Field, fields

# TensorProto.DataType of what a model's weights and shapes are stored in. bfloat16 travels as int16.
DTYPES: dict[int, tuple[torch.dtype, str]] = {
    1: (torch.float32, "<f4"), 2: (torch.uint8, "u1"), 3: (torch.int8, "i1"), 6: (torch.int32, "<i4"),
    7: (torch.int64, "<i8"), 9: (torch.bool, "?"), 10: (torch.float16, "<f2"), 11: (torch.float64, "<f8"),
    16: (torch.bfloat16, "<i2"),
}  # fmt: skip
_FLOAT, _INTEGER, _STRING, _TENSOR, _FLOATS, _INTEGERS = 1, 2, 3, 4, 6, 7


@dataclass
class Constant:
    """A tensor of the file: where its bytes are, or its values where the file has them inline."""

    name: str = ""
    shape: tuple[int, ...] = ()
    type: int = 0
    path: Path = Path()
    start: int = 0
    bytes: int = 0
    inline: list[Any] = field(default_factory=list)
    problem: str = ""  # why it cannot be read, if it cannot: only an error when somebody wants it

    @property
    def is_float(self) -> bool:
        return self.type in (1, 10, 11, 16)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self) -> torch.Tensor:
        """On the CPU, owned by the caller; ValueError says what is wrong with it."""
        if self.problem:
            raise ValueError(f"{self.name}: {self.problem}")
        dtype, code = DTYPES[self.type]
        if self.inline:
            values = torch.tensor(self.inline)
            # Half precision is stored inline as its bits.
            bits = dtype in (torch.float16, torch.bfloat16)
            return (values.to(torch.int16).view(dtype) if bits else values.to(dtype)).reshape(self.shape)
        found = np.fromfile(self.path, np.dtype(code), self.size, offset=self.start)
        if found.size != self.size:
            raise ValueError(f"{self.path}: ends within {self.name}, {self.bytes} bytes at {self.start}")
        return torch.from_numpy(found).view(dtype).reshape(self.shape)


@dataclass
class Node:
    type: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class OnnxFile:
    path: Path
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, Constant] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    producer: str = ""


def read_onnx(path: Path) -> OnnxFile:
    """ValueError names the file and says where it stops being ONNX; FileNotFoundError if there is none."""
    found = OnnxFile(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            graphs = 0
            for entry in fields(file, 0, size):
                if entry.number == 2:
                    found.producer = entry.text()
                elif entry.number == 7:
                    graphs += 1
                    _read_graph(entry, found)
            if not graphs or not found.nodes:
                raise ValueError("no graph in it")
    except (ValueError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path}: not a complete ONNX file ({error})") from error
    found.inputs = [name for name in found.inputs if name not in found.constants]
    return found


def _read_graph(graph: Field, found: OnnxFile) -> None:
    for entry in graph.fields():
        if entry.number == 1:
            found.nodes.append(_read_node(entry, found.path))
        elif entry.number == 5:
            constant = _read_constant(entry, found.path)
            found.constants[constant.name] = constant
        elif entry.number == 11:
            found.inputs += [part.text() for part in entry.fields() if part.number == 1]


def _read_node(entry: Field, path: Path) -> Node:
    node = Node()
    for part in entry.fields():
        if part.number == 1:
            node.inputs.append(part.text())
        elif part.number == 2:
            node.outputs.append(part.text())
        elif part.number == 4:
            node.type = part.text()
        elif part.number == 5:
            name, value = _read_attribute(part, path)
            node.attributes[name] = value
    return node


def _read_attribute(entry: Field, path: Path) -> tuple[str, Any]:
    """Numbers, strings, tensors and lists of numbers; None for what no encoder needs (subgraphs, types)."""
    name, kind = "", 0
    found: dict[int, Any] = {_FLOATS: [], _INTEGERS: []}
    for part in entry.fields():
        if part.number == 1:
            name = part.text()
        elif part.number == 20:
            kind = part.value
        elif part.number == 2:
            found[_FLOAT] = part.real()
        elif part.number == 3:
            found[_INTEGER] = part.signed()
        elif part.number == 4:
            found[_STRING] = part.bytes().decode("utf-8", "replace")
        elif part.number == 5:
            found[_TENSOR] = _read_constant(part, path)
        elif part.number == 7:
            found[_FLOATS] += part.floats()
        elif part.number == 8:
            found[_INTEGERS] += part.integers()
    return name, found.get(kind)


def _read_constant(entry: Field, path: Path) -> Constant:
    found = Constant(path=path)
    shape: list[int] = []
    external: dict[str, str] = {}
    raw = False
    for part in entry.fields():
        if part.number == 1:
            shape += part.integers()
        elif part.number == 2:
            found.type = part.value
        elif part.number == 4:
            found.inline += part.floats()
        elif part.number in (5, 7):
            found.inline += part.integers()
        elif part.number == 8:
            found.name = part.text()
        elif part.number == 9:
            found.start, found.bytes, raw = part.start, part.end - part.start, True
        elif part.number == 13:
            external.update([_read_pair(part.fields())])
    found.shape = tuple(shape)
    if external:
        _locate(found, external)
    found.problem = found.problem or _problem(found, raw or bool(external))
    return found


def _read_pair(parts: Iterator[Field]) -> tuple[str, str]:
    texts = {part.number: part.text() for part in parts}
    return texts.get(1, ""), texts.get(2, "")


def _locate(constant: Constant, external: dict[str, str]) -> None:
    """Data in a file beside the model. A path that leads out of the model's folder is not followed."""
    location = external.get("location", "")
    folder = constant.path.parent.resolve()
    path = (folder / location).resolve()
    if not location or folder not in path.parents:
        constant.problem = f"its data is said to be in {location!r}, outside the model's folder"
        return
    if not path.is_file():
        constant.problem = f"its data is in {path}, and there is no such file"
        return
    size = path.stat().st_size
    constant.path, constant.start = path, int(external.get("offset", 0))
    constant.bytes = int(external.get("length", size - constant.start))
    if constant.start < 0 or constant.bytes < 0 or constant.start + constant.bytes > size:
        constant.problem = (
            f"its data is {constant.bytes} bytes at {constant.start} of {path}, which has {size}: is it complete?"
        )


def _problem(constant: Constant, has_bytes: bool) -> str:
    if constant.type not in DTYPES:
        return f"stored as ONNX type {constant.type}, which ftbert does not read"
    if any(side < 0 for side in constant.shape):
        return f"impossible shape {list(constant.shape)}"
    if has_bytes:
        expected = constant.size * np.dtype(DTYPES[constant.type][1]).itemsize
        return "" if constant.bytes == expected else f"{constant.bytes} bytes for the shape {list(constant.shape)}"
    have = len(constant.inline)
    return "" if have == constant.size else f"{have} values for the shape {list(constant.shape)}"


def file_set(path: Path) -> list[Path]:
    """Every file that the model consists of: itself and its external data."""
    with path.open("rb"):
        paths = {constant.path for constant in read_onnx(path).constants.values() if not constant.problem}
    return [path, *sorted(paths - {path})]


