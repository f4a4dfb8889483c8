"""The embedding tables of an ONNX graph: the sum before the first layer, and the role of each table.

Told apart by what their indices are made of, not by name: ids come straight from an input, position ids count columns
or non-padding tokens, token types come from an input or are all zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ftbert.converters.onnx_file import Constant, computed
from ftbert.converters.onnx_graph import LAYOUT, Graph, closure

# Of these only the first input is a source of values; the rest says where and how.
_MOVES = LAYOUT | {"Slice", "Gather", "GatherElements", "GatherND", "Clip"}


@dataclass
class Tables:
    """Constants [rows, embedding]. padding_id only where positions == "from_padding".

    ids, types: the graph's inputs that index the first and the last; types is "" where there is no such input.
    """

    word: Constant
    ids: str
    types: str = ""
    position: Constant | None = None
    token_type: Constant | None = None
    positions: str = "none"
    padding_id: int = 0


def find_lookups(graph: Graph) -> dict[str, tuple[Constant, str]]:
    """output -> (table, index) of every Gather from a float matrix by an index that is none."""
    found = {}
    for node in graph.nodes:
        if node.type == "Gather" and len(node.inputs) == 2 and not node.attributes.get("axis", 0):
            table = graph.matrix(node.inputs[0])
            if table is not None and not table.transposed:
                found[node.outputs[0]] = (table.constant, node.inputs[1])
    return found


def is_input(graph: Graph, index: str) -> bool:
    return graph.before_layout(index) in graph.inputs


def find_tables(graph: Graph, total: str, lookups: dict[str, tuple[Constant, str]]) -> Tables:
    """Of the sum `total`; ValueError says what in it is no embedding."""
    direct: list[tuple[str, Constant]] = []
    found: dict[str, Constant] = {}
    positions, padding_id = "none", 0
    for leaf in _leaves(graph, total):
        if leaf in lookups:
            table, index = lookups[leaf]
            if is_input(graph, index):
                direct.append((graph.before_layout(index), table))
                continue
            role, padding_id = _role(graph, index, padding_id)
        else:
            role, table = _folded(graph, leaf)
        what = "token type" if role == "token type" else "position"
        if what in found:
            raise ValueError(f"embeddings: two {what} tables, {found[what].name!r} and {table.name!r}")
        found[what] = table
        positions = role if what == "position" else positions
    roles = _name_inputs(direct)
    if "position" in roles:
        raise ValueError("embeddings: position ids are an input of this model; export it without them")
    ids, word = roles["word"]
    types, token_type = roles.get("token type", ("", found.get("token type")))
    return Tables(word, ids, types, found.get("position"), token_type, positions, padding_id)


def _leaves(graph: Graph, total: str) -> list[str]:
    """What the sum `total` adds up."""

    def summands(name: str) -> list[str]:
        node = graph.producer.get(graph.before_layout(name))
        return node.inputs if node is not None and node.type == "Add" else []

    return [graph.before_layout(name) for name in closure([total], summands) if not summands(name)]


def _name_inputs(direct: list[tuple[str, Constant]]) -> dict[str, tuple[str, Constant]]:
    """By the input's name where it has a usual one; else the largest table is the vocabulary."""
    found: dict[str, tuple[str, Constant]] = {}
    for name, table in sorted(direct, key=lambda entry: -entry[1].shape[0]):
        role = "token type" if "type" in name or "segment" in name else "position" if "position" in name else "word"
        role = "token type" if role in found else role
        if role in found:
            raise ValueError(f"embeddings: {len(direct)} tables are indexed by inputs, cannot tell them apart")
        found[role] = (name, table)
    if "word" not in found:
        raise ValueError("embeddings: no table is indexed by the token ids")
    return found


def _role(graph: Graph, index: str, padding_id: int) -> tuple[str, int]:
    """("token type" or the kind of positions, padding id) of a table whose index is computed."""
    ops, constants = _sources(graph, index)
    if "CumSum" in ops:
        return "from_padding", _padding_id(graph, index)
    if "Range" in ops:
        return "absolute", padding_id
    numbers = [values for name in constants if (values := graph.numbers(name)) is not None]
    if numbers and all(not values.any() for values in numbers):
        return "token type", padding_id
    columns = [values.reshape(-1) for values in numbers if values.size > 1]
    if len(columns) == 1 and np.array_equal(columns[0], np.arange(columns[0].size)):
        return "absolute", padding_id
    raise ValueError(f"embeddings: an index is computed from {', '.join(sorted(ops)) or 'constants'}, by no known rule")


def _sources(graph: Graph, name: str) -> tuple[set[str], set[str]]:
    """Which ops compute `name`, and from which constants; not counting where they only take shapes and indices."""

    def sources_of(one: str) -> list[str]:
        node = graph.producer.get(one)
        if node is None or node.type in ("Shape", "Range", "ConstantOfShape"):
            return []
        return node.inputs[:1] if node.type in _MOVES else node.inputs

    values = set(closure([name], sources_of))
    made = [(value, graph.producer[value]) for value in values & graph.producer.keys()]
    for value, node in made:
        if node.type == "ConstantOfShape":
            filled = node.attributes.get("value")
            fallback = computed("", np.zeros(1, np.float32))
            graph.constants.setdefault(value, filled if isinstance(filled, Constant) else fallback)
    return {node.type for _, node in made}, values & graph.constants.keys()


def _padding_id(graph: Graph, index: str) -> int:
    """RoBERTa's rule: padding_id + the number of ids != padding_id so far. The id is what they are compared with."""
    for node in graph.ancestors(index):
        if node.type == "Equal":
            number = next((value for name in node.inputs if (value := graph.number(name)) is not None), None)
            if number is not None:
                return int(number)
    raise ValueError("embeddings: positions are counted from padding, but no id is compared with a padding id")


def _folded(graph: Graph, leaf: str) -> tuple[str, Constant]:
    """An exporter without dynamic shapes looks constants up beforehand: [.., rows, embedding]."""
    constant = graph.constants.get(leaf)
    if constant is None or not constant.is_float or not constant.shape or not constant.size:
        node = graph.producer.get(leaf)
        raise ValueError(f"embeddings: the sum contains {leaf!r}, made by {node.type if node else 'nothing'}")
    table = constant.read().reshape(-1, constant.shape[-1])
    if len(constant.shape) == 3:
        table = table[: constant.shape[1]]
    same = bool((table == table[:1]).all())
    kept = computed(constant.name, np.ascontiguousarray(table[:1] if same else table))
    return ("token type" if same else "absolute"), kept
