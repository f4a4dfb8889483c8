"""The transformers model that a checkpoint stands for: the tables read backwards."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from ftbert.checkpoint import know_type
from ftbert.converters.families import find_family
from ftbert.converters.family import Config, Derived
from ftbert.converters.head_tables import HeadRow, rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftbert.checkpoint import Checkpoint, CheckpointConfig, ModelConfig


def build_reference(checkpoint: Checkpoint, with_heads: bool) -> PreTrainedModel:
    """float32, eval, on the CPU. with_heads: the class with the checkpoint's heads, else the encoder alone."""
    import transformers

    config = checkpoint.config
    document = {key: value for key, value in config.huggingface.items() if key != "auto_map"}
    if with_heads and any(head.task == "masked_lm" and not head.tied for head in config.heads):
        document["tie_word_embeddings"] = False
    if any(layer.attention.soft_cap for layer in config.encoder.layers):
        document["attn_implementation"] = "eager"  # transformers' others leave soft caps out
    know_type(document["model_type"])
    settings = transformers.AutoConfig.for_model(**document)
    ours = {name: tensor for name, tensor in checkpoint.items() if not name.startswith("heads.")}
    state = dict(_to_huggingface(document, config.encoder, ours)) | _frequencies(document, config.encoder)
    if with_heads:
        rows = {row.task: row.formed(document) for row in rows_of(config.architecture)}
        endings = [rows[head.task].architecture for head in config.heads]
        model = _class_of("ForPreTraining" if len(endings) > 1 else endings[0], settings)(settings)
        state = {f"{model.base_model_prefix}.{name}": tensor for name, tensor in state.items()}
        word = f"{model.base_model_prefix}.{find_family(document).source_names('embeddings.word')[0]}"
        state |= _head_state(checkpoint, rows, model, state[word])
    else:
        keywords = {"add_pooling_layer": config.encoder.pooler} if "pooler" in find_family(document).names else {}
        model = _class_of(find_family(document).encoder, settings)._from_config(settings, **keywords)
    result = model.float().eval().load_state_dict(state, strict=False)
    # Classes for single tokens have no pooler, while their checkpoints may keep one.
    unused = [name for name in result.unexpected_keys if "pooler." not in name]
    made = (*find_family(document).buffers, *find_family(document).made)  # by transformers, too
    missing = [name for name in result.missing_keys if not name.endswith(made)]
    if missing or unused:
        raise RuntimeError(f"{type(model).__name__} does not take the weights: {result}")
    return model


def source_modules(config: CheckpointConfig) -> dict[str, tuple[str, ...]]:
    """Of each matrix of the layers, the modules of `build_reference` without heads that compute its product: several
    where theirs are stacked to make ours. They read the same rows."""
    family = find_family(config.huggingface)
    matrices = [spec.name for spec in config.encoder.weight_specs() if spec.matrix and spec.name.startswith("layers.")]
    return {ours: tuple(name.removesuffix(".weight") for name in family.source_names(ours)) for ours in matrices}


def source_tensors(config: CheckpointConfig, ours: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """One of our tensors as `build_reference` without heads has it, by the names there."""
    return dict(_to_huggingface(config.huggingface, config.encoder, {ours: tensor}))


def _to_huggingface(
    config: Config, encoder: ModelConfig, weights: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Our tensors of the encoder as (their name without prefix, tensor)."""
    family = find_family(config)
    for ours, tensor in weights.items():
        row = family.row(ours)
        if isinstance(row, Derived):
            yield from zip(row.sources, row.undo(encoder, config, tensor), strict=True)
        else:
            rows = encoder.stacked_rows(ours) if len(row) > 1 else [len(tensor)]
            yield from zip(row, tensor.split(rows), strict=True)


def _frequencies(document: Config, encoder: ModelConfig) -> dict[str, torch.Tensor]:
    """Those that a file held, which are not the config's, by the name of transformers' buffer."""
    listed = [layer.attention.rotary.frequencies for layer in encoder.layers if layer.attention.rotary]
    names = find_family(document).frequencies
    return {names[0]: torch.tensor(listed[0])} if names and listed and listed[0] is not None else {}


def _class_of(ending: str, settings: Any) -> Any:
    """The class of a family whose name ends so, by the family's config."""
    from transformers import AutoModel

    classes: Any = AutoModel._model_mapping
    base = classes[type(settings)]
    return getattr(import_module(base.__module__), base.__name__.removesuffix("Model") + ending)


def _head_state(
    checkpoint: Checkpoint, rows: dict[str, HeadRow], model: PreTrainedModel, word: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The heads' tensors under every name that the model knows them by (transformers ties some pairs)."""
    wanted = model.state_dict()
    found: dict[str, torch.Tensor] = {}
    for head in checkpoint.config.heads:
        for kind in (*head.shapes(checkpoint.config.encoder.hidden), "out.weight"):
            tied = kind == "out.weight" and head.tied
            tensor = word if tied else checkpoint.read(f"heads.{head.task}.{kind}")
            found |= {name: tensor for name in rows[head.task].names(kind) if name in wanted}
    return found
