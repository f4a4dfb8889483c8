"""A client that checks what a server answers, for as long as it is let."""

from __future__ import annotations

import http.client
import json
import threading
import time

import numpy as np

WORDS = [f"word{i}" for i in range(40)]
TEXTS = [f"{a} {b}" for a in WORDS for b in WORDS[:10]]


class Load(threading.Thread):
    """A client on a connection of its own: asks for random texts and checks every answer. lost: connections that ended
    without an answer to a request. refused: attempts to connect that were refused."""

    def __init__(
        self, port: int, vectors: np.ndarray, seed: int, most: int = 1 << 30, key: str | None = None
    ) -> None:
        super().__init__(daemon=True)
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._port, self._vectors, self._random, self._most = port, vectors, np.random.default_rng(seed), most
        self.statuses: dict[int, int] = {}
        self.lost, self.wrong, self.refused = 0, 0, 0
        self.stop = False

    def run(self) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self.stop and self._most > 0:
            self._most -= 1
            if connection is None:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
                try:
                    connection.connect()
                except OSError:
                    self.refused, connection = self.refused + 1, None
                    time.sleep(0.02)
                    continue
            rows = self._random.integers(0, len(TEXTS), self._random.integers(1, 5)).tolist()
            body = json.dumps({"inputs": [TEXTS[row] for row in rows]})
            try:
                connection.request("POST", "/embed", body, self._headers)
                answer = connection.getresponse()
                got = json.loads(answer.read())
            except (OSError, http.client.HTTPException):
                self.lost += 1
                connection.close()
                connection = None
                continue
            self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
            if answer.status == 200 and not np.allclose(np.array(got, np.float32), self._vectors[rows], atol=3e-5):
                self.wrong += 1
            if answer.getheader("connection") == "close":
                connection.close()
                connection = None
