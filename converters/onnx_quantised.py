"""Products of integers in an ONNX graph, as onnxruntime's dynamic quantisation writes them, made products of floats.

x -> DynamicQuantizeLinear -> MatMulInteger by integers -> Cast -> Mul by both scales becomes x -> MatMul by
DequantizeLinear of the integers: the same product without the rounding of x. What its optimiser fuses of that,
MatMulIntegerToFloat and DynamicQuantizeMatMul, is read too, and so are integers that are looked up or moved before they
are dequantised. The weights stay where they are. Other ops on integers are left, for the reader to refuse.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

_PRODUCTS = ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")
_FUSED = ("QAttention", "QEmbedLayerNormalization")  # taken apart before (onnx_fused.py)
# Ops whose result holds elements of their first input and nothing else.
_MOVES = ("Gather", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_MOST_MOVES = 16  # between a table and what dequantises it


def to_floats(model: Any) -> bool:
    """Changes `model`. False where nothing in it is quantised. ValueError names the node that is not as it should
    be."""
    if not is_quantised(model):
        return False
    _Rewriting(model.graph).run()
    return True


def is_quantised(model: Any) -> bool:
    """Whether it has products of integers that are read, or dequantises."""
    return any(node.op_type in (*_PRODUCTS, *_FUSED, "DequantizeLinear") for node in model.graph.node)


class _Rewriting:
    def __init__(self, graph: Any) -> None:
        self.graph = graph
        # Shapes of constants; a node that makes one counts as one.
        self.shapes = {one.name: tuple(one.dims) for one in graph.initializer}
        self.maker: dict[str, Any] = {}
        self.readers: dict[str, list[Any]] = {}
        for node in graph.node:
            self.maker |= dict.fromkeys(node.output, node)
            for name in set(node.input):
                self.readers.setdefault(name, []).append(node)
            if node.op_type == "Constant":
                self.shapes.update((node.output[0], tuple(one.t.dims)) for one in node.attribute if one.name == "value")
        self.nodes: list[Any] = []  # the graph to come
        self.replaced: dict[str, Any] = {}  # output -> the node that makes it now
        self.floats: dict[tuple[str, str, str], str] = {}  # integers, scale, zero point -> what they stand for
        self.passed: set[str] = set()  # outputs that may have lost their readers

    def run(self) -> None:
        for node in self.graph.node:
            replaced = self.replaced.get(node.output[0]) if node.output else None
            if replaced is not None:
                self.nodes.append(replaced)
            elif node.op_type in _PRODUCTS:
                self._product(node)
            elif node.op_type != "DequantizeLinear" or not self._dequantise(node):
                self.nodes.append(_copy(node))
        read = Counter([one.name for one in self.graph.output])
        read.update(name for node in self.nodes for name in node.input)
        kept = []
        for node in reversed(self.nodes):
            if node.output and node.output[0] in self.passed and not any(read[name] for name in node.output):
                read.subtract(node.input)
            else:
                kept.append(node)
        del self.graph.node[:]
        self.graph.node.extend(reversed(kept))

    def _product(self, node: Any) -> None:
        inputs = [*node.input, "", "", "", "", "", "", ""]
        if node.op_type == "MatMulInteger":
            end, scales = self._scaled(node)
            a, b, za, zb = inputs[:4]
            bias = ""
            sa, sb = self._assign(node, a, b, scales)
        elif node.op_type == "MatMulIntegerToFloat":
            end = node
            a, b, sa, sb, za, zb, bias = inputs[:7]
        else:
            end = node
            a, b, sb, zb, bias = inputs[:5]
            sa = za = ""
        left = self._float(node, a, sa, za) if sa else a
        right = self._float(node, b, sb, zb)
        if bias:
            made = self._add("MatMul", [left, right], self._fresh(end.output[0]))
            self._add("Add", [made, bias], end.output[0])
        elif end is node:
            self._add("MatMul", [left, right], end.output[0])
        else:
            self.passed.add(node.output[0])
            self.replaced[end.output[0]] = _made("MatMul", [left, right], end.output[0])

    def _scaled(self, node: Any) -> tuple[Any, list[str]]:
        """The Mul behind the Cast behind a MatMulInteger, and the two scales by which it multiplies."""
        cast = self._reader(node, node.output[0], "Cast")
        mul = self._reader(node, cast.output[0], "Mul")
        others = [name for name in mul.input if name != cast.output[0]]
        factor = self.maker.get(others[0]) if len(others) == 1 else None
        if factor is None or factor.op_type != "Mul" or len(factor.input) != 2:
            raise ValueError(f"{_told(node)}: expected a Mul by the product of two scales behind its Cast")
        self.passed |= {cast.output[0], factor.output[0]}
        return mul, list(factor.input)

    def _reader(self, node: Any, name: str, kind: str) -> Any:
        found = self.readers.get(name, [])
        if len(found) != 1 or found[0].op_type != kind or not found[0].output:
            kinds = ", ".join(sorted(one.op_type for one in found)) or "nothing"
            raise ValueError(f"{_told(node)}: its result goes to {kinds}, expected Cast and Mul by the scales")
        return found[0]

    def _assign(self, node: Any, a: str, b: str, scales: list[str]) -> tuple[str, str]:
        """Which of `scales` belongs to which operand."""
        known = [self._dynamic_scale(one) for one in (a, b)]
        left = list(scales)
        for one in known:
            if one in left:
                left.remove(one)
            elif one:
                raise ValueError(f"{_told(node)}: its result is not multiplied by {one!r}, the scale of its operand")
        found = [one or (left.pop() if left else "") for one in known]
        if left or not all(found):
            raise ValueError(f"{_told(node)}: its result is not multiplied by one scale of each operand")
        return found[0], found[1]

    def _dynamic_scale(self, name: str) -> str:
        """Of what DynamicQuantizeLinear has made; "" of anything else."""
        for _ in range(_MOST_MOVES):
            node = self.maker.get(name)
            if node is not None and node.op_type == "DynamicQuantizeLinear" and len(node.output) == 3:
                return str(node.output[1])
            if node is None or node.op_type not in _MOVES:
                break
            name = node.input[0]
        return ""

    def _float(self, node: Any, name: str, scale: str, zero: str, moves: int = 0) -> str:
        """The value for which the integers `name` stand, an operand of `node`."""
        key = (name, scale, zero)
        if key not in self.floats:
            self.floats[key] = self._made_float(node, name, scale, zero, moves)
        return self.floats[key]

    def _made_float(self, node: Any, name: str, scale: str, zero: str, moves: int) -> str:
        if name in self.shapes:
            if scale not in self.shapes or (zero and zero not in self.shapes):
                raise ValueError(f"{_told(node)}: the scale or the zero point of {name!r} is no constant")
            # Of a product's weights they are of the columns, which is the last axis.
            shape = self.shapes[name]
            if node.op_type in _PRODUCTS and len(shape) != 2:
                raise ValueError(f"{_told(node)}: {name!r} is {list(shape)}, expected a matrix")
            if node.op_type in _PRODUCTS and name != node.input[1] and self._is_vector(scale, zero):
                raise ValueError(f"{_told(node)}: {name!r} has scales for each of its columns, expected one")
            return self._add("DequantizeLinear", [name, scale, *([zero] if zero else [])], self._fresh(name))
        maker = self.maker.get(name)
        if maker is not None and maker.op_type == "DynamicQuantizeLinear" and list(maker.output) == [name, scale, zero]:
            self.passed.add(name)
            return str(maker.input[0])
        if maker is None or maker.op_type not in _MOVES or moves == _MOST_MOVES:
            made = f"made by {maker.op_type}" if maker is not None else "an input of the graph"
            raise ValueError(f"{_told(node)}: {name!r} is {made}, expected weights or DynamicQuantizeLinear")
        if self._is_vector(scale, zero):
            raise ValueError(f"{_told(node)}: {name!r} is moved and has scales for each of its columns, expected one")
        copy = _copy(maker)
        copy.input[0] = self._float(node, maker.input[0], scale, zero, moves + 1)
        copy.output[0] = self._fresh(name)
        self.nodes.append(copy)
        self.passed.add(name)
        return str(copy.output[0])

    def _dequantise(self, node: Any) -> bool:
        """Of integers that have been looked up or moved. False where it is left as it is: of a constant, or of unknown
        integers."""
        name, scale, zero = [*node.input, "", "", ""][:3]
        if name in self.shapes or not self._is_moved(name) or not node.output:
            return False
        self._add("Identity", [self._float(node, name, scale, zero)], node.output[0])
        return True

    def _is_moved(self, name: str) -> bool:
        """Whether it comes from a constant or from DynamicQuantizeLinear, through nothing but moves."""
        for _ in range(_MOST_MOVES):
            node = self.maker.get(name)
            if name in self.shapes or node is None or node.op_type not in _MOVES:
                break
            name = node.input[0]
        return name in self.shapes or bool(self._dynamic_scale(name))

    def _is_vector(self, *names: str) -> bool:
        return any(self.shapes.get(name, ()) not in ((), (1,)) for name in names if name)

    def _add(self, kind: str, inputs: list[str], output: str) -> str:
        self.nodes.append(_made(kind, inputs, output))
        return output

    def _fresh(self, name: str) -> str:
        """A name that the graph does not have."""
        name += " in floats"
        while name in self.maker or name in self.shapes or name in self.floats.values():
            name += "'"
        return name


def _made(kind: str, inputs: list[str], output: str) -> Any:
    from onnx import helper

    return helper.make_node(kind, inputs, [output])


def _copy(node: Any) -> Any:
    copy = type(node)()
    copy.CopyFrom(node)
    return copy


def _told(node: Any) -> str:
    """"MatMulInteger '/encoder/query/MatMul'": by its name or, without one, by its result."""
    return f"{node.op_type} {node.name or (node.output[0] if node.output else '')!r}"
