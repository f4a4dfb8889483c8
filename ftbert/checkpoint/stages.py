"""What each of several devices computes of a model, one after another: layers in a row."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from ftbert.checkpoint.model_config import ModelConfig, StageConfig
from ftbert.formats import formats


def stages_of(whole: ModelConfig, count: int) -> list[ModelConfig]:
    """The configs of so many stages, whose layers have about equally many bytes of weights. The first has the
    embeddings, the last the final norm and the pooler. A stage's weight_specs are some of the model's, by the same
    names; layers of several stages may share some. ValueError for more stages than layers."""
    if count > whole.depth:
        raise ValueError(f'parallel="pipeline": {count} stages for {whole.depth} layers; each needs at least one')
    ends = _ends(_bytes_of_layers(whole), count)
    return [_stage(whole, i, count, *bounds) for i, bounds in enumerate(itertools.pairwise([0, *ends]))]


def _stage(whole: ModelConfig, index: int, count: int, begin: int, end: int) -> ModelConfig:
    layers = whole.layers[begin:end]
    stage = replace(whole, layers=layers, stage=StageConfig(index, count, begin, whole.depth))
    if not any(layer.attention.relative_bias for layer in layers):
        stage = replace(stage, relative_bias=None)
    if index > 0:
        stage = replace(stage, embedding=whole.hidden, embedding_norm=None, embedding_projection=False)
    if index + 1 < count:
        stage = replace(stage, final_norm=None, pooler=False)
    return stage


def _bytes_of_layers(whole: ModelConfig) -> list[int]:
    """Of each layer's own or shared weights, which each call reads. What has no type of its own counts as 16 bits."""
    by_set: dict[int, int] = {}
    for spec in whole.weight_specs():
        block, index, *_ = spec.name.split(".")
        if block == "layers":
            matrix = formats()[spec.stored or "fp16"]
            by_set[int(index)] = by_set.get(int(index), 0) + matrix.bits * math.prod(spec.shape) // 8
    return [by_set[layer.weights_of] for layer in whole.layers]


def _ends(sizes: list[int], count: int) -> list[int]:
    """Where each part ends of so many, whose sums are near to equal and none of which is empty."""
    sums = list(itertools.accumulate(sizes))
    ends = [0]
    for part in range(1, count):
        wanted = sums[-1] * part / count
        least, most = ends[-1] + 1, len(sizes) - (count - part)
        ends.append(min(range(least, most + 1), key=lambda end: abs(sums[end - 1] - wanted)))
    return [*ends[1:], len(sizes)]
