"""The encoder that a checkpoint holds, layer by layer, and as the JSON that the core reads (docs/checkpoint.md)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from ftbert._library import load_library

Json = dict[str, Any]

WORD_TABLE = "embeddings.word"

_MOST_RUNS = 1 << 16  # layers; the core says how many it runs


class WeightSpec(NamedTuple):
    """A tensor of an encoder. matrix: the operand [n, k] of a product; everything else is read by kernels. stored: the
    format in which it has to be, of what is quantized and its scales; "" where any does."""

    name: str
    shape: list[int]
    matrix: bool
    stored: str = ""


@dataclass(frozen=True)
class NormConfig:
    """kind: "layer" or "rms". bias: it has one. offset: what is added to its weight. rounding: "once", of the result,
    or "before_gamma" too."""

    eps: float
    kind: str
    bias: bool
    offset: float
    rounding: str


@dataclass(frozen=True)
class StretchConfig:
    """In sequences of n > trained tokens, pair i of p turns by its frequency times g^(-i / (p - 1)), with g = factor *
    n / trained - factor + 1."""

    factor: float
    trained: int


@dataclass(frozen=True)
class RotaryConfig:
    """The first `dims` numbers of each head are turned in pairs, pair i by position * frequencies[i]; theta stands for
    the frequencies theta^(-2i / dims). amplitude: of the turned numbers. interleaved: pairs (2i, 2i+1), not
    (i, i + dims/2). stretch: of long sequences."""

    theta: float | None
    dims: int
    frequencies: tuple[float, ...] | None
    amplitude: float
    interleaved: bool
    stretch: StretchConfig | None = None


@dataclass(frozen=True)
class PositionScoresConfig:
    """Products with the model's table of positions that are added to a score before its scale: of the query with what
    the projection of keys makes of the row (keys), of the key with that of queries (queries). shared: projections of
    the attention itself, else of their own, which have biases or none."""

    keys: bool
    queries: bool
    shared: bool
    keys_bias: bool
    queries_bias: bool


@dataclass(frozen=True)
class AttentionConfig:
    """kv_heads: of keys and values. scale: of a score. soft_cap: a scaled score s becomes soft_cap * tanh(s /
    soft_cap), where it is not None. window: how many keys a query sees to its left and right, None for all.
    relative_bias: a table by distance is added to the scores. position_scores: so are products with another. qk_norm:
    over each head of queries and keys. qkv_type, out_type: of the matrices as stored, "e4m3", "int8" or "q8_0", with
    scales, or that of the "model"."""

    heads: int
    head_size: int
    kv_heads: int
    scale: float
    soft_cap: float | None
    window: tuple[int | None, int | None] | None
    causal: bool
    relative_bias: bool
    position_scores: PositionScoresConfig | None
    rotary: RotaryConfig | None
    qk_norm: NormConfig | None
    qkv_bias: bool
    out_bias: bool
    qkv_type: str
    out_type: str

    @property
    def width(self) -> int:
        """Columns of queries and of the result."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Columns of keys, and of values."""
        return self.kv_heads * self.head_size


@dataclass(frozen=True)
class FeedForwardConfig:
    """activation: as HuggingFace spells it. gated: activation(gate) * up; the rows of both alternate in the matrix
    ffn.up [2 * inter, hidden], gate first. up_type, down_type: as those of attention."""

    inter: int
    activation: str
    gated: bool
    up_bias: bool
    down_bias: bool
    up_type: str
    down_type: str


@dataclass(frozen=True)
class LayerConfig:
    """norm_place: of attention_norm and ffn_norm, "post" after each residual sum or "pre" before each block. The result
    norms are of what a block adds. weights_of: its tensors are layers.{weights_of}.*; several layers may share them."""

    attention: AttentionConfig
    ffn: FeedForwardConfig
    weights_of: int
    attention_norm: NormConfig | None
    ffn_norm: NormConfig | None
    attention_result_norm: NormConfig | None
    ffn_result_norm: NormConfig | None
    norm_place: str


@dataclass(frozen=True)
class PositionConfig:
    """kind: "absolute", a token's column; "from_padding", counted from padding_id + 1; "none", there is no table, and
    `rows` is the longest sequence that the model is meant for."""

    kind: str
    rows: int


