"""What products in bf16 cost on this CPU beside those in float32: measured, chosen by, warned of, shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import make_bert

import ftbert
from ftbert import cli, devices
from ftbert._library import build_info, load_library
from ftbert.gpus import Gpu

load_library()

BF16 = torch.bfloat16
needs_bf16 = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bf16 on this CPU")


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_measured", {})
    monkeypatch.setattr(devices, "_warned", set())


@pytest.fixture
def stored_in_bf16(tmp_path: Path) -> Path:
    make_bert().to(BF16).save_pretrained(tmp_path / "bf16")
    return tmp_path / "bf16"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of the op, which says that bf16 takes three times as long, int8 twice."""
    made: list[list[str]] = []

    def time_products(dtypes: list[str]) -> list[float]:
        made.append(dtypes)
        return [{"fp32": 0.5, "bf16": 1.5, "int8": 1.0}[dtype] for dtype in dtypes]

    monkeypatch.setattr(torch.ops.ftbert, "time_products", time_products)
    return made


@needs_bf16
@pytest.mark.parametrize("threads", [1, 2])
def test_measuring_leaves_the_threads_as_they_were(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert 0 < devices.products_speed(BF16) < float("inf")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_every_type_is_timed_alike() -> None:
    one, other = torch.ops.ftbert.time_products(["fp32", "fp32"])
    assert 0 < one < 1 and 0 < other < 1  # seconds
    assert torch.ops.ftbert.time_products([]) == []
    for dtype, words in (("fp16", "no product on cpu multiplies fp32 by a matrix stored as fp16"), ("half of it", "dtype")):
        with pytest.raises(RuntimeError, match=words):
            torch.ops.ftbert.time_products(["fp32", dtype])


def test_int8_is_timed_with_the_bytes_that_it_reads() -> None:
    if build_info()["cpu_int8"] == "none":
        with pytest.raises(RuntimeError, match="stored as int8 without"):
            torch.ops.ftbert.time_products(["int8"])
    else:
        exact, narrow = torch.ops.ftbert.time_products(["fp32", "int8"])
        assert 0 < narrow < 1 and 0 < exact < 1


@needs_bf16
def test_a_process_measures_once_and_warns_once(stored_in_bf16: Path, calls: list[list[str]]) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert ftbert.load(stored_in_bf16, dtype="auto").dtype == torch.float32
        assert not said
        for _ in range(2):
            assert ftbert.load(stored_in_bf16, dtype="bf16").dtype == BF16
        ftbert.load(make_bert()).to(dtype="bf16")
    assert calls == [["fp32", "bf16"]]
    assert [str(one.message) for one in said] == [
        "bf16 products take 3.0 times as long as fp32's on this CPU; dtype='fp32' or 'auto' is faster"
    ]
    assert said[0].filename == __file__


def test_int8_is_warned_of_alike(monkeypatch: pytest.MonkeyPatch, calls: list[list[str]]) -> None:
    monkeypatch.setattr(devices, "_check_stored", lambda *_: None)  # whatever this CPU has
    with pytest.warns(UserWarning, match="^int8 products take 2.0 times as long as fp32's on this CPU; the plain model in fp32 is"):
        devices.check_dtype(torch.device("cpu"), torch.int8)
    assert calls == [["fp32", "int8"]]
    assert devices.told_speed(torch.device("cpu")) == {"products_speed": "int8 takes 2.00 of fp32's time"}


def test_what_is_not_chosen_by_speed_is_not_measured(monkeypatch: pytest.MonkeyPatch, calls: list[list[str]]) -> None:
    for stored in (torch.float32, torch.float16):
        model = ftbert.load(make_bert().to(stored), dtype="auto")
        assert model.dtype == torch.float32 and "products_speed" not in model.info()
    assert ftbert.load(make_bert().to(BF16)).dtype == torch.float32
    monkeypatch.setattr(Gpu, "of", lambda device: Gpu(80, 108, 80))
    assert devices.stored_dtype(torch.device("cuda", 0), BF16) == BF16
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert ftbert.load(make_bert().to(BF16), dtype="auto").dtype == torch.float32
    assert not calls


@needs_bf16
def test_info_says_what_was_measured(stored_in_bf16: Path, capsys: pytest.CaptureFixture[str], calls: list[list[str]]) -> None:
    def shown(*arguments: str) -> tuple[str | None, bool]:
        """And whether there was a warning."""
        assert cli.main(["info", str(stored_in_bf16), *arguments, "--json"]) == 0
        out, err = capsys.readouterr()
        return json.loads(out)["model"].get("products_speed"), "bf16 products take 3.0 times as long" in err

    told = "bf16 takes 3.00 of fp32's time"
    assert shown() == (None, False)
    assert shown("--dtype", "auto") == (told, False)
    assert shown("--dtype", "bf16") == (told, True)
    assert devices.told_speed(torch.device("cuda", 0)) == {}


@needs_bf16
@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="without AVX512-BF16 there is nothing to hold back")
def test_bf16_that_onednn_emulates_is_left(stored_in_bf16: Path) -> None:
    code = f"""
import warnings
import ftbert
model = ftbert.load({str(stored_in_bf16)!r}, dtype="auto")
print(model.dtype, model.info()["products_speed"])
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    print(ftbert.load({str(stored_in_bf16)!r}, dtype="bf16").dtype, *(one.message for one in said))
"""
    held = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    done = subprocess.run([sys.executable, "-c", code], env=held, capture_output=True, text=True, check=True)
    auto, asked = done.stdout.splitlines()
    assert auto.startswith("torch.float32 bf16 takes ") and float(auto.split()[3]) > 1.5
    assert asked.startswith("torch.bfloat16 bf16 products take ") and asked.endswith("is faster")
