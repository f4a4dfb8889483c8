"""The server's page in a real browser: Debian's chromium, driven by the package playwright; skipped where one is missing.

What it shows is compared with what the server answers over HTTP. What a small model never answers, the browser is told.
A picture: chromium --headless --screenshot=docs/page.png --window-size=1200,836 --virtual-time-budget=9000 URL
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_browser import Opened, chromium, digits, models_by_kind, pages_of, servers_of, url_of
from served import Served, in_thread

PAGE = Path(__file__).parents[1] / "ftbert" / "server" / "page.html"
KEY = "sesame-7d1f"
ATTACK = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>'\"`$(touch x)` \\ é 猫"


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


# ---- what it shows ----------------------------------------------------------------------------------------------------


def test_the_file_is_small_and_asks_for_nothing() -> None:
    text = PAGE.read_text("utf-8")
    assert len(text.encode()) < 42_000
    assert re.findall(r"(?:src|href)\s*=|url\(|@import|innerHTML|insertAdjacent|document\.write|Storage|cookie", text) == []
    assert set(re.findall(r"https?://[^\s\"'`)]*", text)) == set()


def test_heatmap_values_are_the_cosines(embedding: Opened, servers: dict[str, Served]) -> None:
    texts = embedding("#texts").input_value().strip().split("\n")
    vectors = servers["embedding"].post("/embed", {"inputs": texts})
    for i, a in enumerate(vectors):
        for j, b in enumerate(vectors):
            embedding.hover(i, j)
            cosine = sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)
            assert embedding.text("#value") == digits(cosine)
    # Another pair has another colour, equal texts the one of 1.
    shades = embedding.page.evaluate(
        """() => {
          const all = map.getContext('2d').getImageData(0, 0, map.width, map.height).data, r = devicePixelRatio;
          return [[0, 0], [5, 5], [0, 3]].map(([row, column]) => {
            const [x, y] = [grid.left + (column + .1) * grid.cell, grid.top + (row + .1) * grid.cell].map(at => Math.round(at * r));
            return all.slice(4 * (y * map.width + x)).slice(0, 4).join();
          });
        }"""
    )
    assert shades[0] == shades[1] != shades[2]
    # A pair is chosen by a click or by keys.
    embedding.hover(2, 6, click=True)
    chosen = embedding.text("#value")
    assert embedding.text("#first") == f"3. {texts[2]}" and embedding.text("#second") == f"7. {texts[6]}"
    embedding.hover(6, 6)
    embedding.page.mouse.move(5, 5)
    assert embedding.text("#value") == chosen
    embedding("#map").focus()
    for key in ("ArrowDown", "ArrowRight", "Enter", "Escape"):
        embedding.page.keyboard.press(key)
    assert embedding.text("#first").startswith("4. ") and embedding.text("#second").startswith("8. ")


def test_live_while_typing_and_only_the_newest(embedding: Opened) -> None:
    embedding("#texts").fill("one text\none text\nquite another\n\n   ")
    embedding.see("#similarity .note", "3 texts")
    assert embedding.text("#value") == "1.0000"
    embedding("#texts").fill("\n".join(f"line {i}" for i in range(90)))
    embedding.see("#similarity .note", "the first 64 of 90 lines")
    embedding("#texts").fill("alone")
    embedding.see("#similarity.failed .note", "two texts or more")


@pytest.mark.parametrize("kind", ["embedding", "reranker"])
def test_passages_are_ranked(kind: str, servers: dict[str, Served], open_page: Callable[..., Opened]) -> None:
    opened = open_page(servers[kind])
    assert opened("#similarity").is_visible() == (kind == "embedding") and not opened("#classify").is_visible()
    query, texts = opened("#query").input_value(), opened("#passages").input_value().strip().split("\n")
    if kind == "embedding":
        asked, *vectors = servers[kind].post("/embed", {"inputs": [query, *texts]})
        scores = [sum(x * y for x, y in zip(asked, one, strict=True)) for one in vectors]
    else:
        found = servers[kind].post("/rerank", {"query": query, "texts": texts})
        scores = [one["score"] for one in sorted(found, key=lambda one: one["index"])]
        assert not opened.asked("/embed")
    order = sorted(range(len(texts)), key=lambda i: -scores[i])
    assert opened("#ranks li .cut").all_inner_texts() == [texts[i] for i in order]
    assert opened("#ranks li .number").all_inner_texts() == [digits(scores[i]) for i in order]
    part = "bars => bars.map(bar => bar.clientWidth / bar.parentNode.clientWidth)"
    widths = opened("#ranks li .track i").evaluate_all(part)
    assert widths == pytest.approx([max(scores[i], 0) for i in order], abs=0.01)


def test_the_reranker_ranks_where_one_is_served(folders: dict[str, Path], open_page: Callable[..., Opened]) -> None:
    with in_thread(("embeds", folders["embedding"]), ("ranks", folders["reranker"])) as server:
        opened = open_page(server)
        assert opened.text("#ranking .note").endswith("scored by ranks")
        query, texts = opened("#query").input_value(), opened("#passages").input_value().strip().split("\n")
        found = server.post("/rerank", {"query": query, "texts": texts, "model": "ranks"})
        assert opened("#ranks li .number").all_inner_texts() == [digits(one["score"]) for one in found]
        opened("#ranking button.main").click()
        opened.see("#snippet", '"model": "ranks"')
    with in_thread(("embeds", folders["embedding"]), ("labels", folders["classifier"])) as server:
        assert open_page(server).text("#ranking .note").endswith("by cosine of embeds")


def test_small_scores_have_digits(servers: dict[str, Served], open_page: Callable[..., Opened]) -> None:
    opened, scores = open_page(servers["reranker"]), [0.25, 0.00012, 0.00000035, 0.0]
    opened.answer("/rerank$", json=[{"index": i, "score": score} for i, score in enumerate(scores)])
    opened("#ranking button.main").click()
    opened.see("#ranks", "0.2500")
    assert opened("#ranks li .number").all_inner_texts() == ["0.2500", "0.00012", "3.5e-7", "0.0000"]


@pytest.mark.parametrize("strategy", ["simple", "none"])
def test_entities_stand_in_their_text(
    strategy: str, servers: dict[str, Served], open_page: Callable[..., Opened]
) -> None:
    opened = open_page(servers["token_classifier"])
    assert not any(opened(f"#{card}").is_visible() for card in ("similarity", "ranking", "classify"))
    texts = ["word1 word2 🙂 word3, a word4", "🙂🙂 word5 word6 word7 b", ATTACK]
    opened("#strategy").select_option(strategy)
    opened("#tagged").fill("\n".join(texts))
    found = servers["token_classifier"].post("/token_classify", {"inputs": texts, "aggregation_strategy": strategy})
    opened.see("#tag .note", f"3 texts, {len(sum(found, []))} entities")
    labels = [one.get("entity_group") or one["entity"] for one in sum(found, [])]
    words = [text[one["start"] : one["end"]] for text, entities in zip(texts, found, strict=True) for one in entities]
    assert len(set(labels)) > 1 and opened("#entities mark small").all_inner_texts() == labels
    assert opened("#entities mark").evaluate_all("all => all.map(one => one.firstChild.textContent)") == words
    bare = "all => all.map(li => [...li.querySelectorAll('small')].reduce((_, one) => one.remove(), 0) ?? li.textContent)"
    assert opened("#entities li").evaluate_all(bare) == texts


def test_a_classifier_labels(servers: dict[str, Served], open_page: Callable[..., Opened]) -> None:
    opened = open_page(servers["classifier"])
    assert not opened("#similarity").is_visible() and not opened("#ranking").is_visible()
    opened("#inputs").fill("word1\nword2")  # two texts, not a pair
    opened.see("#classify .note", "2 texts")
    found = servers["classifier"].post("/predict", {"inputs": [["word1"], ["word2"]]})
    assert [one.split() for one in opened("#classes li").all_inner_texts()] == [
        [text, *(word for one in labels for word in (one["label"], digits(one["score"])))]
        for text, labels in zip(("word1", "word2"), found, strict=True)
    ]
    assert re.search(r"labels\s*3", opened.text("#facts"))


def test_tokens_with_ids_and_special_ones(embedding: Opened, servers: dict[str, Served]) -> None:
    embedding("#text").fill("word3, ab 猫")
    embedding.see("#tokens", "word3")
    (tokens,) = servers["embedding"].post("/tokenize", {"inputs": "word3, ab 猫"})
    shown = [one.split("\n") for one in embedding("#tokens li").all_inner_texts()]
    assert shown == [[token["text"], str(token["id"])] for token in tokens]
    special = sum(t["special"] for t in tokens)  # with [UNK], where a vocabulary lacks the last word
    assert embedding("#tokens li.special").count() == special >= 2
    assert embedding.text("#tokenize .note") == f"{len(tokens)} tokens, {special} special (dashed)"
    assert embedding("#tokens li").nth(1).get_attribute("title") == "characters 0 to 5"


def test_speed_of_the_last_calls(embedding: Opened) -> None:
    embedding("#repeat").click()
    embedding.see("#calls", "the last 100 calls of /embed")
    calls = embedding.page.evaluate("calls")
    spent = sorted(one["time"] for one in calls)
    shown = {name: float(embedding.text(f"#{name}").split()[0].replace(",", "")) for name in ("p50", "p99", "rate")}
    rate = sum(one["tokens"] for one in calls) / sum(spent) * 1000
    assert shown == pytest.approx({"p50": spent[49], "p99": spent[98], "rate": rate}, rel=0.06)
    assert re.search(r"tokenize .* ms\s*queue .* ms\s*inference .* ms\s*HTTP .* ms", embedding.text("#parts"))


def test_several_models_and_their_facts(folders: dict[str, Path], open_page: Callable[..., Opened]) -> None:
    with in_thread(*((name, folders["embedding"]) for name in ("tiny/one", "tiny/two"))) as server:
        opened = open_page(server)
        opened.page.get_by_label("Model", exact=True).select_option("tiny/two")
        opened.page.wait_for_function("() => document.title === 'tiny/two - ftbert'")
        opened.settle()
        models = [body["model"] for body in opened.asked("/embed")]
        assert models[0] == "tiny/one" and models[-1] == "tiny/two"
        assert '"model": "tiny/two"' in opened.text("#snippet")
        info = server.call("GET", "/info").json()
        facts = dict(zip(opened("dt").all_inner_texts(), opened("dd").all_inner_texts(), strict=True))
        assert facts["text"] == f"up to {info['max_input_length']:,} tokens"
        assert [facts[name] for name in ("type", "pooling", "dtype", "version")] == [
            "embedding", "mean", info["model_dtype"], info["version"],
        ]  # fmt: skip


@pytest.mark.parametrize("key", [None, KEY])
def test_the_snippets_repeat_the_call(
    key: str | None, folders: dict[str, Path], open_page: Callable[..., Opened], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They run as they are, whatever the text is; the key comes from the environment."""
    httpx = pytest.importorskip("httpx")
    texts = [ATTACK, "it's a test; rm -rf $HOME"]
    with in_thread(("tiny", folders["embedding"]), api_key=key) as server:
        opened = open_page(server, settle=not key)
        if key:
            opened.page.get_by_label("API key").fill(key)
            opened.page.keyboard.press("Enter")
            opened.see("#similarity .note", "8 texts")
        opened("#texts").fill("\n".join(texts))
        opened.see("#similarity .note", "2 texts")
        shown = {}
        for language in ("curl", "python"):
            opened(f"#{language}").click()
            shown[language] = opened.text("#snippet")
            assert f"{url_of(server)}/embed" in shown[language]
            assert ("API_KEY" in shown[language]) == bool(key) and KEY not in shown[language]
        assert KEY not in opened.page.content()
        want = server.post("/embed", {"inputs": texts})
        monkeypatch.setenv("API_KEY", key or "")
        if shutil.which("curl"):
            done = subprocess.run(["sh", "-c", shown["curl"] + " -s"], cwd=tmp_path, capture_output=True, check=True)
            assert json.loads(done.stdout) == want and list(tmp_path.iterdir()) == []
        monkeypatch.setitem(sys.modules, "requests", httpx)
        said: list[Any] = []
        exec(compile(shown["python"], "snippet", "exec"), {"print": said.append})
        assert said == [want]
        opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        opened("#copy").click()
        opened.see("#copied", "copied")
        assert opened.page.evaluate("navigator.clipboard.readText()") == shown["python"]


