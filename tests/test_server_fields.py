"""Fields of requests: prompts, lengths, truncation, models by name; each counts as documented or is refused."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import VOCAB_WORDS
from served import Served, in_thread
from server_models import TEXTS, as_crossencoder, close, described, embedder, headed, in_order
from tokenizers_offline import FAMILIES, write

import ftbert
from ftbert.text import FastTokenizer, LimitedPairs


def embedded(server: Served, **more: Any) -> list[Any]:
    return [one["embedding"] for one in server.post("/v1/embeddings", {"input": TEXTS, **more})["data"]]


def refused(server: Served, path: str, body: dict[str, Any], words: str) -> None:
    reply = server.call("POST", path, body)
    told = reply.json()  # by TEI's routes, or those of OpenAI's kind
    assert reply.status == 422 and words in (told.get("message") or told["error"]), reply.body


def test_embeddings_of_queries_and_documents(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    prompts = {"query": "word1 a: ", "document": "word2: ", "clustering": "word3 word3: "}
    folder = embedder(tmp_path, tiny_bert, prompts, query_length=8, document_length=12)
    model = ftbert.load(folder)
    queries, documents = model.encode_query(TEXTS), model.encode_document(TEXTS)
    assert np.abs(queries - model.encode(TEXTS, prompt_name="query")).max() > 1e-3  # the length counts
    with in_thread(("m", folder)) as server:
        for word in ("query", "search_query", "retrieval.query", "RETRIEVAL_QUERY"):
            close(embedded(server, input_type=word), queries)
            close(embedded(server, task=word), queries)
        for word in ("document", "passage", "search_document", "retrieval.passage", "RETRIEVAL_DOCUMENT"):
            close(embedded(server, input_type=word), documents)
        close(embedded(server, prompt_name="query"), model.encode(TEXTS, prompt_name="query"))
        close(embedded(server, task="clustering"), model.encode(TEXTS, prompt_name="clustering"))
        close(embedded(server), model.encode(TEXTS))
        close(embedded(server, prompt_name=None, input_type=None, task=None, user="me"), model.encode(TEXTS))
        close(embedded(server, task="query", input_type="search_query"), queries)
        close(embedded(server, prompt_name="query", input_type="query"), queries)
        for more, words in (
            ({"input_type": "classification"}, "`input_type` must be one of 'query', 'document', 'clustering'"),
            ({"task": "text-matching"}, "`task` must be one of"), ({"prompt_name": "none"}, "must be one of"),
            ({"task": "query", "input_type": "document"}, "different prompts"),
        ):  # fmt: skip
            refused(server, "/v1/embeddings", {"input": "a", **more}, words)


def test_prompts_under_other_names_are_found(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    prompts = {"search_query": "word1 a: ", "passage": "word2: "}
    model = ftbert.load(folder := embedder(tmp_path, tiny_bert, prompts))
    with in_thread(("m", folder)) as server:
        close(embedded(server, input_type="query"), model.encode(TEXTS, prompt_name="search_query"))
        close(embedded(server, task="retrieval.passage"), model.encode(TEXTS, prompt_name="passage"))
    bare = ftbert.load(plain := tiny_bert(tmp_path))
    with in_thread(("m", plain)) as server:
        close(embedded(server, input_type="query"), bare.encode_query(TEXTS))  # no prompt, in both


def test_fields_that_would_change_the_answer_are_not_ignored(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    folder, rank = tiny_bert(tmp_path), headed(tmp_path / "r", tiny_bert)
    model = ftbert.load(folder)
    long = " ".join(f"word{i % 40}" for i in range(300))
    with in_thread(("m", folder), ("r", rank)) as server:
        plain = model.encode(TEXTS)
        for name, harmless, other in (
            ("add_special_tokens", True, False), ("encoding_type", "float", "binary"), ("normalize", True, False),
            ("return_multivector", False, True), ("instruction", None, "find"),
        ):  # fmt: skip
            close(embedded(server, **{name: harmless}), plain)
            refused(server, "/v1/embeddings", {"input": "a", name: other}, f"`{name}` is not supported")
        refused(server, "/pooling", {"input": "a", "late_chunking": True}, "`late_chunking` is not supported")
        for name, other in (("dimensions", 8), ("normalize", True)):  # of /embed
            refused(server, "/embed_all", {"inputs": "a", name: other}, f"`{name}` is not supported")
        assert server.call("POST", "/embed_all", {"inputs": "a", "dimensions": None, "normalize": False}).status == 200
        escaped = server.call("POST", "/v1/embeddings", b'{"input":"a","\\u0070rompt":"x"}')
        assert escaped.status == 422 and b"`prompt` is not supported" in escaped.body
        close(embedded(server, request_id="x", priority=0, encoding_format=None), plain)
        close(embedded(server, use_activation=False), model.encode(TEXTS, normalize=False))
        left, right = model.encode([" ".join(long.split()[-126:])]), model.encode([long])
        for how, want in (("START", left), ("END", right), (True, right)):
            got = server.post("/v1/embeddings", {"input": long, "truncate": how})["data"][0]["embedding"]
            close(got, want[0])
        for how in ("NONE", False):
            refused(server, "/v1/embeddings", {"input": long, "truncate": how}, "must have less than 129 tokens")
        refused(server, "/v1/embeddings", {"input": "a", "truncate": "up"}, "`truncate` must be")
        texts: dict[str, Any] = {"query": "a", "documents": ["b"]}
        for name, other in (("rank_fields", ["title"]), ("max_chunks_per_doc", 2), ("instruction", "x")):
            refused(server, "/v1/rerank", {**texts, name: other}, f"`{name}` is not supported")
        assert server.call("POST", "/v1/rerank", {**texts, "rank_fields": ["text"], "top_k": None}).status == 200
        refused(server, "/classify", {"input": "a", "labels": ["b"]}, "`labels` is not supported")


def test_pooling_of_tokens_is_of_length_1(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    """As vLLM's, where use_activation does not say otherwise."""
    model = ftbert.load(folder := tiny_bert(tmp_path))
    want = model.encode(TEXTS, output_value="token_embeddings")
    with in_thread(("m", folder)) as server:
        for more, kept in (({}, 64), ({"dimensions": 7}, 7)):
            for got, rows in zip(server.post("/pooling", {"input": TEXTS, "task": "token_embed", **more})["data"], want, strict=True):
                close(got["data"], torch.nn.functional.normalize(torch.from_numpy(rows[:, :kept])))
        raw = {"input": TEXTS, "task": "token_embed", "use_activation": False, "encoding_format": "base64"}
        for got, rows in zip(server.post("/pooling", raw)["data"], want, strict=True):
            close(np.frombuffer(base64.b64decode(got["data"]), "<f4").reshape(rows.shape), rows)
        pooled = server.post("/pooling", {"input": TEXTS, "use_activation": False, "dimensions": 5})["data"]
        close([one["data"] for one in pooled], model.encode(TEXTS, normalize=False)[:, :5])


