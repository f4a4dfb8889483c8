"""Small random GLiNER models in folders as the package `gliner` writes them: DeBERTa-v3's tokenizer and layout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import randomise
from tokenizers import SentencePieceUnigramTokenizer
from transformers import DebertaV2Tokenizer

TEXTS = [
    "Hello World, the end of a naïve café in two spaces.", "query", "the document here: Hello hello-world CAFÉ, Hello!",
    "", "   ", "a\tb  c\n" * 9, "hello world " * 30,
]  # fmt: skip
LABELS = ["hello", "the café", "world", "document end"]

_ENCODER = {
    "model_type": "deberta-v2", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 64, "max_position_embeddings": 64, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False, "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm",
    "max_relative_positions": -1, "type_vocab_size": 0, "vocab_size": 100, "pad_token_id": 0,
}  # fmt: skip
_LABELS_ENCODER = {
    "model_type": "bert", "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 64,
    "vocab_size": 200,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "span": {"span_mode": "markerV0", "num_rnn_layers": 1},
    "first spans": {"span_mode": "marker", "num_rnn_layers": 1, "embed_ent_token": False},
    "no lstm": {"span_mode": "markerV0", "num_rnn_layers": 0, "max_len": 20},
    "token": {"span_mode": "token_level", "num_rnn_layers": 2},
    "same width": {"span_mode": "token_level", "num_rnn_layers": 0, "hidden_size": 48},
}


def gliner() -> Any:
    """The package, installed beside this Python or in the folder $FTBERT_TEST_GLINER (it pins transformers below the
    release of the tests, so `pip install --no-deps --target`)."""
    if (folder := os.environ.get("FTBERT_TEST_GLINER")) and folder not in sys.path:
        sys.path.append(folder)
    return pytest.importorskip("gliner", reason="no package gliner here, nor in $FTBERT_TEST_GLINER")


def write_backbone(folder: Path) -> Path:
    """What `model_name` names: its config and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_ENCODER), encoding="utf-8")
    tokenizer = SentencePieceUnigramTokenizer()
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    words = " ".join(TEXTS + LABELS)
    tokenizer.train_from_iterator(
        [words] * 3, vocab_size=80, unk_token="[UNK]", special_tokens=special, show_progress=False
    )
    pieces = [tuple(piece) for piece in json.loads(tokenizer.to_str())["model"]["vocab"]]
    DebertaV2Tokenizer(vocab=pieces).save_pretrained(folder)
    return folder


def make_gliner(folder: Path, shape: str = "span", seed: int = 0, **settings: Any) -> Any:
    """A model of `gliner`, saved into `folder`; what `model_name` names lies beside it."""
    package = gliner()
    backbone = write_backbone(folder.parent / "backbone")
    said = {
        "model_name": str(backbone), "hidden_size": 32, "max_width": 4, "max_len": 40, "dropout": 0.1,
        "encoder_config": dict(_ENCODER), **SHAPES.get(shape, {}), **settings,
    }  # fmt: skip
    if shape == "two encoders":
        said |= {"labels_encoder": str(backbone), "labels_encoder_config": dict(_LABELS_ENCODER)}
    model = package.GLiNER.from_config(said, backbone_from_pretrained=False)
    randomise(model.model, seed)
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    return model.eval()
