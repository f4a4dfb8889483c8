"""The server's page before a language model in a real browser: a chat that streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from language_models import random_llama
from page_browser import Opened, chromium, pages_of, url_of
from served import Served, in_thread
from stub_generation import steps_of, until

import ftbert


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("models"), "mark", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with in_thread(("tiny/llama", folder)) as server:
        yield server


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    with pages_of(browser) as start:
        yield start


@pytest.fixture
def opened(open_page: Callable[..., Opened], server: Served) -> Opened:
    found = open_page(server)
    found("#temperature").fill("0")
    found("#most").fill("30")
    return found


def said(opened: Opened) -> list[str]:
    return [str(one) for one in opened.page.evaluate("[...document.querySelectorAll('#talk p')].map(one => one.textContent)")]


def done(opened: Opened, messages: int) -> None:
    opened.page.wait_for_function(
        f"() => document.querySelectorAll('#talk p').length === {messages} && !document.querySelector('#chat[aria-busy]')"
    )


def test_a_conversation(opened: Opened, folder: Path) -> None:
    """The library's answers, each turn with what was said before."""
    model = ftbert.load(folder)
    first = {"role": "user", "content": "Where is Oslo?"}
    (answer,) = model.generate([[first]], max_new_tokens=30)
    opened("#send").click()
    done(opened, 2)
    assert said(opened) == [first["content"], answer] and opened("#message").input_value() == ""
    assert "tokens/s" in opened.text("#chat .note") and "the first after" in opened.text("#chat .note")
    second = {"role": "user", "content": "two lines\nof it"}
    (next_one,) = model.generate([[first, {"role": "assistant", "content": answer}, second]], max_new_tokens=30)
    opened("#message").fill("two lines")
    opened("#message").press("Shift+Enter")
    opened("#message").press_sequentially("of it")
    opened("#message").press("Enter")
    done(opened, 4)
    assert said(opened)[2:] == [second["content"], next_one]
    assert [len(one["messages"]) for one in opened.asked("/v1/chat/completions")] == [1, 3]
    opened("#fresh").click()
    assert said(opened) == [] and opened.text("#chat .note") == "up to 4,096 tokens"


def test_one_is_stopped_and_its_slot_is_free(open_page: Callable[..., Opened], folder: Path) -> None:
    with steps_of(folder) as (server, steps):
        opened = open_page(server)
        opened("#most").fill("100000")
        opened("#message").fill("a")
        opened("#send").click()
        opened.page.wait_for_function("() => document.querySelector('#talk .assistant')?.textContent.length > 20")
        assert opened.text("#send") == "Stop" and len(steps.texts) == 1
        opened("#send").click()
        opened.see("#chat .note", "stopped")
        until(lambda: not steps.texts)
        assert opened.text("#send") == "Send" and set(said(opened)[1]) == {"a"}


def test_what_goes_wrong_is_said(opened: Opened) -> None:
    opened.answer("v1/chat", status=429, headers={"retry-after": "7"}, body='{"error": {"message": "Model is overloaded"}}')
    opened("#send").click()
    opened.see("#chat.failed .note", "The server is busy. Try again in 7 s.")
    assert said(opened) == [] and opened("#message").input_value() == "Where is Oslo?"
    opened.page.unroute_all()
    event = 'data: {"choices": [{"delta": {"content": "half"}}]}\n\n'
    opened.answer("v1/chat", content_type="text/event-stream", body=event + 'event: error\ndata: {"error": {"message": "out of memory"}}\n\n')
    opened("#send").click()
    opened.see("#chat.failed .note", "out of memory")
    assert said(opened)[1:] == ["half"]
    opened.page.unroute_all()
    opened.answer("v1/chat", content_type="text/event-stream", body=event)
    opened("#send").click()
    opened.see("#chat.failed .note", "broke off")


def test_texts_are_no_html(opened: Opened) -> None:
    opened.answer("v1/chat", content_type="text/event-stream", body='data: {"choices": [{"delta": {"content": "<b>x</b>"}}], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n')
    opened("#message").fill("<img src=x>")
    opened("#send").click()
    opened.see("#chat .note", "2 tokens")
    assert said(opened) == ["<img src=x>", "<b>x</b>"] and opened("#talk img, #talk b").count() == 0


def test_the_call_as_code(opened: Opened, server: Served) -> None:
    opened("#message").fill("is it true?")
    opened("#send").click()
    done(opened, 2)
    assert opened.text("#snippet").startswith(f"curl -N {url_of(server)}/v1/chat/completions")
    opened("#python").click()
    code = opened.text("#snippet")
    assert '"stream": True' in code and "is it true?" in code and "iter_lines" in code
    compile(code, "snippet", "exec")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_jumps_or_sticks_out(width: int, open_page: Callable[..., Opened], server: Served) -> None:
    opened = open_page(server, viewport={"width": width, "height": 900}, color_scheme="dark" if width < 400 else "light")
    height = opened.page.evaluate("document.documentElement.scrollHeight")
    opened("#most").fill("300")
    for _ in range(2):
        opened("#message").fill("long " * 200 + "x" * 300)
        opened("#send").click()
        opened.page.wait_for_function("() => !document.querySelector('#chat[aria-busy]')")
    assert opened.page.evaluate("document.documentElement.scrollHeight") == height
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.page.evaluate("(box => box.scrollHeight - box.scrollTop - box.clientHeight)(document.getElementById('talk'))") < 2
    assert opened.page.evaluate("document.getElementById('talk').clientHeight % 19") == 0
    assert opened("#similarity").is_hidden() and opened("#speed").is_hidden() and opened("#tokenize").is_visible()
