"""A worker's side of the models of --models-dir: what requests may load and unload."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ftbert.server.catalogue import Catalogue
from ftbert.server.errors import ApiError, validation
from ftbert.server.served_model import ServedModel

_FOLLOW = 0.05  # seconds between two looks at what other workers were asked for


class OnDemand:
    """models: all of the server. autoload: a request for one that is not loaded loads it. Only the event loop's thread
    calls it."""

    def __init__(self, models: Sequence[ServedModel], catalogue: Catalogue, autoload: bool) -> None:
        self._catalogue, self._autoload = catalogue, autoload
        self._models = {model.name: (i, model) for i, model in enumerate(models) if i >= catalogue.first}
        for _, model in self._models.values():
            model.resident = False
            model.want(False)

    async def follow(self) -> None:
        """For ever."""
        while True:
            wanted = self._catalogue.wanted()
            for i, model in self._models.values():
                model.want(i in wanted)
            await asyncio.sleep(_FOLLOW)

    def holds(self, model: ServedModel) -> bool:
        return model.name in self._models

    def load(self, model: ServedModel) -> None:
        """Begins it. ApiError 422 for a model of the command line, 429 where as many as may be are loaded."""
        i, _ = self._place(model)
        if not self._catalogue.want(i):
            loaded = ", ".join(name for name, (i, _) in self._models.items() if i in self._catalogue.wanted())
            raise ApiError("Overloaded", f"as many models are loaded as may be (models-max): {loaded}; unload one",
                           retry_after=1.0)  # fmt: skip
        model.want(True)

    def unload(self, model: ServedModel) -> None:
        """Requests that it has are answered. ApiError 422 for a model of the command line."""
        self._catalogue.drop(self._place(model)[0])
        model.want(False)

    def absent(self, model: ServedModel) -> ApiError:
        """The answer to a request for a model that is not loaded."""
        if self._autoload and self._catalogue.failure(self._place(model)[0]) is None:
            self.load(model)
            return ApiError("Unhealthy", f"the model {model.name!r} is loading", retry_after=1.0)
        words = f"the model {model.name!r} is not loaded: POST /models/load loads it"
        return ApiError("Validation", words, status=404, param="model", code="model_not_loaded")

    def status(self, model: ServedModel) -> dict[str, Any]:
        """As llama.cpp's router has it; `error` is ours."""
        failed = self._catalogue.failure(self._models[model.name][0]) if self.holds(model) else None
        if failed is None:
            return {"value": model.state}
        return {"value": model.state, "failed": True, "exit_code": failed[0], "error": failed[1]}

    def _place(self, model: ServedModel) -> tuple[int, ServedModel]:
        if not self.holds(model):
            raise validation(f"the model {model.name!r} is of the command line: it stays loaded", param="model")
        return self._models[model.name]
