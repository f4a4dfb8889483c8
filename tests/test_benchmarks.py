"""The benchmarks' own rules: what differs or raises is a row that says so, and what was measured is on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import bench_encode  # noqa: E402
import bench_kernels  # noqa: E402
import bench_model  # noqa: E402
import machine  # noqa: E402

PLUS_ONE = {"make": lambda: (torch.ones(4),), "theirs": lambda x: x + 1, "bytes": 1e6}


def raises(*arguments: Any) -> Any:
    raise RuntimeError("no more")


@pytest.fixture()
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"off": lambda x: x + 2, "nowhere": lambda x: x * torch.nan, "raises": raises, "right": lambda x: x + 1}

    def cases(*arguments: Any) -> Iterator[tuple[int, int, bench_kernels.Case]]:
        for name, call in ours.items():
            yield 1, 4, bench_kernels.Case(name=name, ours=call, **PLUS_ONE)

    monkeypatch.setattr(bench_kernels, "all_cases", cases)
    monkeypatch.setattr(bench_kernels, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(bench_kernels, "flops", lambda device, dtype: 1e9)


def test_a_kernel_that_differs_is_a_row_that_says_so(few_kernels: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kernels-cpu-fp32.json"
    assert bench_kernels.main(["--rounds", "1", "--out", str(out)]) == 1
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["off", "nowhere", "raises", "right"]
    shown = capsys.readouterr().out
    for name, words in (("off", "differs from torch by 5.0e-01"), ("nowhere", "differs"), ("raises", "no more")):
        assert words in rows[name]["failed"] and "cold" not in rows[name]
        assert f"| {name} | 1x4 | failed: {rows[name]['failed']} |" in shown
    assert rows["right"]["cold"] > 0 and "failed" not in rows["right"]
    assert bench_kernels.main(["--rounds", "1", "--out", str(out), "--kernel", "right"]) == 0


def test_kernels_measured_before_a_run_is_cut_off_are_kept(
    few_kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(case: bench_kernels.Case, *arguments: Any) -> dict[str, float]:
        if case.name == "right":
            raise KeyboardInterrupt
        return {"cold": 1.0, "torch_cold": 1.0, "warm": 1.0, "torch_warm": 1.0}

    monkeypatch.setattr(bench_kernels, "compared_and_timed", cut)
    with pytest.raises(KeyboardInterrupt):
        bench_kernels.main(["--out", str(tmp_path / "new" / "k.json")])
    assert len(json.loads((tmp_path / "new" / "k.json").read_text())["rows"]) == 3


@pytest.mark.parametrize("what", [["--peer", "ftbert"], ["--point", "minilm:1x4:full"], ["--model", "minilm"], []])
def test_a_part_of_the_peers_or_points_is_not_published(
    what: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}
    monkeypatch.setitem(bench_model.SHAPES, "minilm", tiny)
    monkeypatch.setattr(bench_model, "CPU_POINTS", ("minilm:2x4:full",))
    monkeypatch.setattr(bench_model, "PEERS", [])
    monkeypatch.setattr(bench_model, "RUNTIMES", [])
    for name in ("cpu_gemm_floor", "byte_floor"):
        monkeypatch.setattr(bench_model, name, lambda *arguments: 1.0)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert bench_model.main(["--rounds", "1", *what]) == 0
    (written,) = tmp_path.rglob("*.json")
    expected = "out/bench-cpu-fp32.json" if what else "benchmarks/results/cpu-fp32.json"
    assert written == tmp_path / expected and f"wrote {written}" in capsys.readouterr().err


class Encoder:
    """Stands for a model that has been loaded. Unit vectors; what is `off` are others."""

    def __init__(self, off: float = 0.0, calls: int = 99) -> None:
        self.off, self.calls = off, calls

    def encode(self, texts: list[str], show_progress_bar: bool = False) -> np.ndarray:
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("no more")
        return np.tile(np.asarray([np.cos(self.off), np.sin(self.off)], dtype=np.float32), (len(texts), 1))


def encode_rows(ours: Encoder, theirs: Encoder, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(bench_encode.ftbert, "load", lambda *arguments, **more: ours)
    monkeypatch.setattr(bench_encode, "peer", lambda options, batch_size: theirs.encode)
    monkeypatch.setattr(bench_encode, "sequences_of", lambda model, texts: [[1, 2]] * len(texts))
    texts = out.with_suffix(".txt")
    texts.write_text("one\ntwo\n", encoding="utf-8")
    words = ["--model", "model", "--texts", str(texts), "--rounds", "2", "--out", str(out)]
    status = bench_encode.main(words)
    return status, {row["name"]: row for row in json.loads(out.read_text())["rows"]}


@pytest.mark.parametrize(
    "ours,words",
    [
        (Encoder(off=0.1), "differs from sentence-transformers, batch_size=32: least cosine 0.99500"),
        (Encoder(off=np.nan), "least cosine nan"),
        (Encoder(calls=0), "RuntimeError: no more"),
        (Encoder(calls=2), "RuntimeError: no more"),  # in the second round
    ],
)
def test_who_encodes_otherwise_is_a_row_that_says_so(
    ours: Encoder, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = encode_rows(ours, Encoder(), tmp_path / "encode-cpu-fp32.json", monkeypatch)
    assert status == 1 and words in rows["ftbert"]["failed"] and "seconds" not in rows["ftbert"]
    assert all(rows[name]["seconds"] > 0 for name in bench_encode.PEERS)
    assert "| ftbert | failed: " in capsys.readouterr().out
