"""What `encode` returns beside pooled vectors, and in which form: arrays, tensors, all that is known of each text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ftbert.packed_model import PackedModel
from ftbert.text.batching import Batch
from ftbert.text.checks import one_of
from ftbert.text.computing import Work
from ftbert.text.encoding import embedding, finished, tokenizer_of
from ftbert.text.late_chunks import takes_chunks
from ftbert.text.options import TextOptions
from ftbert.text.pooling import Upload, pooled_rows, token_states
from ftbert.text.precision import PRECISIONS

VECTORS, STATES = "sentence_embedding", "token_embeddings"


def check_output(output_value: Any, long_texts: str, precision: str) -> bool:
    """Whether states of tokens are asked for alone. ValueError for what is no output, or does not go with it."""
    if output_value is not None and output_value not in (VECTORS, STATES):
        raise ValueError(f"output_value must be {VECTORS!r}, {STATES!r} or None; got {output_value!r}")
    one_of(PRECISIONS, "precision", precision)
    if output_value != VECTORS and long_texts != "truncate":
        raise ValueError(f"long_texts={long_texts!r} is of pooled vectors alone; it does not go with output_value="
                         f"{output_value!r}")  # fmt: skip
    if output_value is None and precision != "float32":
        raise ValueError(f"precision={precision!r} is of pooled vectors alone; it does not go with output_value=None")
    return bool(output_value == STATES)


def every_output(model: PackedModel, how: TextOptions) -> Work:
    """A dict for each text, as `Model.encode` describes it for output_value None, of numpy arrays. ValueError for a
    model whose vectors are no pooled states of tokens."""
    tokenizer = tokenizer_of(model)
    if not takes_chunks(tokenizer.settings):
        raise ValueError("output_value=None is for models that pool the states of tokens, and this one does not")
    typed = "token_type_ids" in tokenizer.loaded.model_input_names
    more = {"prompt_length": tokenizer.prompt_tokens(how.prompt)} if how.prompt else {}
    width = tokenizer.settings.state_width(model.config.hidden)

    def compute(model: PackedModel, batch: Batch, upload: Upload) -> torch.Tensor:
        hidden = model.forward_packed(upload(batch.ids), upload(batch.cu_seqlens), batch.longest)
        lengths = np.diff(batch.cu_seqlens).astype(np.int64)
        vectors = finished(pooled_rows(model, hidden, lengths, how.pooling, upload, how.unpooled_tokens), how)
        return torch.cat([token_states(model, hidden).flatten(), vectors.flatten()])

    def parts(batch: Batch, found: NDArray[np.float32]) -> Iterator[dict[str, Any]]:
        states = found[: len(batch.ids) * width].reshape(-1, width)
        vectors = found[states.size :].reshape(-1, how.width)
        ends = batch.cu_seqlens.tolist()
        for row, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            ids = batch.ids[start:end].copy()
            types = {"token_type_ids": np.zeros_like(ids)} if typed else {}
            yield {"input_ids": ids, **types, "attention_mask": np.ones_like(ids), "modality": "text", **more,
                   STATES: states[start:end].copy(), VECTORS: vectors[row].copy()}  # fmt: skip

    plain = embedding(model, how)
    return Work(compute, plain.tokenise, plain.width, parts, plain.max_tokens, plain.batch_size)


def on_device(found: Any, device: torch.device) -> Any:
    """The dict of a text, or a list of them, with its arrays as tensors there."""
    if isinstance(found, list):
        return [on_device(one, device) for one in found]
    return {
        name: torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
        for name, value in found.items()
    }


def as_asked(found: Any, device: torch.device, numpy: bool, tensor: bool, single: bool) -> Any:
    """`found`, an array or a list of arrays, as convert_to_numpy and convert_to_tensor ask for."""
    if numpy and not tensor:
        return found
    if isinstance(found, list):
        return [torch.from_numpy(one).to(device) for one in found]
    moved = torch.from_numpy(np.asarray(found)).to(device)
    return moved if tensor or single else list(moved)
