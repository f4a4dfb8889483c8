"""The cache of converted checkpoints: right after kills, races and corruption, and never in the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_bert

import ftbert
from ftbert.checkpoint import Checkpoint
from ftbert.conversion_cache import cache, open_cached
from ftbert.converters import open_checkpoint
from ftbert.user_cache import cache_folder


def opened(source: Path, both: Any, results: Any) -> None:
    """What a child process does: opens through the cache at once with the others, and says what it got."""
    torch.set_num_threads(1)
    both.wait()
    results.put(sum(float(tensor.double().sum()) for _, tensor in open_cached(source).items()))


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTBERT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def bin_folder(folder: Path, seed: int = 0, **sizes: Any) -> Path:
    """A HuggingFace folder as they were before safetensors: the smallest foreign format to make."""
    model = make_bert(seed, **sizes)
    folder.mkdir(exist_ok=True)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    model.config.save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return bin_folder(tmp_path / "source")


def entries(root: Path) -> list[Path]:
    # pathlib's glob finds hidden folders too: the work of a killed process is no entry.
    found = (root / "converted").glob("*") if root.exists() else ()
    return [one for one in found if one.is_dir() and not one.name.startswith(".")]


def assert_same(got: Checkpoint, source: Path) -> None:
    expected = open_checkpoint(source)
    assert list(got.tensors) == list(expected.tensors)
    for name in got.tensors:
        assert torch.equal(got.read(name), expected.read(name)), name


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTBERT_CACHE", "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.setenv("FTBERT_CACHE", "off")
    assert cache_folder() is None
    monkeypatch.delenv("FTBERT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/ftbert")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/ftbert")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 1 << 30)  # a container's user without an entry
    assert cache_folder() is None


def test_second_time_nothing_is_converted(source: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(open_cached(source), source)
    monkeypatch.setattr(cache, "_build", lambda *_: pytest.fail("converted again"))
    again = open_cached(source)
    assert_same(again, source)
    assert again.folder == source, "the tokenizer is the source's, not the entry's"
    assert again.source.where.startswith(str(root)) and len(entries(root)) == 1
    moved = source.rename(source.parent / "elsewhere")
    assert_same(open_cached(moved), moved)  # the path is not part of the content


def test_content_decides(source: Path, root: Path) -> None:
    open_cached(source)
    for path in (source / "pytorch_model.bin", source / "config.json"):  # old enough to be remembered by time
        os.utime(path, ns=(1, 1))
    open_cached(source)
    assert len(list((root / "index").glob("*.json"))) == 1
    bin_folder(source, seed=1)
    assert_same(open_cached(source), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-5}))
    assert open_cached(source).config.encoder.layer_norm_eps == 1e-5
    assert len(entries(root)) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 3}', '{"version": [1, 1], "files": [[]], "key": 1}'])
def test_index_may_be_lost(source: Path, root: Path, text: str) -> None:
    for path in (source / "pytorch_model.bin", source / "config.json"):
        os.utime(path, ns=(1, 1))
    open_cached(source)
    (place,) = (root / "index").glob("*.json")
    place.write_text(text)
    assert_same(open_cached(source), source)
    assert len(entries(root)) == 1


def test_safetensors_and_our_own_are_read_directly(tmp_path: Path, root: Path) -> None:
    from ftbert.converters.from_huggingface import convert

    make_bert().save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours")
    for folder in (tmp_path / "hf", tmp_path / "ours"):
        open_cached(folder)
    assert not root.exists()


def test_off_or_not_to_be_written(source: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTBERT_CACHE", "off")
    assert_same(open_cached(source), source)
    assert not root.exists()
    monkeypatch.setenv("FTBERT_CACHE", str(source / "config.json" / "below"))
    with pytest.warns(UserWarning, match="the cache in .* cannot be used .*FTBERT_CACHE names another"):
        assert_same(open_cached(source), source)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path, at: float, same_time: bool = False) -> None:
    data, before = bytearray(path.read_bytes()), path.stat().st_mtime_ns
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(data)
    if same_time:
        os.utime(path, ns=(before, before))


BREAK = {
    "weights truncated": lambda entry: _truncate(entry / "model.safetensors"),
    "weights grown": lambda entry: (entry / "model.safetensors").open("ab").write(b"x"),
    "bit in the header": lambda entry: _flip(entry / "model.safetensors", 0.001),
    "bit in the header, its time as before": lambda entry: _flip(entry / "model.safetensors", 0.001, same_time=True),
    "bit in the weights": lambda entry: _flip(entry / "model.safetensors", 0.7),
    "bit in the config": lambda entry: _flip(entry / "config.json", 0.5),
    "no weights": lambda entry: (entry / "model.safetensors").unlink(),
    "no config": lambda entry: (entry / "config.json").unlink(),
    "no seal": lambda entry: (entry / "entry.json").unlink(),
    "seal cut": lambda entry: _truncate(entry / "entry.json"),
    "seal of something else": lambda entry: (entry / "entry.json").write_text("[1]"),
    "others can write": lambda entry: (entry / "model.safetensors").chmod(0o666),
    "others can write into it": lambda entry: entry.chmod(0o777),
    "empty folder": lambda entry: [one.unlink() for one in entry.iterdir()],
}


@pytest.mark.parametrize("how", BREAK)
def test_corrupt_entry_is_rebuilt(source: Path, root: Path, how: str) -> None:
    open_cached(source)
    (entry,) = entries(root)
    BREAK[how](entry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(open_cached(source), source)
    assert entries(root) == [entry] and cache._is_whole(entry)


def test_broken_source_leaves_nothing(source: Path, root: Path) -> None:
    weights = torch.load(source / "pytorch_model.bin")
    del weights["encoder.layer.0.output.dense.weight"], weights["encoder.layer.1.output.dense.bias"]
    weights["embeddings.LayerNorm.bias"] = torch.zeros(3)
    torch.save(weights, source / "pytorch_model.bin")
    with pytest.raises(ValueError) as caught:
        ftbert.load(source)
    for problem in ("layer.0.output.dense.weight", "layer.1.output.dense.bias", "embeddings.LayerNorm.bias"):
        assert problem in str(caught.value), "every problem at once"
    assert not entries(root) and not list((root / "converted").glob(".*"))
    bin_folder(source)
    assert_same(open_cached(source), source)


def test_two_processes_race(source: Path, root: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    both, results = spawn.Barrier(2), spawn.Queue()
    children = [spawn.Process(target=opened, args=(source, both, results)) for _ in range(2)]
    for child in children:
        child.start()
    assert results.get(timeout=120) == results.get(timeout=120)
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0] and len(entries(root)) == 1
    assert not list((root / "converted").glob(".*"))
    assert_same(open_cached(source), source)
