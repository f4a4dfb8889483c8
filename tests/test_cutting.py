"""Long texts are cut before they are tokenised, and nobody can tell: the ids are those of the whole text."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers_offline import FAMILIES, TEXTS, write
from transformers import AutoTokenizer

from ftbert.text import FastTokenizer, TextSettings, Tokenizer, load_tokenizer

ODD = [
    " ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", "\x00", "\x07", "\u200b", "\u200d", "\ufeff", "\ufffd", "\u0301", "\u0300\u0323",
    " \u0301", "\u0600 ", "\u0d4e ", "中", "中文字符", "한국어 ", "ひらがな", "العربية ", "हिन्दी ", "ไทย", "🙂", "👩‍👩‍👧 ", "é", "e\u0301 ", "ﬁ", "ａｂｃ　",
    "[MASK]", " [MASK] ", "<mask>", " <mask> ", "</s>", "[SEP]x", "``", "''", "'s ", "▁", " ▁ ", "\u0384 ", "\u00b4 ", "½ ", "123 ", ", ", ". ", "...", "!?",
    "hello ", "world ", "the end ", "cafe ", "naïve ", "Hello ", "a" * 120 + " ", "x" * 30,
]  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {},
    {"do_lower_case": False, "strip_accents": True},
    {"tokenize_chinese_chars": False},
    {"add_prefix_space": True},
    {"extra_special_tokens": ["query:", "<new>"]},
    {"additional_special_tokens": ["hello world"]},  # holds a space: nothing may be cut
    {"added_tokens_decoder": {"299": {"content": "<rstrip>", "lstrip": True, "rstrip": True, "normalized": False, "single_word": False, "special": True}}},
    {"added_tokens_decoder": {"299": {"content": "wor", "lstrip": False, "rstrip": False, "normalized": True, "single_word": True, "special": False}}},
]  # fmt: skip


def odd_texts(rng: random.Random, count: int, most: int = 600) -> list[str]:
    """Of a few kinds of pieces each, so that some have no space, some nothing else."""
    return ["".join(rng.choices(rng.sample(ODD, rng.randint(1, 8)), k=rng.randint(30, most))) for _ in range(count)]


def whole_ids(folder: Path, texts: list[Any], length: int, side: str) -> list[list[int]]:
    theirs = load_tokenizer(folder)
    theirs.truncation_side = side
    singles = [text if isinstance(text, str) else text[0] for text in texts]
    if all(isinstance(text, str) for text in texts):
        return theirs(singles, truncation=True, max_length=length)["input_ids"]  # type: ignore[no-any-return]
    return theirs(singles, [text[1] for text in texts], truncation=True, max_length=length)["input_ids"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_ids_are_those_of_the_whole_text(tmp_path: Path, family: str, side: str) -> None:
    rng = random.Random(f"{family} {side}")
    repeated = [text * 12 for text in TEXTS] + [" " * 5000, "a" * 5000, "hello" + " " * 5000 + "world"]
    for number, settings in enumerate(SETTINGS):
        folder = write(tmp_path / str(number), family, **settings)
        tokenizer = Tokenizer(folder, TextSettings(), 64)
        for length in (4, 17):
            texts = odd_texts(rng, 25) + repeated
            got = [row.tolist() for row in tokenizer.tokens(texts, max_length=length, side=side).rows()]
            assert got == whole_ids(folder, texts, length, side), (settings, length)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_with_long_texts(tmp_path: Path, family: str, side: str) -> None:
    rng = random.Random(f"{family} {side}")
    folder = write(tmp_path, family)
    tokenizer = Tokenizer(folder, TextSettings(), 64)
    short = ["", "hello", "hello world the end", "中文字符 and 中文", "a b c d e f g h"]
    for length in (9, 10):  # what is left for the texts is odd and even
        long = odd_texts(rng, 12, 60)
        pairs: list[Any] = [*zip(rng.choices(short, k=12), long, strict=True), *zip(long, rng.choices(short, k=12), strict=True)]
        pairs += [*zip(long, reversed(long), strict=True), *itertools.product(short, short)]
        got = [row.tolist() for row in tokenizer.tokens(pairs, max_length=length, side=side).rows()]
        assert got == whole_ids(folder, pairs, length, side), length


def test_a_long_text_among_pairs(tmp_path: Path) -> None:
    folder = write(tmp_path, "bert")
    texts: list[Any] = [("hello", "world"), ("x" * 120 + " ") * 200 + "hello", ("middle", "word " * 200)]
    found = Tokenizer(folder, TextSettings(), 64).tokens(texts, max_length=64)
    whole = AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    whole.enable_truncation(64)
    want = whole.encode_batch(texts)
    assert [row.tolist() for row in found.rows()] == [one.ids for one in want]
    assert found.types is not None
    assert found.types.tolist() == [kind for one in want for kind in one.type_ids]


def test_what_is_cut(tmp_path: Path) -> None:
    """The tests above compare something: these families are cut, and these settings keep them whole."""
    for family in FAMILIES:
        tokenizer = Tokenizer(write(tmp_path / family, family), TextSettings(), 64)
        assert tokenizer._fast.cutter is not None
        text = "hello world " * 2000
        assert len(tokenizer._fast.cutter.part(text, 500, "right")) <= 500, family
        assert len(tokenizer._fast.cutter.part(text, 500, "left")) <= 500, family
        assert tokenizer._fast.cutter.part("x" * 5000, 500, "right") == "x" * 5000
    spaced = write(tmp_path / "spaced", "bert", additional_special_tokens=["hello world"])
    assert Tokenizer(spaced, TextSettings(), 64)._fast.cutter is None
    strips = {"299": {"content": "<r>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False, "special": True}}
    kept = Tokenizer(write(tmp_path / "rstrip", "roberta", added_tokens_decoder=strips), TextSettings(), 64)._fast.cutter
    assert kept is not None
    assert kept.sides == ("right",)


@pytest.mark.parametrize(
    ("pre_tokenizer", "normalizer", "cut"),
    [
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}, None, True),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}, {"type": "NFKC"}, True),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}, None, False),
        ({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}, None, False),
        ({"type": "Whitespace"}, {"type": "Replace", "pattern": {"Regex": "h.*d"}, "content": "x"}, False),
        ({"type": "Whitespace"}, {"type": "Prepend", "prepend": "▁"}, False),
        ({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "Digits", "individual_digits": True}]}, {"type": "Strip", "strip_left": True, "strip_right": True}, True),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}, {"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]}, True),
        ({"type": "Punctuation", "behavior": "Isolated"}, None, False),
        (None, None, False),
    ],
)  # fmt: skip
def test_other_chains(tmp_path: Path, pre_tokenizer: Any, normalizer: Any, cut: bool) -> None:
    folder = write(tmp_path, "xlm-roberta", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "config.json").write_text("{}")
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    described |= {"pre_tokenizer": pre_tokenizer, "normalizer": normalizer}
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    tokenizer = Tokenizer(folder, TextSettings(), 64)
    assert (tokenizer._fast.cutter is not None) is cut
    texts = odd_texts(random.Random(str(pre_tokenizer)), 150)
    for side in ("right", "left"):
        whole = Fast.from_file(str(folder / "tokenizer.json"))
        whole.no_padding()
        whole.enable_truncation(12, direction=side)
        want = [one.ids for one in whole.encode_batch(texts)]
        assert [row.tolist() for row in tokenizer.tokens(texts, max_length=12, side=side).rows()] == want


@pytest.mark.parametrize("text", ["hello world ", "中文字符", "hello\n\n", "naïve café, "], ids=["words", "cjk", "lines", "accents"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_of_a_million_characters_few_are_read(
    minilm_folder: Path, text: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, handed = Tokenizer(minilm_folder, TextSettings(), 512), list[int]()
    text, rows = text * (1_000_000 // len(text)), FastTokenizer._rows

    def counted(fast: FastTokenizer, texts: Any, *how: Any) -> Any:
        handed.append(sum(map(len, texts)))
        return rows(fast, texts, *how)

    monkeypatch.setattr(FastTokenizer, "_rows", counted)
    got = tokenizer.tokens([text], side=side).rows()[0].tolist()
    assert 0 < sum(handed) < 20_000
    assert [got] == whole_ids(minilm_folder, [text], 512, side)


def test_a_side_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="truncates on the right; got side 'up'"):
        Tokenizer(write(tmp_path, "bert"), TextSettings(), 64).tokens(["a"], side="up")