@dataclass(frozen=True)
class RelativeBiasConfig:
    """A table [heads, 2*span-1] of what is added to scores by distance, the same from span - 1 on. of: the "model" has
    one, or the "layers" have one each."""

    span: int
    heads: int
    of: str = "model"


@dataclass(frozen=True)
class TokenDropoutConfig:
    """Word rows of tokens whose id is mask_id are 0, those of others are scaled by kept / (1 - m), where m is the share
    of such ids in the token's sequence."""

    mask_id: int
    kept: float


@dataclass(frozen=True)
class PositionTableConfig:
    """A table [2*span, hidden], normed first where it has a norm, whose row span + bucket is that of the distance
    column(query) - column(key). buckets: of distances from 0 on, whose sign they keep, the last of all farther ones;
    None: the distances themselves."""

    span: int
    buckets: tuple[int, ...] | None
    norm: NormConfig | None


@dataclass(frozen=True)
class ConvolutionConfig:
    """Beside the first layer: its result y becomes norm(y + activation(convolution of its input)), over `kernel`
    columns, the token's in the middle."""

    kernel: int
    activation: str
    norm: NormConfig


@dataclass(frozen=True)
class ShardConfig:
    """This rank of so many."""

    rank: int
    size: int


@dataclass(frozen=True)
class StageConfig:
    """This one of so many, whose layers are those from first_layer on of the model's `layers`; their tensors keep the
    names that they have in the whole model."""

    index: int
    count: int
    first_layer: int
    layers: int


@dataclass(frozen=True)
class ModelConfig:
    """As csrc/model/config.h, which reads JSON, checks it and knows the defaults. embedding: width of the embedding
    tables, projected to hidden where there is an embedding_projection, whose result projection_norm then norms.
    embedding_scale: of rows of the word table. states_before_final_norm: hidden states of all layers end with what that
    norm reads. word_type: of that table as stored, "int8" with a scale for each row, or that of the "model". shard:
    heads, kv_heads and inter are a rank's. stage: the layers are a stage's."""

    vocab: int
    hidden: int
    embedding: int
    positions: PositionConfig
    layers: tuple[LayerConfig, ...]
    padding_id: int
    token_types: int
    embedding_scale: float
    relative_bias: RelativeBiasConfig | None
    token_dropout: TokenDropoutConfig | None
    position_table: PositionTableConfig | None
    convolution: ConvolutionConfig | None
    embedding_norm: NormConfig | None
    final_norm: NormConfig | None
    states_before_final_norm: bool
    embedding_projection: bool
    projection_bias: bool
    projection_norm: NormConfig | None
    pooler: bool
    word_type: str
    shard: ShardConfig | None
    stage: StageConfig | None

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def max_seq(self) -> int:
        """Longest sequence in tokens."""
        return self.positions.rows - (self.padding_id + 1 if self.positions.kind == "from_padding" else 0)

    @property
    def outgrows_fp16(self) -> bool:
        """Whether numbers of the residual stream may pass fp16's largest: where embeddings are scaled (Gemma 3 270M
        reaches 104,000), and where scores are not and hidden is that of T5's large models."""
        unscaled = any(layer.attention.scale == 1 for layer in self.layers)
        return self.embedding_scale > 1 or (unscaled and self.hidden >= 1024)

    @property
    def has_8_bits(self) -> bool:
        """Whether a matrix is stored in 8 bits, with scales."""
        return bool(self.eight_bits)

    @property
    def eight_bits(self) -> str:
        """The type of the matrices that are stored in 8 bits, or ""."""
        return next((spec.stored for spec in self.weight_specs() if spec.matrix and spec.stored), "")

    def to_json(self) -> Json:
        """What all layers have in common once, then each run of equal layers by what else it has."""
        written = asdict(self, dict_factory=_said)
        layers = written.pop("layers")
        if all(layer["weights_of"] == i for i, layer in enumerate(layers, self.stage.first_layer if self.stage else 0)):
            layers = [{key: value for key, value in layer.items() if key != "weights_of"} for layer in layers]
        common = _common(layers) if layers else {}
        alike = itertools.groupby(_without(layer, common) for layer in layers)
        runs = [{"repeat": len(list(run)), **layer} for layer, run in alike]
        return {**written, "layer": common, "layers": runs}

    @classmethod
    def from_json(cls, document: Json) -> ModelConfig:
        """The core reads it and fills in what is absent (docs/checkpoint.md); ValueError lists what it refuses."""
        whole: ModelConfig = _made(cls, json.loads(_read(json.dumps(document))[0]))
        return whole

    def text(self) -> str:
        """What torch.classes.ftbert.Encoder is built from."""
        return json.dumps(self.to_json())

    def weight_specs(self) -> list[WeightSpec]:
        """Every tensor of the encoder; ValueError lists what the core cannot run."""
        return _read(self.text())[1]

    def weight_shapes(self) -> dict[str, list[int]]:
        return {spec.name: spec.shape for spec in self.weight_specs()}

    def stacked_rows(self, ours: str) -> list[int]:
        """How many rows each of the matrices or vectors has that are stacked to one tensor of ours."""
        _, index, *part = ours.split(".")
        layer = next(one for one in self.layers if one.weights_of == int(index))
        if part[:2] != ["attention", "qkv"]:
            raise KeyError(f"{ours} is not stacked")
        return [layer.attention.width, layer.attention.kv_width, layer.attention.kv_width]

    def stored_as(self, names: Collection[str], word: str) -> ModelConfig:
        """With that type of these: matrices of its layers, or the word table."""
        layers = []
        for layer in self.layers:
            ours = {tuple(name.split(".")[2:4]) for name in names if name.split(".")[1] == str(layer.weights_of)}
            attention: Json = {f"{part}_type": word for block, part in ours if block == "attention"}
            ffn: Json = {f"{part}_type": word for block, part in ours if block == "ffn"}
            changed: Json = {"attention": replace(layer.attention, **attention), "ffn": replace(layer.ffn, **ffn)}
            layers.append(replace(layer, **changed))
        return replace(self, layers=tuple(layers), word_type=word if WORD_TABLE in names else self.word_type)


