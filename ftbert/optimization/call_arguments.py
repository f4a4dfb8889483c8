"""What a call of a transformers encoder asks for, and whether ftbert computes it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ftbert.checkpoint import ModelConfig
from ftbert.end_rows import end_of_padded
from ftbert.heads import Head

# Texts without padding, one behind the other in a row [1, tokens]: int32 [texts+1] and ints, as of flash attention.
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# What ftbert computes. Any other argument that asks for something goes to the original forward.
_COMPUTED = {
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "output_hidden_states", "return_dict", *_OFFSETS
}  # fmt: skip
# Without meaning to these encoders: of decoders, of losses (those of heads get it too), of state space models.
_IGNORED = {"use_cache", "num_items_in_batch", "seq_idx"}
# Read by transformers wherever a forward takes any keyword, beside what signatures say.
_READ = {"return_dict", "output_cross_attentions", "output_mask_decoder_attentions", "kernel_options", "debug_io"}


@dataclass(frozen=True)
class Packed:
    """cu_seqlens: int [texts+1], on any device; max_seqlen: at least the longest text."""

    cu_seqlens: Tensor
    max_seqlen: int


class CallArguments:
    """Reads the calls of one encoder."""

    def __init__(self, signature: inspect.Signature) -> None:
        self._signature = signature
        self._read = _names_read(signature)
        # Where a forward names these, None stands for the config; where it takes any keyword, for False.
        self._config_for_none = {"output_hidden_states", "output_attentions"} & set(signature.parameters)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name, without those that the original ignores. TypeError as of the original."""
        asked = self._signature.bind(*args, **kwargs).arguments
        asked.update({name: value for name, value in asked.pop("kwargs", {}).items() if name in self._read})
        for name in self._config_for_none:
            if asked.get(name) is None:
                asked.pop(name, None)
        return asked


def host_reads(asked: dict[str, Any]) -> bool:
    """Whether what is computed depends on the contents of a tensor."""
    return any(isinstance(asked.get(name), Tensor) for name in ("attention_mask", "position_ids", *_OFFSETS))


def wants_hidden_states(asked: dict[str, Any], theirs: Any) -> Any:
    """theirs: the config of transformers."""
    return asked.get("output_hidden_states", theirs.output_hidden_states)


def starts_with_padding(ids: Tensor, mask: Tensor | None) -> bool:
    return mask is not None and mask.shape == ids.shape and mask.shape[1] > 0 and not bool(mask[:, 0].all())


def pooled_column(pooled: Head, ids: Tensor) -> Tensor:
    """Which column of ids [batch, seq] transformers' pooled output is of, padding or not: int64 [batch]."""
    if pooled.source == "last":
        return torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
    return end_of_padded(ids, torch.arange(ids.numel(), device=ids.device), pooled.end_id) % ids.shape[1]


def _pools_padding(pooled: Head, ids: Tensor, mask: Tensor) -> bool:
    return ids.shape[1] > 0 and not bool(mask.gather(1, pooled_column(pooled, ids)[:, None]).all())


def why_original(
    asked: dict[str, Any], theirs: Any, ours: ModelConfig, first_column: str, pooled: Head | None = None
) -> str | None:
    """What in a call ftbert does not compute, or None. asked["attention_mask"]: if 2-D, bool on the CPU.

    theirs: the config of transformers. first_column: as of PatchedForward. pooled: the encoder's own head.
    """
    for name, value in asked.items():
        if name not in _COMPUTED and name not in _IGNORED and value is not None and value is not False:
            return name
    if not isinstance(asked.get("input_ids"), Tensor):
        return "no input_ids"
    if asked.get("output_attentions", theirs.output_attentions):
        return "output_attentions"
    if reason := _other_masks(theirs, ours):
        return reason
    cached = asked.get("use_cache")
    if cached is not None and cached is not False and any(layer.attention.rotary for layer in ours.layers):
        return "use_cache"  # of a decoder, perhaps one that sees both sides
    if not isinstance(wants_hidden_states(asked, theirs), bool | None):
        return "output_hidden_states of chosen layers"
    if not isinstance(asked.get("return_dict"), bool | None):
        return "a return_dict that is no bool"
    if any(asked.get(name) is not None for name in _OFFSETS):
        if read_packed(asked) and _are_whole_texts(asked, ours):
            return None
        return "cu_seq_lens_q and the like that do not say how input_ids [1, tokens] and position_ids divide into texts"
    ids, mask = asked["input_ids"], asked.get("attention_mask")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return "an attention_mask that is not [batch, seq]"
        if _has_holes(mask) and _counts_columns(theirs, ours):
            return "an attention_mask with holes, in windows that count columns"
        # Most heads read column 0, whatever stands there. ftbert computes nothing at padding.
        if first_column == "read" and starts_with_padding(ids, mask):
            return "padding in column 0 (pad on the right)"
        if pooled is not None and mask.shape == ids.shape and _pools_padding(pooled, ids.cpu(), mask):
            return "padding in the column that the pooled output is of"
        if first_column == "last" and _ends_in_padding(ids, mask, getattr(theirs, "pad_token_id", None)):
            return "padding by the mask whose ids are not config.pad_token_id"
    positions = asked.get("position_ids")
    if positions is not None and not _are_default(positions, ids, mask, ours):
        return "position_ids other than the default"
    return None


