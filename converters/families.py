"""The tables, one for each family. Adding one is adding a table: docs/adding-a-family.md.

Families with rotary positions are in rotary_families.py, others in the modules imported here. Our names are the list in
csrc/model/weights.cpp; `{i}` is the layer.
"""

from __future__ import annotations

from typing import Any

import torch

from ftbert.checkpoint import ModelConfig, shared_layers, shown
from ftbert.converters.alibi_families import ALIBI
from ftbert.converters.clip_families import CLIP
from ftbert.converters.deberta import DEBERTA
from ftbert.converters.esm_families import ESM
from ftbert.converters.family import KEYS, LAYER_NORMS, Config, Derived, Family, Keys, Names, entry, norm_keys
from ftbert.converters.neobert import NEOBERT
from ftbert.converters.refused import REFUSED
from ftbert.converters.relative_bias import add_bias, bias_table
from ftbert.converters.rotary_families import ROTARY
from ftbert.converters.static_embedding import STATIC_EMBEDDING
from ftbert.converters.t5_families import T5

_LAYER = "encoder.layer.{i}."
_ATTENTION = _LAYER + "attention."
_QKV = ("query", "key", "value")
_BERT: Names = {
    "embeddings.word": "embeddings.word_embeddings.weight",
    "embeddings.position": "embeddings.position_embeddings.weight",
    "embeddings.token_type": "embeddings.token_type_embeddings.weight",
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.{i}.attention.qkv": tuple(_ATTENTION + "self." + name for name in _QKV),
    "layers.{i}.attention.out": _ATTENTION + "output.dense",
    "layers.{i}.attention.norm": _ATTENTION + "output.LayerNorm",
    "layers.{i}.ffn.up": _LAYER + "intermediate.dense",
    "layers.{i}.ffn.down": _LAYER + "output.dense",
    "layers.{i}.ffn.norm": _LAYER + "output.LayerNorm",
    "pooler": "pooler.dense",
}
# As jina-reranker-v2 was published, by flash-attention's names.
_FLASH = "encoder.layers.{i}."
_FLASH_NAMES: Names = _BERT | {
    "embeddings.norm": "emb_ln",
    "layers.{i}.attention.qkv": _FLASH + "mixer.Wqkv",
    "layers.{i}.attention.out": _FLASH + "mixer.out_proj",
    "layers.{i}.attention.norm": _FLASH + "norm1",
    "layers.{i}.ffn.up": _FLASH + "mlp.fc1",
    "layers.{i}.ffn.down": _FLASH + "mlp.fc2",
    "layers.{i}.ffn.norm": _FLASH + "norm2",
}
_NO_POOLER: Names = {ours: theirs for ours, theirs in _BERT.items() if ours != "pooler"}
_FROM_PADDING = {"positions.kind": "from_padding"}
_PRE_NORM = {"layer.norm_place": "pre"}
_ROBERTA_KEYS = KEYS | {"padding_id": ("pad_token_id", 1)}


def _without(keys: Keys, *paths: str) -> Keys:
    return {path: key for path, key in keys.items() if path not in paths}


def _electra(config: Config, description: dict[str, Any]) -> None:
    description["embedding_projection"] = description["embedding"] != description["hidden"]


def _roformer(config: Config, description: dict[str, Any]) -> None:
    if entry(config, "rotary_value", "bool", False):
        raise ValueError("rotary_value true is not supported: only false, where values are not turned")
    description["embedding"] = entry(config, "embedding_size", "int", description["hidden"])
    _electra(config, description)
    # Of its own code, whatever the config says of rotary positions.
    description["layer"]["attention"]["rotary"] = {"theta": 10_000.0, "interleaved": True}


def _sinusoids(encoder: ModelConfig) -> torch.Tensor:
    """float32 [positions, head_size]: of each pair the sine of its angle, in the first half, and the cosine."""
    size = encoder.layers[0].attention.head_size
    frequencies = 10_000.0 ** (torch.arange(0, size, 2).double() / -size)
    angles = torch.outer(torch.arange(encoder.positions.rows).double(), frequencies)
    return torch.cat((angles.sin(), angles.cos()), 1).float()


