"""Models whose GGUF file is split, as llama.cpp's llama-gguf-split and its converter write them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers_offline import write as write_tokenizer

import ftbert
from ftbert.converters import convert, open_checkpoint
from ftbert.converters.hub_name import one_of_each

gguf = pytest.importorskip("gguf")
from gguf_models import all_as, make, vocabulary, write  # noqa: E402

TEXTS = ["hello world", "the end"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One model in a file, and in a folder in parts."""
    folder = tmp_path_factory.mktemp("parts")
    extra = vocabulary(write_tokenizer(folder / "tokenizer", "bert"), "bert") | {"bert.pooling_type": 1}
    model = make("bert", vocab_size=300)
    whole = write(model, folder / "whole.gguf", "bert", all_as("Q8_0"), extra)
    (folder / "split").mkdir()
    return whole, write(model, folder / "split" / "m.Q8_0.gguf", "bert", all_as("Q8_0"), extra, most=10)


def beside(part: Path, number: int, count: int = 4) -> Path:
    return part.with_name(f"m.Q8_0-{number:05d}-of-{count:05d}.gguf")


def test_whichever_part_is_named_and_the_folder(pair: tuple[Path, Path], tmp_path: Path) -> None:
    whole, first = pair
    wanted, source = ftbert.load(whole).encode(TEXTS), open_checkpoint(whole)
    assert len(list(first.parent.iterdir())) == 4
    for named in (*sorted(first.parent.iterdir()), first.parent):
        found = open_checkpoint(named)
        assert found.tensors == source.tensors and len(found.source.files) == 4
        np.testing.assert_array_equal(ftbert.load(named).encode(TEXTS), wanted)
    for name in source.source.shapes():
        assert found.source.sample(name) == source.source.sample(name)
    convert(first.parent, tmp_path / "ours")
    np.testing.assert_array_equal(ftbert.load(tmp_path / "ours").encode(TEXTS), wanted)
    assert (ftbert.load(first.parent, dtype="q8_0").encode(TEXTS) @ wanted.T).diagonal().min() > 0.999


def changed(part: Path, what: str, tmp_path: Path) -> Path:
    """A copy of the folder of parts in which something is wrong. The file that is named."""
    folder = Path(shutil.copytree(part.parent, tmp_path / "copy"))
    first = folder / part.name
    two = beside(first, 2)
    other = write(make("bert", vocab_size=300, hidden_size=64, num_attention_heads=2), tmp_path / "m.Q8_0.gguf", "bert", most=10)
    if what == "missing":
        beside(first, 3).unlink()
        return beside(first, 2)
    if what == "another model's":
        shutil.copy(beside(other, 2), two)
    elif what == "the same twice":
        shutil.copy(beside(first, 3), two)
    elif what == "renamed":
        return two.rename(folder / "m.gguf")
    elif what == "another count":
        first = beside(first, 1, 5)
        for i in range(5):
            shutil.copy(two, beside(first, i + 1, 5))
    elif what == "cut short":
        two.write_bytes(two.read_bytes()[:-64])
    else:
        reader = two.read_bytes()
        entry = {"another total": b"split.tensors.count"}[what]
        at = reader.index(entry) + len(entry) + 4
        two.write_bytes(reader[:at] + bytes([reader[at] + 1]) + reader[at + 1 :])
    return first


WRONG: dict[str, tuple[type[Exception], str]] = {
    "missing": (FileNotFoundError, r"-00002-of-00004.gguf: one of 4 parts of a model; missing beside it: m.Q8_0-00003-of-00004.gguf$"),
    "another model's": (ValueError, r"the config asks for \[96, 96\], the file has \[64, 64\]"),
    "the same twice": (ValueError, r"-00002-of-00004.gguf: its split.no is 2: expected 1, by its name"),
    "renamed": (ValueError, r"m.gguf: its split.count is 4: expected the name of one of 4 parts, m-00001-of-00004.gguf"),
    "another count": (ValueError, r"-00001-of-00005.gguf: its split.count is 4: expected the name of one of 4 parts"),
    "cut short": (ValueError, r"-00002-of-00004.gguf: no GGUF file that ftbert can read: tensor '.*' ends at"),
    "another total": (ValueError, r"-00002-of-00004.gguf: its split.tensors.count is 38, in .*-00001-of-00004.gguf it is 37: parts of different"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_parts_that_do_not_belong_together(what: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    kind, words = WRONG[what]
    with pytest.raises(kind, match=words):
        ftbert.load(changed(pair[1], what, tmp_path))


def test_a_tensor_in_two_parts(pair: tuple[Path, Path], tmp_path: Path) -> None:
    first = changed(pair[1], "missing", tmp_path).with_name(pair[1].name)
    data = beside(first, 4).read_bytes()
    at = data.index(b"split.no") + len(b"split.no") + 4
    beside(first, 3).write_bytes(data[:at] + b"\2" + data[at + 1 :])
    with pytest.raises(ValueError, match="-00004-of-00004.gguf: tensor '.*' is in m.Q8_0-00003-of-00004.gguf, too: parts of different models"):
        ftbert.load(first)


def test_parts_by_their_names() -> None:
    files = ["a/m-Q4_K_M.gguf", *(f"b/m-Q8_0-{i:05d}-of-00002.gguf" for i in (1, 2)), *(f"m-F16-{i:05d}-of-00003.gguf" for i in (2, 3))]
    assert one_of_each([*reversed(files)]) == ["a/m-Q4_K_M.gguf", files[1], files[3]]
    odd = ["m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-1-of-2.gguf", "m-00001-of-99999.gguf"]
    assert one_of_each(odd) == sorted(odd)
