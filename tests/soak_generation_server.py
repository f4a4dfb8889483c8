"""A server that generates for a long time: mixed requests, some cancelled at any byte, some fuzzed.

    PYTHONPATH=.:tests python tests/soak_generation_server.py --requests 10000

Exits with 1 where an answer is not Model.generate's, a request got a 5xx that no limit explains, a connection was lost, a slot
is not free at the end, or memory or descriptors grew.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
from generation_servers import events, joined
from language_models import random_llama
from served import Served, as_command
from soak_server import resident

import ftbert

MOST = 40
VALUES: list[Any] = [None, True, 0, -1, 10**30, 1.5, 1e300, "", "a", "hello " * 900, "\x00", "\ud7ff", [], [[]], ["a"], ["a", 1], [1, 2], {}, {"5": 2},
                     {"include_usage": True}, [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "a"}], [{"role": "x"}]]  # fmt: skip
KEYS = ["prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop",
        "logprobs", "top_logprobs", "logit_bias", "stream", "stream_options", "presence_penalty", "min_tokens", "ignore_eos", "n_predict",
        "options", "raw", "system", "n_probs", "tools", "response_format", "chat_template_kwargs"]  # fmt: skip
PATHS = ["/v1/completions", "/v1/chat/completions", "/completion", "/api/generate", "/api/chat", "/props", "/api/tags"]


def asked(place: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A request, and the library's options for it."""
    draws = random.Random(place)
    prompt = f"{place}: " + " ".join(draws.choices(["hello", "world", "café", "中文", "the end", "two"], k=draws.randint(1, 30)))
    most = draws.randint(1, MOST)
    drawn = {"temperature": draws.choice([0.0, 0.0, 0.7, 1.3]), "seed": place, **draws.choice([{}, {"top_k": 20}, {"top_p": 0.8}, {"repetition_penalty": 1.3}])}
    return {"prompt": prompt, "max_tokens": most, **drawn}, {"max_new_tokens": most, **drawn}


class Client(threading.Thread):
    def __init__(self, port: int, want: list[str], seed: int, requests: int) -> None:
        super().__init__(daemon=True)
        self._port, self._want, self._random, self._left = port, want, random.Random(seed), requests
        self.statuses: dict[int, int] = {}
        self.bad: list[str] = []

    def run(self) -> None:
        for _ in range(self._left):
            try:
                self._one()
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.bad.append(f"lost: {error!r}")

    def _one(self) -> None:
        kind = self._random.random()
        place = self._random.randrange(len(self._want))
        body = asked(place)[0] | {"stream": self._random.random() < 0.6}
        if kind < 0.2:
            self._cancel(json.dumps({**body, "max_tokens": 3000, "ignore_eos": True}).encode())
            return
        if kind < 0.35:
            path = self._random.choice(PATHS)
            fuzzed = {key: self._random.choice(VALUES) for key in self._random.sample(KEYS, self._random.randint(0, 6))}
            status, _ = self._call(path, {**({"prompt": "a", "messages": VALUES[-3], "max_tokens": 3} if self._random.random() < 0.7 else {}), **fuzzed})
            if status >= 500 and status != 503:
                self.bad.append(f"{status} for {path} {str(fuzzed)[:200]}")
            return
        status, found = self._call("/v1/completions", body)
        if status == 429:
            return
        text = joined(events(found)) if body["stream"] else json.loads(found)["choices"][0]["text"]
        if text != self._want[place]:
            self.bad.append(f"another text at {place}: {text!r}, not {self._want[place]!r}")

    def _cancel(self, body: bytes) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", self._port), timeout=30) as one:
            one.sendall((head + body)[: self._random.randrange(1, 2 * len(head + body))])
            if self._random.random() < 0.7:
                one.settimeout(self._random.random() * 0.2)
                try:
                    while self._random.random() < 0.8 and one.recv(self._random.randrange(1, 3000)):
                        pass
                except TimeoutError:
                    pass

    def _call(self, path: str, body: Any) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            connection.request("GET" if path in PATHS[-2:] else "POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            found = answer.read()
        finally:
            connection.close()
        self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
        return answer.status, found


def descriptors(server: Served) -> int:
    assert server.process is not None
    family = psutil.Process(server.process.pid)
    return sum(one.num_fds() for one in (family, *family.children()))


def slots_used(server: Served) -> float:
    lines = server.call("GET", "/metrics").body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(("ft_generation_slots_used{", "ft_generation_waiting{")))


def soak(options: argparse.Namespace) -> list[str]:
    log = Path(tempfile.mkdtemp())
    folder = random_llama(log / "m", max_position_embeddings=4096)
    model = ftbert.load(folder)
    want = [model.generate([one["prompt"]], **how)[0] for one, how in map(asked, range(options.texts))]
    bad: list[str] = []
    arguments = ["--workers", options.workers, "--generation-slots", "5", "--batch-tokens", "512"]
    with as_command(log, f"tiny={folder}", *arguments) as server:
        before: tuple[float, int] | None = None
        statuses: dict[int, int] = {}
        for part in range(10):
            clients = [Client(server.port, want, options.seed * 1000 + part * 100 + i, options.requests // 10 // options.clients)
                       for i in range(options.clients)]  # fmt: skip
            for client in clients:
                client.start()
            for client in clients:
                client.join()
                bad += client.bad
                for status, count in client.statuses.items():
                    statuses[status] = statuses.get(status, 0) + count
            for _ in range(100):
                if not (used := slots_used(server)):
                    break
                threading.Event().wait(0.05)
            bad += [f"{used} texts are written or wait, and nobody asks for them"] * bool(used)
            now = resident(server), descriptors(server)
            before = before or now  # after the first tenth: pools and caches are filled
            print(f"{part + 1}0 %: {statuses}, {now[0]:.0f} MB, {now[1]} descriptors, {len(bad)} bad", flush=True)
        assert before is not None and server.log is not None
        bad += [f"memory grew from {before[0]:.0f} to {now[0]:.0f} MB"] * (now[0] - before[0] > options.most_mb)
        bad += [f"descriptors grew from {before[1]} to {now[1]}"] * (now[1] > before[1] + 8)
        bad += ["a traceback in the log"] * ("Traceback" in server.log.read_text())
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-mb", type=float, default=60.0)
    bad = soak(parser.parse_args())
    print("\n".join(bad[:40]) or "nothing bad")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
