"""Poolings by name, and what a Pooling module's file says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftbert.input_file import read_json_object

# How a text's tokens become one vector: our name, sentence-transformers' one, and its flag before 5.x. Vectors of
# several flags stand in this order.
_POOLINGS = {
    "cls": ("cls", "pooling_mode_cls_token"),
    "max": ("max", "pooling_mode_max_tokens"),
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "mean_sqrt_len": ("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens"),
    "weightedmean": ("weightedmean", "pooling_mode_weightedmean_tokens"),
    "last": ("lasttoken", "pooling_mode_lasttoken"),
}
POOLINGS = tuple(_POOLINGS)


def read_pooling(path: Path) -> dict[str, Any]:
    """pooling and include_prompt, of a Pooling's config.json. ValueError for a mode that is none."""
    if not path.exists():
        raise ValueError(f"{path}: missing, although modules.json names it")
    config = read_json_object(path)
    value = config.get("pooling_mode")
    if value is None:
        modes = [mode for mode, (_, flag) in _POOLINGS.items() if config.get(flag)] or ["mean"]
    else:
        ours = {name: mode for mode, (name, _) in _POOLINGS.items()}
        names = [str(name) for name in (value if isinstance(value, list) else [value])]
        if not names or not set(names) <= set(ours):
            known = ", ".join(ours)
            raise ValueError(f"{path}: pooling {' + '.join(names)} is not supported; expected any of {known}")
        modes = [ours[name] for name in names]
    return {"pooling": "+".join(modes), "include_prompt": bool(config.get("include_prompt", True))}
