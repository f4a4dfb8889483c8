"""Random transformers models of every family and head: the cases of test_families.py and the rows of docs/models.md."""

from __future__ import annotations

from typing import Any

import torch
from conftest import randomise

from ftbert.converters.families import FAMILIES, find_family
from ftbert.converters.head_tables import rows_of
from ftbert.converters.reference import class_of
from ftbert.own_models import know_type

# The second size has nothing that a vector of 4 or 8 divides; the third is one that Hopper's own products take.
_SIZES: list[dict[str, Any]] = [
    {
        "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 80,
        "max_position_embeddings": 64, "embedding_size": 16, "hidden_act": "gelu", "num_labels": 3,
    },
    {
        "vocab_size": 101, "hidden_size": 39, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 57,
        "max_position_embeddings": 53, "embedding_size": 17, "hidden_act": "gelu_new", "num_labels": 1,
        "layer_norm_eps": 1e-5,
    },
    {
        "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
        "max_position_embeddings": 64, "embedding_size": 64, "hidden_act": "gelu", "num_labels": 3,
    },
]  # fmt: skip
SIZES = range(len(_SIZES))

_LINEAR = {"rope_type": "linear", "factor": 1.5}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0, "rope_theta": 50.0,
    "original_max_position_embeddings": 24,
}  # fmt: skip

