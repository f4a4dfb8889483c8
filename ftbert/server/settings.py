"""What the server can be told: one table of flags, each with its variable of the environment and its default.

Names are those of text-embeddings-inference (TEI) where it has the flag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Every choice made. models: (name, folder or hub id), the first is the default one. devices: an engine for each,
    or with `parallel` (as of ftbert.load) one over all.

    None: chosen when the server starts. See FLAGS for the meaning of the others.
    """

    models: tuple[tuple[str, str], ...]
    devices: tuple[str, ...] = ("cpu",)
    dtype: str | None = None
    parallel: str | None = None
    revision: str | None = None
    hostname: str = "127.0.0.1"
    port: int = 3000
    workers: int | None = None
    api_key: str | None = None
    cors_allow_origin: str | None = None
    max_concurrent_requests: int = 4096
    max_batch_tokens: int = 16384
    max_batch_requests: int | None = None
    batch_tokens: int | None = None
    max_client_batch_size: int = 2048
    payload_limit: int = 32_000_000
    answer_limit: int = 500_000_000
    max_queue_seconds: float = 2.0
    max_queue_tokens: int = 8_000_000
    request_timeout: float = 30.0
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    keep_alive: float = 75.0
    drain_delay: float = 0.0
    shutdown_timeout: float = 30.0
    auto_truncate: bool = True
    pooling: str | None = None
    default_prompt: str | None = None
    default_prompt_name: str | None = None
    tokenization_workers: int = 2
    json_output: bool = False
    access_log: bool = False

    @property
    def engines(self) -> tuple[str, ...]:
        """Where each engine of a model computes: a device, or several with commas."""
        return self.devices if self.parallel is None else (",".join(self.devices),)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        values = json.loads(text)
        values["models"] = tuple((str(name), str(source)) for name, source in values["models"])
        values["devices"] = tuple(values["devices"])
        return cls(**values)


@dataclass(frozen=True)
class Flag:
    """name: as on the command line, without dashes; in the environment it is upper case with underscores. least, most:
    of a number; a float may be any above 0 where it may be 1. also: other names on the command line."""

    name: str
    kind: type
    text: str
    in_environment: bool = True
    least: int = 1
    most: int | None = None
    also: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def default(self) -> Any:
        return next(field.default for field in fields(Settings) if field.name == self.field)

    def parse(self, text: str) -> Any:
        """ValueError for what is no value of its kind."""
        if self.kind is bool:
            if text.lower() not in ("true", "false", "1", "0"):
                raise ValueError(f"{self.name}: expected true or false; got {text!r}")
            return text.lower() in ("true", "1")
        if self.kind is str:
            return text
        try:
            value = self.kind(text)
        except ValueError:
            raise ValueError(f"{self.name}: expected a number; got {text!r}") from None
        small = value < self.least and not (self.kind is float and value > 0)
        if small or value != value or value == float("inf") or (self.most is not None and value > self.most):
            wanted = f"of at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            raise ValueError(f"{self.name}: expected a number {wanted}; got {text!r}")
        return value


FLAGS = (
    # Docker sets HOSTNAME to the name of the container, which is not the address to listen on.
    Flag("hostname", str, "address to listen on; 0.0.0.0: for other machines", in_environment=False, also=("host",)),
    Flag("port", int, "0: any free one", least=0, most=65535),
    Flag("revision", str, "of a hub id: branch, tag or commit (default: its main branch)"),
    Flag("workers", int, "processes for HTTP and tokenising; 0: all in one process (default: 0 on the CPU)", least=0),
    Flag("api-key", str, "asked of every request but health, metrics and the page"),
    Flag("cors-allow-origin", str, "origins that a browser may call from, with commas; * for any"),
    Flag("max-concurrent-requests", int, "of one worker; more are answered 429"),
    Flag("max-batch-tokens", int, "most tokens computed at once"),
    Flag("max-batch-requests", int, "most texts computed at once"),
    Flag("batch-tokens", int, "tokens computed at once (default: timed at the start)"),
    Flag("max-client-batch-size", int, "most texts of a request"),
    Flag("payload-limit", int, "most bytes of a request"),
    Flag("answer-limit", int, "most bytes of memory that an answer may take while it is made"),
    Flag("max-queue-seconds", float, "a request that would wait longer is answered 429"),
    Flag("max-queue-tokens", int, "most tokens that wait for an engine"),
    Flag("request-timeout", float, "seconds until a request is answered 503; the header x-request-timeout lowers it"),
    Flag("header-timeout", float, "seconds in which a request's head must arrive"),
    Flag("body-timeout", float, "seconds in which its body must arrive"),
    Flag("keep-alive", float, "seconds that an idle connection is kept"),
    Flag("drain-delay", float, "seconds between SIGTERM and the end of accepting", least=0),
    Flag("shutdown-timeout", float, "seconds that requests may take to finish after SIGTERM", least=0),
    Flag("auto-truncate", bool, "cut texts that are too long, where the request does not say"),
    Flag("pooling", str, "as in encode: cls, mean, last, ..., or several as cls+mean (default: the model's)"),
    Flag("default-prompt", str, "put before every text"),
    Flag("default-prompt-name", str, "one of the model's prompts"),
    Flag("tokenization-workers", int, "threads of one worker that tokenise"),
    Flag("json-output", bool, "log lines as JSON"),
    Flag("access-log", bool, "a log line for each answer: method, path, status, bytes, seconds, model"),
)


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Values by field of what the environment sets. ValueError names the variable."""
    found = {}
    for flag in FLAGS:
        text = environment.get(flag.field.upper()) if flag.in_environment else None
        if text:
            try:
                found[flag.field] = flag.parse(text)
            except ValueError as error:
                raise ValueError(f"in the environment: {error}") from None
    return found
