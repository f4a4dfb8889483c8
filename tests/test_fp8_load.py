"""load(dtype="fp8"): where it is refused, which types it has, and live models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibration import few_calibration_texts, quantized_sources
from conftest import make_bert

import ftbert
from ftbert import building, cli, devices
from ftbert import model as models
from ftbert.checkpoint import Checkpoint, fits_8_bits
from ftbert.converters import open_checkpoint
from ftbert.devices import check_dtype, q8_0_is_fast, stored_dtype, stream_dtype
from ftbert.dtypes import DTYPES, EIGHT_BITS, FP8, INT8, MATRIX_DTYPES, Q8_0, parse_dtype, users_word
from ftbert.formats import formats
from ftbert.gpus import Gpu
from ftbert.quantization import (
    cache,
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
    with few_calibration_texts(monkeypatch):
        yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return quantized_sources(monkeypatch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpu(capability, held): this machine seems to have such a GPU, held to a lesser one, until something is to be
    computed there."""

    def seem(capability: tuple[int, int], held: int = 0) -> None:
        own = 10 * capability[0] + capability[1]
        hopper, counts = own == 90 and not held, held or own
        kernels = "wgmma_tile, few_rows" if hopper else "few_rows_lanes, mma_tile" if counts >= 80 else ""
        seen = Gpu(counts, 132, own, warpgroups=hopper, kernels=kernels)
        monkeypatch.setattr(devices, "check_device", torch.device)
        monkeypatch.setattr(Gpu, "of", staticmethod(lambda device: seen))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Fake")

    return seem


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> Iterator[list[Any]]:
    """Of models that would be built on a Hopper GPU: the user's checkpoint, the one with the weights, the type of what is
    not fp8."""
    gpu((9, 0))
    seen: list[Any] = []

    def put_together(encoder: Any, checkpoint: Checkpoint, *_: Any) -> tuple[()]:
        seen.append((checkpoint, *encoder))
        return ()

    monkeypatch.setattr(building, "_encoder", lambda stored, places, element, *_: (stored, element))
    monkeypatch.setattr(building, "load_head", lambda *_: None)
    monkeypatch.setattr(building, "Built", put_together)
    monkeypatch.setattr(models, "Model", lambda *_: SimpleNamespace(take_settings=lambda *_, **__: None))
    def on_the_cpu(source: Path, target: Path, *, dtype: torch.dtype, device: str, force: bool) -> Any:
        return quantize(source, target, dtype=dtype, force=force)

    monkeypatch.setattr(cache, "quantize", on_the_cpu)
    yield seen


def load_quietly(*args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ftbert.load(*args, **kwargs)


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


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_other_devices_are_refused(folder: Path, gpu: Any, made: list[str], capability: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"8\.9 or above \(L4, L40S, H100\); on the CPU ftbert computes in fp32, or bf16"):
        ftbert.load(folder, dtype="fp8")
    with pytest.raises(ValueError, match="on the CPU ftbert computes in fp32"):
        ftbert.load(folder).to(dtype="fp8")
    with pytest.raises(ValueError, match="on the CPU ftbert computes in fp32"):
        ftbert.optimize(make_bert(), dtype="fp8")
    gpu(capability)
    types = "fp16 or fp32" if capability == (7, 5) else "int8, fp16, bf16 or fp32"
    with pytest.raises(ValueError, match=rf"NVIDIA Fake of {capability[0]}\.{capability[1]}, computes in {types}"):
        ftbert.load(folder, "cuda:0", "fp8")
    check_dtype(GPU, torch.float16)
    assert not made


@pytest.mark.parametrize(
    "word,capability,refused",
    [("fp8", (9, 0), ""), ("fp8", (8, 9), ""), ("fp8", (12, 0), ""), ("fp8", (8, 6), "capability 8.9 or above"), ("q8_0", (8, 0), ""), ("q8_0", (12, 0), ""),
     ("q8_0", (7, 5), "capability 8.0 or above"), ("int8", (8, 0), ""), ("int8", (9, 0), ""),
     ("int8", (7, 5), "capability 8.0 or above"), ("bf16", (8, 0), ""), ("fp16", (7, 5), ""),
     ("bf16", (7, 5), "8.0 or above; cuda:0, NVIDIA Fake of 7.5, computes in fp16 or fp32")],
)  # fmt: skip
def test_the_table_of_formats_says_which_gpus(gpu: Any, word: str, capability: tuple[int, int], refused: str) -> None:
    gpu(capability)
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        check_dtype(GPU, parse_dtype(word))


def test_a_held_gpu_computes_what_the_lesser_one_does(gpu: Any) -> None:
    gpu((9, 0), held=80)
    with pytest.raises(ValueError, match=r"8\.9 or above .*; cuda:0, NVIDIA Fake of 9\.0 \(held to 8\.0\), computes in int8, fp16"):
        check_dtype(GPU, FP8)
    check_dtype(GPU, torch.bfloat16)
    check_dtype(GPU, Q8_0)
    assert q8_0_is_fast(GPU) and stored_dtype(GPU, torch.bfloat16) == torch.bfloat16
    gpu((9, 0), held=75)
    assert not q8_0_is_fast(GPU)
    assert stored_dtype(GPU, torch.bfloat16) == torch.float32 and stored_dtype(GPU, torch.float16) == torch.float16
    for held in (89, 90):  # PTX for 9.0 has no warpgroup instructions, and multiplies E4M3 as that for 8.9
        gpu((12, 0), held=held)
        check_dtype(GPU, FP8)


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
        with pytest.raises(ValueError, match="fp8|no products in bf16 on this CPU"):
            ftbert.load(tmp_path / "fp8", dtype=dtype)
    gpu((8, 0))
    for dtype in ("fp16", "auto"):
        with pytest.raises(ValueError, match=r"stored in fp8\. .*bf16 or fp32: load the model that it was made from"):
            ftbert.load(tmp_path / "fp8", "cuda:0", dtype)


def test_types_of_streams() -> None:
    for stored, outgrows, want in (
        (torch.float32, False, torch.float16), (torch.float16, False, torch.float16), (torch.bfloat16, False, torch.bfloat16),
        (torch.float32, True, torch.bfloat16), (torch.float16, True, torch.bfloat16), (torch.float64, False, torch.float16),
    ):  # fmt: skip
        assert stream_dtype(GPU, FP8, stored, outgrows) == want
        assert stream_dtype(GPU, torch.float16, stored, outgrows) == torch.float16
        assert stream_dtype(CPU, torch.bfloat16, stored, outgrows) == torch.float32


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
