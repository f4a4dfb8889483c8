"""Every route against encode's and transformers' numbers, in a server that runs in a thread of this process."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB_WORDS
from served import Served, in_thread, with_head

import ftbert
from ftbert.server import Settings
from ftbert.server.metrics import Metrics
from ftbert.server.routes import all_routes

msgspec = pytest.importorskip("msgspec")

TEXTS = ["word1 word2 a b", "word3", "", "the cat word9 word8 word7 " * 3, "word4 word5!", "word1 word2 a b"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "classify": with_head(root, 3, tiny_bert),
        "rank": with_head(root, 1, tiny_bert),
        "embed": tiny_bert(root),
    }


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Served]:
    with in_thread(*[(name, folders[name]) for name in ("embed", "classify", "rank")], payload_limit=200_000) as one:
        yield one


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> ftbert.Model:
    return ftbert.load(folders["embed"])


def logits(folder: Path, *texts: Any) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    batch = AutoTokenizer.from_pretrained(folder)(*texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
    with torch.no_grad():
        return AutoModelForSequenceClassification.from_pretrained(folder)(**batch).logits  # type: ignore[no-any-return]


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=3e-5)


def test_embed(server: Served, model: ftbert.Model) -> None:
    close(server.post("/embed", {"inputs": TEXTS}), model.encode(TEXTS))
    close(server.post("/embed", {"inputs": TEXTS[0]}), model.encode(TEXTS[:1]))
    close(server.post("/embed", {"inputs": TEXTS, "normalize": False}), model.encode(TEXTS, normalize=False))
    close(server.post("/embed", {"inputs": TEXTS, "dimensions": 5}), model.encode(TEXTS, truncate_dim=5))
    close(server.post("/", {"inputs": TEXTS}), model.encode(TEXTS))
    close(server.post("/invocations", {"inputs": TEXTS}), model.encode(TEXTS))


def test_embed_takes_ids_as_they_are(server: Served, model: ftbert.Model) -> None:
    ids = [2, 40, 41, 3]
    packed = torch.tensor(ids), torch.tensor([0, 4], dtype=torch.int32), 4
    want = torch.nn.functional.normalize(model.forward_packed(*packed).mean(0, keepdim=True))
    close(server.post("/embed", {"inputs": ids}), want)
    close(server.post("/embed", {"inputs": [ids, "word3"]})[1:], model.encode(["word3"]))
    close(server.post("/v1/embeddings", {"input": [ids]})["data"][0]["embedding"], want[0])


def test_embed_all(server: Served, model: ftbert.Model) -> None:
    got = server.post("/embed_all", {"inputs": ["word1 word2", "word3"]})
    assert [len(one) for one in got] == [4, 3]
    ids = torch.tensor([2, VOCAB_WORDS.index("word3"), 3])
    close(got[1], model.forward_packed(ids, torch.tensor([0, 3], dtype=torch.int32), 3))


def test_a_long_answer_arrives_whole_and_the_next_behind_it(server: Served) -> None:
    """A client that reads slowly gets it in pieces, each when it has read the one before."""
    bodies = [json.dumps({"inputs": ["the cat word9 word8 word7 " * 12] * 300}).encode(), b'{"inputs":"word3"}']
    sent = [b"POST /embed_all HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(b), b) for b in bodies]
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        client.settimeout(30)
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"".join(sent))
        file, answers = client.makefile("rb"), []
        for _ in sent:
            head = b"".join(iter(file.readline, b"\r\n"))
            answers.append(json.loads(file.read(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))))
    rows = np.array(answers[0])
    assert rows.nbytes > 1 << 22 and rows.shape[0] == 300
    close(rows, np.array(server.post("/embed_all", {"inputs": ["the cat word9 word8 word7 " * 12]})).repeat(300, 0))
    close(answers[1], server.post("/embed_all", {"inputs": "word3"}))


@pytest.mark.parametrize("side", ["right", "left", "Left"])
def test_truncation(server: Served, model: ftbert.Model, side: str) -> None:
    words = [f"word{i % 40}" for i in range(3000)]
    kept = words[-126:] if side.lower() == "left" else words[:126]
    got = server.post("/embed", {"inputs": " ".join(words), "truncation_direction": side})
    close(got, model.encode([" ".join(kept)]))
    reply = server.call("POST", "/embed", {"inputs": " ".join(words), "truncate": False})
    assert reply.status == 422 and "must have less than 129 tokens" in reply.json()["error"]


def test_similarity(server: Served, model: ftbert.Model) -> None:
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}}
    vectors = model.encode(TEXTS)
    for path in ("/similarity", "/"):
        close(server.post(path, body), vectors[1:] @ vectors[0])


def test_openai_embeddings(server: Served, model: ftbert.Model) -> None:
    got = server.post("/v1/embeddings", {"input": TEXTS, "model": "embed"})
    assert (got["object"], got["model"], [one["index"] for one in got["data"]]) == ("list", "embed", list(range(6)))
    close([one["embedding"] for one in got["data"]], model.encode(TEXTS))
    assert got["usage"]["prompt_tokens"] == got["usage"]["total_tokens"] > 20
    coded = server.post("/embeddings", {"input": TEXTS, "encoding_format": "base64", "dimensions": 7})
    rows = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in coded["data"]]
    close(rows, model.encode(TEXTS, truncate_dim=7))
    pooled = server.post("/pooling", {"input": TEXTS})
    close([one["data"] for one in pooled["data"]], model.encode(TEXTS))
    assert [one["id"] for one in server.call("GET", "/v1/models").json()["data"]] == ["embed", "classify", "rank"]


def test_predict(server: Served, folders: dict[str, Path]) -> None:
    want = logits(folders["classify"], TEXTS).softmax(-1)
    got = server.post("/predict", {"inputs": [[text] for text in TEXTS], "model": "classify"})
    for scores, row in zip(got, want, strict=True):
        assert [one["score"] for one in scores] == sorted([one["score"] for one in scores], reverse=True)
        close([one["score"] for one in sorted(scores, key=lambda x: x["label"])], row)
        assert sorted(one["label"] for one in scores) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    single = server.post("/predict", {"inputs": TEXTS[0], "model": "classify"})
    assert single == server.post("/predict", {"inputs": [TEXTS[0]], "model": "classify"}) and len(single) == 3
    pair = server.post("/predict", {"inputs": TEXTS[:2], "raw_scores": True, "model": "classify"})
    want = logits(folders["classify"], [TEXTS[0]], [TEXTS[1]])[0]
    close([one["score"] for one in sorted(pair, key=lambda x: x["label"])], want)
    data = server.post("/classify", {"input": TEXTS, "model": "classify"})["data"]
    close([one["probs"] for one in data], logits(folders["classify"], TEXTS).softmax(-1))
    assert all(one["num_classes"] == 3 for one in data)


def test_rerank(server: Served, folders: dict[str, Path]) -> None:
    query, long = TEXTS[0], "word5 " * 400
    texts = [*TEXTS[1:], long]
    raw = logits(folders["rank"], [query] * len(texts), texts)[:, 0]
    got = server.post("/rerank", {"query": query, "texts": texts, "return_text": True, "model": "rank"})
    assert sorted(one["index"] for one in got) == list(range(len(texts)))
    assert [one["score"] for one in got] == sorted((one["score"] for one in got), reverse=True)
    close([one["score"] for one in sorted(got, key=lambda x: x["index"])], raw.sigmoid())
    assert all(one["text"] == texts[one["index"]] for one in got)
    got = server.post("/rerank", {"query": query, "texts": texts, "raw_scores": True, "model": "rank"})
    close([one["score"] for one in sorted(got, key=lambda x: x["index"])], raw)
    documents = [texts[0], {"text": texts[1]}, *texts[2:]]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        got = server.post(path, {"query": query, "documents": documents, "top_n": 3, "model": "rank"})
        assert len(got["results"]) == 3 and got["usage"]["total_tokens"] > 0
        best = raw.sigmoid().sort(descending=True)
        close([one["relevance_score"] for one in got["results"]], best.values[:3])
        assert all(one["document"]["text"] == texts[one["index"]] for one in got["results"])
    scores = server.post("/score", {"text_1": query, "text_2": texts, "model": "rank"})["data"]
    close([one["score"] for one in scores], raw.sigmoid())


def test_tokenize_and_decode(server: Served) -> None:
    text = "word1 a"
    (tokens,) = server.post("/tokenize", {"inputs": text})
    assert [one["special"] for one in tokens] == [True, False, False, True]
    assert tokens[0] == {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert [text[one["start"] : one["stop"]] for one in tokens[1:-1]] == ["word1", "a"]
    assert [one["text"] for one in server.post("/tokenize", {"inputs": [text], "add_special_tokens": False})[0]] == ["word1", "a"]
    ids = [one["id"] for one in tokens]
    assert server.post("/decode", {"ids": ids}) == ["word1 a"]
    assert server.post("/decode", {"ids": [ids, ids], "skip_special_tokens": False}) == ["[CLS] word1 a [SEP]"] * 2
    assert server.post("/tokenize", {"prompt": text})["tokens"] == ids


def test_info_and_headers(server: Served) -> None:
    info = server.call("GET", "/info").json()
    assert (info["served_model_name"], info["max_input_length"], info["max_client_batch_size"]) == ("embed", 128, 2048)
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    headers = server.call("POST", "/embed", {"inputs": "word1 word2"}).headers
    assert (headers["x-compute-type"], headers["x-compute-tokens"], headers["x-compute-characters"]) == ("cpu", "4", "11")
    for name in ("x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"):
        assert headers[name].isdigit()
    for path in ("/health", "/ping", "/live"):
        reply = server.call("GET", path)
        assert (reply.status, reply.body) == (200, b"")
    assert server.call("HEAD", "/health").status == 200
    assert server.call("GET", "/").status == 200
    assert server.call("GET", "/version").json() == {"version": ftbert.__version__}


def test_metrics_are_what_prometheus_reads(server: Served) -> None:
    parser = pytest.importorskip("prometheus_client.parser")

    def values() -> dict[tuple[str, str], float]:
        text = server.call("GET", "/metrics").body.decode()
        return {(sample.name, str(sorted(sample.labels.items()))): sample.value
                for family in parser.text_string_to_metric_families(text) for sample in family.samples}  # fmt: skip

    def total(found: dict[tuple[str, str], float], name: str, label: str = "") -> float:
        return sum(value for (of, labels), value in found.items() if of in (name, f"{name}_total") and label in labels)

    before = values()
    assert not [name for name, labels in before if "'model'" not in labels or "'device'" not in labels]
    server.post("/embed", {"inputs": TEXTS})
    server.call("POST", "/embed", {"inputs": 3})
    after = values()
    grown = {name: total(after, *name) - total(before, *name) for name in (
        ("te_request_count", "batch"), ("te_request_success", "batch"), ("te_embed_count",), ("te_embed_success",),
        ("te_request_failure", "'validation'"), ("te_embed_duration_count",), ("te_request_input_length_count",),
    )}  # fmt: skip
    assert list(grown.values()) == [1, 1, 6, 6, 1, 1, 6]
    assert total(after, "te_batch_next_size_count") > 0 and total(after, "ft_tokens_total") > 0
    assert not any(name.endswith("_created") for name, _ in after)


def test_metrics_name_model_and_device() -> None:
    """Of several models each by itself, of several workers their sum; what fails before its model is known has none."""
    settings = Settings((("a", "x"), ('b "c"', "y")), devices=("cuda:0", "cuda:1"), workers=2)
    metrics = [Metrics(settings, worker=worker) for worker in range(2)]
    metrics[1].rows = metrics[0].rows
    metrics[0].requests("a").count("te_embed_count")
    metrics[1].requests("a").count("te_embed_count", 2)
    metrics[1].requests('b "c"').observe("te_request_duration", 0.5)
    metrics[0].requests().failed("overloaded")
    metrics[0].engine(1, 0).queue(3, 40, 512)
    lines = metrics[1].exposition().decode().splitlines()
    both = 'device="cuda:0,cuda:1"'
    for line in (
        f'te_embed_count{{model="a",{both}}} 3', f'te_embed_count{{model="b \\"c\\"",{both}}} 0',
        f'te_request_duration_count{{model="b \\"c\\"",{both}}} 1', f'te_request_duration_count{{model="a",{both}}} 0',
        'te_request_failure{err="overloaded",model="",device=""} 1', f'te_request_failure{{err="overloaded",model="a",{both}}} 0',
        'ft_queue_tokens{model="b \\"c\\"",device="cuda:0"} 40', 'ft_queue_tokens{model="b \\"c\\"",device="cuda:1"} 0',
        'ft_queue_tokens{model="a",device="cuda:0"} 0',
    ):  # fmt: skip
        assert line in lines
    assert sum(line.startswith("# TYPE te_embed_count") for line in lines) == 1


def test_prompts(tmp_path: Path, tiny_bert: Callable[..., Path], ) -> None:
    folder = tiny_bert(tmp_path)
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    parts = Transformer(str(folder)), Pooling(64, "mean", include_prompt=False)
    target = tmp_path / "st"
    SentenceTransformer(modules=list(parts), prompts={"query": "word1 a: "}, device="cpu").save(str(target))
    model = ftbert.load(target)
    with in_thread(("m", target)) as server:
        close(server.post("/embed", {"inputs": TEXTS, "prompt_name": "query"}), model.encode(TEXTS, prompt_name="query"))
        close(server.post("/embed", {"inputs": TEXTS}), model.encode(TEXTS))
        assert server.call("POST", "/embed", {"inputs": "a", "prompt_name": "none"}).status == 422
        with_prompt = server.post("/tokenize", {"inputs": "b", "prompt_name": "query"})[0]
        assert [one["text"] for one in with_prompt[1:-1]] == ["word1", "a", ":", "b"] or len(with_prompt) == 6


def test_another_model_is_asked_by_name(server: Served) -> None:
    info = server.call("GET", "/info?model=rank").json()
    assert (info["served_model_name"], list(info["model_type"])) == ("rank", ["reranker"])
    assert server.call("GET", "/info?model=none").status == 404
    got = server.post("/", {"query": "a", "texts": ["b", "c"], "model": "rank"})  # the first model embeds
    assert sorted(one["index"] for one in got) == [0, 1]


def test_without_a_name_a_model_that_can_answers(server: Served) -> None:
    assert len(server.post("/rerank", {"query": "a", "texts": ["b", "c"]})) == 2
    assert len(server.post("/predict", {"inputs": "a"})) == 3
    assert len(server.post("/v1/rerank", {"query": "a", "documents": ["b"]})["results"]) == 1
    assert server.call("POST", "/rerank", {"query": "a", "texts": ["b"], "model": "embed"}).status == 424


def test_openapi_describes_what_is_answered(server: Served) -> None:
    """Every route that is described answers in its shape, and every field of a body is one that the route reads."""
    found = server.call("GET", "/openapi.json").json()
    assert found == server.call("GET", "/api-doc/openapi.json").json()
    bodies: dict[str, Any] = {
        "/embed": {"inputs": TEXTS}, "/embed_all": {"inputs": TEXTS}, "/decode": {"ids": [5, 6]}, "/tokenize": {"inputs": TEXTS},
        "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "/v1/embeddings": {"input": TEXTS},
        "/pooling": {"input": TEXTS}, "/predict": {"inputs": "a", "model": "classify"}, "/classify": {"input": "a", "model": "classify"},
        "/rerank": {"query": "a", "texts": ["b"], "model": "rank"}, "/v1/rerank": {"query": "a", "documents": ["b"], "model": "rank"},
        "/v2/embed": {"texts": TEXTS}, "/v1/embed": {"texts": TEXTS}, "/api/embed": {"input": TEXTS}, "/api/embeddings": {"prompt": "a"},
        "/openai/deployments/{deployment}/embeddings": {"input": TEXTS}, "/score": {"text_1": "a", "text_2": "b", "model": "rank"}, "/detokenize": {"tokens": [5, 6]},
    }  # fmt: skip
    routes = all_routes()
    for path, methods in found["paths"].items():
        if path in ("/token_classify", "/fill_mask", "/embed_sparse"):
            continue  # for other models: test_server_tokens.py, test_other_vectors.py
        if path in ("/v1/completions", "/v1/chat/completions", "/completion", "/props", "/api/generate", "/api/chat"):
            continue  # of models that generate: test_server_generation.py
        if path.startswith("/models/"):
            continue  # of --models-dir: test_server_models_dir.py
        for method, operation in methods.items():
            named = path.replace("{id}", "rank").replace("{deployment}", "embed")
            reply = server.call(method.upper(), named, bodies[path] if method == "post" else None)
            assert reply.status == 200, (path, reply.body)
            if (shape := routes[method.upper(), path].gives) is not None:
                msgspec.json.decode(reply.body, type=shape)
                assert "schema" in operation["responses"]["200"]["content"]["application/json"]
    assert set(found["components"]["schemas"]["Embed"]["properties"]) >= {"inputs", "truncate", "normalize", "dimensions"}
    page = server.call("GET", "/docs")
    assert page.status == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    assert server.call("GET", "/favicon.ico").status == 204
