"""The cache of what calibration made: made once, kept, made anew where its source has changed; int8 too."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration import few_calibration_texts, quantized_sources

from ftbert.checkpoint import Checkpoint
from ftbert.converters import open_checkpoint
from ftbert.dtypes import EIGHT_BITS, FP8
from ftbert.formats import numbers_of
from ftbert.quantization import (
    cache,
    cached_at,
    contents,
    in_8_bits,
    quantize,
)

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, tiny_bert: Callable[..., Path]) -> Path:
    (tmp_path / "models").mkdir()
    return tiny_bert(tmp_path / "models")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTBERT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fp8"


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with few_calibration_texts(monkeypatch):
        yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return quantized_sources(monkeypatch)


def counts(checkpoint: Checkpoint, dtype: torch.dtype = FP8) -> int:
    """How many matrices are in 8 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with in_8_bits(checkpoint, dtype, CPU) as stored:
            specs = [spec for spec in stored.config.encoder.weight_specs() if numbers_of(spec.stored) == dtype]
            for spec in specs:
                assert stored.read(spec.name, dtype).dtype == dtype
    return len(specs)


@pytest.mark.parametrize("word", ["fp8", "int8"])
def test_made_once_and_kept(folder: Path, cached: Path, made: list[str], word: str) -> None:
    dtype, cached = EIGHT_BITS[word], cached.with_name(word)
    told = pytest.warns(UserWarning, match=f"made {word} by calibration on .* texts, .* kept in {cached}")
    with told, in_8_bits(open_checkpoint(folder), dtype, CPU) as stored:
        first = {name: stored.read(name, dtype) for name in stored.tensors if name.endswith(".ffn.up.weight")}
    before = sorted(cached.iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said of a hit
        with in_8_bits(open_checkpoint(folder), dtype, CPU) as stored:
            assert all(torch.equal(stored.read(name, dtype).float(), one.float()) for name, one in first.items()) and first
    assert made == [folder.name] and sorted(cached.iterdir()) == before
    assert [path.name for path in before if path.is_dir()] == [cached_at(open_checkpoint(folder), dtype).name]  # type: ignore[union-attr]


def test_what_makes_it_anew(folder: Path, cached: Path, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def changed_file() -> None:
        flip(folder / "model.safetensors", -1)

    def other_words() -> None:
        (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text() + "more\n")

    found = {cached_at(open_checkpoint(folder), FP8)}
    assert counts(open_checkpoint(folder)) == 8
    for number, change in enumerate((
        changed_file, other_words, lambda: monkeypatch.setattr(cache, "FORMAT", 1000),
        lambda: monkeypatch.setattr(cache, "__version__", "9.9"),
        lambda: monkeypatch.setattr(cache, "calibration_texts", lambda: ["other texts"]),
    )):  # fmt: skip
        change()
        found.add(cached_at(open_checkpoint(folder), FP8))
        assert len(found) == number + 2
    os.utime(folder / "model.safetensors", ns=(1, 1))  # the same bytes
    (folder / "README.md").write_text("which no number comes from")
    assert cached_at(open_checkpoint(folder), FP8) in found
    assert counts(open_checkpoint(folder)) == 8 and made == [folder.name] * 2


def flip(path: Path, place: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


@pytest.mark.parametrize("entry", ["folder", "link"])
def test_a_strangers_folder_of_the_same_names_is_another_model(
    folder: Path, tmp_path: Path, cached: Path, entry: str
) -> None:
    """Down to the commit's; with files, or with links to blobs of the same names."""
    found = []
    for owner in ("mine", "theirs"):
        snapshot = tmp_path / owner / "models--org--name" / "snapshots" / "0a1b"
        if entry == "folder":
            shutil.copytree(folder, snapshot)
        else:
            snapshot.mkdir(parents=True)
            (blobs := snapshot.parent.parent / "blobs").mkdir()
            for path in folder.iterdir():
                shutil.copy(path, blobs / f"{path.name}-blob")
                (snapshot / path.name).symlink_to(f"../../blobs/{path.name}-blob")
        if owner == "theirs":
            place = snapshot / "model.safetensors"
            before = place.stat()
            flip(place, -1)
            os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
        found.append(cached_at(open_checkpoint(snapshot), FP8))
    assert found[0] != found[1] and all(one is not None and one.name.startswith("org--name-") for one in found)


def test_files_that_others_may_change_have_a_place_of_their_own(folder: Path, cached: Path) -> None:
    """Whoever changes them while they are read would leave other weights where those of the same bytes are looked for."""
    mine = cached_at(open_checkpoint(folder), FP8)
    (folder / "model.safetensors").chmod(0o666)
    assert cached_at(open_checkpoint(folder), FP8) != mine


def test_a_source_that_changes_meanwhile_is_not_kept(
    folder: Path, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(source: Path, *args: Any, **kwargs: Any) -> Any:
        flip(folder / "model.safetensors", -1)
        return quantize(source, *args, **kwargs)

    monkeypatch.setattr(cache, "quantize", slowly)
    with pytest.raises(ValueError, match="its files changed while they were read; load it again"):
        counts(open_checkpoint(folder))
    assert not list(cached.glob("*/config.json"))


def test_bytes_are_read_once(folder: Path, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = contents._digest

    def counted(path: Path, size: int) -> str:
        read.append(path.name)
        return whole(path, size)

    monkeypatch.setattr(contents, "_digest", counted)
    key = cached_at(open_checkpoint(folder), FP8)
    assert "model.safetensors" in read
    cached_at(open_checkpoint(folder), FP8)
    assert read.count("model.safetensors") == 2  # written a moment ago, it might change within a tick of its time
    monkeypatch.setattr(contents, "_SETTLED", -1)
    cached_at(open_checkpoint(folder), FP8)
    read.clear()
    assert cached_at(open_checkpoint(folder), FP8) == key and not read
    place = folder / "model.safetensors"
    before = place.stat()
    flip(place, -1)
    while place.stat().st_ctime_ns == before.st_ctime_ns:
        place.touch()
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cached_at(open_checkpoint(folder), FP8) != key and read == ["model.safetensors"]


def test_a_snapshot_of_the_hub_is_known_by_its_bytes(folder: Path, tmp_path: Path, cached: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "blobs").mkdir()
    first = repository / "snapshots" / "0a1b"
    first.mkdir()
    for path in folder.iterdir():
        (first / path.name).symlink_to(path.rename(repository / "blobs" / f"{path.name}-blob"))
    key = cached_at(open_checkpoint(first), FP8)
    assert key is not None and key.name.startswith("org--name-")
    os.utime(repository / "blobs" / "model.safetensors-blob", ns=(1, 1))  # fetched again
    assert cached_at(open_checkpoint(first), FP8) == key
    second = first.rename(first.with_name("2c3d"))  # a commit that changed the README
    assert cached_at(open_checkpoint(second), FP8) == key
    assert counts(open_checkpoint(second)) == 8


@pytest.mark.parametrize("way", ["off", "no folder", "others may write"])
def test_without_a_cache_nothing_is_left(
    folder: Path, cached: Path, tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "off":
        monkeypatch.setenv("FTBERT_CACHE", "off")
    elif way == "no folder":
        (tmp_path / "cache").write_text("a file is in its place")
    else:
        cached.mkdir(parents=True)
        cached.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    for _ in range(2):
        with pytest.warns(UserWarning, match="not kept: "), in_8_bits(open_checkpoint(folder), FP8, CPU) as stored:
            assert stored.config.encoder.has_8_bits and stored.folder is not None and stored.folder.exists()
        assert not stored.folder.exists() and not list((tmp_path / "temporary").iterdir())
    assert made == [folder.name] * 2 and not list(cached.glob("*"))


def test_a_cache_without_room(
    folder: Path, cached: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made elsewhere, and the cache is left as it was; another failure is told as it is."""
    quantize = cache.quantize

    def failing(code: int) -> None:
        def into(source: Path, target: Path, **how: Any) -> None:
            if target.is_relative_to(cached):
                raise OSError(code, os.strerror(code), str(target))
            quantize(source, target, **how)

        monkeypatch.setattr(cache, "quantize", into)

    failing(errno.ENOSPC)
    with (
        pytest.warns(UserWarning, match="not kept: the cache has no room; FTBERT_CACHE names another .*No space left"),
        in_8_bits(open_checkpoint(folder), FP8, CPU) as stored,
    ):
        assert stored.config.encoder.has_8_bits and stored.folder is not None
    assert made == [folder.name] and not [path for path in cached.iterdir() if path.suffix != ".lock"]
    assert not stored.folder.exists()
    failing(errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), pytest.warns(UserWarning), in_8_bits(
        open_checkpoint(folder), FP8, CPU
    ):
        pass


def test_the_warning_names_the_callers_line(folder: Path, cached: Path) -> None:
    """Not that of contextlib, by which it comes."""
    with pytest.warns(UserWarning, match="made fp8") as said, in_8_bits(open_checkpoint(folder), FP8, CPU):
        pass
    assert [warning.filename for warning in said] == [__file__]


def test_one_that_was_broken_is_made_again(folder: Path, cached: Path, made: list[str]) -> None:
    assert counts(open_checkpoint(folder)) == 8
    kept = cached_at(open_checkpoint(folder), FP8)
    assert kept is not None
    with (kept / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert counts(open_checkpoint(folder)) == 8 and made == [folder.name] * 2
    flip(kept / "model.safetensors", -1)
    assert counts(open_checkpoint(folder)) == 8 and made == [folder.name] * 3


def test_a_file_that_others_may_write_is_not_read(folder: Path, cached: Path, made: list[str]) -> None:
    before = os.umask(0)
    try:
        assert counts(open_checkpoint(folder)) == 8
    finally:
        os.umask(before)
    assert counts(open_checkpoint(folder)) == 8 and made == [folder.name]
    kept = cached_at(open_checkpoint(folder), FP8)
    assert kept is not None
    for path in (kept / "model.safetensors", kept / "config.json", kept):
        path.chmod(path.stat().st_mode | 0o002)
        told = pytest.warns(UserWarning, match=f"not kept: others can write to {path}; `chmod -R go-w")
        with told, in_8_bits(open_checkpoint(folder), FP8, CPU) as stored:
            assert stored.folder != kept
        path.chmod(path.stat().st_mode & ~0o002)
    assert counts(open_checkpoint(folder)) == 8 and made == [folder.name] * 4


def test_a_failure_leaves_nothing(folder: Path, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["ftbert.quantization.quantize"], "calibration_texts", lambda: ["few"])
    with pytest.raises(ValueError, match="too few to calibrate on"):
        counts(open_checkpoint(folder))
    assert not [path for path in cached.iterdir() if path.suffix != ".lock"]


SLOW = """
import sys, time, warnings
warnings.simplefilter("ignore")
import torch
from ftbert.converters import open_checkpoint, write_folder
from ftbert.quantization import cache, in_8_bits, quantize as module
import ftbert.quantization.quantize
inner = sys.modules["ftbert.quantization.quantize"]
def slowly(*args):
    print("writes", flush=True)
    time.sleep(float(sys.argv[2]))
    return write_folder(*args)
inner.write_folder = slowly
with in_8_bits(open_checkpoint(sys.argv[1]), torch.float8_e4m3fn, torch.device("cpu")) as stored:
    print("read", len(stored.tensors), flush=True)
"""


def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SLOW, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True)


def test_of_two_processes_one_calibrates(folder: Path, cached: Path) -> None:
    both = [start(folder, 1.0) for _ in range(2)]
    said = [one.communicate(timeout=120)[0].split("\n")[:-1] for one in both]
    assert [one.returncode for one in both] == [0, 0]
    assert sorted(map(len, said)) == [1, 2] and {lines[-1].split()[0] for lines in said} == {"read"}
    assert len([path for path in cached.iterdir() if path.is_dir()]) == 1


def test_after_a_kill_the_next_goes_on(folder: Path, cached: Path) -> None:
    killed = start(folder, 60)
    assert killed.stdout is not None and killed.stdout.readline() == "writes\n"
    killed.kill()
    killed.wait()
    assert counts(open_checkpoint(folder)) == 8
    assert sorted(path.suffix for path in cached.iterdir()) == sorted([".lock", next(cached.glob("*/config.json")).parent.suffix])