@pytest.mark.parametrize("side", ["right", "left"])
def test_truncate_prompt_tokens(tmp_path: Path, tiny_bert: Callable[..., Path], side: str) -> None:
    folder, rank = tiny_bert(tmp_path), headed(tmp_path / "r", tiny_bert)
    words = [f"word{i % 37}" for i in range(300)]
    short = {n: words[: n - 2] if side == "right" else words[2 - n :] for n in (3, 9, 128)}
    model, ranker = ftbert.load(folder), ftbert.load(rank)
    with in_thread(("m", folder), ("r", rank), auto_truncate=False) as server:
        for most, kept in ((3, 3), (9, 9), (128, 128), (-1, 128)):
            body = {"input": " ".join(words), "truncate_prompt_tokens": most, "truncation_side": side}
            close(server.post("/v1/embeddings", body)["data"][0]["embedding"], model.encode(" ".join(short[kept])))
            close(server.post("/pooling", body)["data"][0]["data"], model.encode(" ".join(short[kept])))
            close(server.post("/classify", body)["data"][0]["probs"], ranker.predict([" ".join(short[kept])]))
        for most in (0, 2, 129, -2):
            refused(server, "/v1/embeddings", {"input": "a", "truncate_prompt_tokens": most}, "must be -1 or from 3 to 128")
        refused(server, "/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 3}, "must be -1 or from 4 to 128")
        refused(server, "/v1/embeddings", {"input": "a", "truncation_side": "up"}, "`truncation_side` must be")
        pairs = [(" ".join(words[:20]), " ".join(words)), ("word1", " ".join(words[:3]))]
        body = {"text_1": [a for a, _ in pairs], "text_2": [b for _, b in pairs], "truncate_prompt_tokens": 16, "truncation_side": side}
        tokenizer = transformers.AutoTokenizer.from_pretrained(rank, truncation_side=side)
        batch = tokenizer([a for a, _ in pairs], [b for _, b in pairs], padding=True, truncation=True, max_length=16, return_tensors="pt")
        with torch.no_grad():
            want = transformers.AutoModelForSequenceClassification.from_pretrained(rank)(**batch).logits[:, 0].sigmoid()
        close([one["score"] for one in server.post("/score", body)["data"]], want)
        refused(server, "/score", body | {"truncate_prompt_tokens": None}, "must have less than 129 tokens")


def test_the_tokenizers_own_side_counts_on_vllms_routes(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    """As in encode; TEI's truncation_direction is right where a request does not say."""
    folder = tiny_bert(tmp_path)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation_side": "left"}))
    long = " ".join(f"word{i % 37}" for i in range(300))
    model = ftbert.load(folder)
    with in_thread(("m", folder)) as server:
        close(server.post("/v1/embeddings", {"input": long})["data"][0]["embedding"], model.encode(long))
        close(server.post("/embed", {"inputs": long}), model.encode([" ".join(long.split()[:126])]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_limited_pairs_as_tokenizers_puts_them_together(tmp_path: Path, family: str, side: str) -> None:
    fast = transformers.AutoTokenizer.from_pretrained(str(write(tmp_path, family))).backend_tokenizer
    fast.no_truncation()
    fast.no_padding()
    cutter = FastTokenizer(fast, True).cutter
    ours, words = LimitedPairs(fast, cutter, True), ["hello", "world", "the", "end", "naive", "cafe", "query"]
    texts = ["", "hello", "two  spaces wide", " ".join(words * 3), " ".join(words * 12), "café" * 9]
    pairs = [(a, b) for a in texts[:4] for b in texts]
    truncating = type(fast).from_str(fast.to_str())
    for limits in ((None, 1000), (None, 5), (3, None), (4, 7), (1000, 1)):
        for length in (1 << 20, 12, 13):
            truncating.enable_truncation(length, direction=side)
            want_ids, want_types = [], []
            for pair in pairs:
                parts = [fast.encode(text, add_special_tokens=False) for text in pair]
                for part, limit in zip(parts, limits, strict=True):
                    if limit is not None:
                        part.truncate(limit)
                whole = truncating.post_process(*parts)
                want_ids.append(whole.ids)
                want_types += whole.type_ids
            got = ours.tokens(pairs, length, side, limits)
            assert [row.tolist() for row in got.rows()] == want_ids
            assert got.types is not None
            assert got.types.tolist() == want_types


@pytest.mark.parametrize("prompt", ["", "word5 word6: "])
def test_limits_of_queries_and_documents(tmp_path: Path, tiny_bert: Callable[..., Path], prompt: str) -> None:
    """Each text's first tokens, paired by hand."""
    folder = headed(tmp_path, tiny_bert)
    as_crossencoder(folder, prompts={"p": prompt}, default_prompt_name="p")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    documents = [*TEXTS, " ".join(f"word{i % 37}" for i in range(5000))]
    query = "word7 word8 word9 a b c"

    def by_hand(query_limit: int | None, limit: int | None) -> list[float]:
        found = []
        for document in documents:
            first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (query, document))
            before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            first, second = [*before, *first[:query_limit]], second[:limit]
            second = second[: 128 - 3 - len(first)]  # the longer one is cut
            ids = torch.tensor([[2, *first, 3, *second, 3]])
            types = torch.tensor([[0] * (len(first) + 2) + [1] * (len(second) + 1)])
            with torch.no_grad():
                found.append(float(theirs(ids, token_type_ids=types).logits.sigmoid()))
        return found

    with in_thread(("m", folder)) as server:
        for limits in ((None, 3), (2, None), (2, 3), (0, 0), (None, 4096)):
            body = {"max_tokens_per_query": limits[0], "max_tokens_per_doc": limits[1]}
            want = by_hand(limits[0] or None, limits[1] or None)
            found = server.post("/v2/rerank", {"query": query, "documents": documents, **body})["results"]
            close(in_order(found, "relevance_score"), want)
            found = server.post("/score", {"queries": query, "documents": documents, **body})["data"]
            close([one["score"] for one in found], want)
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            refused(server, "/v1/rerank", {"query": "a", "documents": ["b"], name: -1}, f"`{name}` must not be negative")


def test_whole_floats_and_nulls_are_taken(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    folder, rank = tiny_bert(tmp_path), headed(tmp_path / "r", tiny_bert)
    with in_thread(("m", folder), ("r", rank)) as server:
        body = {"query": "a", "documents": TEXTS, "max_tokens_per_doc": 2, "return_documents": None}
        got = server.post("/v1/rerank", body | {"top_n": 2.0, "max_tokens_per_doc": 2.0})["results"]
        assert got == server.post("/v1/rerank", body | {"top_n": 2})["results"] and len(got) == 2
        ids = server.post("/embed", {"inputs": [[2.0, 40.0, 3.0]], "dimensions": 7.0, "normalize": None})
        assert ids == server.post("/embed", {"inputs": [[2, 40, 3]], "dimensions": 7})
        assert server.post("/v1/embeddings", {"input": "a", "encoding_format": None, "dimensions": 8.0, "user": None})
        assert server.post("/pooling", {"input": "a", "encoding_format": None})
        assert server.post("/predict", {"inputs": "a", "raw_scores": None, "truncation_direction": None})
        pair = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
        nulls = {"parameters": {"truncation_direction": None, "prompt_name": None}}
        assert server.post("/similarity", pair | nulls) == server.post("/similarity", pair)
        for bad in (b'{"query":"a","documents":["b"],"top_n":1.5}', b'{"query":"a","documents":["b"],"top_n":1e999}',
                    b'{"query":"a","documents":["b"],"top_n":"1"}', b'{"query":null,"documents":["b"]}',
                    b'{"query":"a","documents":["\\ud800"],"top_n":1.0}', b'{"query":"a","top_n":1.0,"documents":["b"],"top_n":2}'):  # fmt: skip
            assert server.call("POST", "/v1/rerank", bad).status in (400, 422), bad


def test_detokenize(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    folder = tiny_bert(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with in_thread(("m", folder)) as server:
        for text in ("word1 a, the cat!", "word3", ""):
            ids = server.post("/tokenize", {"prompt": text})["tokens"]
            assert server.post("/detokenize", {"tokens": ids, "model": "m"}) == {"prompt": tokenizer.decode(ids)}
        refused(server, "/detokenize", {"tokens": [len(VOCAB_WORDS)]}, "outside the model's vocabulary")


def test_one_of_the_models(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    folder = tiny_bert(tmp_path)
    with in_thread(("org/m 1", folder)) as server:
        (listed,) = server.call("GET", "/v1/models").json()["data"]
        for path in ("/v1/models/org/m%201", "/v1/models/org%2Fm%201"):
            assert server.call("GET", path).json() == listed
        reply = server.call("GET", "/v1/models/gpt-4")
        assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")
        assert server.call("POST", "/v1/models/gpt-4", {}).status == 405


def test_a_single_model_answers_to_any_name(
    tmp_path: Path, tiny_bert: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """With a line for each new name, but no more than for a number of them; of several models only theirs."""
    folder = tiny_bert(tmp_path)
    caplog.set_level(logging.INFO, "ftbert.serve")
    with in_thread(("m", folder)) as server:
        want = server.post("/embed", {"inputs": "word1"})
        for name in ("text-embeddings-inference", "gpt-4", "gpt-4", "m", str(folder), "\nfake: line\x1b[2J" + "x" * 500, ""):
            assert server.post("/embed", {"inputs": "word1", "model": name}) == want
            assert server.post("/v1/embeddings", {"input": "word1", "model": name})["model"] == "m"
        lines = [record.getMessage() for record in caplog.records if "names the model" in record.getMessage()]
        assert len(lines) == 4 and sum("gpt-4" in line for line in lines) == 1
        assert all(line.isprintable() and len(line) < 250 for line in lines)
        for i in range(100):
            server.post("/tokenize", {"inputs": "a", "model": f"model {i}"})
        assert sum("names the model" in record.getMessage() for record in caplog.records) == 64
    with in_thread(("m", folder), ("n", folder)) as server:
        for path, key in (("/embed", "inputs"), ("/v1/embeddings", "input")):
            reply = server.call("POST", path, {key: "a", "model": "gpt-4"})
            assert reply.status == 404 and "this server has: m, n" in str(reply.json()["error"])


@pytest.mark.parametrize("origins", ["*", "https://a.example"])
def test_a_browser_may_send_the_headers_it_asks_for(tmp_path: Path, tiny_bert: Callable[..., Path], origins: str) -> None:
    usual = "authorization, content-type, x-request-timeout"
    asked = "authorization,content-type,x-stainless-arch,x-stainless-os, x-stainless-runtime-version"
    with in_thread(("m", tiny_bert(tmp_path)), cors_allow_origin=origins) as server:
        for given, want in ((asked, asked), (None, usual), ("x" * 1025, usual), ("a b", usual), ("a,,b", usual), ("a:b", usual),
                            (",".join("abcdefgh" * 9), usual)):  # fmt: skip
            headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
            headers |= {} if given is None else {"access-control-request-headers": given}
            reply = server.call("OPTIONS", "/v1/embeddings", headers=headers)
            assert (reply.status, reply.headers["access-control-allow-headers"]) == (204, want)
            assert "access-control-request-headers" in reply.headers["vary"]
        reply = server.call("OPTIONS", "/embed", headers={"origin": "https://b.example", "access-control-request-headers": "x"})
        assert ("access-control-allow-headers" in reply.headers) == (origins == "*")


def test_folders_that_make_no_single_vector(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    from sentence_transformers.sparse_encoder import SparseEncoder
    from transformers import BertConfig, BertForMaskedLM

    masked = tiny_bert(tmp_path)
    BertForMaskedLM(BertConfig.from_pretrained(masked)).save_pretrained(masked)
    assert described(masked).task == "embedding"  # by itself it is an encoder like others
    SparseEncoder(str(masked), device="cpu").save(str(tmp_path / "splade"))
    about = described(tmp_path / "splade")
    assert (about.task, about.vectors.sparse, about.vectors.pooling) == ("sparse", "splade", "splade")
    from sentence_transformers.multi_vector_encoder import MultiVectorEncoder

    MultiVectorEncoder(str(tiny_bert(tmp_path / "b")), device="cpu").save(str(tmp_path / "colbert"))
    about = described(tmp_path / "colbert")
    assert (about.task, about.model.token_width) == ("multi_vector", 128)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_long_text_of_a_limited_pair_is_not_tokenised_whole(tmp_path: Path, side: str) -> None:
    fast = transformers.AutoTokenizer.from_pretrained(str(write(tmp_path, "bert"))).backend_tokenizer
    fast.no_truncation()
    ours, read = LimitedPairs(fast, FastTokenizer(fast, True).cutter, True), list[int]()

    class Counting:
        def encode_batch_fast(self, texts: list[str], **given: Any) -> Any:
            read.extend(map(len, texts))
            return fast.encode_batch_fast(texts, **given)

    ours._fast = Counting()
    long, other = "hello world the end " * 20_000, "query document " * 20_000
    got = ours.tokens([(long, other)], 31, side, (None, 9))
    first, second = (fast.encode(text, add_special_tokens=False).ids for text in (long, other))
    kept = 31 - 3 - 9
    first = first[-kept:] if side == "left" else first[:kept]
    assert got.ids.tolist() == [2, *first, 3, *second[:9], 3]
    assert sum(read) < 2000
