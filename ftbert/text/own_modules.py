"""Modules with code in a model's folder that ftbert knows, and prompts that a model's own code puts before texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftbert.own_classes import named_classes
from ftbert.sentence_modules import Module

_TRANSFORMER = "custom_st.Transformer"
_JINA_3, _JINA_5 = "XLMRobertaLoRA", "JinaEmbeddingsV5Model"


def known_modules(modules: Sequence[Module], config: Any) -> tuple[list[Module], dict[str, Any] | None]:
    """The modules with those of Jina's under sentence-transformers' names; of the class that pools by itself also how,
    as entries of `TextSettings`, else None. config: of the model."""
    found = list(modules)
    if not found or found[0].full != _TRANSFORMER or not isinstance(config, dict):
        return found, None
    names = {name.rpartition(".")[2] for name in named_classes(config)}
    if names & {_JINA_3, _JINA_5}:
        found[0] = replace(found[0], kind="Transformer")
    whole = _JINA_5 in names and len(found) == 1
    return found, {"pooling": "last", "normalize": True} if whole else None


def task_prompts(config: Any) -> Mapping[str, str]:
    """By the names of tasks, as jina-embeddings-v3's config.json has them. ValueError for what are no texts."""
    found = config.get("task_instructions") if isinstance(config, dict) else None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise ValueError(f"config.json: task_instructions must be an object of texts; got {found!r}")
    return found
