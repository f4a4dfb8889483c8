"""Which vectors a file gets, and what is computed for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftbert.packed_model import PackedModel

VECTORS = ("dense", "sparse", "multi")
# What shapes dense vectors alone, as embed_file has it by default.
_USUAL = {"normalize": True, "pooling": None, "truncate_dim": None, "long_texts": "truncate"}


def vectors_of(
    model: PackedModel, kind: str | None, given: dict[str, Any], shape: dict[str, Any], precision: str, target: Path
) -> tuple[str, Any, Any]:
    """One of VECTORS, the `Work` that computes them, and the `TextOptions` behind it. kind: None for those that the
    model is for. given: options of all kinds; shape, precision: of dense ones. ValueError where they do not fit."""
    from ftbert.text import embedding, multi_vector_embedding, sparse_embedding, text_options, tokenizer_of

    if kind is not None and kind not in VECTORS:
        raise ValueError(f"vectors must be one of {', '.join(VECTORS)}; got {kind!r}")
    settings = tokenizer_of(model).settings
    if kind is None:
        kind = "dense" if not settings.other else "sparse" if settings.sparse is not None else "multi"
    if kind == "dense":
        how = text_options(model, **given, **shape)
        return kind, embedding(model, how), how
    if other := [name for name, value in shape.items() if value != _USUAL[name]]:
        raise ValueError(f"{other[0]} is for dense vectors, these are {kind} ones")
    if precision != "float32":
        raise ValueError(f"precision {precision} is for dense vectors, these are {kind} ones")
    if target.suffix == ".npy":
        raise ValueError(f"{target}: a .npy holds dense vectors alone, these are {kind} ones; write .jsonl or .parquet")
    how = text_options(model, vectors=kind, **given)
    return kind, (sparse_embedding if kind == "sparse" else multi_vector_embedding)(model, **given), how
