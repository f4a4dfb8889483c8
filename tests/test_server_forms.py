"""Vectors in other APIs' forms, over the wire: Cohere's, Ollama's, Voyage's, Mistral's, Jina's, vLLM's and Azure's."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from served import Served, in_thread
from server_models import TEXTS, as_crossencoder, close, embedder, headed, in_order

import ftbert
from ftbert.server.errors import ApiError
from ftbert.server.instructions import Instruction, instructed_prompt
from ftbert.server.vector_forms import VectorForm

LONG = " ".join(f"word{i % 40}" for i in range(300))  # more than the 128 tokens that the model reads
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TORCH |= {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
BYTES = {"int8": np.int8, "uint8": np.uint8, "binary": np.int8, "ubinary": np.uint8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Any:
    return ftbert.load(tiny_bert(tmp_path_factory.mktemp("forms")))


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Served]:
    with in_thread(("m", model.folder)) as one:
        yield one


def quantised(vectors: Any, name: str) -> Any:
    """sentence-transformers' signs, and what docs/serving.md says of the rest. [n, width]"""
    from sentence_transformers.util import quantize_embeddings

    if name.endswith("binary"):
        return quantize_embeddings(vectors, precision=name)
    values = np.rint(127 * vectors.astype(np.float64)).astype(np.int64)
    return values if name == "int8" else values + 128


def same(got: Any, want: Any, name: str) -> None:
    """An entry between two steps may become the other."""
    got, want = np.asarray(got, np.int64), np.asarray(want, np.int64)
    assert got.shape == want.shape
    if name.endswith("binary"):
        assert (got == want).all()
    else:
        assert np.abs(got - want).max() <= 1 and (got == want).mean() > 0.99


def embedded(server: Served, **more: Any) -> list[Any]:
    answer = server.post("/v1/embeddings", {"input": TEXTS, **more})
    assert answer["id"].startswith("embd-") and [one["index"] for one in answer["data"]] == list(range(len(TEXTS)))
    return [one["embedding"] for one in answer["data"]]


def refused(server: Served, path: str, body: Any, name: str, status: int = 422) -> None:
    reply = server.call("POST", path, body)
    told = reply.json()
    assert reply.status == status and f"`{name}`" in (told.get("message") or told["error"]), reply.body
    if "message" in told:  # OpenAI's object
        assert told["error"]["param"] == name, reply.body


@pytest.mark.parametrize("name", BYTES)
def test_numbers_of_eight_bits(model: Any, server: Served, name: str) -> None:
    want = quantised(model.encode(TEXTS), name)
    same(embedded(server, output_dtype=name), want, name)
    texts = embedded(server, output_dtype=name, encoding_format="base64")
    same([np.frombuffer(base64.b64decode(one), BYTES[name]) for one in texts], want, name)
    same(embedded(server, output_dtype=name, output_dimension=20), quantised_short(model, name), name)
    asked = {"input": TEXTS, "output_dtype": name, "encoding_format": "bytes_only"}
    reply = server.call("POST", "/v1/embeddings", asked)
    same(np.frombuffer(reply.body, BYTES[name]).reshape(len(TEXTS), -1), want, name)


def quantised_short(model: Any, name: str) -> Any:
    """Of 20 entries: signs of the last byte are padded with zeros."""
    vectors = model.encode(TEXTS, truncate_dim=20)
    if not name.endswith("binary"):
        return quantised(vectors, name)
    bits = np.packbits(np.pad(vectors > 0, ((0, 0), (0, 4))), axis=1).astype(np.int64)
    return bits if name == "ubinary" else bits - 128


