"""Published decoders with their real weights, dequantised from GGUF files into transformers' classes, on real text."""

from __future__ import annotations

import copy
import csv
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close, assert_no_worse, in_dtype
from conftest import PLACES, Place
from torch import Tensor

import ftbert

# Where the file is, and what stands before a word in its vocabulary.
FILES = {"FTBERT_TEST_SMOLLM2": "\u0120", "FTBERT_TEST_GEMMA3": "\u2581"}
BATCHES = ("right", "left", "long")
PLACES_AND_BF16 = [*PLACES, Place("cpu", torch.bfloat16)]


@dataclass
class Decoder:
    """of: transformers' model with the head for the next token; float32, on the CPU. texts: ids of sentences. Models and
    results are made once: copies of Gemma's 262,144 rows of embeddings take seconds."""

    of: Any
    texts: list[list[int]]
    exact: dict[str, Tensor] = field(default_factory=dict)
    made: dict[Place, ftbert.Model] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, mark: str, sentences: list[str]) -> Decoder:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        said = load_gguf_checkpoint(path)
        config = AutoConfig.for_model(**said["config"], attn_implementation="sdpa")
        model = AutoModelForCausalLM.from_config(config)
        found = model.load_state_dict(load_gguf_checkpoint(path, True, model)["tensors"], strict=False)
        assert found.missing_keys == ["lm_head.weight"] and not found.unexpected_keys
        model.tie_weights()
        ids = {word: i for i, word in enumerate(said["tokenizer"]["tokens"])}
        first = said["tokenizer_config"]["bos_token_id"]
        words = [[ids[mark + word] for word in text.split() if mark + word in ids] for text in sentences]
        return cls(model.eval(), [[first, *some] for some in words])

    @torch.no_grad()
    def states(self, texts: str) -> Tensor:
        """Those of kept tokens by transformers in float64."""
        if not self.exact:
            model = copy.deepcopy(self.of.model).double()
            for name in BATCHES:
                batch = self.batch(name)
                self.exact[name] = model(**batch, use_cache=False).last_hidden_state[batch["attention_mask"].bool()]
        return self.exact[texts]

    def ours(self, place: Place) -> ftbert.Model:
        if place not in self.made:
            self.made[place] = ftbert.load(self.of.model, device=place.device, dtype=place.dtype)
        return self.made[place]

    def batch(self, texts: str) -> dict[str, Tensor]:
        """Twelve sentences, padded "right" or "left"; "long": one text of many, longer than Gemma's window of 512."""
        rows = [sum((row[1:] for row in self.texts[12:]), self.texts[12])] if texts == "long" else self.texts[:12]
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), self.of.config.pad_token_id)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            kept = slice(longest - len(row), longest) if texts == "left" else slice(len(row))
            ids[place, kept], mask[place, kept] = torch.tensor(row), 1
        return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module", params=FILES)
def decoder(request: pytest.FixtureRequest, stsb_test: Path) -> Decoder:
    path = os.environ.get(request.param)
    if not path or not Path(path).exists():
        pytest.skip(f"{request.param} does not name the real .gguf file (make models-modern fetches it)")
    pytest.importorskip("gguf")
    with open(stsb_test, encoding="utf-8", newline="") as file:
        sentences = [row[5] for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    return Decoder.read(Path(path), FILES[request.param], sentences[::115] + sentences[:110])


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@pytest.mark.parametrize("texts", BATCHES)
@pytest.mark.parametrize("place", PLACES_AND_BF16, ids=str, indirect=True)
@torch.no_grad()
def test_equals_transformers(place: Place, decoder: Decoder, texts: str) -> None:
    """Entries reach 43 and 71 behind streams of 25,000 and 104,000, so that transformers' own float32 is farther from
    float64 than the gate of other models: float64 judges, and the limit counts in the largest entry."""
    if place == PLACES_AND_BF16[-1] and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no instructions for bf16")
    model, batch = decoder.of.model, decoder.batch(texts)
    kept = batch["attention_mask"].bool()
    if place.dtype == torch.float16 and model.config.model_type == "gemma3_text":
        pytest.skip("entries of the residual stream are larger than fp16 holds")
    exact, ours = decoder.states(texts), decoder.ours(place)(**_on(batch, place.device)).last_hidden_state.cpu()
    assert not ours[~kept].any()
    fp32 = place.dtype == torch.float32
    reference = model if fp32 else in_dtype(model, place.dtype).to(place.device)
    theirs = reference(**_on(batch, "cpu" if fp32 else place.device), use_cache=False).last_hidden_state.cpu()
    difference, errors = (ours - theirs)[kept].abs().max(), [rms(states[kept] - exact) for states in (ours, theirs)]
    words = [decoder.of.lm_head(states[kept].float()).argmax(-1) for states in (ours, theirs)]
    same, largest = float((words[0] == words[1]).float().mean()), float(exact.abs().max())
    print(f"{place} {texts}: {len(exact)} tokens, largest entry {largest:.0f}, largest difference {difference:.2g}; "
          f"from float64 ours {errors[0]:.2g}, theirs {errors[1]:.2g} rms; same next token {same:.1%}")  # fmt: skip
    if fp32:
        assert difference <= (2e-5 if place.device == "cpu" else 5e-5) * largest
        assert errors[0] <= 4 * errors[1]  # sums over 2,048 numbers in one go are 3 times as far off as in parts
        assert same >= 0.99
    else:
        assert_no_worse(ours[kept], theirs[kept], exact)


@torch.no_grad()
def test_each_text_is_alone(device: str, decoder: Decoder) -> None:
    """Behind padding its positions, and the rounding of its angles, are others."""
    model = decoder.ours(Place(device, torch.float32))
    for texts in ("right", "left"):
        batch = _on(decoder.batch(texts), device)
        together, mask = model(**batch).last_hidden_state, batch["attention_mask"].bool()
        limit = (1e-6 if (device, texts) == ("cpu", "right") else 2e-5) * float(together.abs().max())
        for i in range(len(mask)):
            alone = model(batch["input_ids"][i : i + 1, mask[i]]).last_hidden_state[0]
            assert_close(together[i, mask[i]], alone, atol=limit, what=f"{texts}, text {i}")


def _on(batch: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(place: Place, decoder: Decoder) -> None:
    """Of every token its logit by transformers, which reads the same text without a cache: the largest, or within 1e-4
    of it (16 bits: a few roundings of logits of 40)."""
    if place.dtype == torch.float16 and decoder.of.config.model_type == "gemma3_text":
        pytest.skip("entries of the residual stream are larger than fp16 holds")
    model = ftbert.load(decoder.of, device=place.device, dtype=place.dtype)
    prompts = decoder.texts[:3]
    for ids, made in zip(prompts, model.generate_ids(prompts, max_new_tokens=24, batch_size=2), strict=True):
        logits = decoder.of(torch.tensor([ids + made]), use_cache=False).logits[0, len(ids) - 1 : -1]
        behind = logits.amax(-1) - logits.gather(1, torch.tensor(made)[:, None])[:, 0]
        assert len(made) > 8 and float(behind.max()) <= (1e-4 if place.dtype == torch.float32 else 4 * 40 * place.eps)
