"""README's and docs' tables follow from the result files; the rules of the benchmark behind them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import bench_encode  # noqa: E402
import bench_model  # noqa: E402
import peers  # noqa: E402
import report  # noqa: E402

TINY = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_pages_say_what_the_results_say(page: Path) -> None:
    """All kinds of tables are on these pages: a change of one shows."""
    text = page.read_text(encoding="utf-8")
    assert "<!-- end -->" in text and report.fill_marks(text, page) == text, "run benchmarks/report.py"


def test_results_name_no_machine_path() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        command = json.loads(path.read_text(encoding="utf-8"))["provenance"]["command"]
        assert " /" not in command and "=/" not in command, path.name


def test_a_peer_that_is_off_or_raises_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(peers.Ftbert):
        by, calls = 0.0, 99

        def prepare(self, batch: peers.Batch) -> peers.Call:
            call, left = super().prepare(batch), iter(range(self.calls))

            def once() -> torch.Tensor:
                if next(left, None) is None:
                    raise RuntimeError("no more")
                return call() + self.by * torch.finfo(torch.float32).eps * 4000

            return once

    changes = {
        "off": {"by": 1.0}, "close": {"by": 1e-3}, "nowhere": {"by": math.nan},
        "tired": {"calls": 4},  # two are compared; then it warms up, and is timed
    }  # fmt: skip
    kinds = [type(name, (Changed,), {"name": name} | change) for name, change in changes.items()]
    monkeypatch.setitem(bench_model.SHAPES, "minilm", TINY)
    cpu = torch.device("cpu")
    reference = bench_model.reference_model("minilm", None, cpu)
    built = {kind: bench_model.build(kind, reference, cpu, torch.float32) for kind in kinds}
    for peer in built.values():
        peer.tolerance = 1e-4
    result = bench_model.measure(reference, built, bench_model.make_batch(30522, 2, 9, "half", cpu), 3, torch.float32, 0.0)
    rows = result["peers"]
    assert rows["close"]["ms"] > 0 and 0 < rows["close"]["rms_diff"] < 1e-4 and "failed" not in rows["close"]
    for name, words in (("off", "differs"), ("nowhere", "differs"), ("tired", "RuntimeError: no more")):
        assert words in rows[name]["failed"] and "ms" not in rows[name]
    assert "| tired | failed: RuntimeError: no more |" in bench_model.table(
        {"model": "minilm", "batch": 2, "longest": 9, "fill_name": "half"} | result
    )


@pytest.mark.parametrize(("angle", "words"), [(0.1, "least cosine 0.99500"), (float("nan"), "least cosine nan")])
def test_who_encodes_otherwise_is_a_row_that_says_so(
    angle: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encoder(by: float) -> Any:
        vector = torch.tensor([math.cos(by), math.sin(by)]).numpy()
        return SimpleNamespace(encode=lambda texts, **more: vector[None].repeat(len(texts), 0))

    monkeypatch.setattr(bench_encode.ftbert, "load", lambda *arguments, **more: encoder(angle))
    monkeypatch.setattr(bench_encode, "peer", lambda options, batch_size: encoder(0.0).encode)
    monkeypatch.setattr(bench_encode, "sequences_of", lambda model, texts: [[1, 2]] * len(texts))
    texts, out = tmp_path / "texts.txt", tmp_path / "encode-cpu-fp32.json"
    texts.write_text("one\ntwo\n", encoding="utf-8")
    assert bench_encode.main(["--model", "model", "--texts", str(texts), "--rounds", "2", "--out", str(out)]) == 1
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert words in rows["ftbert"]["failed"] and "seconds" not in rows["ftbert"]
    assert all(rows[name]["seconds"] > 0 for name in bench_encode.PEERS)


@pytest.mark.parametrize("dtype", bench_model.RUN_DTYPES)
def test_a_peer_passes_by_the_limit_that_tables_mark_it_by(dtype: str) -> None:
    peer = peers.Ftbert.__new__(peers.Ftbert)
    peer.dtype, limit = bench_model.RUN_DTYPES[dtype], report.LIMITS[dtype]
    assert peer.passes(limit) and not peer.passes(1.001 * limit)
    for error, mark in ((limit, ""), (1.1 * limit, f" (off by {1.1 * limit:.2g})"), (math.nan, " (off by nan)")):
        document = {"provenance": {"dtype": dtype}, "results": [{"peers": {"it": {"ms": 8.0, "max_abs_diff": error}}}]}
        assert report.label(document, "it") == f"it{mark}"
