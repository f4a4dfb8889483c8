"""The lint of sentences finds pronouns in comments, docstrings and pages, and leaves code and tables alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import sentences

CHAIN = "What of a product no kernel does, which is the one that the others leave, stays for those that run behind it."
NOUNS = "Returns the epilogue that must run as a separate kernel, and reduces the product to one that a kernel supports."


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("a.h", f"int a;  // short\n// {CHAIN[:50]}\n// {CHAIN[50:]}\n// {NOUNS}\n", 1),
        ("a.py", f'def f():\n    """A short one.\n\n    {CHAIN}\n    """\n    return "{CHAIN}"\n# {CHAIN}\n', 2),
        ("a.md", f"# A page\n\n- {NOUNS}\n- {CHAIN}\n\n| {CHAIN} |\n\n```\n{CHAIN}\n```\n", 1),
    ],
)
def test_sentences(tmp_path: Path, name: str, text: str, count: int) -> None:
    (tmp_path / name).write_text(text)
    assert len([*sentences.wrong(tmp_path / name)]) == count
