"""The server's page in a real browser: its shape at every width, keys and names, and the page of routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_browser import Opened, chromium, models_by_kind, pages_of, servers_of, url_of
from served import Served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def folders(browser: Any, tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> dict[str, Path]:
    return models_by_kind(tmp_path_factory.mktemp("models"), tiny_bert)


@pytest.fixture(scope="module")
def servers(folders: dict[str, Path]) -> Iterator[dict[str, Served]]:
    with servers_of(folders) as servers:
        yield servers


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    with pages_of(browser) as start:
        yield start


@pytest.fixture
def embedding(open_page: Callable[..., Opened], servers: dict[str, Served]) -> Opened:
    return open_page(servers["embedding"])


@pytest.mark.parametrize("width", [390, 1280])
def test_the_first_calls_fill_their_places(width: int, servers: dict[str, Served], open_page: Callable[..., Opened]) -> None:
    """All of the first code is seen, and bars begin at the left."""
    opened = open_page(servers["embedding"], viewport={"width": width, "height": 900})
    opened.see("#calls", "the last 2 calls")
    opened.settle()
    assert opened.page.evaluate("(box => box.scrollHeight - box.clientHeight)(document.querySelector('pre'))") <= 0
    assert opened.page.evaluate("document.getElementById('history').getContext('2d').getImageData(4, 40, 1, 1).data[3]") == 255


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
@pytest.mark.parametrize(
    ("kind", "field"),
    [("embedding", "#texts"), ("reranker", "#passages"), ("classifier", "#inputs"), ("token_classifier", "#tagged")],
)
def test_nothing_jumps_or_sticks_out(
    kind: str, field: str, width: int, scheme: str, servers: dict[str, Served], open_page: Callable[..., Opened]
) -> None:
    opened = open_page(servers[kind], color_scheme=scheme, viewport={"width": width, "height": 900})
    height = opened.page.evaluate("document.documentElement.scrollHeight")
    opened(field).fill("\n".join(f"{'long ' * i} line {i} {'x' * 200}" for i in range(40)))
    opened("#text").fill("word1 " * 700)
    opened.see("#tokenize .note", "the first 600 are shown")
    opened.settle()
    assert opened.page.evaluate("document.documentElement.scrollHeight") == height
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    moved = """() => new Promise(done => new PerformanceObserver(list => done(
        list.getEntries().reduce((sum, one) => sum + one.value, 0))).observe({type: 'layout-shift', buffered: true})
        || setTimeout(() => done(0), 200))"""
    assert opened.page.evaluate(moved) < 0.01
    # No box ends within a line, and what is wider than its place has the whole text for the pointer.
    cut = opened.page.evaluate(
        """() => [...document.querySelectorAll('textarea, pre, ol, ul')].filter(box => box.checkVisibility()).flatMap(box => {
          const end = box.getBoundingClientRect().top + box.clientTop + box.clientHeight;
          const items = [...box.children].map(one => one.getBoundingClientRect());
          const line = parseFloat(getComputedStyle(box.matches('#entities') ? box.firstChild : box).lineHeight);
          const half = box.matches('textarea, pre, #entities') ? box.clientHeight % line > .5
            : items.some(({ top, bottom }) => top < end - 6 && bottom > end + 6);
          return half ? [box.id || box.tagName] : [];
        }).concat([...document.querySelectorAll('.cut, .pair p, .labels span, .head .note')].filter(one =>
          one.scrollWidth > one.clientWidth + 1 && one.title !== one.textContent).map(one => one.textContent))"""
    )
    assert cut == []
    # Text against what is behind it, as WCAG wants it.
    low = opened.page.evaluate(
        """() => {
          const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
            .map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
            .reduce((s, x, i) => s + x * [.2126, .7152, .0722][i], 0);
          const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
            if (!c.endsWith(', 0)')) return c; } return 'rgb(255, 255, 255)'; };
          return [...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && e.firstChild?.nodeType === 3
              && e.textContent.trim() && !['OPTION', 'SCRIPT', 'STYLE'].includes(e.tagName)).map(e => {
            const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
            return [e.tagName + '#' + e.id, (Math.max(a, b) + .05) / (Math.min(a, b) + .05)]; }).filter(([, x]) => x < 4.5);
        }"""
    )
    assert low == []


def test_the_key_is_in_a_form_that_remembers_nothing(embedding: Opened) -> None:
    """Browsers warn of a password field outside one."""
    form = embedding("form:has(#key)")
    assert (form.get_attribute("autocomplete"), embedding("#key").get_attribute("autocomplete")) == ("off", "off")
    url = embedding.page.url
    embedding("#key").press("Enter")
    embedding.see("#state.good", "ready")
    assert embedding.page.url == url


def test_all_can_be_reached_by_keys_and_has_a_name(embedding: Opened) -> None:
    names = embedding.page.evaluate(
        "() => [...document.querySelectorAll('input, textarea, select, button, canvas, [tabindex]')].filter(e => "
        "e.checkVisibility() && !(e.labels?.length || e.ariaLabel || e.tagName === 'BUTTON' && e.textContent)).map(e => e.outerHTML)"
    )
    assert names == []
    embedding("#key").focus()
    seen = []
    for _ in range(24):
        embedding.page.keyboard.press("Tab")
        seen.append(embedding.page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    want = ["repeat", "Compare", "texts", "map", "Rank", "query", "passages", "ranks", "Tokenize", "text", "tokens"]
    assert [name for name in seen if name in want][: len(want)] == want
    embedding("#texts").fill("a\nb")
    embedding("#texts").press("Control+Enter")
    embedding.see("#similarity .note", "2 texts")


def test_the_routes_are_shown(embedding: Opened, servers: dict[str, Served]) -> None:
    url = url_of(servers["embedding"])
    embedding.page.goto(url + "/docs")
    embedding.see("summary", "/embed")
    found = servers["embedding"].call("GET", "/openapi.json").json()
    want = [path for path, methods in found["paths"].items() for _ in methods]
    assert embedding("summary code").all_inner_texts() == want
    embed = embedding("details").filter(has=embedding.page.get_by_text("TEI: a vector for each text"))
    embed.locator("summary").click()
    rows = [row.split("\t") for row in embed.locator("table").inner_text().split("\n")]
    assert [row for row in rows if row[0] in ("inputs", "normalize")] == [
        ["inputs", "string | [string | integer | [integer]]", "required"], ["normalize", "boolean", "true"],
    ]  # fmt: skip
    assert f"curl {url}/embed -H" in embed.locator("pre").inner_text()
