"""Which models a server lets generate, and what it says where one cannot or may not."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_model
from language_models import random_llama
from served import in_thread
from server_models import described
from small_tokenizers import tokenizer

import ftbert
from ftbert.server import Settings, generating, writing
from ftbert.server.metrics import Row
from ftbert.server.settings import from_environment


def writing_of(folder: Path, **settings: Any) -> Any:
    chosen = Settings((("m", str(folder)),), **settings)
    return generating.writing_of(ftbert.load(folder), described(folder), chosen, Row())


def llama(folder: Path, **config: Any) -> Path:
    return random_llama(folder, max_position_embeddings=6000, **config)


def test_slots_and_positions(tmp_path: Path) -> None:
    folder = llama(tmp_path / "m")
    for settings, slots, positions in (({}, 4, 4096), ({"generation_slots": 2, "max_model_len": 6000}, 2, 6000), ({"max_model_len": 10}, 4, 10)):
        writer, facts = writing_of(folder, **settings)
        writer.close()
        assert (facts.slots, facts.positions, facts.bounded, facts.stop) == (slots, positions, False, [])
        assert facts.template and facts.names["bos_token"] == "<s>" and facts.special[2] == "</s>"
    assert writing_of(folder, generation_slots=0) is None
    with pytest.raises(ValueError, match="generation-slots: expected a number from 0 to 1024; got '2000000'"):
        from_environment({"GENERATION_SLOTS": "2000000"})
    with pytest.raises(ValueError, match="max-model-len: m reads at most 6000 tokens; got 6001"):
        writing_of(folder, max_model_len=6001)


def test_a_chat_template_that_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = llama(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{% for m in %}")
    with caplog.at_level(logging.INFO, logger="ftbert.serve"):
        writer, facts = writing_of(folder)
    writer.close()
    assert facts.template is None and "m answers no chats: the chat template is not valid" in caplog.text


def test_a_chat_template_that_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request is refused in time; others are answered meanwhile."""
    monkeypatch.setattr(writing, "_RENDERING", 3.0)
    monkeypatch.setattr("ftbert.text.tokenizer._RENDERING", 0.1)
    folder = llama(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with in_thread(("m", folder)) as server, ThreadPoolExecutor(1) as threads:
        chat = threads.submit(server.call, "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        for _ in range(3):
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
        assert not chat.done()
        reply = chat.result()
    assert reply.status == 422 and "it was not done in 3 s" in reply.json()["message"]


def test_a_model_that_sees_what_follows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = tokenizer("bytes")
    make_model("gemma3_text", "causal_lm", 0, use_bidirectional_attention=True, vocab_size=len(words)).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="ftbert.serve"):
        assert writing_of(tmp_path) is None
    assert "m generates no text: this model has no cache of keys and values" in caplog.text


def test_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(generating, "generation_of", fail)
    with pytest.raises(RuntimeError, match=r"no memory for keys and values of 4 texts of 4096 tokens, \d+ MB: lower generation-slots or max-model-len"):
        writing_of(llama(tmp_path / "m"))
