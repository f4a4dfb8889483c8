"""The page, the charts and README's tables follow from the result files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import bench_model  # noqa: E402
import charts  # noqa: E402
import floors  # noqa: E402
import machine  # noqa: E402
import peers  # noqa: E402
import report  # noqa: E402
import runtimes  # noqa: E402

from ftbert.tuning import gemm_table  # noqa: E402

RESULT: dict[str, Any] = {
    "provenance": {
        "dtype": "fp32", "threads": 2, "cpu": "Some CPU", "commit": "0123456789", "packages": {"torch": "2", "transformers": "5"},
    },
    "results": [
        {
            "model": "base", "batch": 4, "longest": 8, "fill_name": "full", "tokens": 32, "fill": 1.0,
            "gemm_floor_ms": 5.0, "byte_floor_ms": 1.0,
            "peers": {
                "ftbert": {"ms": 10.0, "max_abs_diff": 1e-6},
                "transformers (sdpa)": {"ms": 123.4, "max_abs_diff": 0.0},
                "coarse <int8>": {"ms": 8.0, "max_abs_diff": 0.66},
                "broken": {"failed": "RuntimeError: no"},
            },
        }
    ],
}  # fmt: skip

BF16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no instructions for bf16"),
)
TINY = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}


@pytest.fixture()
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "cpu-fp32.json").write_text(json.dumps(RESULT))
    return tmp_path


@pytest.mark.parametrize("page,mark",
    [
        ("README.md", "summary: cuda-fp16"),
        ("README.md", "summary: cpu-fp32 "),
        ("docs/benchmarks.md", "results: cpu-fp32 "),
        ("docs/speed.md", "split: cuda-fp16 "),
    ],
)
def test_pages_say_what_the_results_say(page: str, mark: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"<!-- {mark}" in text
    assert report.fill_marks(text, ROOT / page) == text, "run benchmarks/report.py"


def test_results_name_no_machine_path() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        command = json.loads(path.read_text(encoding="utf-8"))["provenance"]["command"]
        assert " /" not in command and "=/" not in command, path.name


def test_the_fastest_that_computes_the_same_is_bold(results: Path) -> None:
    text = report.fill_marks("a\n<!-- results: cpu-fp32 -->\nold\n<!-- end -->\nb")
    assert "old" not in text and text.startswith("a\n") and text.endswith("\nb")
    assert "| base 4x8 full | 32 | **10** | 123 | 8 |" in text
    assert "coarse <int8> (off by 0.66)" in text and "broken" not in text
    assert report.fill_marks(text) == text


def test_parts_of_a_run_are_one_table(results: Path) -> None:
    other = json.loads(json.dumps(RESULT))
    other["results"][0]["model"] = "large"
    (results / "cpu-fp32.json").rename(results / "cpu-fp32-base.json")
    (results / "cpu-fp32-large.json").write_text(json.dumps(other))
    (results / "cpu-bf16.json").write_text(json.dumps(RESULT))
    text = report.fill_marks("<!-- results: cpu-fp32 -->\n<!-- end -->")
    assert "| base 4x8 full |" in text and "| large 4x8 full |" in text
    assert "cpu-fp32-base.json), [cpu-fp32-large.json]" in text
    assert report.page().count("<h2>") == 2
    other["provenance"]["commit"] = "another"
    (results / "cpu-fp32-large.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="cpu-fp32-large: its commit is another"):
        report.page()


@pytest.mark.parametrize("key,value", [("threads", 64), ("rest", 0.2), ("rounds", 3), ("gemm_table", "none")])
def test_parts_measured_in_another_way_are_no_table(key: str, value: float, results: Path) -> None:
    other = json.loads(json.dumps(RESULT))
    other["provenance"][key] = value
    (results / "cpu-fp32-large.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match=f"its {key} is .*, that of the run {value}"):
        report.page()


def test_who_was_not_in_a_part_of_the_run_did_not_fail(results: Path) -> None:
    document = json.loads(json.dumps(RESULT))
    other = json.loads(json.dumps(RESULT["results"][0]))
    del other["peers"]["coarse <int8>"]
    other["peers"]["transformers (sdpa)"] = {"failed": "RuntimeError: no"}
    _, rows = report.model_table(document, [*document["results"], other])
    assert rows[1][2:] == ["**10**", "fails", ""]


def test_means_say_over_how_many_points_they_are(results: Path) -> None:
    document = json.loads(json.dumps(RESULT))
    other = json.loads(json.dumps(RESULT["results"][0])) | {"batch": 2}
    del other["peers"]["coarse <int8>"]
    document["results"].append(other)
    (results / "cpu-fp32.json").write_text(json.dumps(document))
    assert "points: ftbert 12.34x, coarse &lt;int8&gt; (off by 0.66) 15.42x (1 ran)." in report.page()


@pytest.mark.parametrize("commit,shown", [(None, "an unknown commit"), ("012345678+changes", "0123456 with uncommitted changes")])
def test_a_commit_that_nobody_knows(commit: str | None, shown: str, results: Path) -> None:
    document = json.loads(json.dumps(RESULT))
    document["provenance"]["commit"] = commit
    (results / "cpu-fp32.json").write_text(json.dumps(document))
    assert f"ftbert at {shown}." in report.page()


def test_a_split_without_the_floor_or_without_a_time(results: Path) -> None:
    document = json.loads(json.dumps(RESULT))
    one = document["results"][0]
    one["split_ms"] = {"gemm": 3.0}
    timed = one.pop("gemm_floor_ms")
    other = one | {"gemm_floor_ms": timed, "peers": {"ftbert": {"failed": "RuntimeError: no"}}}
    rows = report.split_table([one, other])[1]
    assert [row[1:] for row in rows] == [["", "10.000", "", "3.000"], ["", "", "5.000", "3.000"]]


def test_the_split_is_beside_the_floor(results: Path) -> None:
    document = json.loads((results / "cpu-fp32.json").read_text())
    document["results"][0] |= {"gemm_floor_ms": 5.0, "split_ms": {"attention": 1.5, "gemm": 6.0, "gaps": 0.25}}
    (results / "gpu.json").write_text(json.dumps(document))
    text = report.fill_marks("<!-- split: gpu -->\n<!-- end -->")
    assert "| milliseconds | times the floor | all | floor: products alone | products | attention | gaps |" in text
    assert "| base 4x8 full | 2.00 | 10.000 | 5.000 | 6.000 | 1.500 | 0.250 |" in text
    assert report.fill_marks(text) == text


def test_host_times_are_medians_of_a_model(results: Path) -> None:
    document = json.loads((results / "cpu-fp32.json").read_text())
    one = document["results"][0]
    for us in (10.0, 30.0, 20.0):
        other = json.loads(json.dumps(one))
        other["peers"]["ftbert"]["host_us"] = us
        document["results"].append(other)
    head, rows = report.host_table(document)
    assert rows == [["base", *("20" if name == "ftbert" else "" for name in head[1:])]]


def test_the_page_is_whole_and_escaped(results: Path) -> None:
    page = report.page()
    assert page.count("<svg") == 2 and "12.3x" in page and "50 %" in page
    assert "coarse &lt;int8&gt;" in page and "<int8>" not in page
    assert "broken: RuntimeError: no" in page
    for path in results.glob("*.svg"):
        ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert len(list(results.glob("*.svg"))) == 2


def test_a_result_without_ftbert_and_with_a_floor_that_failed(results: Path) -> None:
    result = json.loads(json.dumps(RESULT))
    del result["results"][0]["peers"]["ftbert"]
    result["results"][0]["failed"] = "RuntimeError: no profiler"
    (results / "cpu-fp32.json").write_text(json.dumps(result))
    page = report.page()
    assert "base 4x8 full: RuntimeError: no profiler" in page and page.count("<svg") == 2


def test_charts_are_well_formed() -> None:
    series = {"a & b": [1.0, None], "c": [0.5, 2.0]}
    for svg in (charts.bars("t < u", ["x", "y"], series, "x", 1.0), charts.stacks("t", ["x", "y"], series)):
        root = ElementTree.fromstring(svg)
        assert sum(element.tag.endswith("title") for element in root.iter()) in (3, 4)


def test_bars_are_as_long_as_their_values_and_the_rule_stands_at_its_own() -> None:
    root = ElementTree.fromstring(charts.bars("t", ["x", "y"], {"a": [1.0, None], "b": [4.0, 2.0]}, "x", 1.0))
    found = [element for element in root.iter() if element.tag.endswith("}rect") and len(element)]  # the legend's are bare
    lengths = {str(element[0].text): float(element.attrib["width"]) for element in found}
    assert lengths == {"x, a: 1x": 140.0, "x, b: 4x": 560.0, "y, b: 2x": 280.0}
    (rule,) = (element for element in root.iter() if element.tag.endswith("}line"))
    ends = {float(element.attrib["x"]) + 140.0 for element in found}
    assert {float(rule.attrib[end]) for end in ("x1", "x2")} == ends


def test_gains_are_the_others_time_by_ours(results: Path) -> None:
    facts = RESULT["provenance"]
    times = {"cold": 2.0, "torch_cold": 5.0, "warm": 1.0, "torch_warm": 1.5, "floor_us": 0.5}
    kernels = {"provenance": facts, "speed": {"bytes": 1e9, "flops": 1e9}, "rows": [{"name": "k", "batch": 1, "seq": 8} | times]}
    (results / "kernels-cpu-fp32.json").write_text(json.dumps(kernels))
    table = {
        "provenance": facts,
        "layers": [{"model": "base", "m": 16, "default_us": 30.0, "tuned_us": 20.0}],
        "models": [{"model": "base", "tokens": 16, "first_ms": 5.0, "guess_ms": 3.0, "table_ms": 2.0}],
        "between": [{"table_us": 11.0, "own_us": 10.0}],
    }
    (results / "gemm_table-fp16.json").write_text(json.dumps(table))
    optimized = {"name": "o", "original_ms": 70.0, "optimized_ms": 20.0, "max_abs_diff": 1e-6}
    (results / "optimize-cpu.json").write_text(json.dumps({"provenance": facts, "texts": 1, "rows": [optimized]}))
    page = report.page()
    assert "<td>0.5</td><td>2.50x</td></tr>" in page and "k, 1x8, ftbert: 2.5x</title>" in page
    assert "<td class=ours>20.0</td><td>1.500x</td></tr>" in page
    assert "<td class=ours>2.000</td><td>2.500x</td></tr>" in page and "takes 1.100 (median)" in page
    assert "<td class=ours>20</td><td>3.50x</td>" in page


def test_the_profiler_comes_after_everything_that_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only at the points asked for, of the model's own kind of call."""
    order: list[str] = []

    class Packed(peers.Ftbert):
        name = "ftbert, packed"

        def prepare(self, batch: peers.Batch) -> peers.Call:
            order.append(f"prepared {len(batch.lengths)}")
            return super().prepare(batch)

    def split(call: peers.Call, before: int) -> dict[str, float]:
        assert call().shape[-1] == 64
        order.append("profiled")
        return {"products": float(len(order))}

    monkeypatch.setitem(bench_model.SHAPES, "minilm", TINY)
    monkeypatch.setattr(bench_model, "PEERS", [Packed])
    monkeypatch.setattr(bench_model, "RUNTIMES", [])
    monkeypatch.setattr(bench_model, "split", split)
    for name in ("cpu_gemm_floor", "byte_floor"):
        monkeypatch.setattr(bench_model, name, lambda *arguments: 1.0)
    out = tmp_path / "out.json"
    points = ["--point", "minilm:1x4:full", "--point", "minilm:2x4:full"]
    assert bench_model.main([*points, "--rounds", "1", "--out", str(out)]) == 0
    assert order == ["prepared 1", "prepared 2", "prepared 1", "profiled", "prepared 2", "profiled"]
    assert [result["split_ms"] for result in json.loads(out.read_text())["results"]] == [{"products": 4.0}, {"products": 6.0}]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_peer_that_is_off_is_not_timed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(peers.Ftbert):
        name = "off"
        by = 1.0

        def prepare(self, batch: peers.Batch) -> peers.Call:
            call = super().prepare(batch)
            return lambda: call() + self.by * torch.finfo(dtype).eps * 4000

    class Close(Off):
        name, by = "close", 1e-3

    class Nowhere(Off):
        name, by = "nowhere", float("nan")

    monkeypatch.setitem(bench_model.SHAPES, "minilm", TINY)
    reference, cpu = bench_model.reference_model("minilm", None), torch.device("cpu")
    built = {kind: bench_model.build(kind, reference, cpu, dtype) for kind in (Off, Close, Nowhere)}
    for peer in built.values():
        peer.tolerance = 1e-4
    batch = bench_model.make_batch(30522, 2, 9, "half", cpu)
    rows = bench_model.measure(reference, built, batch, 1, dtype, 0.0)["peers"]
    assert "ms" in rows["close"] and "failed" not in rows["close"]
    for name in ("off", "nowhere"):
        assert "differs" in rows[name]["failed"] and "ms" not in rows[name]


