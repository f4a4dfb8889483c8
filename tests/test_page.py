"""The server's page in a real browser: Debian's chromium, driven by the package playwright; skipped where one is missing.

The server is a stub that answers TEI's routes and says what it was asked. What the page shows is compared with what the
server answers over HTTP, so a real one may stand behind `server_url`.

python tests/test_page.py docs/page.png [URL]    a picture of the page, of the stub or of a running server
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "ftbert" / "server" / "page.html"
DOCS = PAGE.with_name("docs.html")
POLICY = "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
KEY = "sesame-7d1f"
ATTACK = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>'\"`$(touch x)` \\ é 猫"


# ---- the stub ---------------------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def vector(text: str) -> list[float]:
    """Hashed letter triples: texts with common words are alike."""
    values = [0.0] * 96
    for word in words(text):
        for i in range(len(word)):
            values[zlib.crc32(f"^{word}$"[i : i + 3].encode()) % 96] += 1
    norm = math.sqrt(sum(x * x for x in values)) or 1.0
    return [x / norm for x in values]


def pieces(text: str) -> list[dict[str, Any]]:
    """As TEI's /tokenize says them."""
    special = {"special": True, "start": None, "stop": None}
    found = [
        {"id": 1000 + zlib.crc32(m[0].encode()) % 20000, "text": m[0], "special": False, "start": m.start(), "stop": m.end()}
        for m in re.finditer(r"\w{1,7}|[^\w\s]", text)
    ]
    return [{"id": 101, "text": "[CLS]", **special}, *found, {"id": 102, "text": "[SEP]", **special}]


class Refused(Exception):
    def __init__(self, status: int, said: str, type_: str, **headers: str) -> None:
        self.status, self.headers = status, headers
        self.body = json.dumps({"error": said, "error_type": type_}) if type_ else said


