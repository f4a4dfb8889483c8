"""llama.cpp itself on small files: its token ids, vectors and scores, from the package xllamacpp."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

xllamacpp = pytest.importorskip("xllamacpp")
_CELLS = 512


class Llama:
    """A server over one file, while this is open."""

    def __init__(self, path: Path, rank: bool = False) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = params.n_batch = params.n_ubatch = _CELLS
        params.n_parallel = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.verbosity, params.warmup, params.embedding = -1, False, True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to fp16
        if rank:
            params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
        self._server = xllamacpp.Server(params)

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del self._server

    def tokens(self, text: str) -> list[int]:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(self._server.listening_address + "/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return list(json.load(answer)["tokens"])

    def vectors(self, texts: list[str]) -> list[list[float]]:
        return [one["embedding"] for one in self._answer(self._server.handle_embeddings({"input": texts}))["data"]]

    def scores(self, query: str, documents: list[str]) -> list[float]:
        found = self._answer(self._server.handle_rerank({"query": query, "documents": documents}))["results"]
        return [one["relevance_score"] for one in sorted(found, key=lambda one: one["index"])]

    def _answer(self, found: Any) -> Any:
        found = json.loads(found) if isinstance(found, str) else found
        assert "error" not in found, found
        return found
