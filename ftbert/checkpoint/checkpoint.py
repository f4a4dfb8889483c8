"""A checkpoint ready to be read: its config and its tensors by our names, whatever format it came in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ftbert.checkpoint.config import CheckpointConfig
from ftbert.checkpoint.entity_head import EntityHead
from ftbert.checkpoint.model_config import ModelConfig
from ftbert.checkpoint.tensors import TensorSource, check_shapes
from ftbert.formats import numbers_of

# Makes one of our tensors from the source's, in float32.
Make = Callable[[ModelConfig, list[torch.Tensor]], torch.Tensor]


class RowOrder:
    """A Make whose rows are the source's in another order, whatever their type and width."""

    def __init__(self, of: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
        self.of = of

    def __call__(self, config: ModelConfig, parts: list[torch.Tensor]) -> torch.Tensor:
        return self.of(parts)


_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Checkpoint:
    """tensors[ours]: the names in `source` of the tensors that are stacked along the rows to make ours, or from which
    made[ours] makes it.

    Ours are the encoder's (csrc/model/weights.cpp) and the heads' (HeadConfig). in_int8: makes the same model with
    matrices in int8, where the source holds integers that this one reads as floats. tasks: opens the same model with
    the adapter of a task merged, by the task's name; task: of the one that is merged here, "" without. bare: the model
    is one without a task, too.
    """

    config: CheckpointConfig
    source: TensorSource
    tensors: dict[str, tuple[str, ...]]
    folder: Path | None  # where the tokenizer's files are
    made: dict[str, Make] = field(default_factory=dict)
    in_int8: Callable[[], Checkpoint] | None = None
    generation: dict[str, Any] | None = None  # of a live model: what its generation_config says
    entities: EntityHead | None = None  # of a GLiNER
    tasks: Mapping[str, Callable[[], Checkpoint]] = field(default_factory=dict)
    task: str = ""
    bare: bool = True

    def at(self, task: str) -> Checkpoint:
        """With the adapter of a task. ValueError lists those that there are."""
        if task == self.task:
            return self
        if task not in self.tasks:
            known = ", ".join(map(repr, self.tasks)) or "none: the files hold no adapters for tasks"
            raise ValueError(f"{self.source.where}: task {task!r} is none of the model's; they are: {known}")
        return self.tasks[task]()

    def told(self) -> dict[str, str]:
        """What `info` says of the source, and of its tasks."""
        return {**self.source.told(), **({"tasks": ", ".join(self.tasks)} if self.tasks else {})}

    def read(self, ours: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if ours in self.made:
            exact = [self._part(name, torch.float32).float() for name in self.tensors[ours]]
            return self.made[ours](self.config.encoder, exact).to(dtype)
        parts = [self._part(name, dtype).to(dtype) for name in self.tensors[ours]]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        if ours.endswith((".scale", ".input.smooth")):
            of_blocks = dtype == torch.float16  # that of a block of zeros is 0
            if not (whole.isfinite() & (whole >= 0 if of_blocks else whole > 0)).all():
                kind = "finite and not below 0" if of_blocks else "finite and above 0"
                raise ValueError(f"{self.source.where}: {ours}: scales are {kind}, and not all of these are")
        return whole

    def read_blocks(self, ours: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A matrix [n, k] as the source has it in Q8_0: numbers int8 [n, k], scales fp16 [n, k / 32]. None where a part
        is stored otherwise, or more than its rows' order changes."""
        make = self.made.get(ours, RowOrder(torch.cat))
        names = self.tensors[ours]
        if not isinstance(make, RowOrder) or not all(map(self.source.in_blocks, names)):
            return None
        numbers, scales = zip(*map(self.source.read_blocks, names), strict=True)
        config = self.config.encoder
        return make(config, list(numbers)), make(config, list(scales))

    def _part(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        part = self.source.read(name)
        if part.dtype != dtype and not {part.dtype, dtype} <= set(_REAL):
            raise ValueError(
                f"{self.source.where}: {name} is stored as {part.dtype}; quantized weights need their scales, and none "
                f"are read to make {dtype} of it: take the model that they were made from"
                if part.dtype not in _REAL
                else f"{self.source.where}: {name} is stored as {part.dtype}, where the config says {dtype}"
            )
        return part

    def items(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        for ours in self.tensors:
            yield ours, self.read(ours, dtype)

    def stored_items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each in the type in which it is stored: quantized matrices and their scales, and all else."""
        kept = {spec.name: numbers_of(spec.stored) for spec in self.config.encoder.weight_specs()}
        for ours in self.tensors:
            yield ours, self.read(ours, kept.get(ours) or self.stored_dtype)

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.source.read(next(iter(self.tensors.values()))[0]).dtype


def read_checkpoint(folder: Path, document: dict[str, Any], tensors: TensorSource) -> Checkpoint:
    """A folder in ftbert's own format. document: its config.json. ValueError lists what does not fit."""
    where = str(folder / "config.json")
    config = CheckpointConfig.parse(document, where)
    try:
        shapes = config.shapes()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if config.encoder.shard is not None or config.encoder.stage is not None:
        raise ValueError(f"{where}: encoder: shard and stage are of models in memory, which a folder holds whole")
    check_shapes(tensors.where, shapes, tensors.shapes(), ignored=set())
    return Checkpoint(config, tensors, {ours: (ours,) for ours in shapes}, folder)
