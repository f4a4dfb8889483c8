"""Which tensor of a GGUF file is which of transformers': a table an architecture, names as llama.cpp's converter gives
them; `{i}` is the layer. A name is the stem of .weight and .bias.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ftbert.checkpoint import shown
from ftbert.converters.gguf_config import (
    bert,
    gemma,
    gemma3,
    gemma_embedding,
    llama,
    modernbert,
    nomic_bert,
    qwen2,
    qwen3,
    smollm3,
)
from ftbert.converters.gguf_metadata import Metadata

Stems = dict[str, str]
RANK = 4  # of llama.cpp's pooling types


@dataclass(frozen=True)
class Ranker:
    """The head of a reranker (pooling type rank). names: theirs -> transformers'. parts: tensors that must be there.
    config: what config.json says then. two_words: its rows are those of two words, whose difference is the score."""

    names: Stems
    parts: tuple[str, ...]
    config: dict[str, Any]
    two_words: bool = False


@dataclass(frozen=True)
class Architecture:
    """names: theirs -> transformers'. config: transformers' config.json. interleaved: rows of queries and keys lie in
    pairs that are turned together. shift: what is added to the weights of norms. ranker: where rerankers are known."""

    names: Stems
    config: Callable[[Metadata], dict[str, Any]]
    interleaved: bool = False
    shift: float = 0.0
    ranker: Ranker | None = None

    def theirs(self, name: str) -> str | None:
        """transformers' name of a tensor, None for one that is not in the table."""
        stem, _, ending = name.rpartition(".")
        layer = re.match(r"blk\.(\d{1,6})\.", stem)
        generic = stem if layer is None else f"blk.{{i}}.{stem[layer.end() :]}"
        found = (self.names | (self.ranker.names if self.ranker is not None else {})).get(generic)
        if found is None or ending not in ("weight", "bias"):
            return None
        return f"{found if layer is None else found.replace('{i}', layer[1])}.{ending}"

    def is_norm(self, name: str) -> bool:
        """Of transformers' name: whether `shift` was added."""
        return self.shift != 0 and name.endswith("norm.weight")

    def pairs(self, name: str) -> bool:
        """Of transformers' name: whether its rows are to be put back into halves."""
        return self.interleaved and name.rpartition(".")[0].endswith(("q_proj", "k_proj"))


_LAYER = "encoder.layer.{i}."
_BERT: Stems = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.{i}.attn_q": _LAYER + "attention.self.query",
    "blk.{i}.attn_k": _LAYER + "attention.self.key",
    "blk.{i}.attn_v": _LAYER + "attention.self.value",
    "blk.{i}.attn_output": _LAYER + "attention.output.dense",
    "blk.{i}.attn_output_norm": _LAYER + "attention.output.LayerNorm",
    "blk.{i}.ffn_up": _LAYER + "intermediate.dense",
    "blk.{i}.ffn_down": _LAYER + "output.dense",
    "blk.{i}.layer_output_norm": _LAYER + "output.LayerNorm",
}
# As nomic-embed-text was published: queries, keys and values are one matrix.
_PUBLISHED = "encoder.layers.{i}."
_NOMIC: Stems = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "emb_ln",
    "blk.{i}.attn_qkv": _PUBLISHED + "attn.Wqkv",
    "blk.{i}.attn_output": _PUBLISHED + "attn.out_proj",
    "blk.{i}.attn_output_norm": _PUBLISHED + "norm1",
    "blk.{i}.ffn_up": _PUBLISHED + "mlp.fc11",
    "blk.{i}.ffn_gate": _PUBLISHED + "mlp.fc12",
    "blk.{i}.ffn_down": _PUBLISHED + "mlp.fc2",
    "blk.{i}.layer_output_norm": _PUBLISHED + "norm2",
}
_MODERNBERT: Stems = {  # ffn_up: the half that the activation takes comes first, in both
    "token_embd": "embeddings.tok_embeddings",
    "token_embd_norm": "embeddings.norm",
    "blk.{i}.attn_norm": "layers.{i}.attn_norm",
    "blk.{i}.attn_qkv": "layers.{i}.attn.Wqkv",
    "blk.{i}.attn_output": "layers.{i}.attn.Wo",
    "blk.{i}.ffn_norm": "layers.{i}.mlp_norm",
    "blk.{i}.ffn_up": "layers.{i}.mlp.Wi",
    "blk.{i}.ffn_down": "layers.{i}.mlp.Wo",
    "output_norm": "final_norm",
}


