"""Models of every family that four ranks share, and the places of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Place
from families import CASES, FAMILIES, make_model

# Four heads, and where a family groups them one or two of keys and values.
_SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
_HEADS_OF_EACH = {"eurobert": 1, "llama": 2, "mistral": 1, "ministral": 1, "phi3": 2, "smollm3": 1, "qwen2": 2,
                  "qwen3": 1, "gemma": 1, "gemma2": 2, "gemma3_text": 1}  # fmt: skip


def task_of(family: str) -> str:
    """One with heads over tokens where there is one."""
    tasks = [task for name, task in CASES if name == family]
    return next(
        (task for task in ("masked_lm", "token_classification", "sequence_classification") if task in tasks), "encoder"
    )


def shared_model(family: str, **more: Any) -> Any:
    given = {"num_key_value_heads": _HEADS_OF_EACH[family]} if family in _HEADS_OF_EACH else {}
    return make_model(family, task_of(family), 0, **_SIZES | given | more)


def places_of(place: Place, ranks: int) -> list[str]:
    """Skips where there are not so many GPUs."""
    if place.device == "cpu":
        return ["cpu"] * ranks
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    return [f"cuda:{i}" for i in range(ranks)]


__all__ = ["FAMILIES", "places_of", "shared_model", "task_of"]
