"""The examples of other projects' clients, as a user runs them, against a server with a key: encode's and rerank's numbers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from language_models import random_llama
from served import ROOT, Served, in_thread, with_head

import ftbert

EXAMPLES = ROOT / "examples" / "clients"
EMBED = sorted(EXAMPLES.glob("*_embed.py"))
RERANK = sorted(EXAMPLES.glob("*_rerank.py"))
CHAT = sorted(EXAMPLES.glob("*_chat.py"))
KEY = "a-key"
# They see this machine alone: no proxy, no telemetry.
QUIET = {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1", "HAYSTACK_TELEMETRY_ENABLED": "False"}
QUIET |= {"LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"}


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("FTBERT_TEST_CLIENTS_PYTHON")
    if not found:
        pytest.skip("FTBERT_TEST_CLIENTS_PYTHON names no Python with the clients (make clients-test makes one)")
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"rank": with_head(root, 1, tiny_bert), "embed": tiny_bert(root), "chat": random_llama(root / "chat")}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Served]:
    with in_thread(*((name, folders[name]) for name in ("embed", "rank", "chat")), api_key=KEY) as one:
        yield one


def run(python: str, example: Path, server: Served, key: str = KEY) -> subprocess.CompletedProcess[str]:
    unwanted = ("PYTHONPATH", "HF_TOKEN", "HF_HUB_OFFLINE")
    environment = {name: text for name, text in os.environ.items() if name not in unwanted}
    return subprocess.run(
        [python, str(example), f"http://127.0.0.1:{server.port}"], capture_output=True, text=True, check=False,
        timeout=120, env=environment | QUIET | {"API_KEY": key},
    )  # fmt: skip


def printed(*arguments: Any) -> list[Any]:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=3e-5)


def test_every_example_is_run() -> None:
    assert len(EMBED) >= 12 and len(RERANK) >= 3
    assert len(CHAT) >= 4 and sorted([*EMBED, *RERANK, *CHAT]) == sorted(EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("example", EMBED, ids=lambda path: path.stem)
def test_embed(python: str, server: Served, folders: dict[str, Path], example: Path) -> None:
    found, *more = printed(python, example, server)
    vectors = ftbert.load(folders["embed"]).encode(list(found))
    assert len(found) >= 3 and np.abs(vectors[0] - vectors[1]).max() > 0.01  # another text's vector would be seen
    close(list(found.values()), vectors)
    for one in more:
        if isinstance(one, dict):  # int8
            assert list(one) == list(found)
            assert np.abs(np.array(list(one.values())) - np.rint(127 * vectors)).max() <= 1
        else:
            close(one, vectors[1:] @ vectors[0])


@pytest.mark.parametrize("example", RERANK, ids=lambda path: path.stem)
def test_rerank(python: str, server: Served, folders: dict[str, Path], example: Path) -> None:
    [[query, found]] = printed(python, example, server)
    texts = sorted(text for text, _ in found)
    want = ftbert.load(folders["rank"]).rerank(query, texts)
    assert len(texts) >= 3 and min(-np.diff([one["score"] for one in want])) > 1e-3
    assert [text for text, _ in found] == [texts[one["corpus_id"]] for one in want]
    close([score for _, score in found], [one["score"] for one in want])


@pytest.mark.parametrize("example", CHAT, ids=lambda path: path.stem)
def test_chat(python: str, server: Served, folders: dict[str, Path], example: Path) -> None:
    """Whole and streamed."""
    [found] = printed(python, example, server)
    asked = [{"role": "user", "content": "Where is Oslo?"}]
    (want,) = ftbert.load(folders["chat"]).generate([asked], max_new_tokens=40)
    assert found == [want, want] and len(want) > 10


def test_a_wrong_key_is_refused(python: str, server: Served) -> None:
    """So the examples above did send theirs."""
    done = run(python, EXAMPLES / "huggingface_hub_embed.py", server, "another-key")
    assert done.returncode != 0 and "401" in done.stderr
