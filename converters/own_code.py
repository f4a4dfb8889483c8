"""config.json in the words that transformers uses today, also of models that were published before transformers had
them; and whether it names a class that computes what its model type does: transformers' own, or a listed one.
"""

from __future__ import annotations

from ftbert.checkpoint import FLASH, ModelConfig, find_class, in_transformers_words, named_classes, own_class, shown
from ftbert.converters.clip_families import text_part
from ftbert.converters.families import find_family
from ftbert.converters.family import Config, entry
from ftbert.converters.head_tables import rows_of

_WITH_OPTIMIZE = "load it with transformers and call ftbert.optimize(model), which compares the two"


def read_config(document: Config) -> Config:
    """A config.json in the words in which transformers' own class of its type reads it today. ValueError for a model
    that ftbert does not run; no other file of the folder changes that answer."""
    document = todays_words(document)
    find_family(in_transformers_words(document))  # a class of its own may have a type of its own
    return read_classes(document)


def read_classes(document: Config) -> Config:
    """The config in the words of transformers' own class of its type. ValueError for a class that is neither
    transformers' nor listed in ftbert/own_classes.py: what it computes is in its code alone."""
    kind = str(document.get("model_type"))
    for name in named_classes(document):
        if find_class(document, name) is not None:
            continue
        if "." in name:
            raise ValueError(
                f"auto_map names {name}, a class with code of its own, which ftbert does not run and has no row for. "
                f"If it is the same as transformers' {kind}, take auto_map out of config.json; else {_WITH_OPTIMIZE}"
            )
        if not _is_transformers(kind, name):
            raise ValueError(
                f"architectures names {name}, a class that transformers does not have and ftbert has no row for. If it "
                f"computes what transformers' {kind} computes, name that class there; else {_WITH_OPTIMIZE}"
            )
    return in_transformers_words(document)


def _is_transformers(kind: str, name: str) -> bool:
    """Whether transformers has a class of that name, or had it for TensorFlow or Flax. It is not imported for the usual
    names of a type's own."""
    name = name.removeprefix("TF").removeprefix("Flax")
    stems = {one.replace("-", "").replace("_", "") for one in (kind, kind.removesuffix("_text"))}
    endings = ("Model", *(row.architecture for row in rows_of(kind)))
    if name.lower() in {stem + ending.lower() for stem in stems for ending in endings}:
        return True
    import transformers

    return name in dir(transformers)


# nomic-embed-text: the words of its own code.
_NOMIC = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}  # fmt: skip
_NOMIC_ONLY = {
    "activation_function": "swiglu", "causal": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
    "parallel_block": False, "prenorm": False, "qkv_proj_bias": False, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "use_rms_norm": False,
}  # fmt: skip


def todays_words(document: Config) -> Config:
    """The same config, of two towers that of the text model; ValueError says what it asks for that transformers does
    not compute."""
    document = text_part(document)
    flash = document.get("model_type") in ("xlm-roberta", None)
    if flash and (row := own_class(document)) is not None and row.source == FLASH:
        return _flash_words(document)
    if document.get("model_type") != "nomic_bert":
        return document
    _expect_no_experts(document)
    if "n_embd" not in document:
        return document
    for key, only in _NOMIC_ONLY.items():
        if (said := document.get(key)) not in (None, only):
            raise ValueError(f"{key} {shown(said)} is not supported: only {shown(only)}")
    made = {today: document[key] for today, key in _NOMIC.items() if key in document}
    kept = set(document) - set(_NOMIC.values())
    if (factor := document.get("rotary_scaling_factor")) is not None:
        made["max_position_embeddings"] = document.get("max_trained_positions")
        made["rope_scaling"] = {"rope_type": "dynamic", "factor": factor}
        kept.add("n_positions")
    rest = {key: value for key, value in document.items() if key in kept}
    return {**rest, "hidden_act": "silu", **made}


def _flash_words(document: Config) -> Config:
    """jina-embeddings-v3 and jina-colbert-v2, whose code says positions in its own words."""
    if (said := document.get("position_embedding_type", "absolute")) != "rotary":
        raise ValueError(f"position_embedding_type {shown(said)} is not supported of {FLASH}: only 'rotary'")
    base = document.get("rotary_emb_base", 10_000.0)
    left = ("position_embedding_type", "rotary_emb_base")
    rest = {key: value for key, value in document.items() if key not in left}
    return {**rest, "model_type": "jina_embeddings_v3", "rope_theta": base}


def _expect_no_experts(document: Config) -> None:
    """nomic-embed-text-v2-moe: each second layer."""
    every, experts = (entry(document, key, "int", 0) for key in ("moe_every_n_layers", "num_experts"))
    if every > 0 or experts > 0:
        chosen = entry(document, "moe_top_k", "int", 1)
        raise ValueError(
            f"num_experts {experts} (moe_every_n_layers {every}) is not supported: each token goes through {chosen} of "
            f"{experts} feed-forward blocks, and `linear`, through which all products of layers go, has one matrix for "
            "all rows; a count of rows for each expert is known on a GPU alone, and the host would wait for it in "
            "each such layer. transformers runs it with trust_remote_code"
        )


def cut_texts(document: Config, encoder: ModelConfig) -> str:
    """A sentence on the tokens past the trained length for which a config has positions, and the encoder none; "" where
    there are none."""
    trained, rope = document.get("max_position_embeddings"), document.get("rope_parameters")
    rope = document.get("rope_scaling") or rope
    found = rope if isinstance(rope, dict) else {}
    stretched = any((one := layer.attention.rotary) is not None and one.stretch for layer in encoder.layers)
    if stretched or (found.get("rope_type") or found.get("type")) != "dynamic":
        return ""
    factor = found.get("factor")
    if not isinstance(trained, int) or not isinstance(factor, int | float) or factor <= 1:
        return ""
    return (
        f"texts are cut at {trained} tokens, and the config has positions for {trained * factor:.0f} (rope_type "
        f"dynamic, factor {shown(factor)}): frequencies that change with a text's length are those of encoders alone"
    )
