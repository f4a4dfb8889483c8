"""Scores of pairs by what a language model would say next, against sentence-transformers' CrossEncoder with LogitScore,
and against the published recipe of Qwen3-Reranker."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from other_folders import PAIR_TEMPLATE, scored
from sentence_transformers import CrossEncoder
from tokenizers import ByteLevelBPETokenizer
from tokenizers_offline import TEXTS
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import ftbert
from ftbert.checkpoint import HeadConfig
from ftbert.converters import convert
from ftbert.heads import Head
from ftbert.text import TextModel

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
    """A language model alone is asked for them."""
    scored(tmp_path)
    with pytest.raises(ValueError, match=r"its tokenizer has no token 'yes'; name the ids in a LogitScore"):
        ftbert.load(tmp_path / "source").predict([("a", "b")])


@pytest.mark.parametrize("template", [PAIR_TEMPLATE, None])
def test_the_server_ranks(tmp_path: Path, template: str | None) -> None:
    served = pytest.importorskip("served")
    folder = scored(tmp_path, template, prompts={"judge": "Judge this"}, default_prompt_name="judge")
    model, texts = ftbert.load(folder), [text for text in TEXTS if text.strip()]
    want = model.predict([("hello", text) for text in texts])
    with served.in_thread(("m", folder)) as server:
        got = server.post("/rerank", {"query": "hello", "texts": texts})
        assert_close(np.array([one["score"] for one in sorted(got, key=lambda one: one["index"])], np.float32), want)
        got = server.post("/v1/rerank", {"query": "hello", "documents": texts})["results"]
        assert_close(np.array([one["relevance_score"] for one in sorted(got, key=lambda one: one["index"])], np.float32), want)
        got = server.post("/score", {"queries": "hello", "documents": texts})["data"]
        assert_close(np.array([one["score"] for one in got], np.float32), want)
        long = {"query": "hello", "texts": ["the end " * 90], "truncate": False}
        assert server.call("POST", "/rerank", long).status == 422
        if template is not None:
            refused = server.call("POST", "/predict", {"inputs": "hello"})
            assert refused.status == 422 and b"must be pairs" in refused.body
            refused = server.call("POST", "/v1/rerank", {"query": "hello", "documents": texts, "max_tokens_per_doc": 3})
            assert refused.status == 422 and b"go through a template" in refused.body


# The published recipe: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class QwenStub(TextModel):
    """A random Qwen3 of transformers behind the calls that text goes through."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.device, self.dtype = folder, torch.device("cpu"), torch.float32
        self.reference = Qwen3ForCausalLM.from_pretrained(folder).eval()
        sizes = self.reference.config
        self.config = SimpleNamespace(hidden=sizes.hidden_size, max_seq=sizes.max_position_embeddings, vocab=sizes.vocab_size, token_types=0)
        self.encoder = SimpleNamespace(weight=lambda name: self.reference.model.embed_tokens.weight)
        self.checkpoint = SimpleNamespace(config=SimpleNamespace(huggingface=sizes.to_dict(), heads=()))
        config = HeadConfig("masked_lm", "tokens", sizes.vocab_size, 0, "none", 0.0, tied=True)
        self.heads = [Head(config, {"out.bias": torch.zeros(sizes.vocab_size)})]

    def head(self, task: str) -> Head:
        return self.heads[0]

    def forward_packed(self, ids: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, types: Any = None, want: str = "tokens") -> torch.Tensor:
        assert want == "last"
        return torch.stack([self.reference.model(row[None]).last_hidden_state[0, -1] for row in ids.split(cu_seqlens.diff().tolist())])


def qwen(folder: Path) -> Path:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["yes no hello world the end"] * 9, vocab_size=300, min_frequency=1, show_progress=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, pad_token=special[0], eos_token=special[2], additional_special_tokens=special, padding_side="left", model_max_length=256)
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(fast), **sizes, max_position_embeddings=512, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


def test_qwen3_reranker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix and suffix ids around the truncated pair, left padding, softmax over "yes" and "no"."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "examples"))
    from reranking import QWEN3_RERANKER

    folder, task, length = qwen(tmp_path), "Given a web search query, retrieve relevant passages", 250
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = QwenStub(folder)
    queries = ["hello world", "the end?", "yes\n no "]
    documents = ["the world", "hello " * 300, "\tno end "]
    prefix, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (PREFIX, SUFFIX))
    texts = [f"<Instruct>: {task}\n<Query>: {a}\n<Document>: {b}" for a, b in zip(queries, documents, strict=True)]
    inside = tokenizer(texts, padding=False, truncation="longest_first", return_attention_mask=False, max_length=length - len(prefix) - len(suffix))["input_ids"]
    batch = tokenizer.pad({"input_ids": [prefix + ids + suffix for ids in inside]}, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model.reference(**batch).logits[:, -1]
    answers = logits[:, [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]]
    want = torch.nn.functional.log_softmax(answers, dim=1)[:, 1].exp().numpy()
    got = model.predict(list(zip(queries, documents, strict=True)), chat_template=QWEN3_RERANKER, prompt=task, max_length=length)
    assert_close(got, want)
    assert len(set(np.round(got, 6))) == 3
