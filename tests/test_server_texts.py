"""Tokenising in a worker: ids, offsets, types. Settings are read; what is missing is one line."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers_offline import TEXTS, write
from transformers import AutoTokenizer

from ftbert import cli
from ftbert.cli.program import _parser
from ftbert.cli.serve import settings_of
from ftbert.server import FLAGS, Settings, from_environment
from ftbert.text import FastTokenizer

for _package in ("msgspec", "orjson"):
    pytest.importorskip(_package, reason=f"{_package} is not installed: the extra ftbert[serve]")

from ftbert.server.description import Description, ModelFacts, ScoreFacts, TextFacts, VectorFacts  # noqa: E402
from ftbert.server.errors import ApiError  # noqa: E402
from ftbert.server.logs import warn_without_key  # noqa: E402
from ftbert.server.text_encoder import TextEncoder  # noqa: E402

LENGTH = 16


def encoder(folder: Path, family: str = "bert", **other: Any) -> TextEncoder:
    made = AutoTokenizer.from_pretrained(str(write(folder, family)), local_files_only=True).backend_tokenizer
    values: dict[str, Any] = {
        "max_length": LENGTH, "special": 2, "special_ids": [0, 1, 2, 3], "tokenizer": made.to_str(),
        "encode_special_tokens": False, "prompts": {}, "default_prompt": "", "include_prompt": True, "query_length": None,
        "document_length": None, "truncation_side": "right",
    }  # fmt: skip
    model = ModelFacts("float32", "cpu", hidden=4, token_width=4, vocab=made.get_vocab_size(), token_types=2)
    vectors, scores = VectorFacts("mean", None), ScoreFacts([], "Identity")
    return TextEncoder(Description("m", "m", "embedding", model, TextFacts(**{**values, **other}), vectors, scores))


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_ids_are_those_of_the_whole_texts(tmp_path: Path, family: str, side: str) -> None:
    ours = encoder(tmp_path, family)
    whole = copy.deepcopy(ours.whole)
    whole.enable_truncation(LENGTH, direction=side)
    texts = [*TEXTS, "hello world " * 500, "a" * 5000, ""]
    want = [one.ids for one in whole.encode_batch(texts)]
    found = ours.encode(texts, "", True, side)
    assert found.ids.tolist() == sum(want, [])
    assert np.diff(found.offsets).tolist() == list(map(len, want))
    given = ours.encode([texts[0], [5, 6], texts[1]], "", True, side)  # ids stay where they stand
    assert given.ids.tolist() == want[0] + [5, 6] + want[1]
    pairs = list(zip(texts, reversed(texts), strict=True))
    both = ours.encode_pairs(pairs, True, side)
    encodings = whole.encode_batch(pairs)
    assert both.ids.tolist() == sum((one.ids for one in encodings), [])
    assert both.types is not None
    assert both.types.tolist() == sum((one.type_ids for one in encodings), [])


def test_what_is_too_long_is_refused_where_it_must_not_be_cut(tmp_path: Path) -> None:
    ours = encoder(tmp_path)
    for inputs in (["hello " * 100], [[5] * (LENGTH + 1)]):
        with pytest.raises(ApiError, match="must have less than 17 tokens"):
            ours.encode(inputs, "", False, "right")
    with pytest.raises(ApiError, match="must have less than 17 tokens"):
        ours.encode_pairs([("hello " * 20, "world " * 20)], False, "right")
    assert ours.encode(["hello " * (LENGTH - 2)], "", False, "right").tokens == LENGTH
    assert ours.encode([[5, 6] * LENGTH], "", True, "left").ids.tolist() == [5, 6] * (LENGTH // 2)


def test_a_prompt_is_counted_where_it_is_not_pooled(tmp_path: Path) -> None:
    found = encoder(tmp_path, include_prompt=False).encode(["hello", [5, 6]], "hello world ", True, "right")
    assert found.skip is not None and found.skip.tolist() == [3, 0]
    assert encoder(tmp_path).encode(["hello"], "hello world ", True, "right").skip is None


@pytest.mark.parametrize("text", ["x", "字", ".", "é"])
def test_megabytes_without_a_space_are_no_seconds(minilm_folder: Path, text: str) -> None:
    if importlib.util.find_spec("nanotoken") is None:
        pytest.skip("nanotoken is not installed: the extra ftbert[fast-text]")
    ours = FastTokenizer(Tokenizer.from_file(str(minilm_folder / "tokenizer.json")), True)
    ours.tokens(["warm"], 512, "right")
    began = time.process_time()
    ours.tokens([text * 2_000_000], 512, "right")
    assert time.process_time() - began < 1.0  # 20 to 180 ms; `tokenizers` takes seconds


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_no_more_of_a_text_is_read_than_memory_allows(
    tmp_path: Path, family: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `tokenizers` 32 MB are gigabytes: long texts are cut, and refused where they cannot be."""
    monkeypatch.setenv("FTBERT_TOKENIZER", "tokenizers")
    monkeypatch.setattr("ftbert.server.text_encoder._LONGEST", 2000)
    ours = encoder(tmp_path, family)
    text, short = "hello world the end " * 500, "hello " * 20
    want = ours._fast.tokens([text], LENGTH, side).ids.tolist()
    assert ours.encode([text], "", True, side).ids.tolist() == want and len(want) == LENGTH
    pair = ours._fast.tokens([(short, text)], LENGTH, side).ids.tolist()
    assert ours.encode_pairs([(short, text)], True, side).ids.tolist() == pair
    refused: list[Any] = ["a" * 10_000, " " * 10_000 + "hello"] if side == "right" else ["a" * 10_000]
    for bad in refused:
        with pytest.raises(ApiError, match="cannot be cut") as error:
            ours.encode([short, bad], "", True, side)
        assert error.value.status == 413
    for both in (("a" * 10_000, short), (short, "a" * 10_000), (text, text)):
        with pytest.raises(ApiError, match="cannot be cut"):
            ours.encode_pairs([both], True, side)


