"""Azure's paths: a deployment's name in the path is the model's, whatever the body says."""

from __future__ import annotations

from urllib.parse import unquote

from ftbert.server import embed_routes
from ftbert.server.app import App
from ftbert.server.json_bodies import decode
from ftbert.server.messages import Request, Response
from ftbert.server.schemas import OpenAIEmbed


async def embeddings(app: App, request: Request) -> Response:
    """/openai/deployments/{deployment}/embeddings"""
    body = decode(request.body, OpenAIEmbed)
    body.model = unquote(request.path.split("/")[3])
    return await embed_routes.embeddings.answer(app, request, body, app.model(body.model))
