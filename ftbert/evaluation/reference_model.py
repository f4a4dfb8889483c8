"""transformers' model in float32, which everything is compared with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from ftbert.checkpoint import WORD_TABLE, Checkpoint, ModelConfig
from ftbert.converters import build_reference, open_checkpoint
from ftbert.dtypes import DTYPES
from ftbert.live_check import encoder_of
from ftbert.model import Model
from ftbert.quantization import int8_table


def reference_of(model: Model, against: str | Path | torch.nn.Module | None = None) -> Any:
    """On the CPU, with the heads that a call of `model` computes. against: the plain model that `model` was quantized
    from, whose float32 is then the reference. ValueError where it is another model, or is needed and not given."""
    if against is None:
        try:
            return model.reference()
        except ValueError as error:
            if not model.config.has_8_bits:
                raise
            raise ValueError(
                f"{model.folder}: is quantized and does not hold the weights that it was made from; name the plain "
                "model: `ftbert check MODEL --against PLAIN`, or check(model, against=...)"
            ) from error
    plain = open_checkpoint(against)
    ours = model.checkpoint
    same = plain_config(plain.config.encoder) == plain_config(ours.config.encoder)
    if not same or not _same_words(plain, ours):
        what = "weights" if same else "layers"
        raise ValueError(f"against: {plain.source.where} is another model than {ours.source.where}: other {what}")
    return build_reference(plain, with_heads=bool(model.heads))


def _same_words(plain: Checkpoint, ours: Checkpoint) -> bool:
    words = plain.read(WORD_TABLE)
    if ours.config.encoder.word_type == "model":
        return torch.equal(words, ours.read(WORD_TABLE))
    return torch.equal(int8_table(words).weight, ours.read(WORD_TABLE, torch.int8))


def plain_config(config: ModelConfig) -> ModelConfig:
    """Without the types in which matrices and the word table are stored."""
    return config.stored_as([WORD_TABLE, *(spec.name for spec in config.weight_specs() if spec.matrix)], "model")


def base_of(reference: Any) -> Any:
    """The encoder of a transformers model, without its head."""
    return encoder_of(reference)


def peer_dtype(model: Model) -> torch.dtype:
    """In which transformers computes beside `model`: of 8-bit models what is not in 8 bits."""
    found = model.dtype
    if isinstance(found, str) or found not in DTYPES.values():
        return DTYPES[model.encoder.dtype()]
    return found


def in_dtype(reference: Any, dtype: torch.dtype) -> Any:
    """`reference` computing in `dtype`. A copy: .to() changes a module in place, and this one may be the user's."""
    return reference if dtype == torch.float32 else copy.deepcopy(reference).to(dtype)


def pad_id(reference: Any) -> int:
    """The id that transformers takes for padding; 0 when the config has none."""
    return int(getattr(reference.config, "pad_token_id", None) or 0)
