"""Chat templates in a GGUF file: tokenizer.chat_template, and tokenizer.chat_template.tool_use and others by name."""

from __future__ import annotations

import json
import re
from typing import Any

_KEY = "tokenizer.chat_template"
# llama.cpp's template of a reranker is no Jinja: texts stand where it has these.
_RERANK, _PLACES = "rerank", re.compile(r"\{(query|document)\}")


def chat_template(metadata: dict[str, Any]) -> str | list[dict[str, str]] | None:
    """What tokenizer_config.json says of them: one text, or several by name. Of a reranker's file its own alone."""
    said = {key[len(_KEY) + 1 :]: value for key, value in metadata.items() if key == _KEY or key.startswith(_KEY + ".")}
    found = {name or "default": value for name, value in said.items() if isinstance(value, str)}
    if _RERANK in found:
        return _in_jinja(found[_RERANK])
    if set(found) <= {"default"}:
        return found.get("default")
    names = sorted(found, key=lambda name: (name != "default", name))
    return [{"name": name, "template": found[name]} for name in names]


def _in_jinja(template: str) -> str:
    """For messages of the roles query and document."""
    parts = _PLACES.split(template)  # text, role, text, role, ...
    return "".join(
        f"{{{{ (messages | selectattr('role', 'eq', '{part}') | first).content }}}}" if i % 2 else
        f"{{{{ {json.dumps(part)} }}}}" if part else ""
        for i, part in enumerate(parts)
    )  # fmt: skip
