"""Ids of nanotoken beside those of `tokenizers`, on random Unicode and real words, through every setting."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers_offline import TEXTS, write

from ftbert.text import TextSettings, Tokenizer
from ftbert.text.wordpiece import WordPiece

nanotoken = pytest.importorskip("nanotoken", reason="nanotoken is not installed: the extra ftbert[fast-text]")

NORMALIZERS = [
    {"lowercase": True, "strip_accents": None, "clean_text": True, "handle_chinese_chars": True},
    {"lowercase": False, "strip_accents": None, "clean_text": True, "handle_chinese_chars": True},
    {"lowercase": True, "strip_accents": False, "clean_text": False, "handle_chinese_chars": False},
    {"lowercase": False, "strip_accents": True, "clean_text": True, "handle_chinese_chars": False},
]
BLOCKS = [
    (0x20, 0x7F), (0, 0x20), (0x7F, 0x250), (0x300, 0x530), (0x590, 0x700), (0x900, 0xE80), (0x1100, 0x1200),
    (0x1E00, 0x2100), (0x2E80, 0x3100), (0x4E00, 0xA000), (0xAC00, 0xD7A4), (0xF900, 0xFFFE), (0x10000, 0x110000),
]  # fmt: skip


def described(folder: Path) -> dict[str, Any]:
    """tokenizer.json with the vocabulary of the real MiniLM where it is at hand."""
    real = Path(os.environ.get("FTBERT_TEST_MINILM", ""), "tokenizer.json")
    path = real if real.is_file() else write(folder, "bert") / "tokenizer.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found | {"truncation": None, "padding": None}


def random_text(draw: random.Random, words: list[str]) -> str:
    def piece() -> str:
        kind = draw.random()
        if kind < 0.5:
            return draw.choice(words) + draw.choice(["", " "])
        return "".join(chr(draw.randrange(*draw.choice(BLOCKS))) for _ in range(draw.choice([1, 1, 3])))

    return "".join(piece() for _ in range(draw.choice([1, 4, 20, 80])))


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=str)
def test_ids_are_those_of_tokenizers(tmp_path: Path, normalizer: dict[str, Any]) -> None:
    description = described(tmp_path)
    description["normalizer"] |= normalizer
    draw = random.Random(0)
    words = [*description["model"]["vocab"], "x" * 101, "\u200d", "\x0b", "\u3000"]
    texts = [*TEXTS, *(random_text(draw, words) for _ in range(3000))]
    fast = Fast.from_str(json.dumps(description))
    ours = WordPiece.of(fast)
    assert ours is not None
    for length, side in [(3, "right"), (17, "left"), (128, "right")]:
        fast.enable_truncation(length, direction=side)
        want = [encoding.ids for encoding in fast.encode_batch_fast(texts)]
        got = [row.tolist() for row in ours.tokens(texts, length, side).rows()]
        assert [text for text, one, other in zip(texts, got, want, strict=True) if one != other] == []


def test_a_tokenizer_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, texts = write(tmp_path / "bert", "bert"), ["hello world", "word " * 5000, "", "middle"]
    with_it = Tokenizer(folder, TextSettings(), 64)
    monkeypatch.setenv("FTBERT_TOKENIZER", "tokenizers")
    without = Tokenizer(folder, TextSettings(), 64)
    assert with_it._fast.wordpiece is not None
    assert without._fast.wordpiece is None
    for given in (texts, texts[:1], []):
        assert [row.tolist() for row in with_it.tokens(given).rows()] == [row.tolist() for row in without.tokens(given).rows()]
    with pytest.raises(ValueError, match="text 1 is not valid Unicode"):
        with_it.tokens(["a", "b\ud800"])


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "albert"])
def test_other_kinds_are_left_alone(tmp_path: Path, family: str) -> None:
    assert Tokenizer(write(tmp_path, family), TextSettings(), 64)._fast.wordpiece is None


def test_other_ids_are_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = Fast.from_str(json.dumps(described(tmp_path)))
    description = json.loads(fast.to_str())
    description["normalizer"]["clean_text"] = not description["normalizer"]["clean_text"]
    other = nanotoken.WordPieceTokenizer.from_json(json.dumps(description))
    monkeypatch.setattr(WordPiece, "__init__", lambda self, encoder: setattr(self, "_encoder", other))
    assert WordPiece.of(fast) is None
