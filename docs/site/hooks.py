"""Hooks of mkdocs: pages of the site that lie outside docs/, and links to files of the repository.

README.md is the first page; CONTRIBUTING.md, CHANGELOG.md and SECURITY.md are pages too. A source file that a page
links to becomes a page with its code, any other file (results of benchmarks) is copied as it is. So a link works in a
checkout and on the site alike.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}  # fmt: skip
CODE = {
    ".py": "python", ".cpp": "cpp", ".h": "cpp", ".cuh": "cpp", ".cu": "cpp", ".txt": "text",
    ".yaml": "yaml", "": "text",
}  # fmt: skip
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")


def outside(target: str, folder: str) -> tuple[str, str] | None:
    """(path from the repository's root, fragment) of a link from a page in `folder`; None for an address."""
    if re.match(r"[a-z]+:|#", target):
        return None
    path, _, fragment = target.partition("#")
    return posixpath.normpath(posixpath.join(folder, path)), fragment


def place(path: str) -> str:
    """Where the site has a file of the repository, from the site's root."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in PAGES:
        return PAGES[path]
    code = Path(path).suffix in CODE
    return f"source/{path}.md" if code else f"source/{path}"


def sources() -> dict[str, Path]:
    """The pages of the site by their paths from the repository's root."""
    found = {f"docs/{path.relative_to(DOCS)}": path for path in DOCS.rglob("*.md")}
    return found | {name: ROOT / name for name in PAGES}


def linked() -> set[str]:
    """Files outside docs/ that pages link to."""
    found = set()
    for name, path in sources().items():
        for match in LINK.finditer(path.read_text(encoding="utf-8")):
            to = outside(match[2], posixpath.dirname(name))
            if to and not to[0].startswith("docs/") and to[0] not in PAGES:
                found.add(to[0])
    return found


def on_files(files: Any, config: Any) -> Any:
    for name, at in PAGES.items():
        files.append(File.generated(config, at, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted(linked()):
        at = place(path)
        if at.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8").rstrip("\n")
            body = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n``````{CODE[Path(path).suffix]}\n{text}\n``````\n"
            files.append(File.generated(config, at, content=body))
        else:
            files.append(File.generated(config, at, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links from where the page lies in the repository become links from where it lies in the site."""
    at = page.file.src_uri
    name = next((name for name, there in PAGES.items() if there == at), f"docs/{at}")
    if at.startswith("source/"):
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        to = outside(match[2], posixpath.dirname(name))
        if to is None:
            return match[0]
        target = posixpath.relpath(place(to[0]), posixpath.dirname(at) or ".")
        return f"{match[1]}{target}{'#' if to[1] else ''}{to[1]}{match[3]}"

    return LINK.sub(rewritten, markdown)
