"""Real models that run anywhere, in float32 by transformers, and the texts of STS-B: for quantization_numerics.py and
int8_accuracy.py."""

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

Hidden = Callable[[Tensor, Tensor], Tensor]  # ids and mask [batch, seq] to [batch, seq, hidden]


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
    tokenizer: Path | None = None  # a sentence-transformers folder with its tokenizer

    def vectors(self, hidden: Hidden | None = None) -> Tensor:
        """hidden: what gives the last hidden state; None: the model."""
        order = sorted(range(len(self.texts)), key=lambda i: len(self.texts[i]))
        found = [torch.empty(0)] * len(order)
        for start in range(0, len(order), 64):
            some = order[start : start + 64]
            ids, mask = padded([self.texts[i] for i in some], "right", 0, torch.device("cpu"))
            states = hidden(ids, mask) if hidden else self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            for i, row, kept in zip(some, states, mask.bool(), strict=True):
                found[i] = row[kept][-1] if self.last else row[kept].mean(0)
        return normalize(torch.stack(found), dim=1)


def sentences(path: Path, pairs: int) -> tuple[list[str], Tensor]:
    """Both sentences of each pair, behind each other, and the scores."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    rows = rows[:: max(1, len(rows) // pairs)]
    return [text for one in rows for text in one[5:7]], torch.tensor([float(one[4]) for one in rows])


def add_options(parser: argparse.ArgumentParser, calibration: int) -> None:
    """Which models, and which texts. calibration: its value where nobody gives one."""
    add = parser.add_argument
    add("--minilm", type=Path, required=True, help="folder of the real MiniLM-L6, with its tokenizer")
    add("--stsb", type=Path, required=True, help="sts-test.csv, beside sts-train.csv")
    add("--onnx", type=Path, nargs="*", default=[], help="more models with MiniLM's tokenizer")
    add("--folder", type=Path, nargs="*", default=[], help="more models with tokenizers of their own")
    add("--gguf", type=Path, nargs="*", default=[], help="decoders; vectors are the last token's")
    add("--without-minilm", action="store_true", help="the others alone")
    add("--pairs", type=int, default=1379, help="of STS-B's test set")
    add("--calibration", type=int, default=calibration, help="texts of STS-B's training set; 0: ftbert's own")
    add("--threads", type=int, default=0, help="of the CPU (default: all)")
    add("--out", type=Path, help="JSON file")


def real_models(options: argparse.Namespace) -> Iterator[Callable[[], Real]]:
    """Those that the options of `add_options` name, each made when it is called."""
    texts, scores = sentences(options.stsb, options.pairs)
    other = calibration_texts()
    if options.calibration:
        other, _ = sentences(options.stsb.with_name("sts-train.csv"), options.calibration // 2)

    def made(
        name: str, source: Any, ids: Callable[[Sequence[str]], list[Tensor]], last: bool, tokenizer: Path | None = None
    ) -> Real:
        checkpoint = open_checkpoint(source)
        model = build_reference(checkpoint, with_heads=False)
        return Real(name, model, source_modules(checkpoint.config), ids(other), ids(texts), scores, last, tokenizer)

    def encoder(name: str, source: Path, folder: Path) -> Real:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)

        def ids(texts: Sequence[str]) -> list[Tensor]:
            return [torch.tensor(ids) for ids in tokenizer(list(texts), truncation=True, max_length=256)["input_ids"]]

        return made(name, source, ids, False, folder)

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
        yield partial(encoder, "all-MiniLM-L6-v2", options.minilm, options.minilm)
    for path in options.onnx:
        yield partial(encoder, path.stem, path, options.minilm)
    for path in options.folder:
        yield partial(encoder, path.name, path, path)
    for path in options.gguf:
        yield partial(decoder, path)
