"""Packed token ids in, one vector a text out: the encoder, pooling, and the Dense modules of the model's folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import layer_norm, linear, normalize

from ftbert.checkpoint import POOLED, check_shapes, open_bin, open_weights
from ftbert.end_rows import end_of_packed
from ftbert.packed_model import PackedModel, kept
from ftbert.text.activations import Activation, activation
from ftbert.text.auto_tokenizer import load_tokenizer
from ftbert.text.pooling_settings import POOLINGS
from ftbert.text.settings import TextSettings
from ftbert.text.vector_modules import DenseSettings, LayerNormSettings, LayerSettings, WholeNumbersSettings

Upload: TypeAlias = "Callable[[NDArray[Any]], torch.Tensor]"

# What torch.ops.ftbert.pooling computes by itself.
_KERNELS = tuple(mode for mode in POOLINGS if mode != "weightedmean")

# The rows that are all a pooling reads of a text, and so all that the last layer computes.
_ROWS = {"cls": "first", "last": "last"}


@dataclass(frozen=True)
class Dense:
    """As `DenseSettings` describes it. weight: float32 [outputs, inputs]; bias [outputs]; residual: float32 [outputs,
    inputs] where x goes through it, an empty tensor where it is added as it is."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    activation: Activation
    normalized: bool

    @classmethod
    def load(cls, settings: DenseSettings, model: PackedModel) -> Dense:
        """On the model's device. ValueError where the weights are missing or do not fit, or for an activation that is
        not torch's."""
        chosen = activation(settings.activation, f"{settings.folder / 'config.json'}: activation_function")
        if settings.head:
            head = model.head(settings.head)
            if list(head.out_weight.shape) != [settings.outputs, settings.inputs]:
                raise ValueError(
                    f"{settings.folder}: the layer over tokens' states is {list(head.out_weight.shape)}, and the files "
                    f"beside it say [{settings.outputs}, {settings.inputs}]"
                )
            bias = head.out_bias.float() if settings.bias else None
            return cls(head.out_weight.float(), bias, None, chosen, settings.normalized)
        device = model.device
        alone = bool(settings.file)  # a linear layer's state dict
        source = open_bin(settings.folder / settings.file) if alone else open_weights(settings.folder)
        stem = "" if alone else "linear."
        shapes = {f"{stem}weight": [settings.outputs, settings.inputs]}
        if settings.bias:
            shapes[f"{stem}bias"] = [settings.outputs]
        if settings.residual and settings.inputs != settings.outputs:
            shapes["residual.weight"] = [settings.outputs, settings.inputs]
        check_shapes(source.where, shapes, source.shapes(), ignored=set())
        found = {name: source.read(name).float().to(device) for name in shapes}
        residual = found.get("residual.weight", torch.empty(0)) if settings.residual else None
        bias = found.get(f"{stem}bias")
        return cls(found[f"{stem}weight"], bias, residual, chosen, settings.normalized)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, inputs] -> [rows, outputs]"""
        x = normalize(x) if self.normalized else x
        made = self.activation(linear(x, self.weight, self.bias))
        if self.residual is None:
            return made
        return made + (linear(x, self.residual) if self.residual.numel() else x)


@dataclass(frozen=True)
class LayerNorm:
    """As `LayerNormSettings` describes it. weight, bias: float32 [entries]."""

    weight: torch.Tensor
    bias: torch.Tensor
    normalized: bool

    @classmethod
    def load(cls, settings: LayerNormSettings, device: Any) -> LayerNorm:
        """ValueError where the weights are missing or do not fit."""
        source = open_weights(settings.folder)
        shapes = {name: [settings.inputs] for name in ("norm.weight", "norm.bias")}
        check_shapes(source.where, shapes, source.shapes(), ignored=set())
        weight, bias = (source.read(name).float().to(device) for name in shapes)
        return cls(weight, bias, settings.normalized)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, entries]"""
        x = normalize(x) if self.normalized else x
        return layer_norm(x, [x.shape[-1]], self.weight, self.bias)  # eps is torch's, which no file says


