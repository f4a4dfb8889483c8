"""The metadata of a GGUF file by the short keys of its architecture, each of the type that it must have."""

from __future__ import annotations

from typing import Any

import numpy as np

from ftbert.checkpoint import typed
from ftbert.converters.gguf_file import GgufFile

_MISSING: Any = object()


class Metadata:
    """of: the file. `number("rope.freq_base")` is its llama.rope.freq_base."""

    def __init__(self, of: GgufFile) -> None:
        self.of, self.arch = of, str(of.metadata.get("general.architecture"))
        self._read: set[str] = set()

    def raw(self, key: str) -> Any:
        self._read.add(key)
        return self.of.metadata.get(f"{self.arch}.{key}")

    def unread(self) -> list[str]:
        """The short keys of entries that nobody has asked for."""
        prefix = f"{self.arch}."
        keys = [key.removeprefix(prefix) for key in self.of.metadata if key.startswith(prefix)]
        return [key for key in keys if key not in self._read]

    def count(self, key: str, default: Any = _MISSING) -> Any:
        """A whole number of at least 0, `default` where there is none. ValueError names it."""
        value = self._value("int", key, default)
        if type(value) is int and value < 0:
            raise ValueError(f"{self.arch}.{key}: expected at least 0, got {value}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """A number, files have float32, as the shortest decimal that is the same: 1e-5, not 9.999999747378752e-06."""
        value = self._value("float", key, default)
        return float(str(np.float32(value))) if isinstance(value, float) and abs(value) < 3e38 else value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._value("bool", key, default))

    def text(self, key: str, default: str) -> str:
        return str(self._value("str", key, default))

    def rows(self, tensor: str) -> int:
        """Of a table, 0 where it is not there. ggml writes no last side that is 1: a row alone is a vector."""
        found = self.of.tensors.get(f"{tensor}.weight")
        return 0 if found is None else found.shape[0] if len(found.shape) > 1 else 1

    def has(self, tensor: str) -> bool:
        return tensor in self.of.tensors

    def token(self, name: str) -> int | None:
        """The id of a special token ("padding"), None where there is none in the vocabulary."""
        value = self.of.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < self.rows("token_embd") else None

    def _value(self, kind: str, key: str, default: Any) -> Any:
        full = f"{self.arch}.{key}"
        self._read.add(key)
        value = self.of.metadata.get(full, default)
        if value is _MISSING:
            raise ValueError(f"its metadata lack {full}")
        return value if value is default else typed(kind, full, value)