def _decoder(base: str, **others: str) -> Stems:
    """Llama's layers. base: what stands before their names. others: what a layer has beside these, or other names."""
    layer = base + "layers.{i}."
    stems = {
        "token_embd": base + "embed_tokens",
        "output_norm": base + "norm",
        "output": "lm_head",
        "blk.{i}.attn_norm": layer + "input_layernorm",
        "blk.{i}.ffn_norm": layer + "post_attention_layernorm",
    }
    stems |= {f"blk.{{i}}.attn_{one}": f"{layer}self_attn.{one}_proj" for one in "qkv"}
    stems |= {f"blk.{{i}}.ffn_{one}": f"{layer}mlp.{one}_proj" for one in ("gate", "up", "down")}
    stems["blk.{i}.attn_output"] = layer + "self_attn.o_proj"
    return stems | {f"blk.{{i}}.{theirs}": layer + name for theirs, name in others.items()}


_NORMED_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = _NORMED_HEADS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# What a file holds as cls and cls.output, by the class that it was converted from.
_LAST = ("cls.output.weight", "cls.output.bias")
_RANKING_BERT = Ranker(
    {"cls": "pooler.dense", "cls.output": "classifier"},
    ("cls.weight", "cls.bias", *_LAST),
    {"architectures": ["BertForSequenceClassification"]},
)
_RANKING_MODERNBERT = Ranker(
    {"cls": "head.dense", "cls.norm": "head.norm", "cls.output": "classifier"},
    ("cls.weight", "cls.norm.weight", *_LAST),
    {"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "mean"},
)
_RANKING_QWEN3 = Ranker(
    {"cls.output": "score"}, _LAST[:1], {"architectures": ["Qwen3ForSequenceClassification"]}, two_words=True
)
ARCHITECTURES = {
    "bert": Architecture(_BERT, bert, ranker=_RANKING_BERT),
    "nomic-bert": Architecture(_NOMIC, nomic_bert),
    "modern-bert": Architecture(_MODERNBERT, modernbert, ranker=_RANKING_MODERNBERT),
    "llama": Architecture(_decoder("model."), llama, interleaved=True),
    "qwen2": Architecture(_decoder("model."), qwen2),
    "qwen3": Architecture(_decoder("model.", **_NORMED_HEADS), qwen3, ranker=_RANKING_QWEN3),
    "smollm3": Architecture(_decoder("model."), smollm3, interleaved=True),
    "gemma": Architecture(_decoder("model."), gemma, shift=1.0),
    "gemma3": Architecture(_decoder("model.", **_GEMMA), gemma3, shift=1.0),
    "gemma-embedding": Architecture(_decoder("", **_GEMMA), gemma_embedding, shift=1.0),
}
# Heads, which recognise() names where it leaves them out.
_HEADS = ("cls", "dense_")
# Linear layers behind the pooling, in the order in which they are computed.
_BEHIND_POOLING = ("dense_2.weight", "dense_3.weight")
# Read with the config.
_FACTORS = "rope_freqs.weight"


def find_architecture(name: Any) -> Architecture:
    """ValueError for one that has no table."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"architecture {shown(name)} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[name]


def behind_pooling(said: Metadata) -> list[str]:
    """The linear layers that the file has behind its pooling; none where it says no pooling."""
    return [name for name in _BEHIND_POOLING if said.has(name) and said.count("pooling_type", 0)]


def ranked(architecture: Architecture, said: Metadata) -> Architecture:
    """With the head that the file is said to have, without one where it is no reranker. ValueError says what of the
    head is missing."""
    if said.count("pooling_type", 0) != RANK:
        return replace(architecture, ranker=None)
    reranker = f"a reranker ({said.arch}.pooling_type {RANK}, rank)"
    if architecture.ranker is None:
        known = ", ".join(name for name, one in ARCHITECTURES.items() if one.ranker is not None)
        raise ValueError(f"{reranker}, of which no table says the head; heads of {known} are known")
    if missing := [name for name in architecture.ranker.parts if not said.has(name)]:
        raise ValueError(
            f"{reranker} without {', '.join(missing)}: llama.cpp's converter leaves out a BERT's pooler, and scores "
            "are others without it; load the HuggingFace folder or hub id that it was converted from"
        )
    return architecture


def names_of(architecture: Architecture, found: Iterable[str], others: Collection[str] = ()) -> dict[str, str]:
    """transformers' name -> the file's, but for `others`. ValueError lists what no table says."""
    names: dict[str, str] = {}
    unknown = []
    for name in (name for name in found if name not in others):
        if (theirs := architecture.theirs(name)) is not None:
            names[theirs] = name
        elif name.startswith(_HEADS):
            names[name] = name
        elif name != _FACTORS:
            unknown.append(name)
    if unknown:
        raise ValueError(f"{len(unknown)} tensors are none of this architecture: {', '.join(map(shown, unknown[:8]))}")
    return names
