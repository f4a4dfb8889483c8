"""Real models that run anywhere, in float32 by transformers, and the texts of STS-B: for quantization_numerics.py."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ftbert.converters import build_reference, open_checkpoint, source_modules
from ftbert.padded_batches import padded
from ftbert.quantization import calibration_texts


@dataclass
class Real:
    """A model in float32 with the ids of the calibration texts and of STS-B's pairs, and their scores."""

    name: str
    model: Any
    modules: dict[str, tuple[str, ...]]  # of each matrix, transformers' modules
    calibration: list[Tensor]
    texts: list[Tensor]
    scores: Tensor
    last: bool  # a vector is the last token's, else the mean

    def vectors(self) -> Tensor:
        order = sorted(range(len(self.texts)), key=lambda i: len(self.texts[i]))
        found = [torch.empty(0)] * len(order)
        for start in range(0, len(order), 64):
            some = order[start : start + 64]
            ids, mask = padded([self.texts[i] for i in some], "right", 0, torch.device("cpu"))
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            for i, row, kept in zip(some, states, mask.bool(), strict=True):
                found[i] = row[kept][-1] if self.last else row[kept].mean(0)
        return normalize(torch.stack(found), dim=1)


def sentences(path: Path, pairs: int) -> tuple[list[str], Tensor]:
    """Both sentences of each pair, behind each other, and the scores."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    rows = rows[:: max(1, len(rows) // pairs)]
    return [text for one in rows for text in one[5:7]], torch.tensor([float(one[4]) for one in rows])


def real_models(options: argparse.Namespace) -> Iterator[Callable[[], Real]]:
    """Those that the options of quantization_numerics.py name, each made when it is called."""
    texts, scores = sentences(options.stsb, options.pairs)
    other = calibration_texts()
    if options.calibration:
        other, _ = sentences(options.stsb.with_name("sts-train.csv"), options.calibration // 2)

    def made(name: str, source: Any, ids: Callable[[Sequence[str]], list[Tensor]], last: bool) -> Real:
        checkpoint = open_checkpoint(source)
        model = build_reference(checkpoint, with_heads=False)
        return Real(name, model, source_modules(checkpoint.config), ids(other), ids(texts), scores, last)

    def by_tokenizer(texts: Sequence[str]) -> list[Tensor]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.minilm)
        return [torch.tensor(ids) for ids in tokenizer(list(texts), truncation=True, max_length=256)["input_ids"]]

    def decoder(path: Path) -> Real:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        said = load_gguf_checkpoint(path)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**said["config"]))
        model.load_state_dict(load_gguf_checkpoint(path, True, model)["tensors"], strict=False)
        words = {word: i for i, word in enumerate(said["tokenizer"]["tokens"])}
        mark = next(mark for mark in ("\u0120", "\u2581") if mark + "the" in words)
        first = said["tokenizer_config"]["bos_token_id"]

        def ids(texts: Sequence[str]) -> list[Tensor]:
            return [torch.tensor([first, *(words[mark + w] for w in t.split() if mark + w in words)]) for t in texts]

        return made(path.stem, model.model, ids, True)

    if not options.without_minilm:
        yield lambda: made("all-MiniLM-L6-v2", options.minilm, by_tokenizer, False)
    for path in options.onnx:
        yield partial(made, path.stem, path, by_tokenizer, False)
    for path in options.gguf:
        yield partial(decoder, path)
