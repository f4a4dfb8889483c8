"""/models/load and /models/unload, as llama.cpp's router has them."""

from __future__ import annotations

from ftbert.server.app import App
from ftbert.server.errors import ApiError
from ftbert.server.json_bodies import decode, to_json
from ftbert.server.messages import Request, Response
from ftbert.server.on_demand import OnDemand
from ftbert.server.schemas import NamedModel
from ftbert.server.served_model import ServedModel


async def load(app: App, request: Request) -> Response:
    """Answers at once: `status` of /v1/models says when the model is there."""
    models, model = _asked(app, request)
    models.load(model)
    return Response(to_json({"success": True}))


async def unload(app: App, request: Request) -> Response:
    models, model = _asked(app, request)
    models.unload(model)
    return Response(to_json({"success": True}))


def _asked(app: App, request: Request) -> tuple[OnDemand, ServedModel]:
    """ApiError 404 for another name than those that the server has had from the start, 501 without --models-dir."""
    if app.on_demand is None:
        raise ApiError("Unsupported", "models are loaded and unloaded where the server was started with --models-dir")
    return app.on_demand, app.named(decode(request.body, NamedModel).model)
