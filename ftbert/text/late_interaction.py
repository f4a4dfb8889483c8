"""Scores of texts token by token (ColBERT): MaxSim of lists of vectors, and of documents as a model computes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ftbert.packed_model import PackedModel
from ftbert.text.batching import Batch
from ftbert.text.computing import compute_all
from ftbert.text.encoding import tokenizer_of
from ftbert.text.multi_vector import batch_vectors, compared, multi_vector_embedding, skipped_ids
from ftbert.text.pooling import Upload
from ftbert.text.scoring import rank, to_rank
from ftbert.text.tokens import listed

# Types in which vectors are multiplied as they are; others become float32.
_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


def max_sim(one: Any, other: Any, name: str) -> Tensor:
    """Each query of `one` with each document of `other`, lists of [tokens, width] -> float32 [queries, documents]: over
    the query's tokens the sum of the largest product with one of the document's; -1e9 for a document without tokens.

    A single [tokens, width] counts as one of them, a tensor [n, tokens, width] as n. Vectors of float16, bfloat16 and
    int8 on both sides are multiplied as they are. name: "maxsim", or "meanmaxsim", divided by the query's tokens.
    ValueError for vectors of other shapes.
    """
    queries, documents = _both(one, other)
    found = torch.ops.ftbert.max_sim(*queries, *documents)
    return found / queries[1].diff()[:, None].clamp_min(1) if name == "meanmaxsim" else found  # type: ignore[no-any-return]


def max_sim_pairwise(one: Any, other: Any, name: str) -> Tensor:
    """`max_sim` of each query with the document in the same place -> float32 [n]."""
    queries, documents = _both(one, other)
    count = len(queries[1]) - 1
    if count != len(documents[1]) - 1:
        raise ValueError(f"expected as many documents as queries, {count}; got {len(documents[1]) - 1}")
    each = torch.arange(count, dtype=torch.int32, device=queries[0].device)
    found = torch.ops.ftbert.max_sim(*queries, *documents, each)
    return found / queries[1].diff().clamp_min(1) if name == "meanmaxsim" else found  # type: ignore[no-any-return]


def compares_tokens(model: PackedModel) -> bool:
    """Whether the model's folder is for vectors of tokens and nothing else."""
    if model.folder is None:
        return False
    settings = tokenizer_of(model).settings
    return bool(settings.other) and settings.multi is not None


def rerank_tokens(
    model: PackedModel, query: str, texts: Iterable[str], top_k: int | None, return_documents: bool,
    options: Mapping[str, Any],
) -> list[dict[str, Any]]:  # fmt: skip
    """`ftbert.Model.rerank` of such a model. TypeError for an option that it has not."""
    known = ("max_length", "batch_size", "max_tokens", "show_progress_bar")
    if odd := [name for name, value in options.items() if name not in known and value not in (None, False)]:
        words = f"rerank by vectors of tokens has no argument {odd[0]!r}"
        raise TypeError(f"{words}; it has {', '.join(known)}, top_k and return_documents")
    kept = {name: value for name, value in options.items() if name in known}
    shown = kept.pop("show_progress_bar", None)
    given = to_rank(query, texts, top_k)
    return rank(_scores(model, query, given, shown, **kept), given, top_k, return_documents)


def _scores(
    model: PackedModel, query: str, texts: Sequence[str], show_progress_bar: bool | None, **given: Any
) -> NDArray[np.float32]:
    """float32 numpy [texts]: MaxSim of the query with each text, whose vectors stay where they are computed. given: of
    `TextOptions.choose`, for the texts."""
    work = multi_vector_embedding(model, task="document", **given)
    vectors = compute_all(model, [query], multi_vector_embedding(model, task="query"), False)[0]
    tokenizer = tokenizer_of(model)
    settings = tokenizer.settings.multi
    assert settings is not None
    skipped = skipped_ids(tokenizer, settings, "document")
    offsets = np.array([0, len(vectors)], dtype=np.int32)

    def compute(model: PackedModel, batch: Batch, upload: Upload) -> Tensor:
        found = batch_vectors(model, batch, upload, settings)
        rows, cu = compared(found, batch.ids, batch.cu_seqlens, skipped, settings.first, upload)
        query = upload(vectors), upload(offsets)
        return torch.ops.ftbert.max_sim(*query, rows, upload(cu))[0, :, None]  # type: ignore[no-any-return]

    work = replace(work, compute=compute, parts=None, width=1)
    return compute_all(model, texts, work, show_progress_bar)[:, 0]  # type: ignore[no-any-return]


def _both(one: Any, other: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Packed, with offsets, on one device and in one type that has kernels."""
    left, right = _tensors(one), _tensors(other)
    width = {int(part.shape[-1]) for part in (*left, *right)}
    if len(width) > 1:
        raise ValueError(f"vectors of tokens must have one width; got {', '.join(map(str, sorted(width)))}")
    types = {part.dtype for part in (*left, *right)}
    dtype = types.pop() if len(types) == 1 and types <= set(_TYPES) else torch.float32
    places = [part.device for part in (*left, *right)]
    device = next((place for place in places if place.type != "cpu"), torch.device("cpu"))
    columns = width.pop() if width else 1
    return _packed(left, device, dtype, columns), _packed(right, device, dtype, columns)


def _packed(parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)
    rows = torch.cat([part.to(device, dtype) for part in parts]) if parts else torch.empty(0, width, dtype=dtype)
    return rows.to(device).contiguous(), torch.from_numpy(offsets).to(device)


def _tensors(values: Any) -> list[Tensor]:
    """[tokens, width] each. ValueError for other shapes."""
    axes = getattr(values, "ndim", 0)
    given = [values] if axes == 2 else list(values) if axes == 3 else listed(values)
    found = [one if isinstance(one, Tensor) else torch.from_numpy(np.asarray(one)) for one in given]
    for one in found:
        if one.ndim != 2 or not one.shape[1]:
            raise ValueError(
                f"expected vectors of tokens, a list of [tokens, width] as encode_multi_vector gives them; got one of "
                f"shape {list(one.shape)}"
            )
    return found