def _albert(config: Config, description: dict[str, Any]) -> None:
    if (inner := entry(config, "inner_group_num", "int", 1)) != 1:
        raise ValueError(f"inner_group_num {inner} is not supported: only 1")
    layers = entry(config, "num_hidden_layers", "int", None)
    groups = min(entry(config, "num_hidden_groups", "int", 1), layers)
    if groups < min(1, layers):
        raise ValueError(f"num_hidden_groups {groups}: expected at least 1")
    # transformers divides floats, which gives another group here and there where the one is no multiple of the other.
    if any(int(i / (layers / groups)) != i * groups // layers for i in range(min(layers, 10_000))):
        raise ValueError(f"num_hidden_groups {groups} of {layers} layers is not supported: not a divisor")
    description["layers"] = shared_layers(layers, groups)


_MPNET_BUCKETS = 32  # transformers' MPNet looks so many up, and knows distances to 128, whatever its config says


def _mpnet(config: Config, description: dict[str, Any]) -> None:
    add_bias(config, description, most=_MPNET_BUCKETS, distance=128)


def _task_shapes(encoder: ModelConfig, config: Config, ours: list[int]) -> list[list[int]]:
    rows = entry(config, "task_type_vocab_size", "int", 3)
    return [[encoder.token_types, encoder.embedding], [rows, encoder.embedding]]


# ERNIE's task types: inputs always have task 0, so its row is added to every token type once and for all.
_FOLDED_TASK_TYPES = Derived(
    ("embeddings.token_type_embeddings.weight", "embeddings.task_type_embeddings.weight"),
    _task_shapes,
    lambda encoder, sources: sources[0] + sources[1][0],
    lambda encoder, config, ours: [ours, ours.new_zeros(_task_shapes(encoder, config, list(ours.shape))[1])],
)


def _ernie(config: Config) -> tuple[Names]:
    folded = entry(config, "use_task_id", "bool", False)
    return (_BERT | {"embeddings.token_type": _FOLDED_TASK_TYPES} if folded else _BERT,)


def _like_roberta(name: str, base: str, **others: Any) -> Family:
    return Family(name=name, base=base, names=_BERT, keys=_ROBERTA_KEYS, fixed=_FROM_PADDING, **others)


_DISTILBERT_LAYER = "transformer.layer.{i}."
_ALBERT_LAYER = "encoder.albert_layer_groups.{i}.albert_layers.0."
_MPNET_ATTENTION = _ATTENTION + "attn."

_ALL = (
    Family(name="bert", base="bert", names=_BERT),
    _like_roberta("roberta", "roberta"),
    _like_roberta("xlm-roberta", "roberta", spellings=(_FLASH_NAMES,)),
    _like_roberta("camembert", "roberta"),
    _like_roberta("data2vec-text", "data2vec_text"),
    Family(
        name="distilbert",
        base="distilbert",
        names={
            "embeddings.word": "embeddings.word_embeddings.weight",
            "embeddings.position": "embeddings.position_embeddings.weight",
            "embeddings.norm": "embeddings.LayerNorm",
            "layers.{i}.attention.qkv": tuple(_DISTILBERT_LAYER + f"attention.{name}_lin" for name in "qkv"),
            "layers.{i}.attention.out": _DISTILBERT_LAYER + "attention.out_lin",
            "layers.{i}.attention.norm": _DISTILBERT_LAYER + "sa_layer_norm",
            "layers.{i}.ffn.up": _DISTILBERT_LAYER + "ffn.lin1",
            "layers.{i}.ffn.down": _DISTILBERT_LAYER + "ffn.lin2",
            "layers.{i}.ffn.norm": _DISTILBERT_LAYER + "output_layer_norm",
        },
        keys=KEYS | {
            "hidden": ("dim", None), "layers": ("n_layers", None), "layer.attention.heads": ("n_heads", None),
            "layer.ffn.inter": ("hidden_dim", None), "layer.ffn.activation": ("activation", "gelu"),
        },
        fixed={"token_types": 0} | dict.fromkeys(norm_keys("embedding_norm", *LAYER_NORMS), 1e-12),
    ),
    Family(
        name="electra",
        base="electra",
        names=_NO_POOLER | {"embeddings.projection": "embeddings_project"},
        keys=KEYS | {"embedding": ("embedding_size", 128)},
        adjust=_electra,
    ),
    Family(
        name="mpnet",
        base="mpnet",
        names=_BERT | {
            "attention.relative_bias": bias_table("encoder.relative_attention_bias.weight", _MPNET_BUCKETS),
            "layers.{i}.attention.qkv": tuple(_MPNET_ATTENTION + name for name in "qkv"),
            "layers.{i}.attention.out": _MPNET_ATTENTION + "o",
            "layers.{i}.attention.norm": _ATTENTION + "LayerNorm",
        },
        # transformers' MPNet counts positions from 1 whatever its config says.
        fixed=_FROM_PADDING | {"padding_id": 1, "token_types": 0},
        adjust=_mpnet,
    ),
    Family(
        name="albert",
        base="albert",
        names=_BERT | {
            "embeddings.projection": "encoder.embedding_hidden_mapping_in",
            "layers.{i}.attention.qkv": tuple(_ALBERT_LAYER + "attention." + name for name in _QKV),
            "layers.{i}.attention.out": _ALBERT_LAYER + "attention.dense",
            "layers.{i}.attention.norm": _ALBERT_LAYER + "attention.LayerNorm",
            "layers.{i}.ffn.up": _ALBERT_LAYER + "ffn",
            "layers.{i}.ffn.down": _ALBERT_LAYER + "ffn_output",
            "layers.{i}.ffn.norm": _ALBERT_LAYER + "full_layer_layer_norm",
            "pooler": "pooler",
        },
        keys=KEYS | {"embedding": ("embedding_size", 128), "layer.ffn.activation": ("hidden_act", "gelu_new")},
        fixed={"embedding_projection": True},
        adjust=_albert,
    ),
    Family(
        name="rembert",
        base="rembert",
        names=_BERT | {"embeddings.projection": "encoder.embedding_hidden_mapping_in"},
        keys=KEYS | {"embedding": ("input_embedding_size", 256)},
        fixed={"embedding_projection": True},
    ),
    Family(name="ernie", base="ernie", names=_BERT, names_by=_ernie),
    Family(
        name="roformer",
        base="roformer",
        names=_NO_POOLER | {"embeddings.projection": "embeddings_project"},
        fixed={"positions.kind": "none"},
        adjust=_roformer,
        made={"encoder.embed_positions.weight": _sinusoids},
        lacks=("multiple_choice",),  # by default it reads the last column, which may be padding
    ),
    Family(
        name="roberta-prelayernorm",
        base="roberta_prelayernorm",
        names=_BERT | {
            "layers.{i}.attention.norm": _ATTENTION + "LayerNorm",
            "layers.{i}.ffn.norm": _LAYER + "intermediate.LayerNorm",
            "final_norm": "LayerNorm",
        },
        keys=_ROBERTA_KEYS | norm_keys("final_norm"),
        fixed=_FROM_PADDING | _PRE_NORM,
    ),
    Family(
        name="xlm-roberta-xl",
        base="roberta",
        names=_BERT | {
            "layers.{i}.attention.norm": _ATTENTION + "self_attn_layer_norm",
            "layers.{i}.ffn.norm": _LAYER + "LayerNorm",
            "final_norm": "encoder.LayerNorm",
        },
        keys=_without(_ROBERTA_KEYS, "embedding_norm.eps") | norm_keys("final_norm", *LAYER_NORMS, default=1e-5) | {
            "token_types": ("type_vocab_size", 1),
        },
        fixed=_FROM_PADDING | _PRE_NORM,
    ),
    Family(
        name="megatron-bert",
        base="bert",
        names=_BERT | {
            "layers.{i}.attention.norm": _ATTENTION + "ln",
            "layers.{i}.ffn.norm": _LAYER + "ln",
            "final_norm": "encoder.ln",
        },
        keys=_without(KEYS, "embedding_norm.eps") | norm_keys("final_norm"),
        fixed=_PRE_NORM,
    ),
)  # fmt: skip

_FAMILIES = (*_ALL, *DEBERTA, *ROTARY, *T5, ESM, ALIBI, NEOBERT, STATIC_EMBEDDING, *CLIP)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}


def find_family(config: Config) -> Family:
    """The table for a config.json of transformers; ValueError says why there is none."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        reason = REFUSED.get(str(kind), "no table says which of its tensors is which")
        raise ValueError(
            f"model type {shown(kind)} is not supported: {reason}; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[str(kind)].of(config)