@dataclass(frozen=True)
class WholeNumbers:
    """As `WholeNumbersSettings` describes it."""

    normalized: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [rows, entries]"""
        x = normalize(x) if self.normalized else x
        return torch.round(127 * torch.tanh(x))


Layer = Dense | LayerNorm | WholeNumbers


def _loaded(settings: LayerSettings, model: PackedModel) -> Layer:
    if isinstance(settings, WholeNumbersSettings):
        return WholeNumbers(settings.normalized)
    if isinstance(settings, DenseSettings):
        return Dense.load(settings, model)
    return LayerNorm.load(settings, model.device)


def dense_of(model: PackedModel, vectors: str = "dense") -> tuple[Layer, ...]:
    """Those of `model`'s folder on its device, for "dense", "sparse" or "multi" vectors, "scores" or the "states" of
    tokens, read once per model. ValueError as of `TextSettings.from_folder` and `Dense.load`."""

    def read() -> tuple[Layer, ...]:
        read = TextSettings.for_scores if vectors == "scores" else TextSettings.from_folder
        settings = TextSettings() if model.folder is None else read(model.folder)
        layers: tuple[LayerSettings, ...] = settings.dense
        if vectors == "sparse":
            layers = (settings.sparse.linear,) if settings.sparse is not None and settings.sparse.linear else ()
        elif vectors == "multi":
            layers = settings.multi.dense if settings.multi is not None else ()
        elif vectors == "states":
            layers = settings.projection
        return tuple(_loaded(one, model) for one in layers)

    return kept(model, ("layers", vectors), read)


def text_vectors(
    model: PackedModel,
    ids: torch.Tensor,
    cu_seqlens: NDArray[np.int32],
    longest: int,
    upload: Upload,
    *,
    pooling: str,
    skip: NDArray[np.int32] | int = 0,
    unit: bool = False,
    types: torch.Tensor | None = None,
    layers: str = "dense",
) -> torch.Tensor:
    """float32 [texts, width] on the model's device, through the Dense modules of its folder.

    ids: int64 [tokens], there; cu_seqlens: int32 [texts + 1]. pooling: as in `TextSettings`. skip: tokens at the
    beginning of every text, or of each [texts], that are not pooled. unit: vectors of length 1. types: token types
    [tokens]. layers: whose modules, as of `dense_of`.
    """
    if fill := filling(model):
        ids, cu_seqlens, longest = _filled(ids, cu_seqlens, upload, *fill), _even(cu_seqlens, fill[0]), fill[0]
    offsets, skips, dense = upload(cu_seqlens), bool(np.any(skip)), dense_of(model, layers)
    want = "tokens" if skips else _ROWS.get(pooling, "tokens")
    given = () if types is None else (types,)
    if pooling == "end":
        rows = end_of_packed(ids, offsets, model.head(POOLED).end_id).long()
        hidden = model.forward_packed(ids, offsets, longest, *given, want="rows", rows=rows.clamp(min=0))
        vectors = hidden.float() * (rows >= 0)[:, None]
    elif not skips and pooling in _KERNELS:
        hidden = model.forward_packed(ids, offsets, longest, *given, want=want)
        of_texts = offsets if want == "tokens" else None  # rows of the texts already
        vectors = torch.ops.ftbert.pooling(hidden, of_texts, pooling, unit and not dense)
        if not dense:
            return vectors
    else:
        hidden = model.forward_packed(ids, offsets, longest, *given, want=want)
        pooled = _Pooled(hidden, offsets, np.diff(cu_seqlens).astype(np.int64), skip, upload)
        vectors = torch.cat([pooled.by(mode) for mode in pooling.split("+")], dim=1)
    for layer in dense:
        vectors = layer(vectors)
    return normalize(vectors) if unit else vectors


def pooled_rows(
    model: PackedModel, hidden: torch.Tensor, lengths: NDArray[np.int64], pooling: str, upload: Upload,
    skip: NDArray[np.int32] | int = 0,
) -> torch.Tensor:  # fmt: skip
    """float32 [spans, width], through the Dense modules: of spans of so many rows of hidden each, in turn. skip: as of
    `text_vectors`, of spans."""
    pooled = _Pooled(hidden, upload(_offsets(lengths).astype(np.int32)), lengths, skip, upload)
    vectors = torch.cat([pooled.by(mode) for mode in pooling.split("+")], dim=1)
    for layer in dense_of(model, "dense"):
        vectors = layer(vectors)
    return vectors


def filling(model: PackedModel) -> tuple[int, int] | None:
    """Up to how many tokens texts are filled, and the id of padding, where that is how the model reads them."""

    def read() -> tuple[int, int] | None:
        settings = TextSettings() if model.folder is None else TextSettings.from_folder(model.folder)
        if model.folder is None or not settings.filled:
            return None
        return model.config.max_seq, int(load_tokenizer(model.folder, settings).pad_token_id or 0)

    return kept(model, "filling", read)


def _even(cu_seqlens: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    return np.arange(len(cu_seqlens), dtype=np.int32) * np.int32(length)


def _filled(
    ids: torch.Tensor, cu_seqlens: NDArray[np.int32], upload: Upload, length: int, padding: int
) -> torch.Tensor:
    """[texts * length]: each text's ids, then padding."""
    starts = _even(cu_seqlens, length)[:-1].astype(np.int64) - cu_seqlens[:-1]
    places = np.arange(cu_seqlens[-1]) + np.repeat(starts, np.diff(cu_seqlens))
    made = ids.new_full(((len(cu_seqlens) - 1) * length,), padding)
    made[upload(places)] = ids
    return made


