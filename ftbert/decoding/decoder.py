"""The model as torch.classes.ftbert.Decoder."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from ftbert.checkpoint import CAUSAL_LM

_decoders: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by model, with the least of caches


def decoder_of(model: Any, slots: int, positions: int) -> Any:
    """A decoder with an empty cache of its own, of `slots` texts of up to `positions` tokens. The head's weight is read
    once a model, and on the CPU laid out anew. ValueError for a model without a head for the next token."""
    if model not in _decoders:
        tasks = [head.task for head in model.checkpoint.config.heads]
        if CAUSAL_LM not in tasks:
            raise ValueError(
                "this model generates no text: it has no head for the next token, as a decoder's ...ForCausalLM has; "
                f"its heads: {', '.join(tasks) or 'none'}"
            )
        head = model.head(CAUSAL_LM)
        weight = model.encoder.weight("embeddings.word") if head.tied else head.out_weight
        bias = head.out_bias if bool(head.out_bias.any()) else None
        _decoders[model] = _of_torch(model.encoder, weight, bias)
    return _decoders[model].with_cache(slots, positions)


def _of_torch(encoder: Any, weight: Any, bias: Any) -> Any:
    import torch

    return torch.classes.ftbert.Decoder(encoder, weight, bias, 1, 1)