# ---- errors -----------------------------------------------------------------------------------------------------------


def test_errors_in_words(embedding: Opened, servers: dict[str, Served]) -> None:
    for status, body, said in (
        (422, '{"error": "Input validation error: too long", "error_type": "Validation"}', "error: too long"),
        (429, "Model is overloaded", "The server is busy. Try again in 7 s."),
        (502, "<html><h1>Bad gateway</h1></html>", "The server answered 502 Bad Gateway without a reason."),
    ):
        embedding.answer("/(embed|tokenize)$", status=status, body=body, headers={"retry-after": "7"})
        for card in ("#similarity", "#ranking", "#tokenize"):
            embedding(f"{card} button.main").click()
            embedding.see(f"{card}.failed .note", said)
        embedding.page.unroute_all()
    embedding.page.context.set_offline(True)
    embedding("#tokenize button.main").click()
    host = f"127.0.0.1:{servers['embedding'].port}"
    embedding.see("#tokenize.failed .note", f"No answer from {host}. Is the server running?")
    embedding.page.context.set_offline(False)
    embedding("#tokenize button.main").click()
    embedding.see("#tokenize:not(.failed) .note", "tokens")
    embedding.page.route("**/info", lambda given: given.fulfill(status=503, headers={"retry-after": "1"}), times=1)
    embedding.page.reload()
    embedding.see("#state.bad", "The server is not ready. Try again in 1 s.")
    embedding.see("#state.good", "ready")  # by itself


