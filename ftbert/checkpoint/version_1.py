"""The encoder of checkpoints of version 1: one flat object for layers that are all alike."""

from __future__ import annotations

from typing import Any

from ftbert.checkpoint.model_config import shared_layers
from ftbert.input_file import complaints

_REQUIRED = {
    "vocab": "int", "hidden": "int", "layers": "int", "heads": "int", "head_size": "int", "inter": "int",
    "embedding": "int", "max_positions": "int", "token_types": "int", "padding_id": "int", "layer_norm_eps": "float",
    "activation": "str",
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "norm_place": "post", "positions": "absolute", "pooler": False, "embedding_norm": True,
    "embedding_projection": False, "relative_span": 0, "distinct_layers": 0,
}  # fmt: skip


def upgraded(flat: dict[str, Any]) -> dict[str, Any]:
    """The same encoder in the words of version 2. ValueError names every missing, unknown or wrong entry."""
    kinds = _REQUIRED | {key: type(value).__name__ for key, value in _DEFAULTS.items()}
    wrong = complaints(flat, kinds, _REQUIRED.keys())
    if not wrong and not 0 <= flat.get("distinct_layers", 0) <= flat["layers"]:
        wrong.append(f"distinct_layers: expected 0 to {flat['layers']}, got {flat['distinct_layers']}")
    if wrong:
        raise ValueError(f"{', '.join(wrong[:20])}; convert it again")
    e = _DEFAULTS | flat
    norm = {"eps": e["layer_norm_eps"]}
    attention = {"heads": e["heads"], "head_size": e["head_size"], "relative_bias": e["relative_span"] > 0}
    ffn = {"inter": e["inter"], "activation": e["activation"]}
    blocks = {"attention": attention, "attention_norm": norm, "ffn": ffn, "ffn_norm": norm}
    return {
        **{key: e[key] for key in ("vocab", "hidden", "embedding", "padding_id", "token_types")},
        "positions": {"kind": e["positions"], "rows": e["max_positions"]},
        "relative_bias": {"span": e["relative_span"], "heads": e["heads"]} if e["relative_span"] else None,
        "embedding_norm": norm if e["embedding_norm"] else None,
        "final_norm": norm if e["norm_place"] == "pre" else None,
        "embedding_projection": e["embedding_projection"],
        "pooler": e["pooler"],
        "layer": {"norm_place": e["norm_place"], **blocks},
        "layers": shared_layers(e["layers"], e["distinct_layers"]),
    }
