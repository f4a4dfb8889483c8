"""The server's page in a real browser: Debian's chromium, driven by the package playwright; skipped where one is missing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import randomise
from served import Served, in_thread, with_head

CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


@dataclass
class Opened:
    """A page, and what its browser said and asked for meanwhile."""

    page: Any
    errors: list[str]
    requests: list[Any]

    def __call__(self, selector: str) -> Any:
        return self.page.locator(selector)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text()).strip()

    def see(self, selector: str, text: str) -> None:
        """Waits for it."""
        self.page.locator(selector).filter(has_text=text).first.wait_for()

    def settle(self) -> None:
        """Until no card has a call under way and all of them have words to say."""
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('form.card:not([hidden])')]"
            ".every(card => !card.hasAttribute('aria-busy') && card.querySelector('.note').textContent)"
        )

    def asked(self, route: str) -> list[Any]:
        """The bodies of the calls of a route."""
        return [one.post_data_json for one in self.requests if one.url.endswith(route)]

    def answer(self, route: str, **how: Any) -> None:
        """What these routes answer from now on, without the server."""
        self.page.route(re.compile(route), lambda given: given.fulfill(**how))

    def hover(self, row: int, column: int, click: bool = False) -> None:
        box = self("#map").bounding_box()
        grid = self.page.evaluate("grid")
        at = [box[side] + grid[first] + (i + 0.5) * grid["cell"] for side, first, i in (("x", "left", column), ("y", "top", row))]
        self.page.mouse.move(*at)
        if click:
            self.page.mouse.click(*at)


def digits(score: float) -> str:
    """As the page shows it: a small score has digits too."""
    return f"{score:.4f}" if abs(score) >= 0.001 or score == 0 else f"{score:.2g}".replace("e-0", "e-")


def url_of(server: Served) -> str:
    return f"http://127.0.0.1:{server.port}"


@contextmanager
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright is here: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium is here: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def models_by_kind(root: Path, tiny_bert: Callable[..., Path]) -> dict[str, Path]:
    heads = {"classifier": with_head(root, 3, tiny_bert), "reranker": with_head(root, 1, tiny_bert)}
    return {**heads, "token_classifier": tagger(root, tiny_bert), "embedding": tiny_bert(root)}


def tagger(root: Path, tiny_bert: Callable[..., Path]) -> Path:
    from transformers import BertConfig, BertForTokenClassification

    folder = tiny_bert(root).rename(root / "tagger")
    config = BertConfig.from_pretrained(folder, id2label=dict(enumerate(("O", "B-PER", "I-PER", "LOC"))))
    model = randomise(BertForTokenClassification(config), 5)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)  # labels by the word
        model.classifier.bias.zero_()
    model.save_pretrained(folder)
    return folder


@contextmanager
def servers_of(folders: dict[str, Path]) -> Iterator[dict[str, Served]]:
    """One of each kind of model."""
    with ExitStack() as stack:
        yield {kind: stack.enter_context(in_thread((f"tiny/{kind}", folder))) for kind, folder in folders.items()}


@contextmanager
def pages_of(browser: Any) -> Iterator[Callable[..., Opened]]:
    opened = []

    def start(server: Served, settle: bool = True, **options: Any) -> Opened:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
        context.set_default_timeout(10_000)
        page = context.new_page()
        found = Opened(page, [], [])
        page.on("console", lambda said: found.errors.extend([said.text] * (said.type in ("error", "warning", "verbose"))))
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.on("request", lambda request: found.requests.append(request))
        page.goto(url_of(server) + "/")
        opened.append((url_of(server), found))
        if settle:
            found.settle()
        return found

    yield start
    for url, found in opened:
        found.page.context.close()
        assert found.requests and all(asked.url.startswith(url + "/") for asked in found.requests)
        # An answer with an error status is a line of the browser's own, whatever the page does with it.
        assert [said for said in found.errors if not said.startswith("Failed to load resource")] == []
