"""Headers that let a page from elsewhere call the server."""

from __future__ import annotations

from ftbert.server.messages import Request
from ftbert.server.settings import Settings


def cors_headers(settings: Settings, request: Request, preflight: bool = False) -> list[tuple[str, str]]:
    """Empty without the setting, or for an origin that it does not name."""
    if settings.cors_allow_origin is None:
        return []
    allowed = [one.strip() for one in settings.cors_allow_origin.split(",")]
    origin = request.header(b"origin")
    if "*" not in allowed and origin not in allowed:
        return [("vary", "origin")]
    found = [("access-control-allow-origin", "*" if "*" in allowed else origin), ("vary", "origin")]
    exposed = "x-compute-time, x-compute-tokens, x-queue-time, x-inference-time, x-tokenization-time, retry-after"
    if not preflight:
        return [*found, ("access-control-expose-headers", exposed)]
    return [
        *found,
        ("access-control-allow-methods", "GET, POST, OPTIONS"),
        ("access-control-allow-headers", "authorization, content-type, x-request-timeout"),
        ("access-control-max-age", "86400"),
    ]
