"""The pages: links lead somewhere, the site names all of them, generated parts follow from the code and the results."""

from __future__ import annotations

import functools
import html
import importlib.util
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from pages import PAGES, ROOT, anchors, links, prose

import ftbert

sys.path.append(str(ROOT / "benchmarks"))

import speed_chart  # noqa: E402

MKDOCS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def broken(path: Path) -> list[str]:
    """Links to files, folders and headings that are not there. A folder is no page of a site."""
    found = []
    for link in links(path):
        target, _, fragment = link.partition("#")
        if re.match(r"https?:", target):
            continue
        to = (path.parent / target).resolve() if target else path
        if not to.is_file() or (fragment and fragment not in anchors(to)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One word: two\n")
    (page := tmp_path / "page.md").write_text(
        "[a](a.md) [b](b.md) [c](a.md#one-word-two) [d](a.md#two) [e](.) `[f](f.md)`\n\n```\n[g](g.md)\n```\n"
    )
    assert broken(page) == ["b.md", "a.md#two", "."]


def nav(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in nav(part)]


def test_the_site_has_every_page() -> None:
    made = {"index.md", "contributing.md", "changelog.md", "security.md"}
    assert sorted(nav(yaml.safe_load(MKDOCS)["nav"])) == sorted(made | {path.name for path in (ROOT / "docs").glob("*.md")})


class Page(HTMLParser):
    """What a page of the site refers to, and the ids that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.refers: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.refers.append(value)
            elif name == "id" and value:
                self.ids.add(value)


def lost(site: Path) -> list[str]:
    """References between files of the site that lead nowhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        for reference in page.refers:
            target, _, fragment = reference.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            to = (path.parent / unquote(target)).resolve() if target else path
            if not to.exists() or (fragment and to in pages and unquote(fragment) not in pages[to].ids):
                found.append(f"{path.relative_to(site)}: {reference}")
    return found


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="no mkdocs is here: make docs installs it")
def test_the_site_is_built(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lost(tmp_path) == []
    assert "Tokens a second" in (tmp_path / "index.html").read_text() and (tmp_path / "speed.svg").exists()
    reference = (tmp_path / "python.html").read_text()
    text = " ".join(re.sub(r"<[^>]*>", "", html.unescape(reference)).split())
    for name in ("load", "Model.forward_packed", "Model.encode", "Model.rerank", "Model.generate", "optimize"):
        described = functools.reduce(getattr, name.split("."), ftbert)
        assert re.search(rf'id="ftbert\.[\w.]*{name}"', reference), name
        first = re.match(r"[\w ,]+", " ".join(described.__doc__.split()))
        assert first and first[0].strip() in text, f"{name}: {first}"
    assert re.search(r"<li>\s*(<p>)?<code>device</code>:", reference), "arguments are no list"


def test_lost_references_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="x"></h1><a href="b.html"></a><a href="#x"></a><a href="#y"></a><img src="c.png">')
    assert lost(tmp_path) == ["a.html: b.html", "a.html: #y", "a.html: c.png"]


def test_readme_is_read_in_two_minutes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 160
    assert len(prose(ROOT / "README.md").split()) <= 1100


def test_readme_names_every_family() -> None:
    from ftbert.converters.families import FAMILIES

    table = re.findall(r"^\| (?:BERT|encoders|decoders)[^|]* \| (.*) \|$", (ROOT / "README.md").read_text(), flags=re.M)
    assert len(table) == 7
    assert sorted(re.sub(r" \(.*?\)", "", ", ".join(table)).split(", ")) == sorted(FAMILIES)


@pytest.mark.parametrize("name", speed_chart.CHARTS)
def test_charts_are_what_the_results_give(name: str) -> None:
    text = speed_chart.render(speed_chart.CHARTS[name])
    assert (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8") == text, "run benchmarks/speed_chart.py"
    import xml.etree.ElementTree as xml

    root = xml.fromstring(text)
    bars = [float(bar.get("width", 0)) for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("rx") == "1.5"]
    peers = sum(len(panel.peers) for panel in speed_chart.CHARTS[name])
    longest = speed_chart.WIDTH - speed_chart.NAMES - speed_chart.VALUES
    assert len(bars) == 2 * peers and min(bars) >= 0 and max(bars) == longest


def test_a_chart_refuses_a_peer_that_is_off() -> None:
    """onnxruntime's int8 in a run of float32."""
    panel = speed_chart.Panel("cpu-fp32", "", speed_chart.CPU_POINTS, {"onnxruntime int8": "onnxruntime"})
    with pytest.raises(ValueError, match="off by"):
        speed_chart.render((panel,))


@pytest.fixture(scope="module")
def command_line() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "make_command_line.py"))


def test_the_command_line_is_that_of_the_parsers(command_line: dict[str, Any]) -> None:
    assert command_line["TARGET"].read_text(encoding="utf-8") == command_line["render"](), "run python docs/make_command_line.py"


def test_every_variable_of_the_environment_is_listed(command_line: dict[str, Any]) -> None:
    read = set()
    for folder, suffixes in (("ftbert", (".py",)), ("converters", (".py",)), ("csrc", (".cpp", ".cu", ".h"))):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes:
                read |= {*re.findall(r'(?:getenv|environ(?:\.get)?)[(\[]"(FTBERT_\w+)"', path.read_text(encoding="utf-8"))}
    assert read and read == {name for name in command_line["ENVIRONMENT"] if name.startswith("FTBERT_")}


def directives() -> list[tuple[str, list[str]]]:
    """(name, members) of each ::: of docs/python.md."""
    found = []
    for block in re.split(r"^::: ", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), flags=re.M)[1:]:
        name, _, options = block.partition("\n")
        members = re.search(r"members: \[(.*?)\]", options.partition("\n\n")[0], flags=re.S)
        found.append((name, re.split(r",\s*", members[1]) if members else []))
    return found


@pytest.mark.parametrize(("name", "members"), directives(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_reference_documents_what_exists(name: str, members: list[str]) -> None:
    if name in ("ftbert.norm", "ftbert.tuning", "ftbert.converters"):
        found: Any = importlib.import_module(name)
        members = members or found.__all__
    else:
        found = functools.reduce(getattr, name.split(".")[1:], ftbert)
        assert found.__doc__
    for member in members:
        assert getattr(found, member).__doc__, f"{name}.{member} has no docstring"


def test_the_reference_is_whole() -> None:
    named = {name.removeprefix("ftbert.") for name, _ in directives()}
    assert named >= {*ftbert.__all__} - {"__version__"}
