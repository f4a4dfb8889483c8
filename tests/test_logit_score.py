"""Scores of pairs by what a language model would say next, against sentence-transformers' CrossEncoder with LogitScore,
and against the published recipe of Qwen3-Reranker."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close as close
from conftest import Place
from other_folders import PAIR_TEMPLATE, scored
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from tokenizers import ByteLevelBPETokenizer
from tokenizers_offline import TEXTS
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import ftbert
from ftbert.checkpoint import Checkpoint
from ftbert.converters import convert
from ftbert.text import next_logits, shared_prefix

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PAIRS = [*zip(TEXTS, reversed(TEXTS), strict=True), ("hello " * 30, "world " * 90), ("a", "b " * 200), ("naïve " * 200, "the end")]


def assert_close(ours: Any, theirs: Any) -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, np.float32)
    assert np.abs(ours - theirs).max(initial=0) < 2e-6


def both(folder: Path) -> tuple[Any, CrossEncoder]:
    return ftbert.load(folder), CrossEncoder(str(folder), device="cpu", local_files_only=True)


@pytest.mark.parametrize(
    ("template", "false", "settings"),
    [
        (PAIR_TEMPLATE, 9, {"prompts": {"judge": "Judge this", "strict": "Be strict"}, "default_prompt_name": "judge"}),
        (PAIR_TEMPLATE.replace("\n</s>end it", ""), None, {"activation_fn": torch.nn.Identity()}),
        (None, 9, {}),
    ],
)  # fmt: skip
def test_as_crossencoder(tmp_path: Path, template: str | None, false: int | None, settings: dict[str, Any]) -> None:
    """Long pairs are truncated, and what the template ends in stays."""
    folder = scored(tmp_path, template, false, **settings)
    ours, theirs = both(folder)
    for options in ({}, *({"prompt_name": name} for name in settings.get("prompts", {})), {"prompt": "another one"}):
        assert_close(ours.predict(PAIRS, max_tokens=150, **options), theirs.predict(PAIRS, **options))
    assert_close(ftbert.load(convert(folder, tmp_path / "copy")).predict(PAIRS), theirs.predict(PAIRS))
    got, want = ours.rerank("hello", TEXTS[:7]), theirs.rank("hello", TEXTS[:7])
    assert [one["corpus_id"] for one in got] == [one["corpus_id"] for one in want]
    assert ours.id2label == {0: "LABEL_0"}
    if template is not None:
        with pytest.raises(ValueError, match="scores pairs of texts, a query and a document; got a single text"):
            ours.predict(["hello"])


def test_left_truncation(tmp_path: Path) -> None:
    folder = scored(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"truncation_side": "left"}))
    ours, theirs = both(folder)
    assert_close(ours.predict(PAIRS), theirs.predict(PAIRS))


def test_templates_that_cannot_be_done(tmp_path: Path) -> None:
    model = ftbert.load(scored(tmp_path))
    for template, words in (
        ("{{ messages[0].content }}", "cannot carry a pair"),
        (PAIR_TEMPLATE.replace("| first }}\n</s>", "| first | trim }}\n</s>"), "changes the texts that it places"),
        ("{{ nothing.of.this }}", "cannot be used"),
        ("{% endif %}", "cannot be used"),
    ):
        with pytest.raises(ValueError, match=words):
            model.predict(PAIRS, chat_template=template)
    swapped = "{{ messages[-1].content }} is of {{ messages[-2].content }}"
    assert model.predict([("a", "b")], chat_template=swapped) == model.predict([("b", "a")], chat_template="{{ messages[-2].content }} is of {{ messages[-1].content }}")
    from tokenizers_offline import folder_of

    with pytest.raises(ValueError, match="chat_template is for models that score by what they would say next"):
        ftbert.load(folder_of(tmp_path / "other")).predict(PAIRS, chat_template=PAIR_TEMPLATE)


def test_a_tokenizer_without_yes_and_no(tmp_path: Path) -> None:
    """A language model alone is asked for them, with a template for pairs."""
    scored(tmp_path)
    with pytest.raises(ValueError, match=r"its tokenizer has no token 'yes'; name the ids in a LogitScore"):
        ftbert.load(tmp_path / "source").predict([("a", "b")], chat_template=PAIR_TEMPLATE)


@pytest.mark.parametrize("kind", ["LogitScore", "LogitScore, no template", "decoder alone"])
def test_the_server_ranks(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What texts begin with is computed once where the model is causal and it is said to be faster."""
    served = pytest.importorskip("served")
    sharing, shared = [], shared_prefix.apart
    monkeypatch.setattr(shared_prefix, "apart", lambda batch, tokens: sharing.append(tokens) or shared(batch, tokens))
    template = None if "no template" in kind else PAIR_TEMPLATE
    if kind == "decoder alone":
        qwen(folder := tmp_path / "decoder", False)
        (folder / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    else:
        folder = scored(tmp_path, template, prompts={"judge": "Judge this"}, default_prompt_name="judge")
    model, texts = ftbert.load(folder), [text for text in TEXTS if text.strip()]
    monkeypatch.setitem(shared_prefix.LEAST, "cpu", shared_prefix.Least(1000, 0))
    want = model.predict([("hello", text) for text in texts])
    assert not sharing
    monkeypatch.setitem(shared_prefix.LEAST, "cpu", shared_prefix.Least(1, 0))
    with served.in_thread(("m", folder)) as server:
        got = server.post("/rerank", {"query": "hello", "texts": texts})
        assert_close(np.array([one["score"] for one in sorted(got, key=lambda one: one["index"])], np.float32), want)
        got = server.post("/v1/rerank", {"query": "hello", "documents": texts})["results"]
        assert_close(np.array([one["relevance_score"] for one in sorted(got, key=lambda one: one["index"])], np.float32), want)
        got = server.post("/score", {"queries": "hello", "documents": texts})["data"]
        assert_close(np.array([one["score"] for one in got], np.float32), want)
        long = {"query": "hello", "texts": ["the end " * 300], "truncate": False}
        assert server.call("POST", "/rerank", long).status == 422
        if template is not None:
            refused = server.call("POST", "/predict", {"inputs": "hello"})
            assert refused.status == 422 and b"must be pairs" in refused.body
            refused = server.call("POST", "/v1/rerank", {"query": "hello", "documents": texts, "max_tokens_per_doc": 3})
            assert refused.status == 422 and b"go through a template" in refused.body
    assert bool(sharing) == (kind == "decoder alone")


# The published recipe: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["yes no hello world the end"] * 9, vocab_size=300, min_frequency=1, show_progress=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, pad_token=special[0], eos_token=special[2], additional_special_tokens=special, padding_side="left", model_max_length=256)


def qwen(folder: Path, tied: bool) -> Any:
    """A random Qwen3 as it is published: a language model and its tokenizer."""
    fast = byte_tokenizer()
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(fast), **sizes, max_position_embeddings=512, tie_word_embeddings=tied)
    reference = Qwen3ForCausalLM(config).eval()
    torch.nn.init.normal_(reference.lm_head.weight, std=0.2)
    reference.save_pretrained(folder)
    return reference