def token_states(model: PackedModel, hidden: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden] -> float32 [tokens, width]: what transformers calls the model's last hidden state, through the
    layer that a class of its own has behind it."""
    states = hidden.float()
    for layer in dense_of(model, "states"):
        states = layer(states)
    return states


class _Pooled:
    """hidden [tokens, hidden] of texts of so many tokens [texts], of each of which the first `skip` are left out.
    offsets: int32 [texts + 1], of the texts in hidden."""

    def __init__(
        self, hidden: torch.Tensor, offsets: torch.Tensor, lengths: NDArray[np.int64], skip: NDArray[np.int32] | int,
        upload: Upload,
    ) -> None:  # fmt: skip
        self._whole, self._lengths, self._upload = hidden, lengths, upload
        self._skip = np.minimum(skip, lengths)
        if self._skip.any():
            hidden = hidden[upload(np.flatnonzero(self._places() >= np.repeat(self._skip, lengths)))]
            offsets = upload(_offsets(lengths - self._skip).astype(np.int32))
        self._hidden, self._offsets = hidden, offsets

    def by(self, mode: str) -> torch.Tensor:
        """float32 [texts, hidden]; 0 where nothing is left of a text, but with "cls" its first token."""
        if mode == "cls" and self._skip.any():
            first = _offsets(self._lengths)[:-1] + np.where(self._skip < self._lengths, self._skip, 0)
            first = np.minimum(first, len(self._whole) - 1)  # of an empty text at the end
            return self._whole[self._upload(first)].float()
        if mode == "weightedmean":
            return self._weighted_mean()
        pooled: torch.Tensor = torch.ops.ftbert.pooling(self._hidden, self._offsets, mode, False)
        return pooled

    def _weighted_mean(self) -> torch.Tensor:
        """A token weighs its place in its text, from 1 on, whether tokens before it are left out or not."""
        weights = (self._places() + 1)[self._places() >= np.repeat(self._skip, self._lengths)]
        total = (self._lengths * (self._lengths + 1) - self._skip * (self._skip + 1)) / 2
        scale = (self._lengths - self._skip) / np.maximum(total, 1)  # of the mean of the weighted rows
        weighted = self._hidden.float() * self._upload(weights.astype(np.float32))[:, None]
        mean: torch.Tensor = torch.ops.ftbert.pooling(weighted, self._offsets, "mean", False)
        return mean * self._upload(scale.astype(np.float32))[:, None]

    def _places(self) -> NDArray[np.int64]:
        """[tokens]: of each in its text."""
        return np.arange(self._lengths.sum()) - np.repeat(_offsets(self._lengths)[:-1], self._lengths)


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
