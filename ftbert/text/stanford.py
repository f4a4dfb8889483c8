"""Stanford's format of a ColBERT (colbert-ir/colbertv2.0): a transformer with its layer `linear` among its weights, and
artifact.metadata beside them, read as sentence-transformers' MultiVectorEncoder does."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from ftbert.input_file import read_json_object, shown
from ftbert.own_classes import PROJECTION
from ftbert.text.checks import length_in, positive
from ftbert.text.vector_modules import DenseSettings, Expansion, MultiSettings

COLBERT_METADATA = "artifact.metadata"
ARCHITECTURE = "HF_ColBERT"

# What ColBERT's own config says where the file does not.
_WIDTH, _QUERY_LENGTH = 128, 32
_MARKERS = {"query": "[unused0]", "document": "[unused1]"}


def read_stanford(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Of `TextSettings`: the vectors of tokens, the markers as prompts, a document's length. config: of the model in
    `folder`, as HuggingFace writes it. ValueError for an entry that is none."""
    path = folder / COLBERT_METADATA
    said = read_json_object(path) if path.exists() else {}
    prompts = {}
    for task, key in (("query", "query_token_id"), ("document", "doc_token_id")):
        marker = said.get(key) or _MARKERS[task]
        if not isinstance(marker, str) or not marker.split():
            raise ValueError(f"{path}: {key} must be a token; got {shown(marker)}")
        prompts[task] = f"{marker} "
    for key in ("attend_to_mask_tokens", "mask_punctuation"):
        if not isinstance(said.get(key), bool | None):
            raise ValueError(f"{path}: {key} must be true or false; got {shown(said[key])}")
    if (by := said.get("similarity") or "cosine") != "cosine":
        raise ValueError(f"{path}: similarity {shown(by)} is not supported; expected cosine")
    linear = DenseSettings(
        folder,
        positive(f"{folder / 'config.json'}: hidden_size", config.get("hidden_size")),
        length_in(path, said, "dim") or _WIDTH,
        False,
        "torch.nn.modules.linear.Identity",
        head=PROJECTION,
    )
    length = length_in(path, said, "query_maxlen") or _QUERY_LENGTH
    multi = MultiSettings(
        (linear,),
        normalize=True,
        skipped=tuple(string.punctuation) if said.get("mask_punctuation") is not False else (),
        expansion=Expansion(length, True, bool(said.get("attend_to_mask_tokens")), None),
        markers=tuple(prompts.values()),
    )
    return {"multi": multi, "prompts": prompts, "document_length": length_in(path, said, "doc_maxlen")}
