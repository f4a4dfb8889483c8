"""Tokenising in a worker: long texts are cut exactly. Settings are read; what is missing is one line."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import VOCAB_WORDS
from hypothesis import given, settings
from hypothesis import strategies as st

from ftbert import cli
from ftbert.cli.program import _parser
from ftbert.cli.serve import settings_of
from ftbert.server import FLAGS, Settings, from_environment

for _package in ("msgspec", "orjson"):
    pytest.importorskip(_package, reason=f"{_package} is not installed: the extra ftbert[serve]")

from ftbert.server.description import Description  # noqa: E402
from ftbert.server.errors import ApiError  # noqa: E402
from ftbert.server.text_encoder import TextEncoder  # noqa: E402

LENGTH = 16


def tokenizer(kind: str) -> Any:
    """BERT's, RoBERTa's and XLM-R's ways to split, small."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    words = [" ".join(random.Random(i).choices(VOCAB_WORDS[5:], k=20)) for i in range(200)] + ["ä ö ü é 中文 字"] * 5
    common: dict[str, Any] = {"special_tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]"], "show_progress": False}
    trainer: Any
    if kind == "bert":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=300, **common)
    elif kind == "roberta":
        made = Tokenizer(models.BPE(unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, **common)
    else:
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="[UNK]", **common)
    made.train_from_iterator(words, trainer)
    ids = [("[CLS]", made.token_to_id("[CLS]")), ("[SEP]", made.token_to_id("[SEP]"))]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ids)
    return made


def description(made: Any, **other: Any) -> Description:
    values: dict[str, Any] = {
        "name": "m", "source": "m", "task": "embedding", "dtype": "float32", "device": "cpu", "hidden": 4,
        "vocab": made.get_vocab_size(), "token_types": 2, "longest": LENGTH, "max_length": LENGTH, "special": 2,
        "special_ids": [0, 1, 2, 3], "tokenizer": made.to_str(), "encode_special_tokens": False, "pooling": "mean",
        "prompts": {}, "default_prompt": "", "include_prompt": True, "truncate_dim": None, "normalize": False,
        "labels": [], "batch_tokens": 0, "rate": 0.0,
    }  # fmt: skip
    return Description(**{**values, **other})


TOKENIZERS = {kind: tokenizer(kind) for kind in ("bert", "roberta", "xlm")}
ENCODERS = {kind: TextEncoder(description(made)) for kind, made in TOKENIZERS.items()}
pieces = st.sampled_from(
    [*VOCAB_WORDS[5:60], "ä", "中文", "x" * 300, "", " ", "\n", "\t", "\u0301", "\u00a0", "!?", "[SEP]", "\x00"]
)
long_texts = st.lists(pieces, min_size=0, max_size=400).map(" ".join)


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("side", ["right", "left"])
@settings(max_examples=150, deadline=None)
@given(text=long_texts)
def test_cut_texts_have_the_tokens_of_whole_ones(kind: str, side: str, text: str) -> None:
    whole = TOKENIZERS[kind]
    whole.enable_truncation(LENGTH, direction=side)
    assert ENCODERS[kind].encode([text], "", True, side).ids.tolist() == whole.encode(text).ids


@pytest.mark.parametrize("kind", ENCODERS)
@settings(max_examples=100, deadline=None)
@given(query=st.sampled_from(["word1", "a b c", "word1 " * 40, "x" * 100]), text=long_texts)
def test_cut_pairs_have_the_tokens_of_whole_ones(kind: str, query: str, text: str) -> None:
    whole = TOKENIZERS[kind]
    whole.enable_truncation(LENGTH, direction="right")
    want = whole.encode(query, text)
    got = ENCODERS[kind].encode_pairs([(query, text)], True, "right")
    assert got.ids.tolist() == want.ids
    assert got.types is not None and got.types.tolist() == want.type_ids


def test_these_tokenizers_are_cut() -> None:
    for kind, encoder in ENCODERS.items():
        assert encoder._cutter.exact, kind
        assert len(encoder._cutter.cut("word1 " * 10_000, "right")) < 300
        assert len(encoder._cutter.cut("word1 " * 10_000, "left")) < 300


@pytest.mark.parametrize("text", ["a " + "x" * 200_000, "x" * 200_000 + " a", "a  b " * 50_000, "字" * 100_000])
@pytest.mark.parametrize("side", ["right", "left"])
def test_texts_without_a_good_place_to_cut_end(text: str, side: str) -> None:
    whole = TOKENIZERS["bert"]
    whole.enable_truncation(LENGTH, direction=side)
    assert ENCODERS["bert"].encode([text], "", True, side).ids.tolist() == whole.encode(text).ids


def test_what_is_too_long_is_refused_where_it_must_not_be_cut() -> None:
    encoder = ENCODERS["bert"]
    for given_ in ("word1 " * 100, [5] * (LENGTH + 1)):
        with pytest.raises(ApiError, match="must have less than 17 tokens"):
            encoder.encode([given_], "", False, "right")
    assert encoder.encode([[5, 6] * LENGTH], "", True, "left").ids.tolist() == [5, 6] * (LENGTH // 2)


def parsed(*arguments: str, **environment: str) -> Settings:
    return settings_of(_parser().parse_args(["serve", *arguments]), environment)


def test_the_command_line_goes_before_the_environment() -> None:
    environment = {"PORT": "2", "API_KEY": "k", "MAX_CLIENT_BATCH_SIZE": "3", "AUTO_TRUNCATE": "false"}
    found = parsed("m", "--port", "1", HOSTNAME="box", **environment)
    assert (found.port, found.api_key, found.max_client_batch_size, found.auto_truncate) == (1, "k", 3, False)
    assert found.hostname == "0.0.0.0"  # Docker sets HOSTNAME to the container's name
    assert Settings.from_json(found.to_json()) == found


def test_models_and_devices() -> None:
    found = parsed("a/b/minilm", "rank=c/d", "--device", "cuda:0,cuda:1")
    assert found.models == (("minilm", "a/b/minilm"), ("rank", "c/d"))
    assert (found.devices, found.dtype) == (("cuda:0", "cuda:1"), "fp16")
    assert parsed("a", "--served-model-name", "x").models == (("x", "a"),)
    for bad in ("a b/a", "a b --served-model-name x", "a --device tpu", "a --device cpu:1"):
        with pytest.raises(ValueError, match=r"name|--device"):
            parsed(*bad.split())


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_has_a_default_and_refuses_nonsense(flag: Any) -> None:
    assert flag.field in Settings.__dataclass_fields__
    if flag.kind is not str:
        with pytest.raises(ValueError, match=flag.name):
            flag.parse("much")
        if flag.in_environment:
            with pytest.raises(ValueError, match="in the environment"):
                from_environment({flag.field.upper(): "much"})


def test_without_the_extra_serve_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftbert.server import extra

    monkeypatch.setattr(extra, "PACKAGES", ("httptools", "no_such_package"))
    assert cli.main(["serve", "model"]) == 1
    assert capsys.readouterr().err == (
        "ftbert: error: ftbert serve needs no_such_package. Type: pip install no_such_package, "
        "or install ftbert[serve]\n"
    )


def test_help_needs_no_package_of_the_extra() -> None:
    code = (
        "import sys; from ftbert import cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'msgspec', 'orjson', 'uvloop', 'httptools', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0 and "--max-batch-tokens" in done.stdout, done.stderr
