"""The Python of README and docs as a new user copies it: it parses, and names what it uses."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import pytest

import ftbert

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if "```python" in path.read_text("utf-8"))
# What a page leaves to the reader: tensors, layers and texts of a program of theirs.
READERS_OWN = {
    "README.md": {"x", "residual", "weight"},
    "norm.md": {"model", "x", "shortcut", "conv"},
    "several_gpus.md": {"query", "texts", "pairs"},
}


def bound(tree: ast.AST) -> set[str]:
    """Names that a snippet gives a meaning."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_name_what_they_use(page: Path) -> None:
    known = {*dir(builtins), "ftbert"} | READERS_OWN.get(page.name, set())
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        tree = ast.parse(snippet)
        known |= bound(tree)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert used <= known, f"{page.name}: {sorted(used - known)} in\n{snippet}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ftbert":
                assert node.attr in {*ftbert.__all__, "norm", "converters"}, f"{page.name}: ftbert.{node.attr}"