@pytest.mark.parametrize("good_calls", [2, 3, 4])  # two are compared; then it warms up, and is timed
def test_a_peer_that_raises_while_it_is_timed_is_a_row_that_says_so(
    good_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tired(peers.Ftbert):
        name = "tired"

        def prepare(self, batch: peers.Batch) -> peers.Call:
            call, left = super().prepare(batch), iter(range(good_calls))

            def once() -> torch.Tensor:
                if next(left, None) is None:
                    raise RuntimeError("no more")
                return call()

            return once

    monkeypatch.setitem(bench_model.SHAPES, "minilm", TINY)
    reference, cpu = bench_model.reference_model("minilm", None), torch.device("cpu")
    built = {kind: bench_model.build(kind, reference, cpu, torch.float32) for kind in (Tired, peers.Ftbert)}
    batch = bench_model.make_batch(30522, 2, 9, "half", cpu)
    result = bench_model.measure(reference, built, batch, 3, torch.float32, 0.0)
    assert result["peers"]["tired"].keys() == {"max_abs_diff", "failed"}
    assert result["peers"]["tired"]["failed"] == "RuntimeError: no more"
    assert result["peers"]["ftbert"]["ms"] > 0 and "failed" not in result["peers"]["ftbert"]
    assert "| tired | failed: RuntimeError: no more |" in bench_model.table(
        {"model": "minilm", "batch": 2, "longest": 9, "fill_name": "half"} | result
    )


@pytest.mark.parametrize("raises_in", ["host_seconds", "rested"])
def test_a_peer_that_raises_after_its_first_times_has_none(raises_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(calls: dict[str, peers.Call], rounds: int, device: torch.device, rest: float = 0) -> dict[str, object]:
        return {name: "RuntimeError: no more" if rest and name == "tired" else [7e-4] for name in calls}

    def host_seconds(call: peers.Call) -> float:
        return 1e-6 if raises_in == "rested" else float(call().sum())

    def tired() -> torch.Tensor:
        raise RuntimeError("no more")

    monkeypatch.setattr(bench_model, "interleaved", interleaved)
    monkeypatch.setattr(bench_model, "host_seconds", host_seconds)
    calls = {"tired": tired, "ftbert": lambda: torch.zeros(1)}
    rows = bench_model.timed(calls, 1, torch.device("cuda"), 0.1)
    assert rows["tired"] == "RuntimeError: no more"
    assert rows["ftbert"].keys() == {"ms", "ms_least", "host_us", "rested_ms"}


def test_times_are_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_model, "interleaved", lambda *arguments: {"ftbert": [9e-3, 1e-3, 2e-3]})
    rows = bench_model.timed({"ftbert": lambda: torch.empty(0)}, 3, torch.device("cpu"), 0.0)
    assert rows == {"ftbert": {"ms": pytest.approx(2.0), "ms_least": pytest.approx(1.0)}}
    rows = bench_model.timed({"ftbert": lambda: torch.empty(0)}, 3, torch.device("cuda"), 0.1)
    assert rows["ftbert"]["ms"] == rows["ftbert"]["rested_ms"] == pytest.approx(2.0)


def test_what_is_not_finite_fails_whatever_is_allowed() -> None:
    for kind in (*peers.PEERS, *runtimes.RUNTIMES):
        peer = kind.__new__(kind)
        for peer.dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert peer.passes(0.0) and not any(map(peer.passes, (math.nan, math.inf))), kind.name
    assert [kind.name for kind in (*peers.PEERS, *runtimes.RUNTIMES) if kind.tolerance is None] == ["onnxruntime int8"]


@pytest.mark.parametrize("dtype,published", [(torch.float16, 0.024), (torch.bfloat16, 0.155)])
def test_packed_pytorch_is_judged_like_the_others(dtype: torch.dtype, published: float) -> None:
    peer = peers.PackedGraphAnySize.__new__(peers.PackedGraphAnySize)
    peer.dtype = dtype
    assert peer.passes(published) and not peer.passes(1.0)


@pytest.mark.parametrize("dtype", bench_model.DTYPES)
def test_who_is_off_by_more_than_the_dtype_allows_is_marked_and_not_bold(dtype: str) -> None:
    peer = peers.Ftbert.__new__(peers.Ftbert)
    peer.dtype, limit = bench_model.DTYPES[dtype], report.LIMITS[dtype]
    assert peer.passes(limit) and not peer.passes(1.001 * limit)
    for error, mark in ((limit, ""), (1.1 * limit, f" (off by {1.1 * limit:.2g})"), (math.nan, " (off by nan)")):
        document = json.loads(json.dumps(RESULT))
        document["provenance"]["dtype"] = dtype
        rows = document["results"][0]["peers"]
        rows["coarse <int8>"]["max_abs_diff"] = error
        rows["transformers (sdpa)"] = {"failed": "differs from transformers by nan", "max_abs_diff": math.nan}
        head, (cells,) = report.model_table(document, document["results"])
        assert head[2:] == ["ftbert", f"coarse <int8>{mark}"]
        assert cells[2:] == (["**10**", "8"] if mark else ["10", "**8**"])


def test_the_other_type_is_beside_the_runs_own(results: Path) -> None:
    assert peers.FtbertPackedBf16.name == report.OTHER_TYPE
    document = json.loads(json.dumps(RESULT))
    document["provenance"]["dtype"] = "fp16"
    document["results"][0]["peers"] |= {"ftbert, packed": {"ms": 9.0}, report.OTHER_TYPE: {"ms": 4.5, "max_abs_diff": 0.155}}
    document["results"][0]["split_ms"] = {"gemm": 3.0}
    head, rows = report.model_table(document, document["results"])
    assert head[-1] == report.OTHER_TYPE  # judged as bf16, though no fp16 may be off by as much
    assert rows == [["base 4x8 full", "32", "10", "123", "8", "**9**", "4.5"]]
    means = {row[0]: row[1] for row in report.means_table(document)[1]}
    assert means[f"{report.OTHER_TYPE}, against ftbert, packed"] == "2.00x"
    assert not any(name.startswith(f"{report.OTHER_TYPE}, against trans") for name in means)
    assert report.split_table(document["results"])[1][0][1] == "1.80"


def test_a_rested_gpu_is_beside_the_one_that_settled(results: Path) -> None:
    document = json.loads(json.dumps(RESULT))
    document["results"][0]["peers"]["peer, CUDA graph"] = {"ms": 123.4, "max_abs_diff": 0.0}
    small = json.loads(json.dumps(document["results"][0])) | {"batch": 1}
    for name, ms in (("ftbert", 5.0), ("transformers (sdpa)", 200.0), ("peer, CUDA graph", 100.0)):
        document["results"][0]["peers"][name]["rested_ms"] = ms
    document["results"].append(small)  # too small for a rest to matter
    head, rows = report.model_table(document, document["results"])
    assert head[0] == "milliseconds (rested)"
    # The host launches transformers' kernels: what that takes after a rest is not the GPU's.
    assert rows[0][2:] == ["**10** (5)", "123", "8", "123 (100)"] and rows[1][2] == "**10**"
    means = {row[0]: row[1:] for row in report.means_table(document)[1]}
    assert means["ftbert, against transformers (sdpa)"] == ["12.34x", "", "12.34x"]
    assert "ftbert, against transformers (sdpa), rested" not in means
    assert means["ftbert, against peer, CUDA graph, rested"] == ["15.71x", "", "12.34x"]


def test_a_rested_gpu_is_timed_where_power_may_count(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_model.SHAPES, "minilm", TINY)
    for name in ("cpu_gemm_floor", "byte_floor"):
        monkeypatch.setattr(bench_model, name, lambda *arguments: 1.0)
    on = torch.device(device)
    reference = bench_model.reference_model("minilm", None).to(on)
    built = {peers.Ftbert: bench_model.build(peers.Ftbert, reference, on, torch.float32)}
    batch = bench_model.make_batch(30522, 2, 9, "half", on)
    for least, rest in ((1e9, 0.01), (0.0, 0.01), (0.0, 0.0)):
        monkeypatch.setattr(bench_model, "LONG", least)
        row = bench_model.measure(reference, built, batch, 2, torch.float32, rest)["peers"]["ftbert"]
        assert ("rested_ms" in row) == (device == "cuda" and least == 0.0 and rest > 0)


@pytest.fixture()
def grid(results: Path) -> list[str]:
    """A result with every point of the grid; the names of the points. ftbert is twice as fast as transformers, four
    times at half fill."""
    names, found = [], []
    for model, batch, longest, fill in map(bench_model.parse_point, bench_model.GRID):
        ours = batch * longest / 1e3
        peers = {"ftbert": {"ms": ours}, "transformers (sdpa)": {"ms": ours * (4 if fill == "half" else 2)}}
        point = {"model": model, "batch": batch, "longest": longest, "fill_name": fill}
        found.append(point | {"tokens": 1, "gemm_floor_ms": ours / 2, "byte_floor_ms": ours / 99, "peers": peers})
        names.append(report.point_name(point))
    found[-1]["peers"]["ftbert"] = {"failed": "OutOfMemoryError: no"}
    (results / "cuda-fp16.json").write_text(json.dumps(RESULT | {"results": found}))
    return names


def test_of_a_grid_chosen_points_and_means_are_shown(grid: list[str]) -> None:
    assert len(grid) == 108 and set(report.SHOWN_POINTS) <= set(grid)
    text = report.fill_marks("<!-- results: cuda-fp16 -->\n<!-- end -->")
    shown = [line.split(" |")[0].strip("| ") for line in text.splitlines() if " | 1 | " in line]  # of one token
    assert shown == list(report.SHOWN_POINTS)
    assert "| all 108 points | 48 half full | 12 of batch 1 |" in text
    assert "| ftbert, against transformers (sdpa) | 2.71x (107 ran) | 4.00x (47 ran) | 2.00x |" in text


def test_of_a_grid_the_page_has_every_point(grid: list[str]) -> None:
    page = report.page()
    assert all(f"<td>{name}</td>" in page for name in grid) and "2.71x" in page
    assert page.count("<circle") == 107 + 2 * 107  # speed, and two floors


def test_nothing_overlaps_in_a_chart(grid: list[str], results: Path) -> None:
    """Of many points, and of what is published."""
    report.page()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        (results / f"{path.stem.split('-')[0]}-published-{path.name}").write_bytes(path.read_bytes())
    report.page()
    charts_of = {path.name.split("-")[0] for path in results.glob("*.svg")}
    assert charts_of == {"cpu", "cuda", "kernels"}
    for path in results.glob("*.svg"):
        root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        boxes: list[tuple[float, float, float, float]] = []
        for text in (element for element in root.iter() if element.tag.endswith("}text")):
            size = float(text.attrib["font-size"])
            long, x, y = 0.6 * size * len(text.text or ""), float(text.attrib["x"]), float(text.attrib["y"])
            x -= {"end": long, "middle": long / 2}.get(text.attrib.get("text-anchor", ""), 0.0)
            assert x >= 0 and x + long <= width and size <= y <= height, text.text
            for left, top, right, bottom in boxes:
                assert right < x or x + long < left or bottom < y - size or y < top, text.text
            boxes.append((x, y - size, x + long, y))
        for dot in (element for element in root.iter() if element.tag.endswith("}circle")):
            assert 3 <= float(dot.attrib["cx"]) <= width - 3 and 72 <= float(dot.attrib["cy"]) <= height - 42


def test_a_kernel_that_starts_early_counts_from_the_end_of_the_one_ahead() -> None:
    names = ("attention_wgmma<x>", "norm_gemm_kernel", "hopper_gemm_kernel", "add_bias_input_layernorm_kernel", "who")
    times = ((100.0, 10.0), (103.0, 19.0), (108.0, 34.0), (145.0, 5.0), (151.0, 2.0))
    events = [{"name": name, "ts": ts, "dur": dur} for name, (ts, dur) in zip(names, times, strict=True)]
    parts = floors.by_part(reversed(events))
    assert {part: us for part, us in parts.items() if us} == {
        "attention": 10, "products with layernorm": 12, "gemm": 20, "layernorm": 5, "other": 2, "gaps": 4,
    }  # fmt: skip
    assert sum(parts.values()) == 53


def test_results_are_no_change_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second benchmark of a run was measured at the commit too, though the first one's file has changed."""
    files = {name: tmp_path / name for name in ("README.md", "docs/benchmarks.md", "docs/speed.md", "benchmarks/results/a.json", "csrc/a.cu")}
    for path in files.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before\n", encoding="utf-8")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=somebody", "-c", "user.email=", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    commit = machine._commit()
    assert len(commit) == 40
    for name in ("README.md", "docs/benchmarks.md", "docs/speed.md", "benchmarks/results/a.json"):
        files[name].write_text("after\n", encoding="utf-8")
    assert machine._commit() == commit
    files["csrc/a.cu"].write_text("after\n", encoding="utf-8")
    assert machine._commit() == f"{commit}+changes"


@pytest.mark.parametrize("name", ["csrc/b.cu", "b.cu"])
def test_a_file_of_the_code_that_git_does_not_know_is_a_change(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=somebody", "-c", "user.email=", "-c", "commit.gpgsign=false"]
    for path, text in (("csrc/a.cu", "before"), ("benchmarks/results/a.json", "{}"), (".gitignore", "out/")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "out").mkdir()
    for other in ("benchmarks/results/b.json", "notes.md", "out/b.cu"):
        (tmp_path / other).write_text("new", encoding="utf-8")
    assert len(machine._commit()) == 40
    (tmp_path / name).write_text("new", encoding="utf-8")
    assert machine._commit().endswith("+changes")


def test_the_gemm_table_in_force_is_named_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(machine, "_nvidia_smi", lambda what: "")
    monkeypatch.setattr(gemm_table, "summary", lambda device: f"user cache (7 rows) of {device}")
    assert machine.provenance(torch.device("cuda", 0), "fp16")["gemm_table"] == "user cache (7 rows) of cuda:0"
    assert "gemm_table" not in machine.provenance(torch.device("cpu"), "fp32")


def test_floor_of_bytes_reads_every_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setitem(bench_model.SHAPES, "minilm", TINY)
    monkeypatch.setitem(floors._bandwidth, cpu, 1e9)
    weights = 6 * 64 * 64 + 6 * 64 + 2 * 2 * 64  # six products of the one layer with their biases, two LayerNorms
    reference = bench_model.reference_model("minilm", None)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        assert floors.byte_floor(reference, 10, cpu, dtype) == pytest.approx((weights + 2 * 10 * 64) * size / 1e9)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_floor_of_the_cpu_leaves_the_threads_as_they_were(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    assert machine.cpu_product(5, 64, 32, dtype) > 0 and torch.get_num_threads() == threads
