"""GLiNER's folders: gliner_config.json, an encoder of transformers, and a head that finds entities by labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ftbert.checkpoint import (
    Checkpoint,
    EntityHead,
    TensorSource,
    check_shapes,
    exists,
    read_json_object,
    shown,
)
from ftbert.converters.families import find_family
from ftbert.converters.family import Config, entry
from ftbert.converters.huggingface import recognise

GLINER = "gliner_config.json"

_ENCODER = "token_rep_layer.bert_layer.model."
_ANY_LENGTH = 1 << 17  # tokens, where the encoder has no table of positions
_TYPES = (None, "gliner", "gliner_uni_encoder_span", "gliner_uni_encoder_token")
_SPANS = ("marker", "markerV0", "token_level")
# Entries that change what is computed: what they may say, and what another word means.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "model_type": (_TYPES, "a model of another kind than one encoder with scores of words or spans"),
    "labels_encoder": ((None, ""), "labels have an encoder of their own"),
    "labels_decoder": ((None, ""), "a decoder writes the labels"),
    "relations_layer": ((None, ""), "relations are scored too"),
    "span_mode": (_SPANS, "spans are represented otherwise"),
    "span_encoder_config": ((None,), "words have an encoder of their own"),
    "represent_spans": ((None, False), "spans are scored behind the words' scores"),
    "post_fusion_schema": ((None, ""), "words and labels attend to each other"),
    "fuse_layers": ((None, False), "all layers are joined"),
    "subtoken_pooling": ((None, "first"), "a word is not its first token"),
    "words_splitter_type": ((None, "whitespace"), "words are cut by another package"),
    "precomputed_prompts_mode": ((None, False), "labels are stored vectors"),
}  # fmt: skip


class _Part(TensorSource):
    """The tensors whose names begin so, without that beginning."""

    def __init__(self, whole: TensorSource, beginning: str) -> None:
        self.where, self.files = whole.where, whole.files
        self._whole, self._beginning = whole, beginning

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name.removeprefix(self._beginning): shape
            for name, shape in self._whole.shapes().items() if name.startswith(self._beginning)
        }  # fmt: skip

    def read(self, name: str) -> torch.Tensor:
        return self._whole.read(self._beginning + name)

    def sample(self, name: str) -> str:
        return self._whole.sample(self._beginning + name)


def check_gliner(document: Config) -> None:
    """ValueError names the entry that asks for what is not computed."""
    for key, (allowed, meaning) in _ONLY.items():
        said = document.get(key)
        if said not in allowed:
            known = " or ".join(str(shown(one)) for one in allowed if one not in (None, ""))
            raise ValueError(
                f"{key} {shown(said)} is not supported{f' (only {known})' if known else ''}: {meaning}. "
                "`ftbert.optimize` of the package's model computes its encoders"
            )


def backbone_of(document: Config) -> str:
    """Whose config and tokenizer count where the folder has none: a folder or a hub id."""
    return str(entry(document, "model_name", "str", "microsoft/deberta-v3-small"))


def open_gliner(folder: Path, source: TensorSource, backbone: Callable[[str], Path]) -> Checkpoint:
    """The encoder, with `Checkpoint.entities` behind it. backbone: where the small files of a model are, by the name of
    `backbone_of`. ValueError names what is not supported, missing, misshapen or left over."""
    path = folder / GLINER
    document = read_json_object(path)
    try:
        check_gliner(document)
        part, named = _Part(source, _ENCODER), backbone_of(document)
        config = document.get("encoder_config")
        if config is not None and not isinstance(config, dict):
            raise ValueError(f"encoder_config: expected an object, got {shown(config)}")
        config = read_json_object(backbone(named) / "config.json") if config is None else config
        config = {"model_type": "deberta-v2", **config}
        head = EntityHead(
            hidden=_count(document, "hidden_size", 512),
            kind=str(document.get("span_mode") or "markerV0"),
            max_width=_count(document, "max_width", 12),
            max_words=_count(document, "max_len", 384),
            lstm_layers=_count(document, "num_rnn_layers", 1, least=0),
            entity_token=str(entry(document, "ent_token", "str", "<<ENT>>")),
            separator=str(entry(document, "sep_token", "str", "<<SEP>>")),
            class_id=int(entry(document, "class_token_index", "int", -1)),
            label_behind=not entry(document, "embed_ent_token", "bool", True),
            tokenizer=folder if exists(folder / "tokenizer_config.json") else backbone(named),
            source=source,
        )
        found = part.shapes()
        family = find_family(config)
        word = family.of(config).spelled(found).source_names("embeddings.word")[0]
        if word in found:  # with the rows that the package has added
            config["vocab_size"] = found[word][0]
        checkpoint = recognise(config, part, None)
    except ValueError as error:
        raise error if str(error).startswith(source.where) else ValueError(f"{path}: {error}") from error
    encoder = checkpoint.config.encoder
    if encoder.positions.kind == "none":
        encoder = replace(encoder, positions=replace(encoder.positions, rows=max(encoder.max_seq, _ANY_LENGTH)))
    of_head = {name: shape for name, shape in source.shapes().items() if not name.startswith(_ENCODER)}
    check_shapes(source.where, head.shapes(encoder.hidden), of_head, ignored=set())
    return replace(checkpoint, config=replace(checkpoint.config, encoder=encoder), entities=head)


def _count(document: Config, key: str, default: int, least: int = 1) -> int:
    found = int(entry(document, key, "int", default))
    if found < least:
        raise ValueError(f"{key} {found}: expected at least {least}")
    return found
