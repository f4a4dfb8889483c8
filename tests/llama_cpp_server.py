"""llama.cpp itself on small files: its token ids, vectors and scores, from the package xllamacpp.

In a process of its own, which is killed at the end: stopping a server in its own process now and then waits for ever,
with Python's lock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

_CELLS = 512
_SECONDS = 60.0  # that an answer may take


class Llama:
    """A server over one file, while this is open. rank: pooled for scores of pairs."""

    def __init__(self, path: Path, rank: bool = False) -> None:
        command = [sys.executable, __file__, str(path), *(["rank"] if rank else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        late = threading.Timer(_SECONDS, self._process.kill)
        late.start()
        self._address = self._process.stdout.readline().strip()
        late.cancel()
        assert self._address, f"llama.cpp did not read {path}"

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._process:
            self._process.kill()

    def tokens(self, text: str) -> list[int]:
        return list(self._post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"])

    def vectors(self, texts: list[str]) -> list[list[float]]:
        return [one["embedding"] for one in self._post("/v1/embeddings", {"input": texts})["data"]]

    def scores(self, query: str, documents: list[str]) -> list[float]:
        found = self._post("/v1/rerank", {"query": query, "documents": documents})["results"]
        return [one["relevance_score"] for one in sorted(found, key=lambda one: one["index"])]

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self._address + route, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return json.load(answer)


def _serve(path: str, rank: bool) -> None:
    """Prints the address, and stays until stdin ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = params.n_batch = params.n_ubatch = _CELLS
    params.n_parallel = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.verbosity, params.warmup, params.embedding = -1, False, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to fp16
    if rank:
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)  # a server that is deleted may wait for ever


if __name__ == "__main__":
    _serve(sys.argv[1], "rank" in sys.argv[2:])
