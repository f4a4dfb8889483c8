"""Random transformers models of every family and head: the cases of test_families.py and the rows of docs/models.md."""

from __future__ import annotations

from typing import Any

import torch
from conftest import randomise

from ftbert.converters.families import FAMILIES
from ftbert.converters.head_tables import rows_of

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

# What else each family's config says: another choice for the second size where there is one to make.
_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "albert": [{"num_hidden_groups": 1}, {"num_hidden_layers": 4, "num_hidden_groups": 2}],
    "bert": [{}, {"type_vocab_size": 1}],
    "camembert": [{}, {"pad_token_id": 3}],
    "data2vec-text": [{}, {}],
    "distilbert": [{}, {}],
    "electra": [{}, {"embedding_size": 39}],
    "ernie": [{"use_task_id": True}, {"use_task_id": False}],
    "megatron-bert": [{}, {}],
    "mpnet": [{}, {"relative_attention_num_buckets": 40}],
    "rembert": [{"input_embedding_size": 16, "output_embedding_size": 56}, {"input_embedding_size": 39}],
    "roberta": [{}, {"type_vocab_size": 1}],
    "roberta-prelayernorm": [{}, {}],
    "xlm-roberta": [{}, {"type_vocab_size": 1}],
    "xlm-roberta-xl": [{}, {}],
}
_DISTILBERT = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim", "hidden_act": "activation",
}  # fmt: skip

# Heads, and the encoder alone.
CASES = [(family, task) for family in FAMILIES for task in ["encoder", *(row.task for row in rows_of(family))]]


def make_config(family: str, size: int, **overrides: Any) -> Any:
    from transformers import AutoConfig

    settings = {**_SIZES[size], **_SETTINGS[family][size % 2], **overrides}
    if family == "distilbert":
        settings = {_DISTILBERT.get(key, key): value for key, value in settings.items()}
    return AutoConfig.for_model(family, **settings)


def make_model(family: str, task: str, size: int, seed: int = 0, **overrides: Any) -> Any:
    """A random model of transformers with nothing at 0 or 1."""
    import transformers

    if task == "question_answering":
        overrides["num_labels"] = 2
    config = make_config(family, size, **overrides)
    base = transformers.AutoModel._model_mapping[type(config)]
    ending = {row.task: row.architecture for row in rows_of(family)}.get(task)
    kind = getattr(transformers, base.__name__.removesuffix("Model") + ending) if ending else base
    return randomise(kind(config), seed)


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


def packed(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
    """A right-padded batch [rows, seq] as packed ids, offsets, the longest sequence and token types."""
    rows = {name: tensor.flatten(0, -2) for name, tensor in batch.items()}
    kept = rows["attention_mask"].bool()
    cu = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    kinds = rows["token_type_ids"][kept] if "token_type_ids" in rows else None
    return rows["input_ids"][kept], cu, kept.shape[1], kinds
