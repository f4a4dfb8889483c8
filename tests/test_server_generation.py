"""Texts that a server generates, whole and streamed, by every client's route: they are Model.generate's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_servers import CHAT, MOST, Both, both_of, joined, streamed
from served import in_thread
from transformers import AutoModelForCausalLM

PROMPTS = ["hello world", "the café 中文", "two  spaces\nand"]


@pytest.fixture(scope="module", params=["bytes", "mark"])
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with both_of(tmp_path_factory.mktemp("llama"), request.param) as found:
        yield found


# ---- OpenAI


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions(both: Both, prompt: str) -> None:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": MOST}
    whole = both.server.post("/v1/completions", body)
    (choice,) = whole["choices"]
    assert choice["text"] == both.text(prompt)
    ids = both.model.generate_ids([both.model.tokenizer(prompt)["input_ids"]], max_new_tokens=MOST)[0]
    length = len(both.model.tokenizer(prompt)["input_ids"])
    assert choice["finish_reason"] == ("length" if len(ids) == MOST else "stop")
    usage = whole["usage"]
    written = len(ids) + (choice["finish_reason"] == "stop")  # the token that ended it was computed, too
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, written)
    assert usage["total_tokens"] == length + written and whole["object"] == "text_completion" and whole["model"] == "tiny"
    found = streamed(both.server, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert joined(found) == choice["text"]
    assert [event["usage"] for event in found[:-1]] == [None] * (len(found) - 1) and not found[-1]["choices"]
    assert {**found[-1]["usage"], "prompt_tokens_details": 0} == {**usage, "prompt_tokens_details": 0}
    assert [event["choices"][0]["finish_reason"] for event in found[:-1]] == [None] * (len(found) - 2) + [choice["finish_reason"]]
    assert len({event["id"] for event in found}) == 1 and found[0]["id"] != whole["id"]


def test_the_token_that_ends_a_text_is_counted_and_not_told(both: Both) -> None:
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 9, "logit_bias": {"2": 100}, "logprobs": 1}
    found = both.server.post("/v1/completions", body)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]) == ("", "stop", [])
    assert found["usage"]["completion_tokens"] == 1


def test_completions_take_lists_and_ids(both: Both) -> None:
    want = [both.text(one) for one in PROMPTS]
    body = {"prompt": PROMPTS, "temperature": 0, "max_tokens": MOST}
    choices = both.server.post("/completions", body)["choices"]
    assert [(one["index"], one["text"]) for one in choices] == list(enumerate(want))
    found = streamed(both.server, "/v1/completions", body)
    assert [joined(found, i) for i in range(3)] == want
    ids = [both.model.tokenizer(one)["input_ids"] for one in PROMPTS]
    choices = both.server.post("/v1/completions", {**body, "prompt": ids})["choices"]
    assert [one["text"] for one in choices] == want
    assert both.server.post("/v1/completions", {**body, "prompt": ids[0]})["choices"][0]["text"] == want[0]
    assert len(both.server.post("/v1/completions", {**body, "prompt": "a", "max_tokens": None, "ignore_eos": True})["choices"][0]["text"])


def test_chat_completions(both: Both) -> None:
    body = {"messages": CHAT, "temperature": 0, "max_completion_tokens": MOST}
    whole = both.server.post("/v1/chat/completions", body)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": both.text(CHAT), "refusal": None}
    found = streamed(both.server, "/v1/chat/completions", body)
    assert joined(found) == both.text(CHAT)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in event for event in found) and found[-1]["choices"][0]["finish_reason"]
    parts = [{**CHAT[0], "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]}, CHAT[1]]
    assert both.server.post("/chat/completions", {**body, "messages": parts})["choices"][0]["message"]["content"] == both.text(CHAT)
    begun = [*CHAT, {"role": "assistant", "content": "the end"}]
    got = both.server.post("/v1/chat/completions", {**body, "messages": begun})["choices"][0]["message"]["content"]
    assert got == both.text(begun)


def test_without_a_length_an_answer_fills_the_context(both: Both) -> None:
    body = {"messages": CHAT, "temperature": 0, "ignore_eos": True}
    usage = both.server.post("/v1/chat/completions", body)["usage"]
    assert usage["total_tokens"] == 160
    assert both.server.post("/v1/chat/completions", {**body, "max_tokens": 10**30})["usage"]["total_tokens"] == 160
    assert both.server.post("/v1/completions", {"prompt": "hello", "ignore_eos": True})["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"temperature": 0.8, "seed": 5}, {"temperature": 0.8, "seed": 5}),
        ({"seed": 5}, {"temperature": 1.0, "seed": 5}),
        ({"temperature": 1.5, "seed": 7, "top_k": 9, "top_p": 0.9, "min_p": 0.05}, {"temperature": 1.5, "seed": 7, "top_k": 9, "top_p": 0.9, "min_p": 0.05}),
        ({"temperature": 0, "top_k": -1, "repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}),
        ({"temperature": 0, "logit_bias": {"70": 100}}, {"sequence_bias": [[[70], 100.0]]}),
        ({"temperature": 0, "min_tokens": MOST}, {"min_new_tokens": MOST}),
    ],
)  # fmt: skip
def test_how_tokens_are_chosen(both: Both, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    body = {"prompt": "hello", "max_tokens": MOST, **theirs}
    want = both.text("hello", **ours)
    assert both.server.post("/v1/completions", body)["choices"][0]["text"] == want
    assert joined(streamed(both.server, "/v1/completions", body)) == want


def test_several_texts_of_a_prompt(both: Both) -> None:
    body = {"messages": CHAT, "n": 5, "seed": 11, "temperature": 1, "max_tokens": 12}
    want = [both.text(CHAT, temperature=1.0, seed=11 + i, max_new_tokens=12) for i in range(5)]
    assert len(set(want)) > 1
    whole = both.server.post("/v1/chat/completions", body)
    assert [one["message"]["content"] for one in whole["choices"]] == want
    found = streamed(both.server, "/v1/chat/completions", body)
    assert [joined(found, i) for i in range(5)] == want
    prompt = whole["usage"]["prompt_tokens"]
    assert prompt == both.server.post("/v1/chat/completions", {**body, "n": 1})["usage"]["prompt_tokens"]


def test_stop_strings(both: Both) -> None:
    text = both.text("hello", min_new_tokens=MOST)
    for stop in (text[5:7], [text[9:10], "never in there"], [text[3:12]]):
        body = {"prompt": "hello", "temperature": 0, "max_tokens": MOST, "min_tokens": MOST, "stop": stop}
        (choice,) = both.server.post("/v1/completions", body)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (both.text("hello", stop=stop, min_new_tokens=MOST), "stop")
        found = streamed(both.server, "/v1/completions", body)
        assert joined(found) == choice["text"] and found[-1]["choices"][0]["finish_reason"] == "stop"


def same_logprobs(listed: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Behind a prompt that a slot still held sums come in another order."""
    assert len(listed) == len(others)
    for one, other in zip(listed, others, strict=True):
        assert (one["token"], one["bytes"]) == (other["token"], other["bytes"])
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-5)
        same_logprobs(one.get("top_logprobs", []), other.get("top_logprobs", []))


