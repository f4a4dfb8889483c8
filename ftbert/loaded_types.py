"""In which types a checkpoint is loaded, by how it is stored and what was asked for."""

from __future__ import annotations

import torch

from ftbert.checkpoint import CAUSAL_LM, Checkpoint, fits_8_bits, read_modules
from ftbert.devices import check_dtype, q8_0_is_fast, stored_dtype, stream_dtype
from ftbert.dtypes import EIGHT_BITS, INT8, MATRIX_DTYPES, Q8_0, Dtype, users_word


def types_of(checkpoint: Checkpoint, place: torch.device, asked: Dtype | None) -> tuple[torch.dtype, Dtype | None]:
    """The type of all that the checkpoint does not store in 8 bits, and which such type its matrices become first.
    asked: None for "auto". ValueError where `place` cannot serve it, or the checkpoint holds something else."""
    encoder, becomes = checkpoint.config.encoder, None
    if asked is None and checkpoint.in_int8 is not None and _serves(place, INT8):
        asked = INT8
    if asked is None and _is_quantised_decoder(checkpoint) and q8_0_is_fast(place):
        asked = Q8_0
    if encoder.has_8_bits:
        asked = _beside_8_bits(checkpoint, place, asked)
    elif asked is None:
        return stored_dtype(place, checkpoint.stored_dtype), None
    elif asked in EIGHT_BITS.values():
        becomes = asked
    if isinstance(asked, str) or asked in EIGHT_BITS.values():
        return stream_dtype(place, asked, checkpoint.stored_dtype, encoder.outgrows_fp16), becomes
    return asked, None


def has_own_dtype(checkpoint: Checkpoint) -> bool:
    """Whether a model says itself in which type it computes where nobody asks for one, that of "auto": a folder that
    was quantized or converted to a type, and a quantised decoder that is for no vectors. Others are exact, in fp32."""
    config = checkpoint.config
    if config.encoder.has_8_bits or config.dtype:
        return True
    for_vectors = checkpoint.folder is not None and bool(read_modules(checkpoint.folder))
    return _is_quantised_decoder(checkpoint) and not for_vectors


def _is_quantised_decoder(checkpoint: Checkpoint) -> bool:
    """Of a model that generates text, whether most of its layers' weights are stored quantised and fit q8_0."""
    if all(head.task != CAUSAL_LM for head in checkpoint.config.heads):
        return False
    weights = {True: 0, False: 0}
    for spec in checkpoint.config.encoder.weight_specs():
        if spec.matrix and spec.name.startswith("layers."):
            stored = all(map(checkpoint.source.is_quantised, checkpoint.tensors[spec.name]))
            weights[stored and not fits_8_bits("q8_0", spec.shape)] += spec.shape[0] * spec.shape[1]
    return weights[True] > weights[False]


def _serves(place: torch.device, dtype: Dtype) -> bool:
    try:
        check_dtype(place, dtype)
    except ValueError:
        return False
    return True


def _beside_8_bits(checkpoint: Checkpoint, place: torch.device, asked: Dtype | None) -> Dtype:
    """`asked` of a quantized folder, its own type for "auto"; ValueError where it cannot be loaded so."""
    stored = MATRIX_DTYPES[checkpoint.config.encoder.eight_bits]
    word, told = users_word(stored), f"{checkpoint.source.where}: stored in {users_word(stored)}"
    try:
        check_dtype(place, stored)
    except ValueError as error:
        raise ValueError(f"{told}. {error}: load the model that it was made from") from None
    if asked is None or asked == stored:
        return stored
    others = (torch.float16, torch.bfloat16) if place.type == "cuda" and stored != Q8_0 else ()
    if asked in others:
        return asked
    more = f", fp16 and bf16 are for what is not {word} in it" if others else ""
    raise ValueError(
        f"{told}; dtype={word!r} or 'auto' loads it{more}. For {users_word(asked)} load the model that it was made from"
    )
