"""Texts in llama.cpp's and Ollama's forms, whole and streamed: Model.generate's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from generation_servers import CHAT, MOST, Both, both_of, joined, streamed
from served import in_thread

import ftbert


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with both_of(tmp_path_factory.mktemp("llama")) as found:
        yield found


def lines(both: Both, path: str, body: dict[str, Any]) -> list[Any]:
    reply = both.server.call("POST", path, body)
    assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson", reply.body
    return [json.loads(line) for line in reply.body.decode().splitlines()]


# ---- llama.cpp


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 0, "repeat_penalty": 1.5, "logit_bias": [[70, 2.5], [71, False]]}, {"repetition_penalty": 1.5, "sequence_bias": [[[70], 2.5], [[71], -1e9]]}),
        ({"seed": 4}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 4}),
    ],
)  # fmt: skip
def test_completion(both: Both, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    body, want = {"prompt": "hello world", "n_predict": MOST, **theirs}, both.text("hello world", **ours)
    whole = both.server.post("/completion", body)
    assert whole["content"] == want and whole["stop"] is True and whole["stop_type"] in ("limit", "eos")
    assert whole["tokens_evaluated"] == both.tokens("hello world")
    timings = whole["timings"]
    assert timings["predicted_n"] == whole["tokens_predicted"] > 0 and timings["prompt_ms"] > 0
    assert timings["prompt_n"] + timings["cache_n"] == whole["tokens_evaluated"]
    *found, last = streamed(both.server, "/completion", body, done=False)
    assert "".join(one["content"] for one in found) == want and not any(one["stop"] for one in found)
    assert (last["stop"], last["stop_type"], last["content"]) == (True, whole["stop_type"], "")
    assert sum(len(one["tokens"]) for one in found) == whole["tokens_predicted"] == last["tokens_predicted"]


def test_the_token_that_ends_a_text_is_told(both: Both) -> None:
    """As llama.cpp's server does."""
    body = {"prompt": "hello", "n_predict": MOST, "temperature": 0, "return_tokens": True, "logit_bias": [[2, 100]], "n_probs": 1}
    whole = both.server.post("/completion", body)
    assert (whole["content"], whole["tokens"], whole["tokens_predicted"], whole["stop_type"]) == ("", [2], 1, "eos")
    (scored,) = whole["completion_probabilities"]
    assert scored["id"] == 2 and scored["logprob"] < 0
    first, last = streamed(both.server, "/completion", body, done=False)
    assert (first["content"], first["tokens"], first["tokens_predicted"], first["stop"]) == ("", [2], 1, False)
    assert (last["tokens"], last["tokens_predicted"], last["stop"]) == ([], 1, True)


def test_completion_stops_and_scores(both: Both) -> None:
    body: dict[str, Any] = {"prompt": "hello", "n_predict": MOST, "temperature": 0, "n_probs": 2, "return_tokens": True}
    body["logit_bias"] = [[2, False], [7, False]]  # which end a text
    text = both.server.post("/completion", body)["content"]
    body["stop"] = ["never", text[4:7]]
    whole = both.server.post("/completion", body)
    assert (whole["stop_type"], whole["stopping_word"], whole["content"]) == ("word", text[4:7], text[: text.index(text[4:7])])
    scored = whole["completion_probabilities"]
    assert [one["id"] for one in scored] == whole["tokens"] and all(len(one["top_logprobs"]) == 2 for one in scored)
    ids = both.model.tokenizer("hello")["input_ids"]
    assert both.server.post("/completion", {**body, "prompt": ids})["content"] == whole["content"]
    assert both.server.post("/completion", {**body, "n_predict": -1, "stop": []})["tokens_predicted"] == 160 - len(ids)
    assert both.server.post("/completion", {**body, "n_predict": -1, "stop": [], "logit_bias": [], "ignore_eos": True})["tokens_predicted"] == 160 - len(ids)
    endless = both.server.post("/completion", {**body, "n_predict": 1 << 64, "stop": []})  # more than a number of JSON is
    assert (endless["tokens_predicted"], endless["generation_settings"]["n_predict"]) == (160 - len(ids), 160)


def test_props(both: Both) -> None:
    found = both.server.call("GET", "/props").json()
    assert (found["total_slots"], found["default_generation_settings"]["n_ctx"]) == (3, 160)
    assert found["chat_template"] == both.model.tokenizer.chat_template and found["model_alias"] == "tiny"
    assert (found["bos_token"], found["eos_token"]) == ("<s>", "</s>")


# ---- Ollama