def test_logprobs(both: Both) -> None:
    prompt = both.model.tokenizer("hello")["input_ids"]
    ids = both.model.generate_ids([prompt], max_new_tokens=8)[0]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(both.model.folder)(torch.tensor([[*prompt, *ids]])).logits
    logits = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 8, "logprobs": 3}
    found = both.server.post("/v1/completions", body)["choices"][0]["logprobs"]
    assert torch.allclose(torch.tensor(found["token_logprobs"]), logits[range(len(ids)), ids], atol=1e-4)
    assert "".join(found["tokens"]).count("\ufffd") or "".join(found["tokens"]) == both.text("hello", max_new_tokens=8)
    assert found["text_offset"][0] == 0 and all(len(top) <= 3 for top in found["top_logprobs"])
    chat = {"messages": CHAT, "temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    listed = both.server.post("/v1/chat/completions", chat)["choices"][0]["logprobs"]["content"]
    pieces = [one for event in streamed(both.server, "/v1/chat/completions", chat) for one in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    same_logprobs(listed, pieces)
    assert all(one["top_logprobs"][0]["logprob"] == one["logprob"] and len(one["top_logprobs"]) == 2 for one in listed)
    assert all(one["bytes"] is None or bytes(one["bytes"]).decode() == one["token"] for one in listed)
    alone = both.server.post("/v1/chat/completions", {**chat, "top_logprobs": None})["choices"][0]["logprobs"]["content"]
    same_logprobs([{**one, "top_logprobs": []} for one in listed], alone)


# ---- what is refused, by name

WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["a", 3]}, 422, "prompt"),
    ("/v1/completions", {"prompt": [1, 1 << 40]}, 422, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, 422, "prompt"),
    ("/v1/completions", {"prompt": "hello " * 500}, 422, "at most 160 tokens"),
    ("/v1/completions", {"prompt": "x" * 100_000}, 422, "at most 160 tokens"),
    ("/v1/completions", {"prompt": "a", "n": 1000}, 422, "`n`"),
    ("/v1/completions", {"prompt": "a", "n": 0}, 422, "`n`"),
    ("/v1/completions", {"prompt": ["a"] * 129}, 422, "`n`"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 422, "`max_tokens`"),
    ("/v1/completions", {"prompt": "a", "temperature": -1}, 422, "temperature"),
    ("/v1/completions", {"prompt": "a", "top_p": 1.5}, 422, "top_p"),
    ("/v1/completions", {"prompt": "a", "top_k": -2}, 422, "top_k"),
    ("/v1/completions", {"prompt": "a", "min_p": 3}, 422, "min_p"),
    ("/v1/completions", {"prompt": "a", "repetition_penalty": 0}, 422, "repetition_penalty"),
    ("/v1/completions", {"prompt": "a", "min_tokens": -1}, 422, "min_tokens must be"),
    ("/v1/completions", {"prompt": "a", "presence_penalty": 1e300}, 422, "presence_penalty"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"70": 1e300}}, 422, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "seed": "x"}, 422, "seed"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, 422, "99999"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"word": 1}}, 422, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {str(10**30): 1}}, 422, "`logit_bias`"),
    *[("/v1/completions", {"prompt": "a", name: sign * 10**30}, 422, f"`{name}`") for name in ("seed", "top_k", "min_tokens", "logprobs") for sign in (1, -1)],
    ("/v1/completions", {"prompt": "a", "max_tokens": -(10**30)}, 422, "`max_tokens`"),
    ("/v1/completions", {"prompt": "a", "n": 10**30}, 422, "`n`"),
    ("/v1/completions", {"prompt": [10**30]}, 422, "`prompt`"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, 422, "`logit_bias`"),
    ("/v1/completions", {"prompt": "a", "logprobs": 21}, 422, "logprobs"),
    ("/v1/completions", {"prompt": "a", "stop": ["x"] * 17}, 422, "`stop`"),
    ("/v1/completions", {"prompt": "a", "stop": "x" * 1001}, 422, "`stop`"),
    ("/v1/completions", {"prompt": "a", "stop": [str(i) for i in range(1_000_000)]}, 422, "texts"),
    ("/v1/completions", {"prompt": "a", "echo": True}, 422, "`echo`"),
    ("/v1/completions", {"prompt": "a", "best_of": 3}, 422, "`best_of`"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, 422, "`suffix`"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"content": "a"}]}, 422, "role"),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, 422, "`tools`"),
    ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}}, 422, "`response_format`"),
    ("/v1/chat/completions", {"messages": CHAT, "chat_template": "{{ 1 }}"}, 422, "`chat_template`"),
    ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 3}, 422, "`top_logprobs`"),
    ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 21}, 422, "`top_logprobs` must be"),
    ("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": -1}, 422, "`max_completion_tokens`"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422, "image_url"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 422, "tool_calls"),
    ("/v1/responses", {"input": "a"}, 501, "/v1/chat/completions"),
]  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
def test_what_is_refused_is_named(both: Both, streams: bool) -> None:
    """Streamed too, with a status: nothing of the answer is sent before it is known to come."""
    for path, body, status, words in WRONG:
        reply = both.server.call("POST", path, {**body, "stream": streams})
        assert (reply.status, words in reply.json()["error"]["message"]) == (status, True), (path, str(body)[:80], reply.body[:300])
    assert both.server.post("/v1/completions", {"prompt": "hello", "temperature": 0, "max_tokens": MOST})["choices"][0]["text"] == both.text("hello")


