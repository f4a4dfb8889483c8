"""A process that tokenises for another: `python -m ftbert.text.token_worker FD`, told what by that socket.

It answers (seconds, ids, starts, types) of each call, or None where the call failed: who asked makes it again, and has
the exception. It ends with the socket. Imports no torch.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ftbert.text.fast_tokenizer import FastTokenizer


def main(socket: int) -> None:
    tokenizers: dict[int, FastTokenizer] = {}
    with Connection(socket) as asked, suppress(EOFError, ConnectionError):
        while True:
            number, stored, call = asked.recv()
            try:
                if stored is not None:
                    tokenizers[number] = FastTokenizer.from_stored(*stored)
                answer: Any = _answer(tokenizers[number], *call)
            except Exception:  # noqa: BLE001 - of whatever type, it is raised where the texts came from
                answer = None
            asked.send(answer)


def _answer(tokenizer: FastTokenizer, texts: list[Any], length: int, side: str) -> Any:
    began = time.perf_counter()
    found = tokenizer.tokens(texts, length, side)
    types = None if found.types is None else found.types.astype(np.int32)
    return time.perf_counter() - began, found.ids.astype(np.int32), found.starts, types


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # somebody waits for it
