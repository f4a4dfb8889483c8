"""Text models that were trained beside one for images: how a text becomes the vector that is compared with images'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbert.sentence_modules import Module
from ftbert.text.checks import positive
from ftbert.text.vector_modules import DenseSettings

_IDENTITY = "torch.nn.modules.linear.Identity"


@dataclass(frozen=True)
class _Tower:
    """pooling: as of `TextSettings`. head: the checkpoint's that makes the vector, of `outputs` entries, a key of the
    config. hidden, usual: what transformers takes where the config has no hidden_size, no `outputs`; 0: hidden.
    needs: how the name of a class with that head ends. filled: texts are read with padding tokens behind them, up to
    the model's length, that others attend to."""

    pooling: str
    head: str
    outputs: str
    bias: bool
    hidden: int
    usual: int
    needs: str = ""
    filled: bool = False


_CLIP = _Tower("end", "text_embeds", "projection_dim", False, 512, 512, needs="WithProjection")
_SIGLIP = _Tower("last", "pooled", "projection_size", True, 768, 0, filled=True)
_TEXT = {"clip_text_model": _CLIP, "siglip_text_model": _SIGLIP, "siglip2_text_model": _SIGLIP}
_BOTH = {"clip": _CLIP, "siglip": _SIGLIP, "siglip2": _SIGLIP}  # with the images' model in one checkpoint

# What sentence-transformers' files say of such a model.
MODULE = "CLIPModel"
_METHOD = "get_text_features"


def read_tower(folder: Path, config: Any) -> dict[str, Any]:
    """Of `TextSettings`: pooling, dense and filled; {} for another model. config: of the model in `folder`, as
    HuggingFace writes it. ValueError for a width that is none."""
    kind = str(config.get("model_type")) if isinstance(config, dict) else ""
    tower = _TEXT.get(kind) or _BOTH.get(kind)
    if tower is None:
        return {}
    said: Mapping[str, Any] = config
    if kind in _BOTH:
        said = {**(config.get("text_config") or {}), **(config.get("text_config_dict") or {})}
        said = {**said, tower.outputs: config.get(tower.outputs, said.get(tower.outputs))}
    elif not str((config.get("architectures") or [""])[0]).endswith(tower.needs):
        return {"pooling": tower.pooling}
    where = folder / "config.json"
    inputs = positive(f"{where}: hidden_size", _or(said.get("hidden_size"), tower.hidden))
    outputs = positive(f"{where}: {tower.outputs}", _or(said.get(tower.outputs), tower.usual or inputs))
    dense = DenseSettings(folder, inputs, outputs, tower.bias, _IDENTITY, head=tower.head)
    return {"pooling": tower.pooling, "dense": (dense,), "filled": tower.filled}


def gives_text_features(module: Module, settings: Mapping[str, Any]) -> bool:
    """Whether the first module of a folder gives a text's vector by itself. settings: of sentence_bert_config.json."""
    modality = settings.get("modality_config")
    text = modality.get("text") if isinstance(modality, dict) else None
    own = isinstance(text, dict) and text.get("method") == _METHOD
    return module.kind == MODULE or (module.kind == "Transformer" and own)


def without_modality(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What such a module's file says beside how it reads texts and images."""
    return {key: value for key, value in settings.items() if key not in ("modality_config", "module_output_name")}


def _or(value: Any, usual: int) -> Any:
    return usual if value is None else value