def shared_layers(layers: int, distinct: int) -> list[dict[str, int]]:
    """The entries of `layers` where so many sets of weights serve the layers in runs; 0: each has its own."""
    if distinct == 0 or layers > _MOST_RUNS:
        return [{"repeat": layers}] if layers else []
    runs = itertools.groupby(i * distinct // layers for i in range(layers))
    return [{"repeat": len(list(run)), "weights_of": weights} for weights, run in runs]


def _read(text: str) -> tuple[str, list[WeightSpec]]:
    """The same description with every default and each layer for itself, and its tensors."""
    load_library()
    try:
        whole, specs = torch.ops.ftbert.read_config(text)
    except RuntimeError as error:
        raise ValueError(str(error)[:4000]) from None
    return whole, [WeightSpec(*one) for one in specs]


def _said(values: list[tuple[str, Any]]) -> Json:
    return {key: value for key, value in values if value is not None}


_NESTED: dict[str, Any] = {
    "attention": AttentionConfig, "ffn": FeedForwardConfig, "layers": LayerConfig, "rotary": RotaryConfig,
    "positions": PositionConfig, "relative_bias": RelativeBiasConfig, "position_scores": PositionScoresConfig,
    "position_table": PositionTableConfig, "convolution": ConvolutionConfig, "shard": ShardConfig, "stage": StageConfig,
    "stretch": StretchConfig, "token_dropout": TokenDropoutConfig,
}  # fmt: skip


def _made(kind: Any, values: Json) -> Any:
    """A dataclass from JSON that the core has made; a key that is not there is None."""
    return kind(**{f.name: _value(f.name, values.get(f.name)) for f in fields(kind)})


def _value(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value(key, one) for one in value)
    return _made(_NESTED.get(key, NormConfig), value) if isinstance(value, dict) else value  # all others are norms


def _common(layers: list[Json]) -> Json:
    """What all of them say alike."""
    first, found = layers[0], {}
    for key, value in first.items():
        values = [layer.get(key) for layer in layers]
        objects = [one for one in values if isinstance(one, dict)]
        if all(one == value for one in values):
            found[key] = value
        elif len(objects) == len(values) and (inside := _common(objects)):
            found[key] = inside
    return found


def _without(layer: Json, common: Json) -> Json:
    found = {}
    for key, value in layer.items():
        if key not in common:
            found[key] = value
        elif isinstance(value, dict):
            found |= {key: rest} if (rest := _without(value, common[key])) else {}
    return found
