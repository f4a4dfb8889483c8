"""What the tables of rotary_families.py share: types of layers, windows, rotary positions, shared heads of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftbert.checkpoint import shown
from ftbert.converters.family import Config, entry
from ftbert.converters.rotary import rope_of, rotary

Description = dict[str, Any]


def rms(*norms: str, **others: Any) -> dict[str, Any]:
    """What an RMSNorm has beside its eps."""
    said = {"kind": "rms", "bias": False, **others}
    return {f"{norm}.{key}": value for norm in norms for key, value in said.items()}


def _head_size(description: Description) -> int:
    return int(description["layer"]["attention"]["head_size"])


def turn(theta: float, *rules: str) -> Callable[[Config, Description], None]:
    """Rotary positions, the same in all layers."""

    def adjust(config: Config, description: Description) -> None:
        attention = description["layer"]["attention"]
        found = rotary(config, rope_of(config), theta, _head_size(description), rules)
        if stretch := found.get("stretch"):
            if attention.get("causal"):  # keys in a cache were turned when their sequence was shorter
                del found["stretch"]
            else:
                given = config.get("n_positions")  # of nomic's own config
                longest = int(stretch["trained"] * stretch["factor"]) if given is None else given
                description["positions"]["rows"] = max(longest, stretch["trained"])
        attention["rotary"] = found

    return adjust


def group_heads(config: Config, description: Description, default: int | None) -> None:
    """Heads of keys and values; default: transformers' where the config has no entry. null: as many as of queries."""
    attention = description["layer"]["attention"]
    count = config.get("num_key_value_heads", default)
    attention["kv_heads"] = attention["heads"] if count is None else entry(config, "num_key_value_heads", "int", count)


def layer_types(config: Config, otherwise: Callable[[int], bool]) -> list[str]:
    """Of each layer; otherwise: whether a layer's attention slides, where the config has no list."""
    layers = min(entry(config, "num_hidden_layers", "int", None), 1 << 16)  # the core says how many it runs
    if layers < 0:
        raise ValueError(f"num_hidden_layers {layers}: expected at least 0")
    types: Any = config.get("layer_types")
    if types is None:
        return ["sliding_attention" if otherwise(i) else "full_attention" for i in range(layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise ValueError(f"layer_types {shown(types)} is not supported: one of {', '.join(known)} for each layer")
    return list(types)


def by_type(description: Description, types: list[str], parts: dict[str, Description]) -> None:
    """parts: the attention's entries that only layers of a type have."""
    description["layers"] = [{"attention": parts[kind]} for kind in types]


def slide(description: Description, types: list[str], window: int | None, least: int = 1) -> None:
    """Layers that see `window` tokens at most, themselves among them; without is_causal that many to each side. least:
    that a window may be, 0 where a token may see itself alone."""
    parts: dict[str, Description] = {"full_attention": {}}
    if "sliding_attention" in types:
        if window is None or window < least:
            raise ValueError(f"sliding_window {shown(window)}: expected at least {least} for layers that slide")
        causal = description["layer"]["attention"].get("causal", False)
        parts["sliding_attention"] = {"window": [window - 1, None] if causal else [window, window]}
    by_type(description, types, parts)


def rotary_of_type(config: Config, description: Description, kind: str, key: str, theta: float) -> dict[str, Any]:
    """Rotary positions of the layers of a type. key: of their theta in older files."""
    own = _object(_object(config.get("rope_parameters"), "rope_parameters").get(kind), f"rope_parameters.{kind}")
    scaling = _object(config.get("rope_scaling"), "rope_scaling")
    found = rotary(config, {"rope_theta": config.get(key, theta)} | own | scaling, theta, _head_size(description))
    return {name: value for name, value in found.items() if name != "stretch"}  # the core has one for all layers


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise ValueError(f"{name}: expected an object, got {shown(value)}")
    return value or {}