def test_what_changes_nothing_is_taken(both: Both) -> None:
    neutral = {"tools": [], "response_format": {"type": "text"}, "tool_choice": "none", "user": "u", "store": False, "n": None, "stop": None}
    body = {"messages": CHAT, "temperature": 0.0, "max_tokens": 8.0, **neutral, "stop": [""], "seed": -3}
    assert both.server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"] == both.text(CHAT, max_new_tokens=8)


# ---- what is told of it


def test_models_say_what_they_can_do(both: Both) -> None:
    (card,) = both.server.call("GET", "/v1/models").json()["data"]
    assert card["capabilities"] == ["embedding", "completion", "chat"] and card["max_model_len"] == 160
    info = both.server.call("GET", "/info").json()
    assert (info["generation_slots"], info["max_model_len"]) == (3, 160)
    vectors = both.server.post("/embed", {"inputs": PROMPTS})
    assert torch.allclose(torch.tensor(vectors), torch.from_numpy(both.model.encode(PROMPTS)), atol=1e-5)


def test_metrics(both: Both) -> None:
    def read() -> dict[str, float]:
        lines = both.server.call("GET", "/metrics").body.decode().splitlines()
        return {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("ft_") and "bucket" not in line}

    before = read()
    usage = both.server.post("/v1/completions", {"prompt": "hello", "max_tokens": 9, "ignore_eos": True})["usage"]
    after = read()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["ft_generated_tokens_total"] == grown["ft_time_per_output_token_seconds_count"] + 1 == 9
    assert grown["ft_prompt_tokens_total"] == usage["prompt_tokens"] and grown["ft_time_to_first_token_seconds_count"] == 1
    assert grown["ft_generation_busy_seconds_total"] > 0
    assert (after["ft_generation_slots"], after["ft_generation_slots_used"], after["ft_generation_waiting"]) == (3, 0, 0)


def test_a_model_that_shall_not_or_cannot_generate(both: Both, tmp_path: Path) -> None:
    folder = both.model.folder
    assert folder is not None
    with in_thread(("tiny", folder), generation_slots=0) as server:
        reply = server.call("POST", "/v1/completions", {"prompt": "a"})
        assert reply.status == 424 and "is not a generating model (it is: embedding)" in reply.json()["message"]
        assert server.call("GET", "/v1/models").json()["data"][0]["capabilities"] == ["embedding"]
