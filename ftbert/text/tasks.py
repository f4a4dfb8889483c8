"""Which adapter computes texts for a task, and which prompt stands before them."""

from __future__ import annotations

from collections.abc import Mapping

from ftbert.packed_model import PackedModel

# Adapters for what encode_query and encode_document name: of jina-embeddings-v3, its transformers form, and v5.
_ADAPTERS = {
    "query": ("retrieval.query", "retrieval_query", "retrieval"),
    "document": ("retrieval.passage", "retrieval_passage", "retrieval"),
}


def adapter_for(model: PackedModel, task: str | None) -> str:
    """The name of the task whose adapter computes texts for `task`, "" for weights without one. ValueError lists the
    tasks that there are."""
    tasks, loaded = model.checkpoint.tasks, model.checkpoint.task
    if task in tasks:
        return str(task)
    listed = ", ".join(map(repr, tasks))
    if task is not None and task not in _ADAPTERS:
        known = f"'query', 'document', {listed}{', ' if tasks else ''}"
        raise ValueError(f"task must be {known.removesuffix(', ')} or None; got {task!r}")
    found = next((one for one in _ADAPTERS.get(task or "", ()) if one in tasks), loaded)
    if not found and not model.checkpoint.bare:
        raise ValueError(f"this model has an adapter for each task and computes nothing without: give task, {listed}")
    return found


def prompt_for(task: str | None, adapter: str, prompts: Mapping[str, str]) -> str | None:
    """The name of the prompt for texts of a task, the first of its own and its adapter's that is not empty; None where
    neither has one."""
    if not adapter:
        return task
    named = [one for one in (task, adapter) if one is not None and one in prompts]
    return next((one for one in named if prompts[one]), named[0] if named else None)