def test_generate(both: Both) -> None:
    options = {"temperature": 0, "num_predict": MOST}
    want = both.text([{"role": "user", "content": "hello"}])
    whole = both.server.post("/api/generate", {"model": "tiny", "prompt": "hello", "options": options, "stream": False})
    assert whole["response"] == want and whole["done"] is True and whole["done_reason"] in ("stop", "length")
    assert whole["eval_count"] > 0 and whole["prompt_eval_count"] > 0 and whole["total_duration"] >= whole["eval_duration"]
    assert datetime.fromisoformat(whole["created_at"]).tzinfo is not None
    *found, last = lines(both, "/api/generate", {"model": "tiny", "prompt": "hello", "options": options})
    assert "".join(one["response"] for one in found) == want and not any(one["done"] for one in found)
    assert (last["done"], last["response"], last["eval_count"]) == (True, "", whole["eval_count"])
    raw = both.server.post("/api/generate", {"model": "tiny", "prompt": "hello", "raw": True, "options": options, "stream": False})
    assert raw["response"] == both.text("hello")
    said = both.server.post("/api/generate", {"model": "tiny", "prompt": "hello", "system": "be brief", "options": options, "stream": False})
    assert said["response"] == both.text(CHAT)
    assert both.server.post("/api/generate", {"model": "tiny"})["done_reason"] == "load"


def test_chat(both: Both) -> None:
    options = {"seed": 3, "num_predict": MOST}
    want = both.text(CHAT, temperature=0.8, top_k=40, top_p=0.9, seed=3)
    body = {"model": "tiny", "messages": CHAT, "options": options}
    assert both.server.post("/api/chat", {**body, "stream": False})["message"] == {"role": "assistant", "content": want}
    *found, last = lines(both, "/api/chat", body)
    assert "".join(one["message"]["content"] for one in found) == want and last["done"] is True
    stopped = both.server.post("/api/chat", {**body, "options": {**options, "stop": want[2:5]}, "stream": False})
    assert (stopped["message"]["content"], stopped["done_reason"]) == (want[: want.index(want[2:5])], "stop")
    assert both.server.post("/api/chat", {"model": "tiny"})["done_reason"] == "load"


def test_what_clients_ask_first(both: Both) -> None:
    (card,) = both.server.call("GET", "/api/tags").json()["models"]
    assert (card["name"], card["model"]) == ("tiny", "tiny")
    shown = both.server.post("/api/show", {"model": "tiny"})
    assert shown["capabilities"] == ["embedding", "completion", "chat"] and shown["model_info"]["ftbert.context_length"] == 160
    assert both.server.call("GET", "/api/version").json()["version"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/completion", {"prompt": "a", "grammar": "root ::= x"}, "`grammar`"),
        ("/completion", {"prompt": "a", "json_schema": {"type": "object"}}, "`json_schema`"),
        ("/completion", {"prompt": "a", "n_predict": -3}, "`n_predict`"),
        ("/completion", {"prompt": "a", "n_probs": 21}, "`n_probs` must be"),
        ("/completion", {"prompt": "a", "n_probs": 1 << 31}, "`n_probs` must be"),
        ("/completion", {"prompt": "a", "repeat_penalty": 0}, "repeat_penalty must be"),
        ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"repeat_penalty": -1}}, "repeat_penalty must be"),
        ("/completion", {"prompt": [1, 9999]}, "`prompt`"),
        ("/api/generate", {"model": "tiny", "prompt": "a", "format": "json"}, "`format`"),
        ("/api/generate", {"model": "tiny", "prompt": "a", "images": ["x"]}, "`images`"),
        ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"mirostat": 2}}, "`options.mirostat`"),
        ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"temperature": "hot"}}, "temperature"),
        ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"num_predict": 0}}, "`options.num_predict`"),
        ("/api/chat", {"model": "tiny", "messages": CHAT, "tools": [{}]}, "`tools`"),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "images"),
    ],
)
def test_what_is_refused_is_named(both: Both, path: str, body: dict[str, Any], words: str) -> None:
    reply = both.server.call("POST", path, body)
    assert (reply.status, words in reply.json()["error"]) == (422, True), reply.body


# ---- real weights


def test_smollm2_says_what_the_library_says() -> None:
    """By the folder's template. The same request again finds its prompt kept, and is the same whole and streamed; the
    second turn computes what is new alone."""
    path = os.environ.get("FTBERT_TEST_SMOLLM2")
    if not path or not Path(path).exists():
        pytest.skip("FTBERT_TEST_SMOLLM2 does not name the real .gguf file (make models-modern fetches it)")
    chat = [{"role": "user", "content": "Where is Oslo? Answer in one sentence."}]
    with in_thread(("smol", Path(path)), generation_slots=2, max_model_len=512) as server:
        (want,) = ftbert.load(path).generate([chat], max_new_tokens=30)
        body: dict[str, Any] = {"messages": chat, "temperature": 0, "max_tokens": 30}
        assert server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"] == want
        kept = server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        assert joined(streamed(server, "/v1/chat/completions", body)) == kept
        body["messages"] = [*chat, {"role": "assistant", "content": want}, {"role": "user", "content": "And Bergen?"}]
        usage = server.post("/v1/chat/completions", body)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 30
