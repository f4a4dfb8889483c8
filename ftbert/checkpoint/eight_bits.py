"""Which matrices of an encoder are stored in 8 bits and why the others are not, in words."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable

from ftbert.checkpoint.config import CheckpointConfig
from ftbert.checkpoint.model_config import WeightSpec
from ftbert.formats import formats

_LEFT = "left as it was when the model was quantized"


def fits_8_bits(word: str, shape: list[int]) -> str:
    """Why no product multiplies by such a matrix in this format, or ""."""
    return formats()[word].why_not(shape) if word else ""


def told_products(config: CheckpointConfig) -> dict[str, str]:
    """"products": "qkv, out, up of layers 0-11, down of layers 1-11 in e4m3", "kept": those that are in the model's
    type, with the reason, that of `quantize` where the config has it, and "word_table": its type where that is not the
    model's; {} for a model without 8 bits."""
    specs = [spec for spec in config.encoder.weight_specs() if spec.matrix]
    known, word = config.quantized.get("kept"), config.encoder.eight_bits
    reasons = known if isinstance(known, dict) else {}
    stored, kept = defaultdict[str, list[WeightSpec]](list), defaultdict[str, list[WeightSpec]](list)
    for spec in specs:
        if spec.stored:
            stored[spec.stored].append(spec)
        elif spec.name.startswith("layers."):
            kept[reasons.get(spec.name) or fits_8_bits(word, spec.shape) or _LEFT].append(spec)
    if not stored:
        return {}
    products = "; ".join(f"{_of_layers(found)} in {word}" for word, found in stored.items())
    others = [spec.name.removesuffix(".weight") for spec in specs if not spec.name.startswith("layers.")]
    lines = [f"{_of_layers(found)} ({why})" for why, found in kept.items()]
    told = {"products": products, "kept": "; ".join([*lines, f"{', '.join([*others, 'heads'])} (outside the layers)"])}
    return told if config.encoder.word_type == "model" else told | {"word_table": config.encoder.word_type}


def _of_layers(specs: Iterable[WeightSpec]) -> str:
    """"qkv, out of layers 0-11, down of layers 0, 2-11"."""
    layers = defaultdict[str, list[int]](list)
    for spec in specs:
        _, layer, _, part, _ = spec.name.split(".")
        layers[part].append(int(layer))
    alike = defaultdict[str, list[str]](list)
    for part, found in layers.items():
        alike[_ranges(sorted(found))].append(part)
    return ", ".join(f"{', '.join(parts)} of {found}" for found, parts in alike.items())


def _ranges(numbers: list[int]) -> str:
    """"layer 3", "layers 0-2, 5"."""
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), key=lambda one: one[1] - one[0])]
    told = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' if len(numbers) > 1 else ''} {told}"
