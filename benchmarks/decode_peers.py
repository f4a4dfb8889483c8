"""Who generates in bench_decode.py, in this process: ftbert, transformers, compiled PyTorch. Texts of one call are
equally long. `start` computes the prompts, each `step` the most likely next token of every text. alone: no step
follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch_decoder import TorchDecoder, TorchTexts

import ftbert
from ftbert.decoding.decoder import decoder_of
from ftbert.decoding.generation import Generation
from ftbert.decoding.requests import Request

Q8_0_BYTES = 34 / 32  # of a weight


class Texts(Protocol):
    def start(self, prompts: list[list[int]], alone: bool = False) -> None: ...

    def step(self) -> None: ...


class Peer:
    """weight, cached: bytes of a weight, and of a number in the cache."""

    weight: float
    cached: float

    def texts(self, batch: int, positions: int) -> Texts:
        raise NotImplementedError

    def logits(self, prompt: list[int], token: int, positions: int) -> Tensor:
        """[2, vocab]: behind the prompt, and then behind the token; in a cache of so many positions."""
        raise NotImplementedError


class Ftbert(Peer):
    def __init__(self, source: Path | torch.nn.Module, device: torch.device, dtype: str) -> None:
        self.model = ftbert.load(source, device=device, dtype=dtype)
        self.device = device
        in_float = 4 if device.type == "cpu" else 2
        self.weight = {"q8_0": Q8_0_BYTES, "fp32": 4}.get(dtype, 2)
        self.cached = 4 if dtype == "fp32" else in_float

    def texts(self, batch: int, positions: int) -> FtbertTexts:
        return FtbertTexts(self, batch, positions)

    def logits(self, prompt: list[int], token: int, positions: int) -> Tensor:
        decoder, slot = decoder_of(self.model, 1, positions), torch.zeros(1, dtype=torch.int32)
        found = []
        for ids in (prompt, [token]):
            offsets = torch.tensor([0, len(ids)], dtype=torch.int32)
            found.append(decoder.forward(torch.tensor(ids, device=self.device), offsets, slot, False)[0])
        return torch.stack(found)


class FtbertTexts:
    """As `generate` computes them, to the ids that the host reads after each step."""

    def __init__(self, peer: Ftbert, batch: int, positions: int) -> None:
        self.decoder, self.device, self.batch = decoder_of(peer.model, batch, positions), peer.device, batch
        self.positions = positions
        # Each start computes its prompts, also those that slots still hold.
        self.generation = Generation(self.decoder, batch, peer.model.config.vocab, self.device, reuse=False)
        self.places: list[int] = []

    def start(self, prompts: list[list[int]], alone: bool = False) -> None:
        for place in self.places:
            self.generation.end(place)
        # With a token to follow, the next step is launched before this one's are read.
        most = [1 if alone else self.positions - len(prompt) for prompt in prompts]
        self.places = [self.generation.add(Request(*of)) for of in zip(prompts, most, strict=True)]
        self.generation.step()

    def step(self) -> None:
        if len(self.generation.step()) != self.batch:
            raise RuntimeError("a text has ended: its cache has too few positions")


class Transformers(Peer):
    """Eager, attention by PyTorch's sdpa, its own growing cache."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device
        self.weight = self.cached = float(model.dtype.itemsize)

    def texts(self, batch: int, positions: int) -> TransformersTexts:
        return TransformersTexts(self)

    def logits(self, prompt: list[int], token: int, positions: int) -> Tensor:
        texts = TransformersTexts(self)
        texts.start([prompt])
        first = texts.logits
        texts.next = torch.tensor([[token]], device=self.device)
        texts.step()
        return torch.cat([first, texts.logits])


class TransformersTexts:
    def __init__(self, peer: Transformers) -> None:
        self.model, self.device = peer.model, peer.device

    def start(self, prompts: list[list[int]], alone: bool = False) -> None:
        self.cache: Any = None
        self._forward(torch.tensor(prompts, device=self.device))

    def step(self) -> None:
        self._forward(self.next)

    @torch.inference_mode()
    def _forward(self, ids: Tensor) -> None:
        found = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache, self.logits = found.past_key_values, found.logits[:, -1]
        self.next = self.logits.argmax(-1, keepdim=True)


class PlainTorch(Peer):
    """On a GPU steps compiled and recorded; prompts, of which each length would be compiled anew, eager."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.device = device
        self.decoder = TorchDecoder(model, compiled=device.type == "cuda")
        self.weight = self.cached = float(model.dtype.itemsize)

    def texts(self, batch: int, positions: int) -> PlainTorchTexts:
        return PlainTorchTexts(self, batch, positions)

    def logits(self, prompt: list[int], token: int, positions: int) -> Tensor:
        texts = TorchTexts(self.decoder, 1, positions)
        texts.start(torch.tensor([prompt], device=self.device))
        first = texts.found.clone()
        texts.next.fill_(token)
        texts.step()
        return torch.cat([first, texts.found])


class PlainTorchTexts:
    """Its steps are enqueued without the host reading an id."""

    def __init__(self, peer: PlainTorch, batch: int, positions: int) -> None:
        self.made, self.device = TorchTexts(peer.decoder, batch, positions), peer.device

    def start(self, prompts: list[list[int]], alone: bool = False) -> None:
        self.made.start(torch.tensor(prompts, device=self.device))

    def step(self) -> None:
        self.made.step()