def test_a_key_is_asked_for_and_forgotten(folders: dict[str, Path], open_page: Callable[..., Opened]) -> None:
    with in_thread(("tiny", folders["embedding"]), api_key=KEY) as server:
        opened = open_page(server, settle=False)
        opened.see("#state.bad", "The server wants an API key: enter it at the top.")
        for key, look, said in (
            ("wrong", "bad", "The server does not accept this API key."),
            ("schlüssel", "bad", "a character that no HTTP header can carry"),
            (KEY, "good", "ready"),
        ):
            opened.page.get_by_label("API key").fill(key)
            opened.page.keyboard.press("Tab")
            opened.see(f"#state.{look}", said)
        opened.settle()
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert KEY not in opened.page.evaluate(kept) and not any(KEY in asked.url for asked in opened.requests)
        opened.page.reload()
        opened.see("#state.bad", "The server wants an API key")
        assert opened.page.get_by_label("API key").input_value() == ""


def test_markup_stays_text(embedding: Opened, servers: dict[str, Served]) -> None:
    """Of the user, and of a server that is not to be trusted."""
    info = servers["embedding"].call("GET", "/info").json()
    embedding.answer("/info$", json=info | dict.fromkeys(("served_model_name", "model_dtype", "version"), ATTACK))
    embedding.page.reload()
    embedding.settle()
    assert embedding.text("#model") == ATTACK and ATTACK in embedding("dd").all_inner_texts()
    for name in ("#texts", "#passages"):
        embedding(name).fill(f"{ATTACK}\n{ATTACK} too")
    embedding("#text").fill(ATTACK)
    embedding("#query").fill(ATTACK)
    embedding.see("#first", ATTACK)
    embedding.see("#ranks", ATTACK)
    embedding.answer("/tokenize$", json=[[{"id": 1, "text": ATTACK, "special": False, "start": 0, "stop": 1}]])
    embedding.answer("/embed$", status=422, body=json.dumps({"error": ATTACK}))
    for card, where in (("#tokenize", "#tokens"), ("#similarity", "#similarity.failed .note")):
        embedding(f"{card} button.main").click()
        embedding.see(where, ATTACK)
    assert embedding.page.title() == f"{ATTACK} - ftbert"
    assert embedding("img").count() == 0 and embedding("script").count() == 1
