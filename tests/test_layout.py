"""The house keeps its shape: imports run down one list, in no circle, and past faces only."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# The modules of ftbert/ and its packages, from top to bottom: each may import what stands below it. "__init__" is the
# face of ftbert itself. converters is /converters, installed as ftbert.converters.
PYTHON = (
    "__main__",
    "cli",
    "server",
    "__init__",
    "evaluation",
    "files",
    "optimization",
    "model",
    "task_models",
    "replicas",
    "parallel",
    "building",
    "decoding",
    "outputs",
    "live_check",
    "load_arguments",
    "loaded_types",
    "quantization",
    "converters",
    "text",
    "packed_model",
    "heads",
    "module",
    "tuning",
    "norm",
    "checkpoint",
    "devices",
    "formats",
    "gpus",
    "forked",
    "progress",
    "_library",
    "binding",
    "_fake",
    "cores",
    "dtypes",
    "end_rows",
    "own_classes",
    "own_models",
    "padded_batches",
    "pooled_rows",
    "sentence_modules",
    "staging_folder",
    "caller",
    "input_file",
    "keywords",
    "torch_release",
    "user_cache",
    "version",
)
# The folders of csrc/, and encoder.h and .cpp, from top to bottom.
CORE = ("binding", "encoder", "layers", "model", "gemm", "kernels", "device", "core")
# All that converters/ may import of ftbert/: other people's checkpoints become this format, and what reads texts shows
# that a copy of a tokenizer's files reads them alike. Nothing else is known.
CONVERTERS_MAY_IMPORT = {"converters", "checkpoint", "text"}
COMPILED = "ftbert.lib"


class Import(NamedTuple):
    """One import, or one use of a private name of an imported module. name: "" where the whole module is meant."""

    file: str  # the importing module: "ftbert.files.embed"
    line: int
    module: str  # the imported one: "ftbert.files.records"
    name: str  # what of it: "Position"


parse = functools.cache(ast.parse)


def read(modules: dict[str, str]) -> Iterator[Import]:
    """Every import of ftbert, at the top or in a function. modules: source by module name, packages by their face."""
    for file, source in modules.items():
        tree, bound = parse(source), dict[str, str]()  # bound: modules by the names that they have in the file
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (Import(file, node.lineno, a.name, "") for a in node.names if a.name.startswith("ftbert"))
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno}: a relative import"
                if str(node.module).partition(".")[0] != "ftbert":
                    continue
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    if whole not in modules:
                        yield Import(file, node.lineno, str(node.module), alias.name)
                        continue
                    bound[alias.asname or alias.name] = whole
                    # A package's face may hand out one of its modules.
                    theirs = unit(whole) != unit(file) and len(whole.split(".")) > 2
                    yield Import(file, node.lineno, *((str(node.module), alias.name) if theirs else (whole, "")))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in bound:
                yield Import(file, node.lineno, bound[ast.unparse(node.value)], node.attr)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def unit(module: str) -> str:
    """The entry of PYTHON that a module belongs to."""
    return (module.split(".") + ["__init__"])[1]


def broken_rules(modules: dict[str, str]) -> list[str]:
    """What is wrong with the imports of these modules, a line each."""
    wrong = [f"{module}: has no place in the order" for module in modules if unit(module) not in PYTHON]
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for one in read(modules):
        if one.module.startswith(COMPILED):
            continue
        where, mine, theirs = f"{one.file}:{one.line}", unit(one.file), unit(one.module)
        if one.module not in modules:
            wrong.append(f"{where}: there is no {one.module}")
            continue
        graph[one.file].add(one.module)
        if mine == theirs or mine not in PYTHON or theirs not in PYTHON:
            continue
        if PYTHON.index(theirs) < PYTHON.index(mine):
            wrong.append(f"{where}: {mine} imports {theirs}, which stands above it")
        if mine == "converters" and theirs not in CONVERTERS_MAY_IMPORT:
            wrong.append(f"{where}: converters may not import {theirs}")
        inside = one.module.split(".")[2:]
        if any(map(is_private, [*inside, one.name])):  # ftbert/_library.py itself is private to ftbert, not in it
            wrong.append(f"{where}: {one.module}.{one.name} is private to {theirs}")
        elif inside:
            wrong.append(f"{where}: {one.module} is inside {theirs}; import from its face, ftbert.{theirs}")
        elif not inside and one.name and (face := names_of_face(modules[one.module])) and one.name not in face:
            wrong.append(f"{where}: {one.name} is not in the face of {theirs}")
    return wrong + circles(graph)


def names_of_face(source: str) -> set[str]:
    """__all__, empty where there is none."""
    lists = (n.value for n in parse(source).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    return {str(name) for one in lists for name in ast.literal_eval(one)}


def circles(graph: dict[str, set[str]]) -> list[str]:
    """What is wrong where a module reaches itself: one line, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"a circle: {' <- '.join(error.args[1])}"]
    return []