def test_workers_import_no_torch() -> None:
    code = "import sys, ftbert.server.worker; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def parsed(*arguments: str, **environment: str) -> Settings:
    return settings_of(_parser().parse_args(["serve", *arguments]), environment)


def test_the_command_line_goes_before_the_environment() -> None:
    environment = {"PORT": "2", "API_KEY": "k", "MAX_CLIENT_BATCH_SIZE": "3", "AUTO_TRUNCATE": "false"}
    found = parsed("m", "--port", "1", HOSTNAME="box", **environment)
    assert (found.port, found.api_key, found.max_client_batch_size, found.auto_truncate) == (1, "k", 3, False)
    assert found.hostname == "127.0.0.1"  # Docker sets HOSTNAME to the container's name
    assert parsed("m", "--host", "0.0.0.0").hostname == parsed("m", "--hostname", "0.0.0.0").hostname == "0.0.0.0"
    assert Settings.from_json(found.to_json()) == found


def test_models_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parsed("a/b/minilm", "rank=c/d", "--device", "cuda:0,cuda:1")
    assert found.models == (("minilm", "a/b/minilm"), ("rank", "c/d"))
    assert (found.devices, found.dtype) == (("cuda:0", "cuda:1"), None)
    assert parsed("a", "--served-model-name", "x").models == (("x", "a"),)
    assert parsed("a", "--dtype", "auto").dtype == "auto"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert parsed("a", "--device", "cuda:*").devices == parsed("a", "--device", "cuda").devices == ("cuda:0", "cuda:1")
    for bad in ("a b/a", "a b --served-model-name x", "a --device tpu", "a --device cpu:1", "a --device cuda:*,cuda:1"):
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
        for wrong in ("-1", *([str(flag.most + 1)] if flag.most is not None else [])):
            with pytest.raises(ValueError, match=f"{flag.name}: expected"):
                flag.parse(wrong)


@pytest.mark.parametrize("host, key, warned", [
    ("127.0.0.1", False, False), ("::1", False, False), ("localhost", False, False), ("0.0.0.0", True, False),
    ("0.0.0.0", False, True), ("::", False, True), ("10.0.0.1", False, True), ("box", False, True),
])  # fmt: skip
def test_who_listens_beyond_this_machine_without_a_key_is_told(
    host: str, key: bool, warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftbert.server.logs.LOG.propagate", True)
    warn_without_key(host, key)
    assert ("without a key" in caplog.text) == warned


def test_without_the_extra_serve_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftbert.server import process

    monkeypatch.setattr(process, "PACKAGES", ("httptools", "no_such_package"))
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


def test_a_prompt_makes_one_copy_of_a_query(tmp_path: Path) -> None:
    made, query = encoder(tmp_path), "word " * 200_000
    pairs = [(query, f"text {i}") for i in range(100)]
    tracemalloc.start()
    try:
        found = made.encode_pairs(pairs, True, "right", prompt="query: ")
        assert tracemalloc.get_traced_memory()[1] < 10 * len(query)
    finally:
        tracemalloc.stop()
    alone = [made.encode_pairs([pair], True, "right", prompt="query: ").ids for pair in pairs]
    assert found.ids.tolist() == np.concatenate(alone).tolist()
