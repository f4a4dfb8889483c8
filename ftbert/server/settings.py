"""What the server can be told: one table of flags, each with its default and its variable of the environment.

Names are those of text-embeddings-inference (TEI) where it has the flag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_KINDS = {one.__name__: one for one in (str, int, float, bool)}


def _flag(default: Any, text: str, **more: Any) -> Any:
    """A field of Settings that is a Flag, too."""
    return field(default=default, metadata={"text": text, **more})


@dataclass(frozen=True)
class Settings:
    """Every choice made. models: (name, folder or hub id), the first is the default one. devices: an engine for each,
    or with `parallel` (as of ftbert.load) one over all.

    None: chosen when the server starts. FLAGS are made of all fields with a text.
    """

    models: tuple[tuple[str, str], ...]
    devices: tuple[str, ...] = ("cpu",)
    dtype: str | None = None
    parallel: str | None = None
    on_demand: int = 0  # so many of the last models are of models_dir
    # Docker sets HOSTNAME to the name of the container, which is not the address to listen on.
    hostname: str = _flag(
        "127.0.0.1", "address to listen on; 0.0.0.0: for other machines", in_environment=False, also=("host",)
    )
    port: int = _flag(3000, "0: any free one", least=0, most=65535)
    revision: str | None = _flag(None, "of a hub id: branch, tag or commit (default: its main branch)")
    workers: int | None = _flag(
        None,
        "processes for HTTP and tokenising; 0: all in one process (default: 0 on the CPU, else of three quarters "
        "of the cores, at most 12)",
        least=0,
    )
    model_memory_limit: int | None = _flag(None, "most bytes of a model's weights; a model with more is not loaded")
    models_dir: str | None = _flag(None, "folder of models that requests load and unload by name: /models/load")
    models_max: int = _flag(4, "most of these that are loaded at the same time; 0: any number", least=0)
    models_autoload: bool = _flag(False, "a request for one of these that is not loaded loads it, and is answered 503")
    api_key: str | None = _flag(None, "asked of every request but probes, metrics, the page and /docs")
    cors_allow_origin: str | None = _flag(None, "origins that a browser may call from, with commas; * for any")
    max_concurrent_requests: int = _flag(4096, "of one worker; more are answered 429")
    max_batch_tokens: int = _flag(16384, "most tokens computed at once")
    max_batch_requests: int | None = _flag(None, "most texts computed at once")
    batch_tokens: int | None = _flag(None, "tokens computed at once (default: timed at the start)")
    generation_slots: int = _flag(
        4, "texts that an engine of a language model writes at the same time; 0: none", least=0, most=1024,
        also=("max-num-seqs",),
    )  # fmt: skip
    max_model_len: int | None = _flag(
        None, "most tokens of a text that is written, prompt included (default: the model's, at most 4096)"
    )
    max_client_batch_size: int = _flag(2048, "most texts of a request")
    payload_limit: int = _flag(32_000_000, "most bytes of a request")
    answer_limit: int = _flag(500_000_000, "most bytes of memory that an answer may take while it is made")
    max_queue_seconds: float = _flag(2.0, "a request that would wait longer is answered 429")
    max_queue_tokens: int = _flag(8_000_000, "most tokens that wait for an engine")
    request_timeout: float = _flag(
        30.0, "seconds until a request is answered 503; the header x-request-timeout lowers it"
    )
    header_timeout: float = _flag(10.0, "seconds in which a request's head must arrive")
    body_timeout: float = _flag(60.0, "seconds in which its body must arrive")
    keep_alive: float = _flag(75.0, "seconds that an idle connection is kept")
    drain_delay: float = _flag(0.0, "seconds between SIGTERM and the end of accepting", least=0)
    shutdown_timeout: float = _flag(30.0, "seconds that requests may take to finish after SIGTERM", least=0)
    auto_truncate: bool = _flag(True, "cut texts that are too long, where the request does not say")
    pooling: str | None = _flag(
        None, "as in encode: cls, mean, last, ..., or several as cls+mean (default: the model's)"
    )
    default_prompt: str | None = _flag(None, "put before every text")
    default_prompt_name: str | None = _flag(None, "one of the model's prompts")
    task: str | None = _flag(
        None, "of a model with an adapter for each: that of requests which name none", in_environment=False
    )
    tokenization_workers: int = _flag(2, "threads of one worker that tokenise")
    json_output: bool = _flag(False, "log lines as JSON")
    otlp_endpoint: str | None = _flag(None, "URL of an OpenTelemetry collector (HTTP) for traces of requests")
    otlp_service_name: str = _flag("ftbert", "the server's name in traces")
    access_log: bool = _flag(False, "a log line for each answer: method, path, status, bytes, seconds, model")

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
    default: Any = None

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

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


FLAGS = tuple(
    Flag(one.name.replace("_", "-"), _KINDS[str(one.type).partition(" ")[0]], default=one.default, **one.metadata)
    for one in fields(Settings) if one.metadata
)  # fmt: skip


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