def test_products_of_int8_are_cosines(model: Any, server: Served) -> None:
    found = np.array(embedded(server, output_dtype="int8"), np.float64)
    vectors = model.encode(TEXTS)
    assert np.abs(found @ found.T / 127**2 - vectors @ vectors.T).max() < 0.02
    alone = server.post("/v1/embeddings", {"input": TEXTS[0], "output_dtype": "int8"})["data"][0]["embedding"]
    same([alone], found[:1], "int8")  # whatever else a request has


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("big", [False, True])
def test_vllm_s_numbers(model: Any, server: Served, name: str, big: bool) -> None:
    want = torch.from_numpy(model.encode(TEXTS)).to(TORCH[name])
    size = want.element_size()
    ends = {"endianness": "big"} if big else {}

    def read(data: bytes) -> Any:
        if big:
            data = np.frombuffer(data, f"V{size}").view(f">u{size}").astype(f"<u{size}").tobytes()
        return torch.frombuffer(bytearray(data), dtype=TORCH[name]).float().numpy()

    step = {4: 1e-6, 2: 2**-7, 1: 2**-2}[size]  # a number between two may become the other
    texts = embedded(server, embed_dtype=name, encoding_format="base64", **ends)
    got = np.stack([read(base64.b64decode(one)) for one in texts])
    exact = want.float().numpy()
    assert (np.abs(got - exact) <= step * np.abs(exact) + 2**-9).all() and np.isclose(got, exact, 1e-5, 1e-6).mean() > 0.98
    asked = {"input": TEXTS, "embed_dtype": name, "encoding_format": "bytes", **ends}
    reply = server.call("POST", "/v1/embeddings", asked)
    assert reply.headers["content-type"] == "application/octet-stream" and "x-compute-time" in reply.headers
    told = json.loads(reply.headers["metadata"])
    assert told["usage"]["total_tokens"] > 10 and told["model"] == "m" and len(told["data"]) == len(TEXTS)
    for one, row in zip(told["data"], got, strict=True):
        np.testing.assert_array_equal(read(reply.body[one["start"] : one["end"]]).reshape(one["shape"]), row)
        assert one["embed_dtype"] == name and one["endianness"] == ("big" if big else "little")


@pytest.mark.parametrize("name", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_numbers_are_rounded_as_torch_does(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(3000, generator=generator) * 10.0**power for power in range(-9, 3)]
    kinds, steps = TORCH[name], torch.arange(1 << 15, dtype=torch.int16)
    exact = steps.view(kinds).float() if kinds.itemsize == 2 else steps[:128].to(torch.uint8).view(kinds).float()
    exact = exact[exact.isfinite()]
    values = torch.cat([*drawn, exact, -exact, (exact[1:] + exact[:-1]) / 2])  # those between two, to the even one
    values = values[values.abs() <= exact.max()]
    got = VectorForm(name).numbers(values.numpy()[None])[0]
    want = values.to(kinds).view(torch.int16 if kinds.itemsize == 2 else torch.uint8).numpy().view(got.dtype)
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ApiError, match=name):
        VectorForm(name).numbers(np.array([[np.finfo(np.float32).max]], np.float32))


def test_forms_of_pooling(model: Any, server: Served) -> None:
    asked = {"input": TEXTS[:2], "task": "token_embed", "embed_dtype": "float16", "encoding_format": "bytes"}
    reply = server.call("POST", "/pooling", asked)
    told, want = json.loads(reply.headers["metadata"]), model.encode(TEXTS[:2], output_value="token_embeddings")
    for one, rows in zip(told["data"], want, strict=True):
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        got = np.frombuffer(reply.body[one["start"] : one["end"]], np.float16).reshape(one["shape"])
        np.testing.assert_allclose(got, rows, atol=1e-3)
    for name in ("output_dtype", "embedding_type"):
        refused(server, "/pooling", {"input": "a", "task": "token_embed", name: "int8"}, name)


def test_jina_s_fields(model: Any, server: Served) -> None:
    vectors = model.encode(TEXTS)
    objects = [{"text": one} for one in TEXTS]
    close(embedded(server, input=objects), vectors)
    close(embedded(server, input=[objects[0], *TEXTS[1:]]), vectors)
    close(embedded(server, normalized=False), model.encode(TEXTS, normalize=False))
    for name in ("binary", "ubinary"):
        same(embedded(server, embedding_type=name, normalized=False), quantised(vectors, name), name)
    texts = embedded(server, embedding_type="base64", dimensions=16)
    close([np.frombuffer(base64.b64decode(one), np.float32) for one in texts], model.encode(TEXTS, truncate_dim=16))
    close(embedded(server, task="text-matching", truncate=True, embedding_type="float"), vectors)
    parts = [{"text": one} for one in TEXTS[:3]]
    chunks = server.post("/v1/embeddings", {"input": parts, "late_chunking": True})["data"]
    plain = server.post("/v1/embeddings", {"input": TEXTS[:3], "late_chunking": True})["data"]
    close([one["embedding"] for one in chunks], [one["embedding"] for one in plain])
    refused_words = server.call("POST", "/v1/embeddings", {"input": [{"image": "x"}]})
    assert refused_words.status == 422 and b"text" in refused_words.body


