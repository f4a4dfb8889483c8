"""load(dtype="fp8"): where it is refused, which types it has; the cache that holds what calibration made, int8 too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_bert

import ftbert
from ftbert import building, cli, devices
from ftbert import model as models
from ftbert.checkpoint import Checkpoint, fits_8_bits
from ftbert.converters import open_checkpoint
from ftbert.devices import check_dtype, stream_dtype
from ftbert.dtypes import DTYPES, EIGHT_BITS, FP8, INT8, MATRIX_DTYPES, parse_dtype, users_word
from ftbert.formats import formats, numbers_of
from ftbert.quantization import (
    cache,
    cached_at,
    calibration_texts,
    contents,
    in_8_bits,
    live_in_8_bits,
    quantize,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


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
    """Calibration takes a fraction of its time: threads wait for each other over such small matrices."""
    few, threads = calibration_texts()[:30], torch.get_num_threads()
    monkeypatch.setattr(sys.modules["ftbert.quantization.quantize"], "calibration_texts", lambda: few)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were quantized."""
    sources = []

    def counted(source: Path, *args: Any, **kwargs: Any) -> Any:
        sources.append(source.name)
        return quantize(source, *args, **kwargs)

    monkeypatch.setattr(cache, "quantize", counted)
    return sources


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpu(capability): this machine seems to have such a GPU, until something is to be computed there."""

    def seem(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(devices, "check_device", torch.device)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Fake")

    return seem


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> Iterator[list[Any]]:
    """Of models that would be built on a Hopper GPU: the user's checkpoint, the one with the weights, the type of what is
    not fp8."""
    gpu((9, 0))
    seen: list[Any] = []

    def build(checkpoint: Checkpoint, stored: Checkpoint, _: Any, element: torch.dtype, *__: Any) -> tuple[()]:
        seen.append((checkpoint, stored, element))
        return ()

    monkeypatch.setattr(building, "_build", build)
    monkeypatch.setattr(models, "Model", SimpleNamespace)
    def on_the_cpu(source: Path, target: Path, *, dtype: torch.dtype, device: str, force: bool) -> Any:
        return quantize(source, target, dtype=dtype, force=force)

    monkeypatch.setattr(cache, "quantize", on_the_cpu)
    yield seen


def load_quietly(*args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ftbert.load(*args, **kwargs)


def counts(checkpoint: Checkpoint, dtype: torch.dtype = FP8) -> int:
    """How many matrices are in 8 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with in_8_bits(checkpoint, dtype, CPU) as stored:
            specs = [spec for spec in stored.config.encoder.weight_specs() if numbers_of(spec.stored) == dtype]
            for spec in specs:
                assert stored.read(spec.name, dtype).dtype == dtype
    return len(specs)


# ---- words -----------------------------------------------------------------------------------------------------------


def test_words() -> None:
    for word in ("fp8", "float8_e4m3fn", torch.float8_e4m3fn):
        assert parse_dtype(word) == FP8
    for word in ("int8", torch.int8):
        assert parse_dtype(word) == INT8
    assert all(users_word(dtype) == word for word, dtype in EIGHT_BITS.items())
    for word in ("e4m3", "uint8", torch.uint8, torch.float8_e5m2):
        with pytest.raises(ValueError, match="expected fp32, fp16, bf16, fp8, int8 or q8_0"):
            parse_dtype(word)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_other_devices_are_refused(folder: Path, gpu: Any, made: list[str], capability: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"9\.0 \(H100, H200\); on the CPU ftbert computes in fp32, or bf16"):
        ftbert.load(folder, dtype="fp8")
    with pytest.raises(ValueError, match="on the CPU ftbert computes in fp32"):
        ftbert.load(folder).to(dtype="fp8")
    with pytest.raises(ValueError, match="on the CPU ftbert computes in fp32"):
        ftbert.optimize(make_bert(), dtype="fp8")
    gpu(capability)
    with pytest.raises(ValueError, match=rf"NVIDIA Fake of {capability[0]}\.{capability[1]}, computes in fp16, bf16 or fp32"):
        ftbert.load(folder, "cuda:0", "fp8")
    check_dtype(GPU, torch.float16)
    assert not made


