"""A type of 8 bits: how a matrix is stored, the rows that its products read, and the loss that is allowed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ftbert.dtypes import NUMBERS, users_word
from ftbert.quantization.observe import Observed


@dataclass(frozen=True)
class Limits:
    """Cosines of texts' vectors with those of float32, the mean and the worst, that any texts may come to."""

    mean: float
    worst: float

    @property
    def asked(self) -> Limits:
        """Of those that are measured: they have to lose a tenth less. SmolLM2's .99778 and .9901 in E4M3 were .99745
        and .98999 on STS-B."""
        return Limits(*(round(1 - 0.9 * (1 - one), 6) for one in (self.mean, self.worst)))


@dataclass(frozen=True)
class Quantized:
    """A matrix or a table as it is stored, on the CPU: 8 bits [n, k], and the scale of each row, float32 [n]."""

    weight: Tensor
    scale: Tensor

    def values(self, device: torch.device) -> Tensor:
        """float32 [n, k]: what is stored stands for."""
        return self.weight.to(device).float() * self.scale.to(device)[:, None]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All that is stored, by name. name: of the matrix or table."""
        return {name: self.weight, f"{name}.scale": self.scale}


class QuantizedMatrix(Quantized, ABC):
    """One that products multiply `reads` of their input by."""

    @abstractmethod
    def reads(self, given: Tensor) -> Tensor:
        """What a product reads of its input, float [..., k]."""

    @abstractmethod
    def of_input(self) -> dict[str, Tensor]:
        """What is stored beside it of what it multiplies, by the ends of names: {"scale": ...} is X.input.scale."""

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All that is stored. name: X.weight."""
        of_input = {f"{name.removesuffix('.weight')}.input.{end}": one for end, one in self.of_input().items()}
        return super().tensors(name) | of_input


@dataclass(frozen=True)
class StoredType:
    """word: the core's, in configs. store: of a matrix, float [n, k], and of what it was seen to multiply, on its
    device. store_table: of the word table, float [vocab, k], or None where that stays as it is. needs_gram: whether
    `store` asks for the gram of what it is shown. instead: types for a model that loses too much."""

    word: str
    store: Callable[[Tensor, Observed], QuantizedMatrix]
    store_table: Callable[[Tensor], Quantized] | None
    needs_gram: bool
    limits: Limits
    instead: str

    @property
    def dtype(self) -> torch.dtype:
        return NUMBERS[self.word]

    @property
    def name(self) -> str:
        """The users' word."""
        return users_word(self.dtype)
