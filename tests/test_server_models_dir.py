"""Models of --models-dir: loaded and unloaded by name while the server runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Reply, Served, as_command, in_thread
from server_models import close

import ftbert
from ftbert.cli import main
from ftbert.server import Settings
from ftbert.server.app import App
from ftbert.server.catalogue import Catalogue, models_in
from ftbert.server.errors import ApiError
from ftbert.server.links import LocalLink
from ftbert.server.metrics import Metrics
from ftbert.server.on_demand import OnDemand

KEY = "geheim"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    """A folder with two models, one that cannot be read, and what is none."""
    made = tmp_path_factory.mktemp("shelf")
    tiny_bert(made).rename(made / "one")
    shutil.copytree(made / "one", made / "two")
    shutil.copytree(made / "one", made / "broken")
    (made / "broken" / "model.safetensors").write_bytes(b"no weights")
    (made / "notes").mkdir()
    (made / "notes" / "config.txt").write_text("{}")
    shutil.copytree(made / "one", made / ".hidden")
    shutil.copytree(made / "one", made.parent / f"{made.name}-outside")
    return made


@pytest.fixture(scope="module")
def server(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    arguments = ["--models-dir", str(shelf), "--models-max", "1", "--workers", "2", "--batch-tokens", "64"]
    with as_command(tmp_path_factory.mktemp("log"), *arguments, "--api-key", KEY) as found:
        found.key = KEY
        yield found


def state(server: Served, name: str) -> dict[str, Any]:
    status: dict[str, Any] = server.call("GET", f"/v1/models/{name}").json()["status"]
    return status


def wait_for(server: Served, name: str, value: str, times: int = 8) -> dict[str, Any]:
    """So often in turn: connections come to either worker."""
    until, seen = time.monotonic() + 60, 0
    while time.monotonic() < until:
        status = state(server, name)
        seen = seen + 1 if status["value"] == value else 0
        if seen == times:
            return status
        time.sleep(0.02)
    raise AssertionError((name, status))


def embed(server: Served, name: str | None, texts: list[str]) -> Reply:
    return server.call("POST", "/v1/embeddings", {"input": texts, **({} if name is None else {"model": name})})


def vectors(reply: Reply) -> list[list[float]]:
    assert reply.status == 200, reply.body
    return [one["embedding"] for one in reply.json()["data"]]


def test_a_model_is_loaded_serves_and_is_unloaded(server: Served, shelf: Path) -> None:
    assert server.call("GET", "/health").status == 200  # those on demand are not waited for
    assert {one["id"]: one["status"] for one in server.call("GET", "/models").json()["data"]} == {
        name: {"value": "unloaded"} for name in ("broken", "one", "two")
    }
    assert embed(server, None, ["a"]).status == 404
    refused = embed(server, "one", ["a"])
    assert refused.status == 404 and refused.json()["error"]["code"] == "model_not_loaded"
    assert "the model 'one' is not loaded: POST /models/load" in refused.json()["message"]
    assert server.call("GET", "/health?model=one").status == 503
    assert server.post("/models/load", {"model": "one"}) == {"success": True}
    assert wait_for(server, "one", "loaded") == {"value": "loaded"}
    assert server.call("GET", "/health?model=one").status == 200
    assert server.call("GET", "/health?model=two").status == 503
    want = ftbert.load(shelf / "one").encode(["word1 word2", "word3"])
    close(vectors(embed(server, "one", ["word1 word2", "word3"])), want)
    close(vectors(embed(server, None, ["word1 word2", "word3"])), want)  # what is loaded is the first that fits
    assert server.post("/models/load", {"model": "one"}) == {"success": True}  # it is
    full = server.call("POST", "/models/load", {"model": "two"})
    assert full.status == 429 and "(models-max): one; unload one" in full.json()["message"]
    assert server.post("/models/unload", {"model": "one"}) == {"success": True}
    wait_for(server, "one", "unloaded")
    assert embed(server, "one", ["a"]).status == 404
    assert server.post("/models/load", {"model": "two"}) == {"success": True}
    wait_for(server, "two", "loaded")
    close(vectors(embed(server, "two", ["word3"])), want[1:])
    assert server.post("/models/unload", {"model": "two"}) == {"success": True}
    wait_for(server, "two", "unloaded")


def test_the_process_of_an_unloaded_model_ends_behind_its_requests(server: Served) -> None:
    server.post("/models/load", {"model": "one"})
    wait_for(server, "one", "loaded")
    assert server.process is not None
    with_it, replies = children(server.process.pid), list[Reply]()
    texts = ["word1 word2 word3 " * 30] * 1024
    asking = threading.Thread(target=lambda: replies.append(embed(server, "one", texts)))
    asking.start()
    time.sleep(0.1)
    server.post("/models/unload", {"model": "one"})
    asking.join(60)
    assert len(vectors(replies[0])) == len(texts)
    until = time.monotonic() + 10
    while len(children(server.process.pid)) == len(with_it) and time.monotonic() < until:
        time.sleep(0.02)
    assert len(children(server.process.pid)) == len(with_it) - 1


def children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(one) for one in found]


def test_a_model_that_cannot_be_loaded_says_so_and_ends_nothing(server: Served) -> None:
    server.post("/models/load", {"model": "broken"})
    status = wait_for(server, "broken", "unloaded")
    assert (status.pop("value"), status.pop("failed"), status.pop("exit_code")) == ("unloaded", True, 3)
    assert "model.safetensors" in status["error"]
    assert server.log is not None and "broken cannot be loaded" in server.log.read_text()
    assert server.call("GET", "/health").status == 200
    server.post("/models/load", {"model": "two"})  # the place is free
    time.sleep(0.3)
    server.post("/models/unload", {"model": "two"})  # while it loads
    time.sleep(0.15)
    server.post("/models/load", {"model": "two"})
    wait_for(server, "two", "loaded")
    assert "starting it again" not in server.log.read_text()
    server.post("/models/unload", {"model": "two"})
    wait_for(server, "two", "unloaded")


@pytest.mark.parametrize("path", ["/models/load", "/models/unload"])
def test_only_names_of_the_folder_are_taken_with_the_key(server: Served, shelf: Path, path: str) -> None:
    outside = f"{shelf.name}-outside"
    for name in (f"../{outside}", str(shelf.parent / outside), ".hidden", "notes", ".", "..", "", "one/", "one\0", "/", "ONE"):
        assert (name, server.call("POST", path, {"model": name}).status) == (name, 404)
    assert server.call("POST", path, {"model": None}).status == 422
    assert server.call("POST", path, {}).status == 422
    assert server.call("POST", path, {"model": "one"}, {"authorization": "Bearer falsch"}).status == 401
    unknown = server.call("GET", f"/health?model={outside}", headers={"authorization": ""})
    assert unknown.status == 404 and b"two" not in unknown.body
    assert all(one["status"]["value"] == "unloaded" for one in server.call("GET", "/models").json()["data"])


def test_a_request_loads_its_model_with_autoload(tmp_path: Path) -> None:
    """Until it has failed: then it is not tried with each request."""

    async def run() -> list[tuple[int, float]]:
        settings = Settings((("base", "b"), ("one", "o"), ("two", "t")), on_demand=2, models_max=1)
        app = App(settings, [[LocalLink()] for _ in settings.models], Metrics(settings), {})
        catalogue = Catalogue(settings, tmp_path)
        app.on_demand = OnDemand(app.models, catalogue, autoload=True)
        found: list[tuple[int, float]] = []

        def ask(call: Callable[..., Any], *arguments: Any) -> None:
            try:
                call(*arguments)
                found.append((200, 0.0))
            except ApiError as error:
                found.append((error.status, error.retry_after))

        ask(app.model, "one")
        ask(app.model, "one")  # it is wanted now
        ask(app.model, "two")  # one at a time
        ask(app.model, None)
        catalogue.explain(1, "too large")
        catalogue.fail(1, 3)
        app.models[1].want(False)  # as it follows
        ask(app.model, "one")
        ask(app.on_demand.unload, app.models[0])
        ask(app.model, "base")
        assert [app.on_demand.status(model) for model in app.models] == [
            {"value": "loading"}, {"value": "unloaded", "failed": True, "exit_code": 3, "error": "too large"},
            {"value": "unloaded"},
        ]  # fmt: skip
        await app.close()
        return found

    assert asyncio.run(run()) == [(503, 1), (200, 0), (429, 1), (200, 0), (404, 0), (422, 0), (200, 0)]


def test_without_the_folder_nothing_is_loaded_or_unloaded(shelf: Path) -> None:
    with in_thread(("m", shelf / "one")) as server:
        refused = server.call("POST", "/models/load", {"model": "m"})
        assert refused.status == 501 and "--models-dir" in refused.json()["message"]
        assert state(server, "m") == {"value": "loaded"}
        assert server.call("GET", "/health?model=m").status == 200
        assert server.call("GET", "/health?model=x").status == 404


def test_what_the_folder_may_hold(shelf: Path, tmp_path: Path) -> None:
    assert models_in(str(shelf)) == tuple((name, str(shelf / name)) for name in ("broken", "one", "two"))
    with pytest.raises(NotADirectoryError, match="models-dir: expected a folder of models; got"):
        models_in(str(shelf / "one" / "config.json"))
    with pytest.raises(ValueError, match="holds no model: no folder with config.json"):
        models_in(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "link").symlink_to(shelf / "one")
    assert [name for name, _ in models_in(str(tmp_path))] == ["a", "link"]
    (tmp_path / "a.onnx").write_bytes(b"")
    with pytest.raises(ValueError, match="two models have the name a"):
        models_in(str(tmp_path))


def test_flags_that_do_not_go_together(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        ([], "expected a MODEL, or --models-dir"),
        ([f"two={shelf / 'one'}", "--models-dir", str(shelf)], "have one name: two"),
        (["--models-dir", str(shelf), "--workers", "0"], "--workers must be at least 1"),
        (["--models-dir", str(shelf / "none")], "models-dir: expected a folder of models"),
    ):
        assert main(["serve", *arguments]) == 1
        assert words in capsys.readouterr().err


def test_no_more_models_are_wanted_than_may_be(tmp_path: Path) -> None:
    """Whoever asks: all processes look at the same files."""
    models = tuple((str(i), str(i)) for i in range(8))
    settings = Settings(models, on_demand=6, models_max=3)
    catalogues = [Catalogue(settings, tmp_path) for _ in range(2)]
    got: list[bool] = []
    threads = [
        threading.Thread(target=lambda i=i: got.append(catalogues[i % 2].want(i))) for i in range(2, 8)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False, False, False, True, True, True]
    first, *_ = wanted = sorted(catalogues[0].wanted())
    assert len(wanted) == 3 and catalogues[1].want(first)
    catalogues[1].fail(first, 3)
    assert catalogues[0].failure(first) == (3, "") and len(catalogues[0].wanted()) == 2
    assert catalogues[0].want(first) and catalogues[1].failure(first) is None
    assert os.listdir(tmp_path / "wanted")
