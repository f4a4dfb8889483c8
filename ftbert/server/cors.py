"""Headers that let a page from elsewhere call the server."""

from __future__ import annotations

import re

from ftbert.server.messages import Request
from ftbert.server.settings import Settings

# What a browser asks leave for: names of headers, at most 64 of them in a kilobyte.
_NAMES = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+){0,63}")
_LONGEST = 1024
_USUAL = "authorization, content-type, x-request-timeout"


def cors_headers(settings: Settings, request: Request, preflight: bool = False) -> list[tuple[str, str]]:
    """Empty without the setting, or for an origin that it does not name."""
    if settings.cors_allow_origin is None:
        return []
    allowed = [one.strip() for one in settings.cors_allow_origin.split(",")]
    origin = request.header(b"origin")
    if "*" not in allowed and origin not in allowed:
        return [("vary", "origin")]
    vary = ("vary", "origin, access-control-request-headers" if preflight else "origin")
    found = [("access-control-allow-origin", "*" if "*" in allowed else origin), vary]
    exposed = "x-compute-time, x-compute-tokens, x-queue-time, x-inference-time, x-tokenization-time, retry-after"
    if not preflight:
        return [*found, ("access-control-expose-headers", exposed)]
    asked = request.header(b"access-control-request-headers")
    return [
        *found,
        ("access-control-allow-methods", "GET, POST, OPTIONS"),
        # Clients add some of their own, as openai's x-stainless-...; the key is checked, whatever they are.
        ("access-control-allow-headers", asked if len(asked) <= _LONGEST and _NAMES.fullmatch(asked) else _USUAL),
        ("access-control-max-age", "86400"),
    ]
