"""The transformers model that a checkpoint stands for: the tables read backwards."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from ftbert.checkpoint import know_type
from ftbert.converters.families import find_family
from ftbert.converters.family import Config, Derived
from ftbert.converters.head_tables import PREFIXES, HeadRow, rows_of

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
        endings = [ending for head in config.heads if (ending := rows[head.task].architecture)]
        named = endings[0] if endings else find_family(document).encoder
        model = class_of(settings, "ForPreTraining" if len(endings) > 1 else named)(settings)
        word, wanted = find_family(document).source_names("embeddings.word")[0], model.state_dict()
        prefix = next(one for one in find_family(document).prefixes if one + word in wanted)
        state = {prefix + name: tensor for name, tensor in state.items()}
        state |= _head_state(checkpoint, rows, model, state[prefix + word])
    else:
        keywords = {"add_pooling_layer": config.encoder.pooler} if "pooler" in find_family(document).names else {}
        model = class_of(settings, find_family(document).encoder)._from_config(settings, **keywords)
    result = model.float().eval().load_state_dict(state, strict=False)
    # Classes for single tokens have no pooler, while their checkpoints may keep one.
    unused = [name for name in result.unexpected_keys if "pooler." not in name]
    made = (*find_family(document).buffers, *find_family(document).made)  # by transformers, too
    # A class may have a head in any case, also where none is wanted.
    others = () if with_heads else PREFIXES
    missing = [name for name in result.missing_keys if not name.endswith(made) and not name.startswith(others)]
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


def class_of(settings: Any, ending: str) -> Any:
    """transformers' class whose name ends so, of the family that a config is for."""
    from transformers import AutoModel

    classes: Any = AutoModel._model_mapping
    if type(settings) in classes:
        base = classes[type(settings)]
        return getattr(import_module(base.__module__), base.__name__.removesuffix("Model") + ending)
    home = import_module(type(settings).__module__.replace(".configuration_", ".modeling_"))
    return getattr(home, type(settings).__name__.removesuffix("Config") + ending)


def _head_state(
    checkpoint: Checkpoint, rows: dict[str, HeadRow], model: PreTrainedModel, word: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The heads' tensors under every name that the model knows them by (transformers ties some pairs)."""
    wanted = model.state_dict()
    found: dict[str, torch.Tensor] = {}
    for head in checkpoint.config.heads:
        kinds = head.shapes(checkpoint.config.encoder.hidden)
        for kind in (*kinds, "out.weight") if kinds else ():
            tied = kind == "out.weight" and head.tied
            tensor = word if tied else checkpoint.read(f"heads.{head.task}.{kind}")
            found |= {name: tensor for name in rows[head.task].names(kind) if name in wanted}
    return found