def sources() -> dict[str, str]:
    """ftbert/ and converters/ by the names that they are imported by."""
    found: dict[str, str] = {}
    for folder, package in ((ROOT / "ftbert", "ftbert"), (ROOT / "converters", "ftbert.converters")):
        for path in sorted(folder.rglob("*.py")):
            if "converters" in path.relative_to(folder).parts:
                continue  # the link, in a Python that follows it
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path.read_text(encoding="utf-8")
    return found


def test_every_place_in_the_order_is_lived_in() -> None:
    assert set(PYTHON) == {unit(module) for module in sources()}


def test_no_test_module_imports_another() -> None:
    for path in (ROOT / "tests").glob("*.py"):
        assert not re.search(r"^(from|import) test_", path.read_text(encoding="utf-8"), re.MULTILINE), path.name


def test_a_wheel_holds_every_package() -> None:
    listed = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    packages = {module.rpartition(".")[0] if module.count(".") == 2 else "ftbert" for module in sources()}
    assert set(re.findall(r'"(.+?)"', listed[1])) == packages


PLANTED = [
    ("ftbert.checkpoint.tensors", "from ftbert.converters import convert", "which stands above it"),
    ("ftbert.text.options", "def late():\n    import ftbert.model", "which stands above it"),
    ("ftbert.converters.families", "from ftbert.user_cache import locked", "converters may not import user_cache"),
    ("ftbert.model", "from ftbert.checkpoint import _REAL", "is private to checkpoint"),
    ("ftbert.optimization.patch", "from ftbert.model import _build", "is private to model"),
    ("ftbert.live_check", "from ftbert.tuning import gemm_table\ngemm_table._installed", "is private to tuning"),
    ("ftbert.cli.models", "from ftbert.text import Cutter", "Cutter is not in the face of text"),
    ("ftbert.cli.models", "from ftbert.tuning.run import tune", "import from its face, ftbert.tuning"),
    ("ftbert.files.records", "def late():\n    from ftbert.files.embed import embed_file", "a circle: "),
    ("ftbert.text.tokenizer", "from ftbert.text import encode", "a circle: "),
    ("ftbert.model", "import ftbert.nothing", "there is no ftbert.nothing"),
    ("ftbert.shed", "import os", "has no place in the order"),
]


# ---- csrc/ ---------------------------------------------------------------------------------------------------------


def broken_includes(files: dict[str, str]) -> list[str]:
    """What is wrong with the includes of these files, a line each. files: source by path below csrc/."""
    wrong, graph = [], dict[str, set[str]]()
    for file, source in files.items():
        mine = Path(file).parts[0].partition(".")[0]
        graph[file] = {header for header in re.findall(r'#include "(.+?)"', source) if header in files}
        for header in graph[file]:
            theirs = Path(header).parts[0].partition(".")[0]
            if CORE.index(theirs) < CORE.index(mine):
                wrong.append(f"{file} includes {header}: {theirs} stands above {mine}")
        if mine != "binding" and (torch := re.search(r'#include ["<]((?:torch|ATen|c10)/.+?)[">]', source)):
            wrong.append(f"{file} includes {torch[1]}: torch's headers are for binding/")
        if mine != "core" and re.search(r"#\s*if.*\bFTBERT_CUDA\b", source):
            wrong.append(f"{file}: FTBERT_CUDA is asked in core/ alone")
    return wrong + circles(graph)


def core_sources() -> dict[str, str]:
    paths = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in (".h", ".cuh", ".cpp", ".cu")]
    return {str(path.relative_to(ROOT / "csrc")): path.read_text(encoding="utf-8") for path in paths}


PLANTED_INCLUDES = [
    ("kernels/kernels.h", '#include "gemm/gemm.h"', "gemm stands above kernels"),
    ("core/operand.h", '#include "gemm/product.h"', "a circle: "),
    ("encoder.h", '#include "binding/padding.h"', "binding stands above encoder"),
    ("layers/residual.h", "#include <ATen/core/Tensor.h>", "torch's headers"),
    ("gemm/gemm.h", "#ifdef FTBERT_CUDA", "in core/ alone"),
]


@pytest.mark.parametrize(
    ("gather", "broken", "planted"),
    [(sources, broken_rules, PLANTED), (core_sources, broken_includes, PLANTED_INCLUDES)],
    ids=["imports", "includes"],
)
def test_what_runs_up_the_house_is_found_and_there_is_none(gather: Any, broken: Any, planted: Any) -> None:
    files = gather()
    wrong = broken(files)
    assert not wrong, "\n".join(wrong)
    for file, line, _ in planted:
        files[file] = files.get(file, "") + f"\n{line}\n"
    wrong = broken(files)
    assert [words for *_, words in planted if not any(words in one for one in wrong)] == []
