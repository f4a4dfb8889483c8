"""A stand-in for a loaded model where the native library would only be in the way of a unit test."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import reference
import torch

from ftbert.text import Job, Launch, ReplicaThreads, Result, TextModel

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d", "e", "f", "g", "h", "the", "cat", "dog", "sat", "on", "mat", "über", "A"]


class StubModel(TextModel):
    """forward_packed gives a fixed random row per token id: a text's vector depends on that text only."""

    device, dtype = torch.device("cpu"), torch.float32
    heads: tuple[Any, ...] = ()
    replicas: Any = ()
    checkpoint: Any = SimpleNamespace(
        config=SimpleNamespace(heads=(), huggingface={}), source=SimpleNamespace(files=()), tasks={}, task="", bare=True
    )

    def __init__(self, folder: Path | None, delay: float = 0.0) -> None:
        self.folder = folder
        self.replicas = (self,)
        self.config = SimpleNamespace(hidden=16, max_seq=512, vocab=len(WORDS), token_types=2)
        self.table = torch.randn(len(WORDS), 16, generator=torch.Generator().manual_seed(0))
        self.delay = delay
        self.calls: list[list[int]] = []  # lengths of each call
        self.fail_at = -1  # the call that raises
        self.error: BaseException = RuntimeError("stub failed")

    def for_task(self, task: str) -> StubModel:
        return self

    def forward_packed(
        self, ids: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, want: str = "tokens"
    ) -> torch.Tensor:
        assert ids.dtype == torch.int64
        assert cu_seqlens.dtype == torch.int32
        assert isinstance(max_seqlen, int)
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        assert sum(lengths) == len(ids)
        assert max(lengths) == max_seqlen
        if len(self.calls) == self.fail_at:
            raise self.error
        self.calls.append(lengths)
        time.sleep(self.delay)
        rows = {"first": cu_seqlens[:-1], "last": cu_seqlens[1:] - 1}
        return self.table[ids if want == "tokens" else ids[rows[want]]]


class StubSet(StubModel):
    """Replicas that share the work of a call, in threads."""

    def __init__(self, replicas: Sequence[StubModel]) -> None:
        super().__init__(replicas[0].folder)
        self.replicas = replicas

    def workers(self, launch: Launch[Job, Result]) -> ReplicaThreads[Job, Result]:
        return ReplicaThreads(self.replicas, launch)


class Mirror:
    """A model whose forward is transformers' own, spoiled on request: spoil(hidden, mask) of each hidden state."""

    heads: tuple[Any, ...] = ()
    encoder = SimpleNamespace(dtype=lambda: "fp32")

    def __init__(self, spoil: Any = None, dtype: torch.dtype = torch.float32) -> None:
        from conftest import make_bert

        self.hf = make_bert(max_position_embeddings=512)
        self.config = SimpleNamespace(hidden=64, max_seq=512, vocab=120, layers=())
        self.device, self.dtype, self.folder, self.spoil = torch.device("cpu"), dtype, None, spoil
        self.replicas = (self,)

    def reference(self) -> Any:
        return self.hf

    def __call__(self, ids: torch.Tensor, attention_mask: torch.Tensor, output_hidden_states: bool = False) -> Any:
        made = self.hf(input_ids=ids, attention_mask=attention_mask, output_hidden_states=True).hidden_states
        states = [hidden * attention_mask[..., None] for hidden in made]
        if self.spoil is not None:
            states = [self.spoil(hidden, attention_mask) for hidden in states]
        return SimpleNamespace(last_hidden_state=states[-1], hidden_states=states if output_hidden_states else None)


def pooling(hidden: torch.Tensor, cu_seqlens: torch.Tensor | None, mode: str, normalize: bool) -> torch.Tensor:
    """What torch.ops.ftbert.pooling computes."""
    lengths = [1] * len(hidden) if cu_seqlens is None else cu_seqlens.diff().tolist()
    return reference.pooling(hidden, lengths, mode, normalize).float()


def threads_left() -> int:
    """Background threads of encode that still run; none should."""
    return sum(thread.name.startswith(("ftbert-tokenise", "ftbert-replica")) for thread in threading.enumerate())


def use_stub_pooling() -> None:
    """For a process of its own; tests patch torch.ops instead."""
    torch.ops.ftbert.pooling = pooling


def write_tokenizer(folder: Path) -> Path:
    """A word tokenizer whose file asks for truncation and fixed padding, as real ones sometimes do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=6)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    # As the file is: BERT's own class would put BERT's normaliser in.
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