@pytest.mark.parametrize(
    "word,capability,refused",
    [("fp8", (9, 0), ""), ("fp8", (8, 9), "capability 9.0 "), ("q8_0", (8, 0), ""), ("q8_0", (12, 0), ""),
     ("q8_0", (7, 5), "capability 8.0 or above"), ("int8", (9, 0), "is for the CPU"), ("bf16", (7, 0), "")],
)  # fmt: skip
def test_the_table_of_formats_says_which_gpus(gpu: Any, word: str, capability: tuple[int, int], refused: str) -> None:
    gpu(capability)
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        check_dtype(GPU, parse_dtype(word))


def test_the_table_of_formats_is_the_cores() -> None:
    of_matrices = {name for name, one in formats().items() if one.in_checkpoints}
    assert of_matrices == {"e4m3", "int8", "q8_0"} == {*MATRIX_DTYPES} - {*DTYPES}
    assert {name: one.numbers for name, one in formats().items()} == {
        **DTYPES, "e4m3": FP8, "e4m3_tensor": FP8, "int8": INT8, "byte_rows": torch.uint8, "q8_0": INT8,
    }  # fmt: skip
    assert all(one.other in ("", *formats()) for one in formats().values())
    assert not fits_8_bits("q8_0", [8, 64]) and fits_8_bits("int8", [8, 70000]) == "70000 columns are more than 65793"


def test_a_folder_of_fp8_on_other_devices(folder: Path, tmp_path: Path, gpu: Any) -> None:
    quantize(folder, tmp_path / "fp8")
    for dtype in ("fp32", "bf16", "fp8", "auto"):
        with pytest.raises(ValueError, match="fp8"):
            ftbert.load(tmp_path / "fp8", dtype=dtype)
    gpu((8, 0))
    for dtype in ("fp16", "auto"):
        with pytest.raises(ValueError, match=r"stored in fp8\. .*bf16 or fp32: load the model that it was made from"):
            ftbert.load(tmp_path / "fp8", "cuda:0", dtype)


