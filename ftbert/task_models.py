"""The part of Model that has other weights for each task: adapters, of which each is merged once."""

from __future__ import annotations

import threading
from typing import Any

from ftbert.building import build
from ftbert.packed_model import PackedModel, kept
from ftbert.replicas import replicate

_MERGING = threading.Lock()


class TaskModels(PackedModel):
    """What `ftbert.Model` inherits."""

    def for_task(self, task: str) -> Any:
        """The same model with the adapter of `task` merged, in its dtype on its devices; merged when first asked for,
        and kept. RuntimeError where one model lies on several devices."""
        if task == self.checkpoint.task:
            return self

        def make() -> Any:
            if not self.encoder.whole():
                raise RuntimeError(f"this model lies on several devices as one: ftbert.load(..., task={task!r})")
            model: Any = self
            asked = model.info()
            path = asked["attention"] if asked["attention_reason"] == "asked for" else "auto"
            built = build(self.checkpoint.at(task), model.devices[:1], self.dtype, path, bool(self.heads))
            return replicate(type(model)(*built), model.devices[1:])

        with _MERGING:
            return kept(self, ("task", task), make)