@dataclass
class Stub:
    kind: str = "embedding"
    key: str = ""
    models: tuple[str, ...] = ("stub/tiny",)
    embed: Callable[[list[str]], list[list[float]]] = lambda texts: [vector(text) for text in texts]
    loading: int = 0  # so many times /info answers 503
    facts: dict[str, Any] = field(default_factory=dict)
    openapi: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def answer(self, method: str, path: str, body: Any) -> Any:
        self.asked.append((path, body))
        if (method, path.partition("?")[0]) == ("GET", "/info"):
            self.loading -= 1
            if self.loading >= 0:
                raise Refused(503, "loading", "Unhealthy", **{"retry-after": "1"})
            name = path.partition("?model=")[2].replace("%2F", "/") or self.models[0]
            labels = {"id2label": {"0": "NEGATIVE", "1": "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
            return {
                "model_id": name, "model_sha": None, "model_dtype": "float32", "served_model_name": name,
                "model_type": {self.kind: {"pooling": "mean"} if self.kind == "embedding" else labels},
                "max_concurrent_requests": 512, "max_input_length": 512, "max_batch_tokens": 8192, "max_batch_requests": None,
                "max_client_batch_size": 2048, "auto_truncate": True, "tokenization_workers": 2, "version": "1.0.0",
                "sha": None, "docker_label": None, **self.facts,
            }  # fmt: skip
        if (method, path) == ("GET", "/v1/models"):
            return {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
        if (method, path) == ("GET", "/openapi.json"):
            return self.openapi
        if method != "POST":
            raise Refused(404, "no such route", "")
        said = json.dumps(body)
        if "too long" in said:
            raise Refused(422, "Input validation error: `inputs` must have less than 512 tokens. Given: 900", "Validation")
        if "too many" in said:
            raise Refused(429, "Model is overloaded", "Overloaded", **{"retry-after": "7"})
        if "a gateway" in said:
            raise Refused(502, "<html><h1>Bad gateway</h1></html>", "")
        if path == "/embed" and self.kind == "embedding":
            return self.embed(body["inputs"])
        if path == "/rerank" and self.kind == "reranker":
            asked = set(words(body["query"]))
            scores = [len(asked & set(words(text))) / (len(asked) + 1) for text in body["texts"]]
            order = sorted(range(len(scores)), key=lambda i: -scores[i])
            return [{"index": i, "score": scores[i]} for i in order]
        if path == "/predict" and self.kind == "classifier":
            assert all(isinstance(one, list) and len(one) == 1 for one in body["inputs"]), "a pair, or one text alone"
            good = [0.9 if "great" in text else 0.2 for (text,) in body["inputs"]]
            both = [[{"score": p, "label": "POSITIVE"}, {"score": 1 - p, "label": "NEGATIVE"}] for p in good]
            return [sorted(labels, key=lambda label: -float(str(label["score"]))) for labels in both]
        if path == "/tokenize":
            inputs = body["inputs"] if isinstance(body["inputs"], list) else [body["inputs"]]
            return [pieces(text) for text in inputs]
        raise Refused(424, f"a model of kind {self.kind} has no {path}", "Backend")


@contextmanager
def serve(stub: Stub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # the headers and the body in one packet

        def log_message(self, *_: Any) -> None:
            pass

        def do(self) -> None:
            start, headers = time.perf_counter(), {"content-type": "application/json"}
            text = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = 200, ""
            try:
                if (self.command, self.path) == ("GET", "/"):
                    headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": POLICY}
                    body = PAGE.read_text("utf-8")
                elif (self.command, self.path) == ("GET", "/docs"):
                    headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": POLICY}
                    body = DOCS.read_text("utf-8")
                elif self.path == "/favicon.ico":  # browsers ask for it by themselves, and without the key
                    status = 204
                elif stub.key and self.headers.get("authorization") != f"Bearer {stub.key}":
                    raise Refused(401, "", "")
                else:
                    answer = stub.answer(self.command, self.path, json.loads(text) if text else None)
                    spent = 1000 * (time.perf_counter() - start)
                    body = json.dumps(answer)
                    if self.path in ("/embed", "/rerank", "/predict"):
                        times = {"total": spent, "tokenization": spent * 0.3, "queue": 0, "inference": spent * 0.7}
                        headers |= {f"x-{name}-time": f"{value:.2f}" for name, value in times.items()}
                        headers["x-compute-tokens"] = str(len(words(text.decode())))
            except Refused as refused:
                status, body = refused.status, refused.body
                headers |= refused.headers
            data = body.encode()
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
            self.wfile.flush()

        do_GET = do_POST = do

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def post(url: str, route: str, body: Any) -> Any:
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/{route}", json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


# ---- the browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright is here: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium is here: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page, and what its browser said and asked for meanwhile."""

    page: Any
    errors: list[str]
    requests: list[str]

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

    def hover(self, row: int, column: int, click: bool = False) -> None:
        box = self("#map").bounding_box()
        grid = self.page.evaluate("grid")
        at = [box[side] + grid[first] + (i + 0.5) * grid["cell"] for side, first, i in (("x", "left", column), ("y", "top", row))]
        self.page.mouse.move(*at)
        if click:
            self.page.mouse.click(*at)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    contexts, opened = [], []

    def start(url: str, settle: bool = True, **options: Any) -> Opened:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
        context.set_default_timeout(10_000)
        page = context.new_page()
        found = Opened(page, [], [])
        page.on("console", lambda said: found.errors.extend([said.text] * (said.type in ("error", "warning"))))
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(url + "/")
        contexts.append(context)
        opened.append((url, found))
        if settle:
            found.settle()
        return found

    yield start
    for context in contexts:
        context.close()
    for url, found in opened:
        assert found.requests and all(asked.startswith(url + "/") for asked in found.requests), found.requests
        # An answer with an error status is a line of the browser's own, whatever the page does with it.
        ours = [said for said in found.errors if not said.startswith("Failed to load resource")]
        assert ours == []


@pytest.fixture
def server_url() -> Iterator[str]:
    """A server of one embedding model without a key: the stub, or the one at FTBERT_TEST_PAGE_URL."""
    if url := os.environ.get("FTBERT_TEST_PAGE_URL"):
        yield url.rstrip("/")
        return
    with serve(Stub()) as url:
        yield url


@pytest.fixture
def quiet(open_page: Callable[..., Opened], server_url: str) -> Iterator[Opened]:
    """The page of that server; nothing at all may be said in the console."""
    opened = open_page(server_url)
    yield opened
    assert opened.errors == []


# ---- what it shows ----------------------------------------------------------------------------------------------------


def test_the_file_is_small_and_asks_for_nothing() -> None:
    text = PAGE.read_text("utf-8")
    assert len(text.encode()) < 30_000
    assert re.findall(r"(?:src|href)\s*=|url\(|@import|innerHTML|insertAdjacent|document\.write|Storage|cookie", text) == []
    assert set(re.findall(r"https?://[^\s\"'`)]*", text)) == set()


def test_heatmap_values_are_the_cosines(quiet: Opened, server_url: str) -> None:
    texts = quiet("#texts").input_value().strip().split("\n")
    vectors = post(server_url, "embed", {"inputs": texts})

    def cosine(i: int, j: int) -> float:
        a, b = vectors[i], vectors[j]
        return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)

    for i in range(len(texts)):
        for j in range(len(texts)):
            quiet.hover(i, j)
            assert quiet.text("#value") == f"{cosine(i, j):.4f}"
    quiet.hover(2, 5)
    assert quiet.text("#first") == f"3. {texts[2]}" and quiet.text("#second") == f"6. {texts[5]}"
    # Another pair has another colour, equal texts the one of 1.
    shades = quiet.page.evaluate(
        """() => {
          const all = map.getContext('2d').getImageData(0, 0, map.width, map.height).data, r = devicePixelRatio;
          return [[0, 0], [5, 5], [0, 3]].map(([row, column]) => {
            const [x, y] = [grid.left + (column + .1) * grid.cell, grid.top + (row + .1) * grid.cell].map(at => Math.round(at * r));
            return [...all.slice(4 * (y * map.width + x)).slice(0, 4)];
          });
        }"""
    )
    assert shades[0] == shades[1] != shades[2]


def test_a_pair_is_chosen_by_click_or_keys(quiet: Opened) -> None:
    best = quiet.text("#value")
    quiet.hover(2, 6, click=True)
    chosen = quiet.text("#value")
    quiet.hover(6, 6)
    assert quiet.text("#value") == "1.0000"
    quiet.page.mouse.move(5, 5)
    assert quiet.text("#value") == chosen != best
    quiet("#map").focus()
    quiet.page.keyboard.press("ArrowDown")
    quiet.page.keyboard.press("ArrowRight")
    quiet.page.keyboard.press("Enter")
    quiet.page.keyboard.press("Escape")
    assert quiet.text("#first").startswith("4. ") and quiet.text("#second").startswith("8. ")


def test_live_while_typing_and_only_the_newest(quiet: Opened) -> None:
    quiet("#texts").fill("one text\none text\nquite another\n\n   ")
    quiet.see("#similarity .note", "3 texts")
    assert quiet.text("#value") == "1.0000"
    quiet("#texts").fill("\n".join(f"line {i}" for i in range(90)))
    quiet.see("#similarity .note", "the first 64 of 90 lines")
    quiet("#texts").fill("alone")
    quiet.see("#similarity.failed .note", "two texts or more")


def test_passages_are_ranked_by_cosine(quiet: Opened, server_url: str) -> None:
    query, texts = quiet("#query").input_value(), quiet("#passages").input_value().strip().split("\n")
    asked, *vectors = post(server_url, "embed", {"inputs": [query, *texts]})
    scores = [sum(x * y for x, y in zip(asked, one, strict=True)) for one in vectors]
    order = sorted(range(len(texts)), key=lambda i: -scores[i])
    assert quiet("#ranks li .cut").all_inner_texts() == [texts[i] for i in order]
    assert quiet("#ranks li .number").all_inner_texts() == [f"{scores[i]:.4f}" for i in order]
    widths = quiet("#ranks li .track i").evaluate_all("bars => bars.map(bar => bar.clientWidth / bar.parentNode.clientWidth)")
    assert widths == pytest.approx([max(scores[i], 0) for i in order], abs=0.01)


def test_a_reranker_ranks(open_page: Callable[..., Opened]) -> None:
    stub = Stub("reranker")
    with serve(stub) as url:
        opened = open_page(url)
        assert not opened("#similarity").is_visible() and not opened("#classify").is_visible()
        opened("#query").fill("red fox")
        opened("#passages").fill("a blue whale\nthe red fox\na fox")
        opened.see("#ranking .note", "3 passages, scored by the model")
        assert opened("#ranks li .cut").all_inner_texts() == ["the red fox", "a fox", "a blue whale"]
        assert opened("#ranks li .number").all_inner_texts() == ["0.6667", "0.3333", "0.0000"]
        assert ("/rerank", {"query": "red fox", "texts": ["a blue whale", "the red fox", "a fox"]}) in stub.asked
        assert "/embed" not in dict(stub.asked) and opened.errors == []


def test_a_classifier_labels(open_page: Callable[..., Opened]) -> None:
    stub = Stub("classifier")
    with serve(stub) as url:
        opened = open_page(url)
        assert not opened("#similarity").is_visible() and not opened("#ranking").is_visible()
        opened("#inputs").fill("a great day\na dull day")  # two texts, not a pair
        opened.see("#classify .note", "2 texts")
        found = opened("#classes li").all_inner_texts()
        assert [one.split() for one in found] == [
            ["a", "great", "day", "POSITIVE", "0.9000", "NEGATIVE", "0.1000"],
            ["a", "dull", "day", "NEGATIVE", "0.8000", "POSITIVE", "0.2000"],
        ]
        assert re.search(r"labels\s*2", opened.text("#facts")) and opened.errors == []


def test_tokens_with_ids_and_special_ones(quiet: Opened, server_url: str) -> None:
    quiet("#text").fill("Hello, world 猫")
    quiet.see("#tokenize .note", "tokens")
    ((tokens),) = post(server_url, "tokenize", {"inputs": "Hello, world 猫"})
    quiet.see("#tokens", "Hello")
    assert [one.split("\n") for one in quiet("#tokens li").all_inner_texts()] == [[t["text"], str(t["id"])] for t in tokens]
    special = sum(t["special"] for t in tokens)  # with [UNK], where a vocabulary lacks the last word
    assert quiet("#tokens li.special").count() == special >= 2
    assert quiet.text("#tokenize .note") == f"{len(tokens)} tokens, {special} special (dashed)"
    assert quiet("#tokens li").nth(1).get_attribute("title") == "characters 0 to 5"


def test_the_facts(quiet: Opened, server_url: str) -> None:
    with urllib.request.urlopen(f"{server_url}/info") as answer:
        info = json.load(answer)
    assert quiet.text("#model") == info["served_model_name"] and quiet.text("#state") == "ready"
    facts = dict(zip(quiet("dt").all_inner_texts(), quiet("dd").all_inner_texts(), strict=True))
    assert facts["dtype"] == info["model_dtype"] and facts["version"] == info["version"]
    assert facts["text"] == f"up to {info['max_input_length']:,} tokens"
    assert facts["type"] == "embedding" and facts["pooling"] == "mean"


def test_speed_of_the_last_calls(quiet: Opened) -> None:
    quiet("#repeat").click()
    quiet.see("#calls", "the last 100 calls of /embed")
    calls = quiet.page.evaluate("calls")
    spent = sorted(one["time"] for one in calls)

    def value(selector: str, units: dict[str, float]) -> float:
        number, _, unit = quiet.text(selector).replace(",", "").partition(" ")
        return float(number) * units[unit]

    assert value("#p50", {"ms": 1, "s": 1000}) == pytest.approx(spent[49], rel=0.06)
    assert value("#p99", {"ms": 1, "s": 1000}) == pytest.approx(spent[98], rel=0.06)
    rate = value("#rate", {"": 1, "M": 1e6})
    assert rate == pytest.approx(sum(one["tokens"] for one in calls) / sum(spent) * 1000, rel=0.06)
    assert re.search(r"tokenize .* ms\s*queue .* ms\s*inference .* ms\s*HTTP .* ms", quiet.text("#parts"))


def test_several_models(open_page: Callable[..., Opened]) -> None:
    stub = Stub(models=("stub/tiny", "stub/large"))
    with serve(stub) as url:
        opened = open_page(url)
        opened.page.get_by_label("Model", exact=True).select_option("stub/large")
        opened.page.wait_for_function("() => document.title === 'stub/large - ftbert'")
        opened.settle()
        assert ("/info?model=stub%2Flarge", None) in stub.asked
        quoted = [body["model"] for path, body in stub.asked if path == "/embed"]
        assert quoted[0] == "stub/tiny" and quoted[-1] == "stub/large"
        assert '"model": "stub/large"' in opened.text("#snippet") and opened.errors == []


# ---- the last call as code --------------------------------------------------------------------------------------------


def shown(opened: Opened, language: str) -> str:
    opened(f"#{language}").click()
    assert opened(f"#{language}").get_attribute("aria-pressed") == "true"
    return opened.text("#snippet")


@pytest.mark.parametrize("key", ["", KEY])
def test_the_snippets_repeat_the_call(
    key: str, open_page: Callable[..., Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run as they are, whatever the text is; the key comes from the environment."""
    httpx = pytest.importorskip("httpx")
    texts = [ATTACK, "it's a test; rm -rf $HOME"]
    stub = Stub(key=key)
    with serve(stub) as url:
        opened = open_page(url, settle=not key)
        if key:
            opened.page.get_by_label("API key").fill(key)
            opened.page.keyboard.press("Enter")
            opened.see("#similarity .note", "8 texts")
        opened("#texts").fill("\n".join(texts))
        opened.see("#similarity .note", "2 texts")
        curl, python = shown(opened, "curl"), shown(opened, "python")
        assert curl.startswith(f"curl {url}/embed \\\n") and f'"{url}/embed"' in python
        assert ("API_KEY" in curl) == ("API_KEY" in python) == bool(key) and KEY not in curl + python
        assert KEY not in opened.page.content()
        want = [vector(text) for text in texts]
        monkeypatch.setenv("API_KEY", key)
        if shutil.which("curl"):
            done = subprocess.run(["sh", "-c", curl + " -s"], cwd=tmp_path, capture_output=True, check=True)
            assert json.loads(done.stdout) == want and list(tmp_path.iterdir()) == []
        monkeypatch.setitem(sys.modules, "requests", httpx)
        said: list[Any] = []
        exec(compile(python, "snippet", "exec"), {"print": said.append})
        assert said == [want]
        opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        opened("#copy").click()
        opened.see("#copied", "copied")
        assert opened.page.evaluate("navigator.clipboard.readText()") == python


# ---- errors -----------------------------------------------------------------------------------------------------------


def test_errors_in_words(open_page: Callable[..., Opened]) -> None:
    cases = {
        "too long": "Input validation error: `inputs` must have less than 512 tokens. Given: 900",
        "too many": "The server is busy. Try again in 7 s.",
        "a gateway": "The server answered 502 Bad Gateway without a reason.",
    }
    with serve(Stub()) as url:
        opened = open_page(url)
        for text, said in cases.items():
            for name in ("#texts", "#passages", "#text"):
                opened(name).fill(text + "\nor not" * (name != "#text"))
            for card in ("#similarity", "#ranking", "#tokenize"):
                opened.see(f"{card}.failed .note", said)
        opened("#text").fill("fine")
        opened.see("#tokenize:not(.failed) .note", "3 tokens")


def test_a_key_is_asked_for_and_forgotten(open_page: Callable[..., Opened]) -> None:
    stub = Stub(key=KEY)
    with serve(stub) as url:
        opened = open_page(url, settle=False)
        opened.see("#state.bad", "The server wants an API key: enter it at the top.")
        opened.page.get_by_label("API key").fill("wrong")
        opened.page.keyboard.press("Enter")
        opened.see("#state.bad", "The server does not accept this API key.")
        opened.page.get_by_label("API key").fill("schlüssel")
        opened.page.keyboard.press("Enter")
        opened.see("#state.bad", "a character that no HTTP header can carry")
        opened.page.get_by_label("API key").fill(KEY)
        opened.page.keyboard.press("Tab")
        opened.see("#state.good", "ready")
        opened.settle()
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert KEY not in opened.page.evaluate(kept) and not any(KEY in asked for asked in opened.requests)
        opened.page.reload()
        opened.see("#state.bad", "The server wants an API key")
        assert opened.page.get_by_label("API key").input_value() == ""


def test_a_server_that_is_gone_and_comes_back(open_page: Callable[..., Opened]) -> None:
    with serve(Stub()) as url:
        opened = open_page(url)
    # The stub's threads may still hold the browser's idle connections.
    opened.page.context.set_offline(True)
    opened("#similarity button.main").click()
    opened.see("#similarity.failed .note", f"No answer from {url.removeprefix('http://')}. Is the server running?")
    opened.page.context.set_offline(False)

    with serve(Stub(loading=1)) as url:
        opened = open_page(url, settle=False)
        opened.see("#state.bad", "The server is not ready. Try again in 1 s.")
        opened.see("#state.good", "ready")  # by itself


def test_markup_stays_text(open_page: Callable[..., Opened]) -> None:
    """Of the user, and of a server that is not to be trusted."""
    stub = Stub(facts={"served_model_name": ATTACK, "model_dtype": ATTACK, "version": ATTACK})
    with serve(stub) as url:
        opened = open_page(url)
        assert opened.text("#model") == ATTACK and ATTACK in opened("dd").all_inner_texts()
        for name in ("#texts", "#passages"):
            opened(name).fill(f"{ATTACK}\n{ATTACK} too")
        opened("#text").fill(ATTACK)
        opened("#query").fill(ATTACK)
        opened.see("#first", ATTACK)
        opened.see("#ranks", ATTACK)
        opened.see("#tokens", "onerror")
        opened("#texts").fill(f"too long\n{ATTACK}")
        opened.see("#similarity.failed .note", "Input validation error")
        assert opened.page.title() == f"{ATTACK} - ftbert"
        assert opened("img").count() == 0 and opened("script").count() == 1 and opened.errors[1:] == []


# ---- shape ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
@pytest.mark.parametrize("kind", ["embedding", "reranker", "classifier"])
def test_nothing_jumps_or_sticks_out(kind: str, width: int, scheme: str, open_page: Callable[..., Opened]) -> None:
    with serve(Stub(kind)) as url:
        opened = open_page(url, color_scheme=scheme, viewport={"width": width, "height": 900})
        moved = """() => new Promise(done => new PerformanceObserver(list => done(
            list.getEntries().reduce((sum, one) => sum + one.value, 0))).observe({type: 'layout-shift', buffered: true})
            || setTimeout(() => done(0), 200))"""
        card = {"embedding": "#texts", "reranker": "#passages", "classifier": "#inputs"}[kind]
        height = opened.page.evaluate("document.documentElement.scrollHeight")
        opened(card).fill("\n".join(f"{'long ' * i} line {i} {'x' * 200}" for i in range(40)))
        opened("#text").fill("word " * 700)
        opened.see("#tokenize .note", "the first 600 are shown")
        opened.settle()
        assert opened.page.evaluate("document.documentElement.scrollHeight") == height
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.page.evaluate(moved) < 0.01
        # Text against what is behind it, as WCAG wants it.
        low = opened.page.evaluate(
            """() => {
              const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
                .map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4).reduce((s, x, i) => s + x * [.2126, .7152, .0722][i], 0);
              const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
                if (!c.endsWith(', 0)')) return c; } return 'rgb(255, 255, 255)'; };
              return [...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && e.firstChild?.nodeType === 3
                  && e.textContent.trim() && !['OPTION', 'SCRIPT', 'STYLE'].includes(e.tagName)).map(e => {
                const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
                return [e.tagName + '#' + e.id, (Math.max(a, b) + .05) / (Math.min(a, b) + .05)]; }).filter(([, x]) => x < 4.5);
            }"""
        )
        assert low == []


def test_all_can_be_reached_by_keys_and_has_a_name(quiet: Opened) -> None:
    names = quiet.page.evaluate(
        "() => [...document.querySelectorAll('input, textarea, select, button, canvas, [tabindex]')].filter(e => "
        "e.checkVisibility() && !(e.labels?.length || e.ariaLabel || e.tagName === 'BUTTON' && e.textContent)).map(e => e.outerHTML)"
    )
    assert names == []
    quiet("#key").focus()
    seen = []
    for _ in range(24):
        quiet.page.keyboard.press("Tab")
        seen.append(quiet.page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    want = ["repeat", "Compare", "texts", "map", "Rank", "query", "passages", "ranks", "Tokenize", "text", "tokens"]
    assert [name for name in seen if name in want][: len(want)] == want
    quiet("#texts").fill("a\nb")
    quiet("#texts").press("Control+Enter")
    quiet.see("#similarity .note", "2 texts")


def test_the_routes_are_shown(open_page: Callable[..., Opened]) -> None:
    pytest.importorskip("msgspec", reason="msgspec is not installed: the extra ftbert[serve]")
    from ftbert.server.openapi import document
    from ftbert.server.routes import all_routes

    found = document(all_routes())
    with serve(Stub(openapi=found)) as url:
        opened = open_page(url)
        opened.page.goto(url + "/docs")
        opened.see("summary", "/embed")
        shown = opened.page.evaluate("() => [...document.querySelectorAll('summary code')].map(one => one.textContent)")
        assert shown == [path for path, methods in found["paths"].items() for _ in methods]
        embed = opened("details").filter(has=opened.page.get_by_text("TEI: a vector for each text"))
        embed.locator("summary").click()
        rows = [row.split("\t") for row in embed.locator("table").inner_text().split("\n")]
        assert [row for row in rows if row[0] in ("inputs", "normalize")] == [
            ["inputs", "string | [string | integer | [integer]]", "required"], ["normalize", "boolean", "true"],
        ]  # fmt: skip
        assert f"curl {url}/embed -H" in embed.locator("pre").inner_text()
        assert opened.errors == []


# ---- the picture ------------------------------------------------------------------------------------------------------


def picture(file: str, url: str) -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        opened = Opened(browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme="light"), [], [])
        opened.page.goto(url)
        opened.settle()
        opened("#repeat").click()
        opened("#repeat:not([disabled])").wait_for()
        opened.page.wait_for_timeout(300)
        opened.page.screenshot(path=file)
        browser.close()
    Image.open(file).convert("RGB").quantize(256, kmeans=4).save(file, optimize=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        picture(sys.argv[1], sys.argv[2])
    else:
        with serve(Stub()) as address:
            picture(sys.argv[1], address)