def test_voyage_s_truncation(model: Any, server: Served) -> None:
    got = server.post("/v1/embeddings", {"input": LONG, "truncation": True})["data"][0]["embedding"]
    close(got, model.encode(LONG))
    told = server.call("POST", "/v1/embeddings", {"input": LONG, "truncation": False})
    assert told.status == 422 and b"less than 129 tokens" in told.body


@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])
def test_cohere(model: Any, server: Served, path: str) -> None:
    vectors, types = model.encode(TEXTS), ["float", *BYTES, "base64", "int8"]
    asked = {"model": "m", "texts": TEXTS, "input_type": "search_document", "embedding_types": types}
    answer = server.post(path, asked)
    assert answer["response_type"] == "embeddings_by_type" and answer["texts"] == TEXTS and answer["id"]
    assert set(answer["embeddings"]) == set(types)
    close(answer["embeddings"]["float"], vectors)
    close([np.frombuffer(base64.b64decode(one), np.float32) for one in answer["embeddings"]["base64"]], vectors)
    for name in BYTES:
        same(answer["embeddings"][name], quantised(vectors, name), name)
    tokens = server.post("/v1/embeddings", {"input": TEXTS})["usage"]["total_tokens"]
    assert answer["meta"] == {"api_version": {"version": path[2]}, "billed_units": {"input_tokens": tokens}}
    plain = server.post(path, {"texts": TEXTS, "input_type": "clustering", "output_dimension": 24})
    found = plain["embeddings"]["float"] if path == "/v2/embed" else plain["embeddings"]
    close(found, model.encode(TEXTS, truncate_dim=24))
    assert plain["response_type"] == ("embeddings_by_type" if path == "/v2/embed" else "embeddings_floats")
    inputs = [{"content": [{"type": "text", "text": one}]} for one in TEXTS]
    inputs[0]["content"] = [{"type": "text", "text": part} for part in TEXTS[0].split(" ", 1)]
    answer = server.post(path, {"inputs": inputs, "embedding_types": ["float"]})
    close(answer["embeddings"]["float"], vectors)  # a line's end is white space to this tokenizer
    for how, want in (("START", " ".join(LONG.split()[-126:])), ("END", LONG)):
        answer = server.post(path, {"texts": [LONG], "truncate": how, "embedding_types": ["float"]})
        close(answer["embeddings"]["float"][0], model.encode(want))
    answer = server.post(path, {"texts": [LONG], "max_tokens": 12, "embedding_types": ["float"]})
    close(answer["embeddings"]["float"][0], model.encode(" ".join(LONG.split()[:10])))
    for body in ({"texts": [LONG], "truncate": "NONE"}, {"texts": ["a " * 20], "truncate": "NONE", "max_tokens": 12}):
        assert server.call("POST", path, body).status == 422
    for name, value in (
        ("embedding_types", ["float", "int4"]), ("output_dimension", 65), ("output_dimension", 0), ("truncate", "UP"),
        ("input_type", "image"), ("max_tokens", 2), ("images", ["data:image/png;base64,AA=="]),
    ):  # fmt: skip
        refused(server, path, {"texts": ["a"], name: value}, name)
    for body, name, status in (
        ({}, "texts", 400), ({"texts": []}, "texts", 400), ({"inputs": []}, "inputs", 400),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types", 400), ({"inputs": [{"content": []}]}, "inputs", 400),
        ({"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs", 422),
        ({"texts": ["a"], "inputs": inputs}, "inputs", 422),
    ):  # fmt: skip
        refused(server, path, body, name, status)


def test_ollama(model: Any, server: Served) -> None:
    answer = server.post("/api/embed", {"model": "m:latest", "input": TEXTS, "keep_alive": "5m", "options": {"seed": 1}})
    close(answer["embeddings"], model.encode(TEXTS))
    assert answer["model"] == "m:latest" and answer["total_duration"] > 0 and answer["load_duration"] == 0
    assert answer["prompt_eval_count"] == server.post("/v1/embeddings", {"input": TEXTS})["usage"]["total_tokens"]
    one = server.post("/api/embed", {"input": TEXTS[0], "dimensions": 8, "keep_alive": 300})
    close(one["embeddings"], model.encode(TEXTS[:1], truncate_dim=8))
    close(server.post("/api/embed", {"input": LONG})["embeddings"], model.encode([LONG]))
    close(
        server.post("/api/embed", {"input": LONG, "options": {"num_ctx": 12}})["embeddings"],
        model.encode([" ".join(LONG.split()[:10])]),
    )
    assert server.call("POST", "/api/embed", {"input": LONG, "truncate": False}).status == 422
    older = server.post("/api/embeddings", {"model": "m", "prompt": TEXTS[0], "options": {"temperature": 0}})
    assert set(older) == {"embedding"}
    close(older["embedding"], model.encode(TEXTS[0], normalize=False))
    refused(server, "/api/embed", {"input": []}, "input", 400)
    refused(server, "/api/embed", {"input": "a", "dimensions": 65}, "dimensions")
    refused(server, "/api/embed", {"input": "a", "options": {"num_ctx": 2}}, "options.num_ctx")
    refused(server, "/api/embeddings", {"model": "m"}, "prompt")


def test_names_of_models_in_paths_and_of_ollama(tmp_path: Path, model: Any, tiny_bert: Callable[..., Path]) -> None:
    from conftest import VOCAB_WORDS

    other = tiny_bert(tmp_path, hidden_size=32, vocab_size=len(VOCAB_WORDS))
    with in_thread(("first", model.folder), ("a model", other), ("mod\u00e8le \u6a21", model.folder), api_key="secret") as server:
        bare = Served(server.port)
        path = "/openai/deployments/a%20model/embeddings?api-version=2024-10-21"
        for headers in ({"api-key": "secret"}, {"authorization": "Bearer secret"}):
            reply = bare.call("POST", path, {"model": "first", "input": TEXTS, "encoding_format": "float"}, headers)
            assert reply.status == 200 and reply.json()["model"] == "a model"
            close([one["embedding"] for one in reply.json()["data"]], ftbert.load(other).encode(TEXTS))
        reply = bare.call("POST", "/openai/v1/embeddings", {"model": "first", "input": TEXTS}, {"api-key": "secret"})
        close([one["embedding"] for one in reply.json()["data"]], model.encode(TEXTS))
        asked = {"model": "mod\u00e8le \u6a21", "input": TEXTS, "encoding_format": "bytes"}
        told = bare.call("POST", "/v1/embeddings", asked, {"api-key": "secret"}).headers["metadata"]
        assert json.loads(told)["model"] == asked["model"]
        reply = bare.call("POST", "/api/embed", {"model": "a model:latest", "input": TEXTS}, {"api-key": "secret"})
        close(reply.json()["embeddings"], ftbert.load(other).encode(TEXTS))
        for headers in ({}, {"api-key": ""}, {"api-key": "secre"}, {"authorization": "Bearer x", "api-key": "secret"}):
            assert bare.call("POST", path, {"input": "a"}, headers).status == 401
        reply = bare.call("POST", "/openai/deployments/none/embeddings", {"input": "a"}, {"api-key": "secret"})
        assert reply.status == 404 and reply.json()["error"]["code"] == "model_not_found"
        for path in ("/openai/deployments/first/embeddings/x", "/openai/deployments//embeddings", "/openai/deployments"):
            assert bare.call("POST", path, {"input": "a"}, {"api-key": "secret"}).status == 404
        assert bare.call("GET", "/openai/deployments/first/embeddings", None, {"api-key": "secret"}).status == 405


def test_bad_forms_are_refused_by_name(server: Served) -> None:
    for more, name in (
        ({"output_dtype": "int4"}, "output_dtype"), ({"embedding_type": "int8"}, "embedding_type"),
        ({"encoding_format": "hex"}, "encoding_format"), ({"output_dimension": 65}, "output_dimension"),
        ({"output_dimension": 0}, "output_dimension"), ({"dimensions": -1}, "dimensions"),
        ({"dimensions": 8, "output_dimension": 16}, "dimensions"), ({"truncation": "up"}, ""),
        ({"embed_dtype": "float8", "encoding_format": "base64"}, "embed_dtype"), ({"embed_dtype": "float16"}, "embed_dtype"),
        ({"endianness": "middle"}, "endianness"), ({"endianness": "big"}, "endianness"),
        ({"output_dtype": "int8", "embed_dtype": "float16", "encoding_format": "base64"}, "embed_dtype"),
        ({"output_dtype": "int8", "embedding_type": "binary"}, "embedding_type"),
        ({"embedding_type": "base64", "encoding_format": "float"}, "embedding_type"),
        ({"output_dtype": "int8", "normalized": False}, "normalized"),
        ({"output_dtype": "uint8", "use_activation": False}, "use_activation"),
    ):  # fmt: skip
        if name:
            refused(server, "/v1/embeddings", {"input": "a", **more}, name)
        else:
            assert server.call("POST", "/v1/embeddings", {"input": "a", **more}).status == 422
    refused(server, "/v1/embeddings", {"input": []}, "input", 400)
    refused(server, "/v1/embeddings", {"input": ["a"] * 1000, "encoding_format": "bytes"}, "encoding_format")


def test_the_page_of_routes_shows_the_bodies(server: Served) -> None:
    document = server.call("GET", "/openapi.json").json()
    for path, name in (
        ("/v2/embed", "CohereEmbed"), ("/v1/embed", "CohereEmbed"), ("/api/embed", "OllamaEmbed"),
        ("/api/embeddings", "OllamaEmbeddings"), ("/openai/deployments/{deployment}/embeddings", "OpenAIEmbed"),
    ):  # fmt: skip
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["$ref"].endswith("/" + name)
        assert document["components"]["schemas"][name]["properties"]
    assert "output_dtype" in document["components"]["schemas"]["OpenAIEmbed"]["properties"]


INSTRUCTED = {"query": "Instruct: word1 word2\nQuery: ", "other": "word3: ", "passage": ""}


def test_an_instruction_stands_in_the_prompt(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    """Of Qwen3-Embedding's and e5-instruct's kind: as encode with the whole prompt."""
    model = ftbert.load(folder := embedder(tmp_path, tiny_bert, INSTRUCTED))
    said = "word4 \\1 word5\nword6"
    want = model.encode(TEXTS, prompt=f"Instruct: {said}\nQuery: ")
    assert np.abs(want - model.encode(TEXTS, prompt_name="query")).max() > 1e-3
    with in_thread(("m", folder)) as server:
        for name in ("instruct", "instruction"):
            close(embedded(server, **{name: said}), want)
            close(embedded(server, **{name: said}, input_type="query"), want)
            close(embedded(server, **{name: said}, prompt_name="query"), want)
            close(server.post("/embed", {"inputs": TEXTS, name: said}), want)
            close(server.post("/embed", {"inputs": TEXTS, name: said, "prompt_name": "query"}), want)
        close(embedded(server, instruct=""), model.encode(TEXTS))
        for more in ({"input_type": "document"}, {"prompt_name": "other"}, {"task": "passage"}):
            refused(server, "/v1/embeddings", {"input": "a", "instruct": said, **more}, "instruct")
        refused(server, "/embed", {"inputs": "a", "instruction": said, "prompt_name": "other"}, "instruction")
        refused(server, "/embed", {"inputs": [[5, 6]], "instruct": said}, "instruct")
        refused(server, "/v1/embeddings", {"input": ["a", [5]], "instruct": said}, "instruct")
        refused(server, "/v1/embeddings", {"input": "a", "instruct": said, "instruction": "a"}, "instruction")
        refused(server, "/v1/embeddings", {"input": "a", "instruct": "a" * 8193}, "instruct")
        for path, name in (("/embed_all", "inputs"), ("/pooling", "input"), ("/similarity", "inputs")):
            sentences = {"source_sentence": "a", "sentences": ["b"]}
            body = {name: sentences if path == "/similarity" else "a", "instruct": said}
            refused(server, path, body, "instruct")
        for path, name in (("/v2/embed", "texts"), ("/v1/embed", "texts"), ("/api/embed", "input"), ("/api/embeddings", "prompt")):
            refused(server, path, {name: "a" if name == "prompt" else ["a"], "instruct": said}, "instruct")
        for i in range(300):  # more prompts than are kept
            server.post("/embed", {"inputs": "a", "instruct": f"word{i}"})
        close(server.post("/embed", {"inputs": TEXTS, "instruct": said}), want)


def test_an_instruction_without_a_place(server: Served) -> None:
    refused(server, "/v1/embeddings", {"input": "a", "instruct": "find"}, "instruct")
    refused(server, "/embed", {"inputs": "a", "instruction": "find"}, "instruction")


def test_an_instruction_in_a_reranker_s_prompt(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    folder = as_crossencoder(headed(tmp_path, tiny_bert), prompts=INSTRUCTED, default_prompt_name="query")
    want = ftbert.load(folder).predict([("a", text) for text in TEXTS], prompt="Instruct: word7\nQuery: ")
    with in_thread(("m", folder)) as server:
        got = server.post("/score", {"queries": "a", "documents": TEXTS, "instruct": "word7"})["data"]
        close(in_order(got, "score"), want)
        got = server.post("/v1/rerank", {"query": "a", "documents": TEXTS, "instruction": "word7"})["results"]
        close(in_order(got, "relevance_score"), want)
        got = server.post("/rerank", {"query": "a", "texts": TEXTS, "instruction": "word7", "raw_scores": True})
        logits = ftbert.load(folder).predict([("a", text) for text in TEXTS], prompt="Instruct: word7\nQuery: ", activation_fn=torch.nn.Identity())
        close(in_order(got, "score"), logits)


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("Instruct: Given a query, retrieve\nQuery:", "Instruct: NEW\nQuery:"),
        ("<instruct>Given a query\n<query>", "<instruct>NEW\n<query>"),
        ("<Instruct>: Given a query\n<Query>: ", "<Instruct>: NEW\n<Query>: "),
        ("task: search result | query: ", "task: NEW | query: "),
        ("Instruct: two\nlines\nQuery: ", "Instruct: NEW\nQuery: "), ("query: ", None), ("title: none | text: ", None),
    ],
)  # fmt: skip
def test_prompts_with_a_place(prompt: str, want: str | None) -> None:
    about: Any = SimpleNamespace(adapters=[], text=SimpleNamespace(default_prompt="", prompts={"q": prompt}))
    for chosen in (None, prompt):
        if want is None:
            with pytest.raises(ApiError, match="has.* place for one"):
                instructed_prompt(about, Instruction("instruct", "NEW"), chosen)
        else:
            assert instructed_prompt(about, Instruction("instruct", "NEW"), chosen) == want


def test_voyage_s_ranking(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    """top_k or truncation ask for it."""
    folder = headed(tmp_path, tiny_bert)
    want = ftbert.load(folder).rerank("a", TEXTS)
    with in_thread(("m", folder)) as server:
        body = {"query": "a", "documents": TEXTS}
        answer = server.post("/v1/rerank", {**body, "top_k": None, "truncation": True})
        assert answer["object"] == "list" and answer["usage"]["total_tokens"] > 0 and "results" not in answer
        assert [one["index"] for one in answer["data"]] == [one["corpus_id"] for one in want]
        close([one["relevance_score"] for one in answer["data"]], [one["score"] for one in want])
        assert all(set(one) == {"index", "relevance_score"} for one in answer["data"])
        few = server.post("/v1/rerank", {**body, "top_k": 2, "return_documents": True})["data"]
        assert [one["document"] for one in few] == [TEXTS[one["corpus_id"]] for one in want[:2]]
        assert "results" in server.post("/v1/rerank", {**body, "top_n": 2, "top_k": None})
        refused(server, "/v1/rerank", {**body, "top_k": 0}, "top_k")
        refused(server, "/v1/rerank", {**body, "top_k": 2, "top_n": 3}, "top_k")
        told = server.call("POST", "/v1/rerank", {"query": "a", "documents": [LONG], "truncation": False})
        assert told.status == 422 and b"less than 129 tokens" in told.body
        assert server.call("POST", "/v1/rerank", {"query": "a", "documents": [LONG], "truncation": True}).status == 200