def test_types_of_streams() -> None:
    for stored, scale, want in (
        (torch.float32, 1.0, torch.float16), (torch.float16, 1.0, torch.float16), (torch.bfloat16, 1.0, torch.bfloat16),
        (torch.float32, 25.3, torch.bfloat16), (torch.float16, 25.3, torch.bfloat16), (torch.float64, 0.5, torch.float16),
    ):  # fmt: skip
        assert stream_dtype(GPU, FP8, stored, scale) == want
        assert stream_dtype(GPU, torch.float16, stored, scale) == torch.float16
        assert stream_dtype(CPU, torch.bfloat16, stored, scale) == torch.float32


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_load_builds(folder: Path, tmp_path: Path, cached: Path, built: list[Any], stored: torch.dtype) -> None:
    from transformers import AutoModel

    AutoModel.from_pretrained(folder).to(stored).save_pretrained(folder)
    narrow = torch.bfloat16 if stored == torch.bfloat16 else torch.float16
    load_quietly(folder, "cuda:0", "fp8")
    checkpoint, weights, element = built[0]
    assert element == narrow and checkpoint.folder == folder and not checkpoint.config.encoder.has_8_bits
    assert weights.config.encoder.has_8_bits and weights.folder.parent == cached
    quantize(folder, tmp_path / "fp8")
    for dtype, want in ((None, narrow), ("fp8", narrow), ("auto", narrow), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        load_quietly(tmp_path / "fp8", "cuda:0", dtype)
        checkpoint, weights, element = built[-1]
        assert element == want and checkpoint is weights and checkpoint.folder == tmp_path / "fp8"
    with pytest.raises(ValueError, match="stored in fp8; dtype='fp8' or 'auto' loads it"):
        ftbert.load(tmp_path / "fp8", "cuda:0", "fp32")
    assert len(list(cached.glob("*/config.json"))) == 1  # of the plain model alone


@pytest.mark.parametrize("word", EIGHT_BITS)
def test_commands_know_the_word(folder: Path, word: str) -> None:
    from ftbert.cli.program import _parser
    from ftbert.cli.serve import settings_of

    options = _parser().parse_args(["serve", str(folder), "--device", "cuda:0", "--dtype", word])
    assert settings_of(options, {}).dtype == word
    for command in ("embed", "check", "bench", "info"):
        files = [str(folder / "a.txt"), str(folder / "a.npy")] if command == "embed" else []
        assert _parser().parse_args([command, str(folder), *files, "--dtype", word]).dtype == word
    if word != "q8_0":  # which no texts calibrate
        assert _parser().parse_args(["quantize", str(folder), "there", "--dtype", word]).dtype == word


def test_the_command_says_what_works(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", str(folder), "--dtype", "fp8"]) == 1
    assert "on the CPU ftbert computes in fp32, or bf16" in capsys.readouterr().err


# ---- the cache -------------------------------------------------------------------------------------------------------


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


# ---- live models -----------------------------------------------------------------------------------------------------


@contextmanager
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import socket

    def refuse(*_: Any) -> None:
        raise AssertionError("nothing is to be fetched")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        yield


def test_a_live_model_takes_the_tokenizer_of_its_folder(folder: Path, cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModel, BertTokenizerFast

    live = AutoModel.from_pretrained(folder)
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    name = "layers.1.ffn.down.weight"
    for module, given in ((live, None), (make_bert(vocab_size=len(tokenizer)), tokenizer)):
        told = pytest.warns(UserWarning, match="of a live model")
        with no_network(monkeypatch), told, live_in_8_bits(open_checkpoint(module), FP8, CPU, module, given) as stored:
            back = stored.read(name, FP8).float() * stored.read(f"{name}.scale")[:, None]
        torch.testing.assert_close(back, module.encoder.layer[1].output.dense.weight, atol=0.05, rtol=0.1)
    assert not cached.exists()


@pytest.mark.parametrize("name", ["", "org/a-model-that-is-not-here", "a folder"])
def test_a_live_model_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    live = make_bert()
    (tmp_path / "a folder").mkdir()
    live.config.name_or_path = str(tmp_path / name) if name == "a folder" else name
    refused = pytest.raises(ValueError, match="needs the model's tokenizer .* Save model and tokenizer")
    with no_network(monkeypatch), refused, live_in_8_bits(open_checkpoint(live), FP8, CPU, live):
        pass


def test_a_live_model_in_the_hubs_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, revision, local_files_only: str(folder))
    live = make_bert(vocab_size=120)
    live.config.name_or_path = "org/name"
    with pytest.warns(UserWarning, match="of a live model"), live_in_8_bits(open_checkpoint(live), FP8, CPU, live) as stored:
        assert stored.config.encoder.has_8_bits


def test_types_of_live_models(built: list[Any], folder: Path) -> None:
    from transformers import AutoModel

    monkey = pytest.MonkeyPatch()
    monkey.setattr(models, "check_loaded", lambda *_: None)
    try:
        load_quietly(AutoModel.from_pretrained(folder), "cuda:0", "fp8")
    finally:
        monkey.undo()
    checkpoint, stored, element = built[-1]
    assert checkpoint.folder is None and stored.config.encoder.has_8_bits and element == torch.float16


def test_weights_of_a_live_model_do_not_become_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "check_dtype", lambda *_: None)
    with pytest.raises(ValueError, match="of a live model .*: load it again"):
        ftbert.load(make_bert()).to(dtype="fp8")