def _has_holes(mask: Tensor) -> bool:
    """mask: bool [batch, seq] on the CPU"""
    starts = mask[:, 1:] & ~mask[:, :-1]
    return mask.shape[1] > 0 and bool((starts.sum(1) + mask[:, 0] > 1).any())


def _ends_in_padding(ids: Tensor, mask: Tensor, padding_id: int | None) -> bool:
    """Whether the last id of some row that is not padding_id, which a decoder's head reads, is masked."""
    if mask.shape != ids.shape or mask.shape[1] == 0 or bool(mask.all()):
        return False
    columns = torch.arange(1, ids.shape[1] + 1) * (ids.cpu() != (-1 if padding_id is None else padding_id))
    return not bool(mask.gather(1, columns.argmax(1, keepdim=True)).all())


def _counts_columns(theirs: Any, ours: ModelConfig) -> bool:
    """Whether transformers' windows are of columns; ours, and those of its flash attention, are of kept tokens."""
    windows = any(layer.attention.window for layer in ours.layers)
    return windows and "flash" not in str(getattr(theirs, "_attn_implementation", None))


def _other_masks(theirs: Any, ours: ModelConfig) -> str | None:
    """What the config says now on the tokens that each token sees, if `ours` was built for something else."""
    causal, said = any(layer.attention.causal for layer in ours.layers), getattr(theirs, "is_causal", None)
    if causal:
        return "is_causal, false since" if said is False else None
    return "a decoder" if said or getattr(theirs, "is_decoder", False) else None


def read_packed(asked: dict[str, Any]) -> Packed | None:
    """The texts of a packed call, by the form of its arguments; None where it has not all of that form."""
    cu_seqlens, keys, longest, longest_key = (asked.get(name) for name in _OFFSETS)
    ids, positions = asked.get("input_ids"), asked.get("position_ids")
    if not (isinstance(cu_seqlens, Tensor) and isinstance(keys, Tensor) and isinstance(longest, int)):
        return None
    if not (isinstance(ids, Tensor) and isinstance(positions, Tensor)) or asked.get("attention_mask") is not None:
        return None
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or keys.shape != cu_seqlens.shape or longest != longest_key:
        return None
    if ids.dim() != 2 or len(ids) != 1 or ids.shape[1] == 0 or positions.shape != ids.shape:
        return None
    kinds = asked.get("token_type_ids")
    fit = kinds is None or (isinstance(kinds, Tensor) and kinds.shape == ids.shape)
    return Packed(cu_seqlens, longest) if fit else None


def _are_whole_texts(asked: dict[str, Any], config: ModelConfig) -> bool:
    """Whether the contents of a packed call agree: offsets of queries and keys that divide the row, and in each text
    the positions that ftbert gives it. On a GPU the host waits for them once, as it waits for a mask."""
    tensors = [asked[name].flatten() for name in ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids", "input_ids")]
    place = asked["input_ids"].device
    numbers = torch.cat([tensor.to(place, torch.int64) for tensor in tensors]).cpu()
    cu_seqlens, keys, positions, ids = numbers.split([len(tensor) for tensor in tensors])
    lengths = cu_seqlens.diff()
    divided = cu_seqlens[0] == 0 and cu_seqlens[-1] == len(ids) and lengths.min() >= 0
    if not divided or not torch.equal(cu_seqlens, keys) or lengths.max() > asked["max_length_q"]:
        return False
    starts = cu_seqlens[:-1].repeat_interleave(lengths)
    if config.positions.kind in ("absolute", "none"):
        return torch.equal(positions, torch.arange(len(ids)) - starts)
    if config.positions.kind != "from_padding":
        return False
    counted, kept = _count(ids, config)
    before = functional.pad(counted, (1, 0))[starts]
    return torch.equal(positions, (counted - before) * kept + config.padding_id)


def _count(ids: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """How many ids up to each are not padding, along the last dimension; and which."""
    kept = (ids != config.padding_id).long()
    return kept.cumsum(-1), kept


def _are_default(positions: Any, ids: Tensor, mask: Tensor | None, config: ModelConfig) -> bool:
    if not isinstance(positions, Tensor) or ids.dim() != 2 or positions.shape not in (ids.shape, (1, ids.shape[1])):
        return False
    if config.positions.kind == "from_padding":
        counted, kept = _count(ids, config)
        default = counted * kept + config.padding_id
    elif config.positions.kind in ("absolute", "none"):
        default = torch.arange(ids.shape[1], device=ids.device)[None]
    else:
        return False
    equal = positions.to(ids.device) == default
    return bool((equal | ~mask.to(ids.device)).all() if mask is not None and mask.shape == ids.shape else equal.all())


def _names_read(signature: inspect.Signature) -> set[str]:
    """The keywords that mean something to transformers; a forward with **kwargs ignores all others."""
    from transformers import AttentionInterface, utils

    names = {*signature.parameters, *_COMPUTED, *_IGNORED, *_READ}
    names |= set(getattr(getattr(utils, "TransformersKwargs", None), "__annotations__", {}))
    for attention in AttentionInterface().values():
        names |= set(inspect.signature(attention).parameters)
    return names