# What else each family's config says: another choice for the second size where there is one to make.
_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "albert": [{"num_hidden_groups": 1}, {"num_hidden_layers": 4, "num_hidden_groups": 2}],
    "bert": [{}, {"type_vocab_size": 1}],
    "camembert": [{}, {"pad_token_id": 3}],
    "data2vec-text": [{}, {}],
    "deberta": [
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False, "type_vocab_size": 0},
        {
            "relative_attention": True, "pos_att_type": ["p2c"], "max_relative_positions": 7, "type_vocab_size": 2,
            "legacy": False, "pooler_hidden_act": "tanh", "embedding_size": 39,
        },
    ],
    "deberta-v2": [  # as v3; as v2 before buckets, with projections of positions of their own
        {
            "relative_attention": True, "pos_att_type": "p2c|c2p", "position_biased_input": False, "position_buckets": 8,
            "share_att_key": True, "norm_rel_ebd": "layer_norm", "max_relative_positions": 20, "conv_kernel_size": 3,
            "conv_act": "gelu",
        },
        {
            "relative_attention": True, "pos_att_type": ["c2p"], "type_vocab_size": 2, "legacy": False,
            "max_relative_positions": 9, "pooler_hidden_act": "relu", "embedding_size": 39,
        },
    ],
    "distilbert": [{}, {}],
    "electra": [{}, {"embedding_size": 39}],
    "ernie": [{"use_task_id": True}, {"use_task_id": False}],
    "megatron-bert": [{}, {}],
    "mpnet": [{}, {"relative_attention_num_buckets": 40}],
    # Few buckets and distances, so that these texts reach the last; heads wider and narrower than hidden.
    "t5": [
        {"d_kv": 20, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
        {"d_kv": 10, "feed_forward_proj": "gated-gelu"},
    ],
    "mt5": [{"d_kv": 16, "relative_attention_max_distance": 20}, {"d_kv": 13, "feed_forward_proj": "gated-silu"}],
    "umt5": [
        {"d_kv": 16, "relative_attention_num_buckets": 9, "relative_attention_max_distance": 12},
        {"d_kv": 10, "feed_forward_proj": "relu"},
    ],
    # ESM-2, and ESM-1b with its table; no id of these tests is the mask's (test_esm.py).
    "esm": [
        {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 4, "pad_token_id": 1},
        {"emb_layer_norm_before": True, "mask_token_id": 4, "pad_token_id": 1},
    ],
    # The end of a text is its largest id, then an id that some texts lack.
    "clip_text_model": [
        {"eos_token_id": 2, "hidden_act": "quick_gelu", "projection_dim": 20},
        {"eos_token_id": 7, "projection_dim": 39},
    ],
    "siglip_text_model": [{}, {"projection_size": 20}],
    "siglip2_text_model": [{"projection_size": 52}, {}],
    "rembert": [{"input_embedding_size": 16, "output_embedding_size": 56}, {"input_embedding_size": 39}],
    "roformer": [{}, {"embedding_size": None, "type_vocab_size": 1}],
    "alibi_bert": [{}, {"type_vocab_size": 1, "num_attention_heads": 13, "feed_forward_type": "reglu"}],
    "roberta": [{}, {"type_vocab_size": 1}],
    "roberta-prelayernorm": [{}, {}],
    "xlm-roberta": [{}, {"type_vocab_size": 1}],
    "xlm-roberta-xl": [{}, {}],
    # Windows that cut these texts; layers of both kinds; heads of 10 where hidden is no multiple of their width.
    "modernbert": [
        {"num_hidden_layers": 4, "local_attention": 6},
        {
            "num_hidden_layers": 5, "global_attn_every_n_layers": 2, "local_attention": 9, "norm_bias": True,
            "attention_bias": True, "mlp_bias": True, "classifier_bias": True, "decoder_bias": False, "norm_eps": 1e-4,
            "classifier_pooling": "mean", "hidden_activation": "silu", "rope_scaling": _LINEAR,
        },
    ],
    "modernbert-decoder": [
        {"num_hidden_layers": 4, "local_attention": 10, "use_cache": False},
        {
            "num_hidden_layers": 5, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
            "local_attention": 9, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True,
            "decoder_bias": False, "norm_eps": 1e-4, "hidden_activation": "silu", "rope_scaling": _LINEAR,
            "is_causal": False, "use_cache": False,
        },
    ],
    "nomic_bert": [{}, {"head_dim": 10, "type_vocab_size": 1, "rope_parameters": _YARN}],
    "jina_embeddings_v3": [{}, {"type_vocab_size": 2, "rope_parameters": _LINEAR}],
    "static_embedding": [{}, {}],
    "neobert": [{"hidden_act": "swiglu"}, {"hidden_act": "SwiGLU", "norm_eps": 1e-4}],
    "new": [{"type_vocab_size": 0}, {"type_vocab_size": 2, "rope_scaling": {"type": "ntk", "factor": 2.0}}],
    "eurobert": [
        {"num_key_value_heads": 1},
        {
            "head_dim": 10, "attention_bias": True, "mlp_bias": True, "classifier_pooling": "mean", "rms_norm_eps": 1e-4,
            "rope_parameters": _LLAMA3,
        },
    ],
    "llama": [
        {"num_key_value_heads": 1, "use_cache": False},
        {
            "head_dim": 10, "attention_bias": True, "mlp_bias": True, "is_causal": False, "rope_parameters": _LLAMA3,
            "use_cache": False,
        },
    ],
    "mistral": [
        {"num_key_value_heads": 1, "sliding_window": 4, "use_cache": False},
        {"num_key_value_heads": 3, "sliding_window": None, "is_causal": False, "head_dim": 10, "use_cache": False},
    ],
    "ministral": [
        {
            "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4, "use_cache": False,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        {"num_key_value_heads": 3, "sliding_window": 5, "is_causal": False, "head_dim": 10, "use_cache": False},
    ],
    "phi3": [
        {"num_key_value_heads": 1, "sliding_window": 4, "use_cache": False},
        {"is_causal": False, "rms_norm_eps": 1e-4, "use_cache": False},
    ],
    "smollm3": [
        {"num_key_value_heads": 1, "no_rope_layer_interval": 2, "use_cache": False},
        {
            "num_key_value_heads": 3, "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5,
            "attention_bias": True, "mlp_bias": True, "rope_parameters": _YARN, "use_cache": False,
        },
    ],
    "qwen2": [
        {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "use_cache": False},
        {
            "num_key_value_heads": None, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
            "is_causal": False, "use_cache": False,
        },
    ],
    "qwen3": [
        {"num_key_value_heads": 1, "head_dim": 16, "use_cache": False},
        {
            "num_key_value_heads": 3, "head_dim": 10, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": _YARN,
            "use_cache": False,
        },
    ],
    "gemma": [
        {"num_key_value_heads": 1, "head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "use_cache": False},
        {"num_key_value_heads": 3, "head_dim": 10, "attention_bias": True, "is_causal": False, "use_cache": False},
    ],
    "gemma2": [  # transformers leaves soft caps out where its attention is not "eager"
        {
            "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": None,
            "final_logit_softcapping": None, "use_cache": False,
        },
        {
            "num_key_value_heads": 3, "head_dim": 10, "sliding_window": 5, "is_causal": False,
            "attn_logit_softcapping": 0.5, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attn_implementation": "eager", "final_logit_softcapping": None, "use_cache": False,
        },
    ],
    "gemma3_text": [
        {
            "num_key_value_heads": 1, "head_dim": 16, "use_bidirectional_attention": True, "sliding_window": 8,
            "sliding_window_pattern": 2, "query_pre_attn_scalar": 20, "use_cache": False,
        },
        {
            "num_key_value_heads": 3, "head_dim": 10, "sliding_window": 5, "sliding_window_pattern": 2, "attention_bias": True,
            "rope_scaling": _LINEAR, "use_cache": False,
        },
    ],
}  # fmt: skip
_BIASED = ("attention.relative_bias", "layers.{i}.attention.relative_bias")
ROTARY = sorted(
    family
    for family, table in FAMILIES.items()
    if table.fixed.get("positions.kind") == "none" and not table.names.keys() & set(_BIASED)
    and "layers" not in table.fixed
)
LAYERED = [family for family, table in FAMILIES.items() if "layers" not in table.fixed]
# What families call the entries of _SIZES.
_KEYS: dict[str, dict[str, str]] = {
    "distilbert": {
        "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim", "hidden_act": "activation",
    },
    "neobert": {"max_position_embeddings": "max_length"},
} | dict.fromkeys(("t5", "mt5", "umt5"), {
    "hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff", "layer_norm_eps": "layer_norm_epsilon",
})  # fmt: skip

# Heads, and the encoder alone.
CASES = [(family, task) for family in FAMILIES for task in ["encoder", *(row.task for row in rows_of(family))]]
# Heads that every call of a model computes.
HEADS = [case for case in CASES if case[1] not in ("encoder", "causal_lm")]


def make_config(family: str, size: int, **overrides: Any) -> Any:
    from transformers import AutoConfig

    know_type(family)
    settings = {**_SIZES[size], **_SETTINGS[family][size % 2]}
    if family in ROTARY:  # pairs of columns: 39 / 3 is odd
        settings |= {"pad_token_id": 0, "hidden_size": 42 if size == 1 else settings["hidden_size"]}
    if FAMILIES[family].decoder:
        settings |= {"tie_word_embeddings": size == 1}
    settings |= overrides
    settings = {_KEYS.get(family, {}).get(key, key): value for key, value in settings.items()}
    return AutoConfig.for_model(family, **settings)


def make_model(family: str, task: str, size: int, seed: int = 0, **overrides: Any) -> Any:
    """A random model of transformers with nothing at 0 or 1, with a head that the family has."""
    import transformers

    assert (family, task) in CASES, f"transformers' {family} has no head for {task}"
    if task == "question_answering":
        overrides["num_labels"] = 2
    config = make_config(family, size, **overrides)
    if task == "causal_lm":
        return randomise(transformers.AutoModelForCausalLM.from_config(config), seed)
    ending = {row.task: row.architecture for row in rows_of(family)}.get(task)
    return randomise(class_of(config, ending or FAMILIES[family].encoder)(config), seed)


# Widths like those of real models, which Hopper's own products take up to 768 tokens at least.
WIDE: dict[str, dict[str, Any]] = {
    # Before blocks: RMSNorm and kv heads, heads wider than hidden; the same with another rounding.
    "qwen3": {
        "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1536,
    },
    "llama": {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 1536},
    # LayerNorm without beta and none before the first block; with beta, biases, and no gate.
    "modernbert": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 1152, "local_attention": 64},
    "megatron-bert": {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    # Behind sums: a gate and no biases.
    "nomic_bert": {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1024},
}  # fmt: skip


def make_wide(family: str, **overrides: Any) -> Any:
    """Of ids up to 119 and sequences up to 128."""
    sizes = {"vocab_size": 120, "max_position_embeddings": 256, "num_hidden_layers": 3}
    return make_model(family, "encoder", 2, **sizes | WIDE[family] | overrides)


def make_batch(model: Any, task: str, mask: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Ids and mask [4, 31] ([2, 2, 31] for multiple choice), padded with the padding id; holes keep their ids."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    ids = torch.randint(5, config.vocab_size, (4, 31), generator=generator)
    lengths = torch.tensor([31, 1, 17, 24])
    kept = (torch.arange(31)[None] < lengths[:, None]).long()
    if mask == "left":
        kept = kept.flip(1)
    elif mask == "holes":
        kept[:, 1:] = torch.randint(0, 2, (4, 30), generator=generator)
    if mask != "holes":
        ids[kept == 0] = config.pad_token_id
    batch = {"input_ids": ids, "attention_mask": kept}
    if getattr(config, "type_vocab_size", 0) > 1 and config.model_type not in ("distilbert", "mpnet"):
        batch["token_type_ids"] = torch.randint(0, config.type_vocab_size, (4, 31), generator=generator)
    return {key: value.view(2, 2, 31) for key, value in batch.items()} if task == "multiple_choice" else batch


def masks_of(model: Any) -> tuple[str, ...]:
    """Without holes where transformers' windows count columns and ours the kept tokens, as its flash attention does."""
    document = model.config.to_dict()
    windows = any(layer.attention.window for layer in find_family(document).config(document).layers)
    return ("right", "left") if windows else ("right", "left", "holes")


def packed(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
    """A right-padded batch [rows, seq] as packed ids, offsets, the longest sequence and token types."""
    rows = {name: tensor.flatten(0, -2) for name, tensor in batch.items()}
    kept = rows["attention_mask"].bool()
    cu = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    kinds = rows["token_type_ids"][kept] if "token_type_ids" in rows else None
    return rows["input_ids"][kept], cu, kept.shape[1], kinds