TASK = "Given a web search query, retrieve relevant passages"
QWEN_PAIRS = [("hello world", "the world"), ("the end?", "hello " * 300), ("yes\n no ", "\tno end ")]


def published(reference: Any, length: int) -> np.ndarray:
    """Prefix and suffix ids around the truncated pair, left padding, softmax over "no" and "yes"."""
    tokenizer = byte_tokenizer()
    prefix, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
    texts = [f"<Instruct>: {TASK}\n<Query>: {query}\n<Document>: {document}" for query, document in QWEN_PAIRS]
    inside = tokenizer(texts, padding=False, truncation="longest_first", return_attention_mask=False, max_length=length - len(prefix) - len(suffix))["input_ids"]
    batch = tokenizer.pad({"input_ids": [prefix + ids + suffix for ids in inside]}, padding=True, return_tensors="pt")
    assert not batch["attention_mask"][0, 0] and batch["attention_mask"][:, -1].all()
    with torch.no_grad():
        logits = reference(**batch).logits[:, -1]
    answers = logits[:, [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]]
    scores: np.ndarray = torch.nn.functional.log_softmax(answers, dim=1)[:, 1].exp().numpy()
    return scores


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from reranking import QWEN3_RERANKER

    return QWEN3_RERANKER


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3_reranker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, tied: bool) -> None:
    """From its own folder, converted or not. The head is read where a score asks for it, once."""
    reference, length = qwen(tmp_path / "theirs", tied), 250
    want, read, real = published(reference, length), [], Checkpoint.read

    def counted(self: Checkpoint, ours: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        read.append(ours)
        return real(self, ours, dtype)

    monkeypatch.setattr(Checkpoint, "read", counted)
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert ("heads.causal_lm.out.weight" in load_file(tmp_path / "ours" / "model.safetensors")) != tied
    for folder, heads in (("theirs", True), ("theirs", False), ("ours", True)):
        read.clear()
        model = ftbert.load(tmp_path / folder, heads=heads)
        assert model.tasks == [] and model.info()["heads"] == "causal_lm (on demand)"
        assert model(torch.tensor([[3, 4, 5]])).last_hidden_state.shape == (1, 3, 32)
        model.encode("hello world")
        assert not [name for name in read if name.startswith("heads.")]
        options = {"chat_template": template, "prompt": TASK, "max_length": length}
        got = model.predict(QWEN_PAIRS, **options)
        assert_close(got, want)
        assert_close(model.predict(QWEN_PAIRS[::-1], batch_size=1, **options)[::-1], want)
        assert [name for name in read if name.startswith("heads.")] == ([] if tied else ["heads.causal_lm.out.weight"])
    assert len(set(np.round(got, 6))) == 3
    ranked = model.rerank(QWEN_PAIRS[0][0], [document for _, document in QWEN_PAIRS], **options)
    assert ranked[0]["score"] > ranked[-1]["score"] and {one["corpus_id"] for one in ranked} == {0, 1, 2}


# As chat models have it: any role is taken. And one that looks at them, without a word on pairs.
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
STRICT = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("chat", [CHAT, STRICT, None])
def test_a_chats_model_is_no_reranker(tmp_path: Path, template: str, chat: str | None) -> None:
    """It embeds, here and served, unless the caller has a template for pairs."""
    qwen(folder := tmp_path / "m", True)
    if chat is not None:
        (folder / "chat_template.jinja").write_text(chat)
    model = ftbert.load(folder)
    for call in (lambda: model.predict(QWEN_PAIRS), lambda: model.rerank("a", ["b"]), lambda: model.id2label):
        with pytest.raises(ValueError, match="this model's heads: none. A language model scores pairs where .* or pass chat_template"):
            call()
    assert len(model.rerank("a", ["b", "c"], chat_template=template)) == 2
    served = pytest.importorskip("served")
    with served.in_thread(("m", folder)) as server:
        assert server.call("GET", "/info").json()["model_type"].keys() == {"embedding"}
        for path, texts in (("/rerank", "texts"), ("/v1/rerank", "documents")):
            refused = server.call("POST", path, {"query": "a", texts: ["b"]})
            assert refused.status == 424 and b"model is not a re-ranker model (it is: embedding)" in refused.body
        close(torch.tensor(server.post("/embed", {"inputs": ["hello"]})), torch.from_numpy(model.encode(["hello"])), atol=1e-6)
        answered = server.call("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3})
        assert (answered.status, b"has no chat template" in answered.body) == ((422, True) if chat is None else (200, False))


def test_an_instruction_of_a_request(tmp_path: Path, template: str) -> None:
    """Is the system's message of the template, where the model has one."""
    served = pytest.importorskip("served")
    qwen(folder := tmp_path / "m", True)
    (folder / "chat_template.jinja").write_text(template)
    model, texts, said = ftbert.load(folder), ["the end", "hello"], "Find {{ what }} is\nright"
    want = model.predict([("hello", text) for text in texts], prompt=said)
    assert np.abs(want - model.predict([("hello", text) for text in texts])).max() > 1e-6
    with served.in_thread(("m", folder)) as server:
        for path, named, score in (("/rerank", "texts", "score"), ("/v1/rerank", "documents", "relevance_score"), ("/v2/rerank", "documents", "relevance_score")):
            for key in ("instruct", "instruction"):
                got = server.post(path, {"query": "hello", named: texts, key: said})
                got = sorted(got if path == "/rerank" else got["results"], key=lambda one: one["index"])
                assert_close(np.array([one[score] for one in got], np.float32), want)
        for more in ({"instruct": said}, {"chat_template_kwargs": {"instruction": said}}, {"instruct": said, "instruction": said}):
            got = server.post("/score", {"queries": "hello", "documents": texts, **more})["data"]
            assert_close(np.array([one["score"] for one in got], np.float32), want)
        for more, name in (
            ({"instruct": said, "instruction": "x"}, "instruction"), ({"instruction": "x" * 8193}, "instruction"),
            ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs"),
        ):  # fmt: skip
            refused = server.call("POST", "/score", {"queries": "hello", "documents": texts, **more})
            assert refused.status == 422 and refused.json()["error"]["param"] == name, refused.body
    plain = scored(tmp_path / "plain", None)
    with served.in_thread(("m", plain)) as server:
        for path, named in (("/rerank", "texts"), ("/v1/rerank", "documents"), ("/score", "documents")):
            body = {"query": "a", "queries": "a", named: ["b"], "instruct": None}
            server.post(path, body)
            refused = server.call("POST", path, body | {"instruct": said})
            assert refused.status == 422 and b"`instruct` is not supported: no template or prompt of this model has a place" in refused.body
        for path, body in (("/classify", {"input": "a"}), ("/predict", {"inputs": [["a", "b"]]})):
            refused = server.call("POST", path, body | {"instruct": said})
            assert refused.status == 422 and b"`instruct` is not supported" in refused.body


@pytest.mark.parametrize("tied", [True, False])
def test_a_live_language_model(place: Place, tmp_path: Path, tied: bool) -> None:
    reference = qwen(tmp_path, tied)
    model, ids = ftbert.load(reference, device=place.device, dtype=place.dtype), torch.randint(5, 200, (17,))
    with torch.no_grad():
        logits = torch.cat([reference(part[None]).logits[0, -1:] for part in (ids[:12], ids[12:])])
    offsets = torch.tensor([0, 12, 17], dtype=torch.int32, device=place.device)
    got = next_logits(model, (ids.to(place.device), offsets, 12, None), [7, 9])
    limit = 1e-5 if place.dtype == torch.float32 else 16 * place.eps
    close(got, logits[:, 7:8] - logits[:, 9:10], atol=limit)
    close(next_logits(model, (ids.to(place.device), offsets, 12, None), [7]), logits[:, 7:8], atol=limit)
    with pytest.raises(ValueError, match=r"has no head for masked_lm; its heads: causal_lm"):
        model.head("masked_lm")


def test_qwen3_reranker_as_crossencoder(tmp_path: Path) -> None:
    """A language model alone, with the example's template in its folder, and as CrossEncoder saves it."""
    qwen(tmp_path / "alone", True)
    command, here = [sys.executable, EXAMPLES / "reranking.py", "--template"], os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    written = subprocess.run(command, capture_output=True, check=True, env=here)
    (tmp_path / "alone" / "chat_template.jinja").write_bytes(written.stdout)
    theirs = CrossEncoder(str(tmp_path / "alone"), device="cpu", prompts={"web": TASK}, default_prompt_name="web")
    theirs.save_pretrained(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "modules.json").exists()
    want = theirs.predict(QWEN_PAIRS)
    assert_close(ftbert.load(tmp_path / "alone").predict(QWEN_PAIRS, prompt=TASK), want)
    assert_close(ftbert.load(tmp_path / "saved").predict(QWEN_PAIRS), want)
    assert_close(ftbert.load(convert(tmp_path / "saved", tmp_path / "ours")).predict(QWEN_PAIRS), want)


def test_a_head_is_read_once_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qwen(tmp_path, False)
    model, real, read = ftbert.load(tmp_path), Checkpoint.read, []

    def slow(self: Checkpoint, ours: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        read.append(ours)
        time.sleep(0.1)
        return real(self, ours, dtype)

    monkeypatch.setattr(Checkpoint, "read", slow)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: model.head("causal_lm"), range(8)))
    assert read == ["heads.causal_lm.out.weight"] and all(one is found[0] for one in found)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30.0 is not supported: the head for causal_lm"),
        ({"logit_scale": 0.5}, r"logit_scale 0.5 is not supported"),
        ({"logits_scaling": 8}, r"logits_scaling 8 is not supported"),
    ],
)
def test_logits_that_are_scaled_or_capped(tmp_path: Path, entry: dict[str, Any], words: str) -> None:
    qwen(tmp_path, True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | entry))
    with pytest.raises(ValueError, match=words):
        ftbert.load(tmp_path)
    path.write_text(json.dumps(config | entry | {"architectures": ["Qwen3Model"]}))
    with pytest.raises(ValueError, match=r"this model's heads: none"):
        ftbert.load(tmp_path).predict(QWEN_PAIRS)


def test_a_language_model_whose_head_is_not_in_the_file(tmp_path: Path, template: str) -> None:
    """It says that it has one of its own, and embeds as ever."""
    qwen(tmp_path, False)
    state = load_file(tmp_path / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = ftbert.load(tmp_path)
    assert model.encode("hello").shape == (32,)
    with pytest.raises(ValueError, match=r"this model's heads: none"):
        model.predict(QWEN_PAIRS, chat_template=template)
