"""Errors that a client sees: status, type and words, as TEI's routes and as OpenAI's give them."""

from __future__ import annotations

import math

import orjson

# TEI's error_type -> the status that it is sent with, and the label of te_request_failure.
_TYPES = {
    "Empty": (400, "validation"),
    "Validation": (422, "validation"),
    "Tokenizer": (422, "tokenization"),
    "Backend": (424, "inference"),
    "Unsupported": (501, "model_type"),
    "Overloaded": (429, "overloaded"),
    "Unhealthy": (503, "dropped"),
}
_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable", 500: "server_error"}


class ApiError(Exception):
    """What is answered instead of a result. counted: its label in te_request_failure, one of metrics.ERRORS.
    allow: methods that the path has."""

    def __init__(
        self,
        kind: str,
        words: str,
        *,
        status: int | None = None,
        counted: str | None = None,
        retry_after: float = 0.0,
        param: str | None = None,
        code: str | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(words)
        default, label = _TYPES[kind]
        self.kind, self.words = kind, words
        self.status = default if status is None else status
        self.counted = counted or label
        self.retry_after, self.param, self.code, self.allow = retry_after, param, code, allow

    def body(self, openai: bool) -> bytes:
        """openai: the routes of OpenAI, Cohere and vLLM. Their body has OpenAI's object, TEI's fields and
        `detail`, where clients of Voyage and Jina look: without it they do not see that they are to try again."""
        if not openai:
            return orjson.dumps({"error": self.words, "error_type": self.kind})
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error")
        inner = {"message": self.words, "type": kind, "param": self.param, "code": self.code}
        told = {"error": inner, "message": self.words, "code": self.status, "type": self.kind, "detail": self.words}
        return orjson.dumps(told)

    def headers(self) -> list[tuple[str, str]]:
        found = [("retry-after", str(max(1, math.ceil(self.retry_after))))] if self.retry_after else []
        found += [("allow", self.allow)] if self.allow else []
        return found + ([("www-authenticate", "Bearer")] if self.status == 401 else [])


def validation(words: str, *, param: str | None = None) -> ApiError:
    """422 in TEI's words."""
    return ApiError("Validation", f"Input validation error: {words}", param=param)


def too_many(words: str) -> ApiError:
    return ApiError("Validation", f"Input validation error: {words}", counted="batch_size")


def too_large(limit: int) -> ApiError:
    words = f"the request has more than {limit} bytes (payload-limit)"
    return ApiError("Validation", words, status=413, counted="validation")


def of_failure(status: int, words: str, retry_after: float) -> ApiError:
    """What an engine's Failure is for a client."""
    kind = {413: "Validation", 422: "Validation", 429: "Overloaded", 503: "Unhealthy"}.get(status, "Backend")
    return ApiError(kind, words, status=status, retry_after=retry_after)
