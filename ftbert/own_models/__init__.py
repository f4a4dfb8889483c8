"""PyTorch models of the types that transformers has no class of, as their published code computes them.

They are what `check`, `Model.reference` and calibration compare with, and the oracle of the tests. No published file of
code is run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {"alibi_bert": "alibi_bert", "neobert": "neobert", "new": "gte", "static_embedding": "static_embedding"}


def know_type(model_type: Any) -> None:
    """Makes AutoConfig and AutoModel know a model type, where it is one of these and transformers has none of it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in _MODULES and model_type not in CONFIG_MAPPING:
        import_module(f"{__name__}.{_MODULES[model_type]}")
