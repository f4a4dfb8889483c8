"""A client of bench_serve.py in a process of its own: raw HTTP/1.1 on asyncio, so that it is not what is measured.

Reads a JSON object from standard input, writes one to the file that it names as `out`.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import httptools

_IP_BIND_ADDRESS_NO_PORT = 24


class Connection(asyncio.Protocol):
    """One request at a time. done(connection): when its answer is there, or the connection ended."""

    def __init__(self, done: Any) -> None:
        self._done = done
        self._transport: Any = None
        self._parser: Any = None
        self.status = 0
        self.retry_after = 0.0  # seconds, where the answer says so
        self.since = 0.0
        self.waits = False
        self.closed = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self.waits:
            self.status, self.waits = 0, False
            self._done(self)

    def send(self, data: bytes, since: float) -> None:
        """since: when the request was due."""
        self._parser, self.since, self.waits = httptools.HttpResponseParser(self), since, True
        self.retry_after = 0.0
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self.retry_after = float(value)

    def on_message_complete(self) -> None:
        self.status, self.waits = self._parser.get_status_code(), False
        self.closed = self.closed or not self._parser.should_keep_alive()
        self._done(self)


class Client:
    """told: host, port, bodies, path, seconds, warm (seconds that are not counted), connections, and for an open loop
    rate (requests/s). In an open loop what is due while every connection is taken waits for one: its time counts."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        head = f"POST {told['path']} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        self._requests = [f"{head}content-length: {len(body)}\r\n\r\n{body}".encode() for body in told["bodies"]]
        self._random = random.Random(told["seed"])
        self.latencies: list[float] = []
        self.refusals: list[float] = []  # how long a 429 took
        self.statuses: dict[int, int] = {}
        self._idle: deque[Connection] = deque()
        self._due: deque[float] = deque()  # without a connection
        self._connecting: set[asyncio.Task[None]] = set()
        self._end = self._count_from = 0.0
        self._busy = 0  # requests without an answer

    async def run(self) -> None:
        done = self._rest if "rate" in self._told else self._again
        connections = [await self._connect(done) for _ in range(self._told["connections"])]
        began = time.perf_counter()
        self._count_from, self._end = began + self._told["warm"], began + self._told["warm"] + self._told["seconds"]
        if "rate" in self._told:
            self._idle.extend(connections)
            await self._open_loop()
        else:
            for connection in connections:
                self._send(connection, time.perf_counter())
        while (now := time.perf_counter()) < self._end or (self._busy + len(self._due) and now < self._end + 30):
            await asyncio.sleep(0.01)
        if unanswered := self._busy + len(self._due):
            self.statuses[0] = self.statuses.get(0, 0) + unanswered

    async def _connect(self, done: Any) -> Connection:
        # An address has 28,000 ports: each client has its own address, of those that are this machine. The port is
        # chosen with the connection: bind alone looks through all that are taken, for milliseconds where many are.
        with socket.socket() as made:
            made.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            made.bind((f"127.0.0.{self._told['seed'] + 1}", 0))
            made.connect((self._told["host"], self._told["port"]))
            connected = socket.socket(fileno=made.detach())
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(done), sock=connected)
        return connection

    async def _open_loop(self) -> None:
        due = time.perf_counter()
        # The loop's timers are of milliseconds, and shorter waits spin. At high rates what is due is sent each
        # millisecond, so that the client leaves the cores to the server.
        least = 0.001 if self._told["rate"] > 500 else 0.0
        while due < self._end:
            now = time.perf_counter()
            while due <= now:
                self._due.append(due)
                due += self._random.expovariate(self._told["rate"])
            self._send_due()
            await asyncio.sleep(max(least, due - time.perf_counter()))

    def _send_due(self) -> None:
        while self._due and self._idle:
            if (connection := self._idle.popleft()).closed:
                task = asyncio.create_task(self._replace())
                self._connecting.add(task)
                task.add_done_callback(self._connecting.discard)
            else:
                self._send(connection, self._due.popleft())

    def _send(self, connection: Connection, due: float) -> None:
        self._busy += 1
        connection.send(self._random.choice(self._requests), due)

    def _again(self, connection: Connection) -> None:
        """Closed loop: the next request at once, or when the server says."""
        self._count(connection.status, connection.since)
        if connection.retry_after:
            asyncio.get_running_loop().call_later(connection.retry_after, self._next, connection)
        else:
            self._next(connection)

    def _next(self, connection: Connection) -> None:
        now = time.perf_counter()
        if now < self._end and not connection.closed:
            self._send(connection, now)

    def _rest(self, connection: Connection) -> None:
        """Open loop: the connection is for the next."""
        self._count(connection.status, connection.since)
        self._idle.append(connection)
        self._send_due()

    async def _replace(self) -> None:
        while time.perf_counter() < self._end:
            try:
                self._idle.append(await self._connect(self._rest))
            except OSError:
                await asyncio.sleep(0.1)
                continue
            self._send_due()
            return

    def _count(self, status: int, since: float) -> None:
        now = time.perf_counter()
        self._busy -= 1
        # How much is served is what was answered in this time; how long it takes is asked of what was due in it.
        counted = since if "rate" in self._told else now
        if counted < self._count_from or counted >= self._end:
            return
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status == 200:
            self.latencies.append(now - since)
        elif status == 429:
            self.refusals.append(now - since)


def main() -> None:
    told = json.loads(sys.stdin.read())
    client = Client(told)
    import uvloop

    uvloop.run(client.run())
    found = {"latencies": client.latencies, "refusals": client.refusals, "statuses": client.statuses,
             "cpu": time.process_time()}  # fmt: skip
    Path(told["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
