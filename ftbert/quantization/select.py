"""The choice of matrices that stay as they are: the fewest that bring the vectors of texts near enough to float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ftbert.checkpoint import CheckpointConfig
from ftbert.converters import source_modules, source_tensors
from ftbert.quantization.stored_type import Limits, QuantizedMatrix
from ftbert.quantization.vectors import TextVectors

MOST_LEFT_OUT = 0.5  # of the weights
_TELLING, _PROBES = 32, 4  # texts and random directions that tell what a matrix costs


@dataclass(frozen=True)
class Measured:
    """cosines: of texts' vectors with those of float32, [texts]; the first `unseen` texts are not of calibration."""

    cosines: Tensor
    unseen: int

    @property
    def mean(self) -> float:
        """The lesser one, of all texts and of those that calibration did not see."""
        unseen = self.cosines[: self.unseen] if self.unseen else self.cosines
        return min(float(self.cosines.mean()), float(unseen.mean()))

    @property
    def worst(self) -> float:
        return float(self.cosines.min())

    @property
    def order(self) -> list[int]:
        """The texts, the worst first."""
        places: list[int] = self.cosines.argsort(stable=True).tolist()
        return places

    def within(self, limits: Limits) -> bool:
        return self.mean >= limits.mean and self.worst >= limits.worst

    def __str__(self) -> str:
        return f"mean cosine {self.mean:.5f}, worst {self.worst:.4f}"


@contextmanager
def altered(
    model: torch.nn.Module, parameters: Mapping[str, Tensor], inputs: Mapping[str, Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """model with other parameters, by their names, and modules, by theirs, that read a function of their input.

    Sums are in float32, and what no product multiplies stays as it is: what kernels lose in 16 bits is not simulated.
    """

    def read(function: Callable[[Tensor], Tensor], _: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (function(given[0]), *given[1:])

    with ExitStack() as undo:
        for name, tensor in parameters.items():
            home, _, last = name.rpartition(".")
            module = model.get_submodule(home)
            undo.callback(partial(setattr, module, last, getattr(module, last)))
            setattr(module, last, torch.nn.Parameter(tensor, requires_grad=False))
        for name, function in inputs.items():
            hook = model.get_submodule(name).register_forward_pre_hook(partial(read, function))
            undo.callback(hook.remove)
        yield


@dataclass(frozen=True)
class Simulation:
    """The quantized model on some texts. rows: their ids, the first `unseen` not of calibration. exact: the vectors of
    float32. tables: what is quantized whichever matrices are, by transformers' names, float32."""

    vectors: TextVectors
    config: CheckpointConfig
    stored: Mapping[str, QuantizedMatrix]
    rows: Sequence[Tensor]
    unseen: int
    exact: Tensor
    tables: Mapping[str, Tensor]

    def measure(self, kept: Collection[str] = ()) -> Measured:
        """With all matrices in 8 bits but those."""
        modules = source_modules(self.config)
        weights, inputs = dict(self.tables), dict[str, Callable[[Tensor], Tensor]]()
        for name in self.stored.keys() - set(kept):
            weights |= self._theirs(name)
            inputs |= dict.fromkeys(modules[name], self.stored[name].reads)
        with altered(self.vectors.model, weights, inputs):
            cosines = (self.vectors(self.rows).double() * self.exact.double()).sum(1).cpu()
        return Measured(cosines, self.unseen)

    def by_loss(self, texts: Sequence[int]) -> list[str]:
        """The matrices, those first that cost most for their size on these of the texts.

        To first order: what a product loses in 8 bits times the gradient of a text's vector in a random direction,
        squared. The passes are as many for two matrices as for two hundred.
        """
        loss = dict.fromkeys(self.stored, 0.0)
        generator = torch.Generator().manual_seed(0)
        chosen = [self.rows[i] for i in texts]
        for some, ids, mask in self.vectors.batches(chosen):
            changes: dict[str, Tensor] = {}  # of each text, by matrix
            with ExitStack() as hooks, torch.enable_grad():
                for name in self.stored:
                    for theirs, weight in self._theirs(name).items():
                        module = self.vectors.model.get_submodule(theirs.removesuffix(".weight"))
                        look = partial(_look, changes, name, weight, self.stored[name].reads)
                        hooks.callback(module.register_forward_hook(look).remove)
                vectors = self.vectors.read(ids, mask, [len(chosen[i]) for i in some])
                for _ in range(_PROBES):
                    changes.clear()
                    probe = torch.randn(vectors.shape, generator=generator).to(vectors.device)
                    vectors.backward(probe, retain_graph=True)
                    for name, change in changes.items():
                        loss[name] += float(change.square().sum())
        size = {name: stored.weight.numel() for name, stored in self.stored.items()}
        return sorted(loss, key=lambda name: (-loss[name] / size[name], name))

    def _theirs(self, name: str) -> dict[str, Tensor]:
        return source_tensors(self.config, name, self.stored[name].values(self.vectors.device))


def _look(
    changes: dict[str, Tensor],
    name: str,
    weight: Tensor,
    reads: Callable[[Tensor], Tensor],
    module: Any,
    given: Any,
    result: Tensor,
) -> Tensor:
    """A forward hook: the backward pass adds to `changes` how far the loss of this product moves each text."""
    with torch.no_grad(), altered(module, {"weight": weight}, {}):
        lost = module.forward(reads(given[0])) - result

    def told(gradient: Tensor) -> None:
        change = (lost * gradient).flatten(1).sum(1)
        changes[name] = changes[name] + change if name in changes else change

    if not result.requires_grad:
        result.requires_grad_()
    result.register_hook(told)
    return result * 1  # which may be changed in place


class TooFar(ValueError):
    """No choice of matrices that is allowed meets the gate."""


def choose(simulation: Simulation, asked: Limits) -> tuple[list[str], Measured, Measured]:
    """The matrices that stay, what is measured with them and what without. `TooFar` where half of the weights are not
    enough."""
    everything = simulation.measure()
    if everything.within(asked):
        return [], everything, everything
    spread = range(0, len(simulation.rows), max(1, 2 * len(simulation.rows) // _TELLING))
    order = simulation.by_loss(list(dict.fromkeys([*everything.order[: _TELLING // 2], *spread]))[:_TELLING])
    sizes = torch.tensor([simulation.stored[name].weight.numel() for name in order]).cumsum(0)
    fails, passes = 0, int((sizes <= MOST_LEFT_OUT * sizes[-1]).sum())
    best = simulation.measure(order[:passes])
    if not best.within(asked):
        raise TooFar(f"{everything} with all matrices, {best} without half of the weights")
    while passes - fails > 1:
        count = (fails + passes) // 2
        measured = simulation.measure(order[:count])
        if measured.within(asked):
            passes, best = count, measured
        else:
            fails = count
    return order[:passes], best, everything
