"""`ftbert tune` on a GPU that is made up; on a GPU, the tuner itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import gpu_memory_left
from fake_gpu import QKV, FakeAlgorithm, fake_gpu
from own_kernels import have_warpgroups
from tables import HERE, row

from ftbert.checkpoint import ModelConfig
from ftbert.cli import main
from ftbert.dtypes import DTYPES
from ftbert.quantization import quantize
from ftbert.tuning import (
    WITH_NORM,
    Bench,
    Machine,
    Own,
    Product,
    ProductTuner,
    Row,
    buckets,
    choice_of,
    gemm_table,
    in_force,
    products_of_shape,
)
from ftbert.tuning import product_tuner as tuning
from ftbert.tuning import run as tune
from ftbert.tuning.gemm_table import add_rows, read_table

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def measured(path: Path) -> int:
    """How many m were timed for a file; neighbours with one algorithm share a row."""
    return sum(len(r.timed) for r in read_table(path)[1])


def test_the_encoder_runs_the_m_that_is_timed_and_few_more() -> None:
    module = gemm_table.tuner_module()
    ranges = buckets(1, 16384)
    assert ranges[0][0] == 1 and ranges[-1][1] == 16384
    assert all(high + 1 == low for (_, high), (low, _) in itertools.pairwise(ranges))
    for low, high in ranges:
        ran = {module.rows(m) for m in range(low, high + 1)}
        steps = 1 if high <= 1024 else 2 if high <= 8192 else 4
        assert ran == {high - i * (high - low + 1) // steps for i in range(steps)}, (low, high)
        assert all(0 <= module.rows(m) - m < max(64, 1 + m // 32) for m in range(low, high + 1))


def of_one_layer(norm: dict[str, Any], **layer: Any) -> ModelConfig:
    """Of width 768; norm: both of the layer."""
    return ModelConfig.from_json({
        "vocab": 9, "hidden": 768, "embedding": 768, "positions": {"kind": "none", "rows": 9},
        "layers": [layer | {"attention_norm": norm, "ffn_norm": norm}],
    })  # fmt: skip


def test_products_are_those_that_a_model_runs() -> None:
    config = of_one_layer(
        attention={"heads": 12, "head_size": 64}, ffn={"inter": 3072, "activation": "gelu_new"}, norm={"eps": 1e-12}
    )
    layer = config.layers[0]
    config, attention, norm = replace(config, layers=(layer,) * 2), layer.attention, layer.ffn_norm
    out, down = (Product("fp16", 768, k, True, layernorm=True) for k in (768, 3072))
    up = Product("fp16", 3072, 768, True, "gelu_tanh")
    assert tuning.products(config, "fp16") == products_of_shape(768, 3072, "gelu_new", "fp16") == [QKV, out, up, down]
    pre, narrow = replace(layer, norm_place="pre"), replace(attention, heads=8, kv_heads=2, qkv_bias=False)
    # Behind the last sum there is no block, and in a sandwich another norm comes first.
    summed = [replace(product, layernorm=False, prenorm=True) for product in (out, down)]
    expected = [QKV, summed[0], up, summed[1], tuning.without_norm(down)]
    assert tuning.products(replace(config, layers=(pre,) * 2), "fp16") == expected
    sandwich = replace(pre, attention_result_norm=norm, ffn_result_norm=norm)
    rms = replace(norm, kind="rms")
    for alone in (sandwich, replace(layer, attention_norm=rms, ffn_norm=rms)):
        assert not any(product.normed for product in tuning.products(replace(config, layers=(alone,) * 2), "fp16"))
    # The general attention path adds the bias itself.
    small = replace(layer, attention=replace(attention, heads=48, kv_heads=48, head_size=16))
    assert tuning.products(replace(config, layers=(small,)), "fp16")[0] == Product("fp16", 2304, 768)
    gated = replace(layer, ffn=replace(layer.ffn, gated=True))
    assert tuning.products(replace(config, layers=(gated,)), "fp16")[2:] == [replace(up, n=6144, gated=True), down]
    mixed = tuning.products(replace(config, layers=(layer, replace(layer, attention=narrow))), "fp16")
    assert {QKV, Product("fp16", 768, 768), Product("fp16", 768, 512, True, layernorm=True)} < {*mixed}


def test_products_of_e4m3_are_those_that_a_model_runs() -> None:
    """Results are in E4M3 where the next product reads them so; what no kernel applies follows a product alone."""
    up, down = "e4m3 e4m3 e4m3", "e4m3 e4m3 fp16"
    assert products_of_shape(768, 3072, "gelu", "fp16", word="e4m3") == [
        Product(down, 2304, 768, True), Product(down, 768, 768, True, layernorm=True), Product(up, 3072, 768, True, "gelu"),
        Product(down, 768, 3072, True, layernorm=True),
    ]  # fmt: skip
    assert products_of_shape(768, 3072, "gelu_new", "bf16", word="e4m3")[2] == Product("e4m3 e4m3 bf16", 3072, 768)
    # Matrices of other sizes stay as they are, and hand on what the next one reads or not.
    odd = products_of_shape(768, 3080, "gelu", "fp16", word="e4m3")
    assert [product.dtype for product in odd] == [down, down, "fp16", "fp16"]
    config = of_one_layer(
        attention={"heads": 12, "head_size": 64, "qkv_bias": False, "out_bias": False},
        ffn={"inter": 1152, "activation": "silu", "gated": True, "up_bias": False, "down_bias": False},
        norm={"eps": 1e-6, "kind": "rms", "bias": False}, norm_place="pre",
    )  # fmt: skip
    layer, ffn = config.layers[0], config.layers[0].ffn
    stored = tuning.with_layers_in("e4m3", config)
    assert sum(spec.stored == "e4m3" for spec in stored.weight_specs()) == 4
    gated = Product(up, 2304, 768, activation="silu", gated=True)
    assert gated in tuning.products(stored, "bf16")
    kept = replace(layer, ffn=replace(ffn, up_type="e4m3"))
    assert tuning.products(replace(config, layers=(kept,)), "bf16")[2] == replace(gated, dtype="e4m3 e4m3 bf16")
    kept = replace(layer, ffn=replace(ffn, down_type="e4m3"))
    assert tuning.products(replace(config, layers=(kept,)), "bf16")[2] == replace(gated, dtype="bf16")


@pytest.fixture()
def installed(user: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """On a machine that `tune` can run on, where 2 is the fastest algorithm: how many rows the user's table had each
    time that tables came into force."""
    fake_gpu(monkeypatch, [FakeAlgorithm(1, 10.0), FakeAlgorithm(2, 8.0)])
    monkeypatch.setattr(Machine, "of", staticmethod(lambda device: HERE))
    found: list[int] = []

    def install(device: torch.device, *, again: bool = False) -> None:
        assert again
        found.append(measured(user))

    monkeypatch.setattr(tune, "install", install)
    return found


SHAPE = ["tune", "--hidden", "64", "--dtype", "fp32"]  # four products, of which none defers a LayerNorm


def test_a_table_is_made_in_force_kept_and_made_again(
    installed: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SHAPE, "--tokens", "129..256", "--json"]
    for more, made in (([], 8), ([], 0), (["--force"], 8)):
        assert main([*arguments, *more]) == 0
        done = json.loads(capsys.readouterr().out)
        assert (done["made"], done["left"], len(done["rows"])) == (made, 0, 4)  # neighbours are one row
    assert installed == [8, 8, 8]
    rows = in_force(HERE)
    assert len(rows) == 4 and all((r.first, r.last, r.algorithm) == (129, 256, (2,) * 8) for r in rows)
    assert all(r.gain == pytest.approx(0.25, rel=0.01) for r in rows)
    assert main([*arguments, "--force", "--minutes", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["left"] == 8 and in_force(HERE) == rows


def test_ctrl_c_keeps_the_rows(
    installed: list[int], user: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, honest = itertools.count(), ProductTuner.row

    def interrupted(tuner: ProductTuner, first: int, last: int) -> Row:
        if next(made) == 3:
            raise KeyboardInterrupt
        return honest(tuner, first, last)

    monkeypatch.setattr(ProductTuner, "row", interrupted)
    assert main([*SHAPE, "--tokens", "129..256"]) == 130
    err = capsys.readouterr().err
    assert err == f"ftbert: stopped; the rows made are in {user}, the same command goes on from there\n"
    assert installed == [3]  # they are in force
    assert main([*SHAPE, "--tokens", "129..256", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["made"] == 5 and installed == [3, 8]
    made = itertools.count(3)
    assert main([*SHAPE, "--tokens", "129..256", "--force"]) == 130
    assert "the same command without --force goes on" in capsys.readouterr().err


def test_fp8_is_tuned(
    user: Path, tmp_path: Path, tiny_bert: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a shape and of a model, quantized or not, where a GPU computes it."""
    rule = FakeAlgorithm(1, 10.0, "wgmma_persistent")
    fake_gpu(monkeypatch, [], [rule, FakeAlgorithm(2, 8.0, "wgmma_persistent")], in_force=rule)
    monkeypatch.setattr(Machine, "of", staticmethod(lambda device: HERE))
    monkeypatch.setattr(tune, "install", lambda device, again: None)
    model = tiny_bert(tmp_path)
    quantize(model, tmp_path / "quantized", ["words of all kinds"] * 99)
    quantized = str(tmp_path / "quantized")
    for i, what in enumerate((["--hidden", "64"], [str(model)], [quantized], [quantized, "fp16"], [quantized, ""])):
        path, dtype = tmp_path / f"{i}.json", what.pop() if len(what) == 2 and i > 2 else "fp8"
        type = ["--dtype", dtype] if dtype else []
        assert main(["tune", *what, *type, "--tokens", "1025..1088", "--out", str(path)]) == 0
        rows = read_table(path)[1]
        assert sorted(row.product.dtype for row in rows) == ["e4m3 e4m3 e4m3", *["e4m3 e4m3 fp16"] * 3]
        assert all(row.algorithm == Own("wgmma_persistent", "2") for row in rows)
    assert "by the rule" in capsys.readouterr().out
    other = replace(HERE, gpu="NVIDIA A100", kind="sm_80 x 108")
    monkeypatch.setattr(Machine, "of", staticmethod(lambda device: other))
    assert main(["tune", "--hidden", "64", "--dtype", "fp8"]) == 1
    assert "need compute capability 8.9 or above, and this is NVIDIA A100: use fp16" in capsys.readouterr().err


def test_where_cublaslt_proposes_nothing_there_is_no_row(
    installed: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_gpu(monkeypatch, [FakeAlgorithm(1, 10.0)], refused=(192, 256))
    assert main([*SHAPE, "--tokens", "100..256"]) == 0
    assert capsys.readouterr().err.count("proposes nothing for") == 4  # once for each product
    assert {m for r in in_force(HERE) for m in r.timed} == {112, 128}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["tune"], "give a MODEL"),
        ([*SHAPE, "--texts", "in.txt"], "--texts needs one"),
        (["tune", "model", "--inter", "64"], "--inter and --activation belong to --hidden"),
        (["tune", "--show", "--out", "t.json"], "takes no --out"),
        ([*SHAPE, "--minutes", "-1"], "--minutes: expected a number that is not negative"),
        ([*SHAPE, "--tokens", "x"], "A..B"),
    ],
)
def test_contradictions_are_usage_errors(
    arguments: list[str], words: str, installed: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err and installed == []


def test_tables_that_are_switched_off(
    installed: list[int], user: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--show"]) == 0
    assert "no table: products are guessed; `ftbert tune` makes one" in capsys.readouterr().out
    monkeypatch.setenv("FTBERT_GEMM_TABLE", "off")
    assert main([*SHAPE, "--tokens", "129..192"]) == 0 and measured(user) == 4
    assert "warning: no model uses these rows" in capsys.readouterr().err
    assert main(["tune", "--show"]) == 0
    assert "switched off (FTBERT_GEMM_TABLE=off)" in capsys.readouterr().out
    monkeypatch.setenv("FTBERT_CACHE", "off")
    assert main(SHAPE) == 1 and "where the table shall go (--out)" in capsys.readouterr().err


def test_an_unwritable_file_is_said_before_any_work(
    installed: list[int], user: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([*SHAPE, "--out", str(tmp_path / "file" / "t.json")]) == 1
    assert "file" in capsys.readouterr().err and installed == [] and not user.exists()


def test_what_is_in_force_is_shown(installed: list[int], user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_rows(user, HERE, [row(1, 16), row(17, 32, runs=(2,), us=10.0), row(33, 48, runs=(3,))])
    assert main(["tune", "--show"]) == 0
    out = capsys.readouterr().out
    assert f"user cache           {user}: 3 rows" in out
    assert "m 1..48        2 of 3 ranges differ from cuBLASLt's first proposal" in out


def test_texts_say_which_token_counts(
    installed: list[int], user: Path, tmp_path: Path, tiny_bert: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two batches, of 8 and of 23 tokens."""
    (tmp_path / "in.txt").write_text("a b c\na\n" + "a " * 18 + "\nb\n", encoding="utf-8")
    arguments = ["tune", str(tiny_bert(tmp_path)), "--texts", str(tmp_path / "in.txt"), "--batch", "2", "--dtype", "fp32"]
    for tokens, timed in ((["--tokens", "1..16"], {8}), ([], {8, 24})):
        assert main([*arguments, *tokens]) == 0
        assert {m for r in read_table(user)[1] for m in r.timed} == timed
    assert main([*arguments, "--tokens", "9..16"]) == 1
    assert "no token count to tune for lies in 9..16" in capsys.readouterr().err


def test_on_the_cpu_the_command_says_that_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--hidden", "64", "--device", "cpu"]) == 0
    assert "nothing to tune" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--hidden", "64"]) == 1
    assert "no GPU to tune for" in capsys.readouterr().err


@on_gpu
@pytest.mark.parametrize("behind", ["none", "gelu", "gelu_tanh", "silu", "layernorm", "prenorm", "gate"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_every_candidate_tried_is_right(dtype: str, behind: str) -> None:
    gated, normed = behind == "gate", behind.endswith("norm")
    activation = "silu" if gated else "none" if normed else behind
    bench = Bench(Product(dtype, 384, 256, behind != "prenorm", activation, behind == "layernorm", gated, behind == "prenorm"), 200)
    default = bench.heuristics(1)[0]
    limit = 2 * bench.error(default) + 4 * torch.finfo(DTYPES[dtype]).eps
    own = bench.own()
    assert (len(own) > 8) == (dtype != "fp32" and have_warpgroups())
    contained = normed and dtype != "fp32" and have_warpgroups()
    assert any(algorithm.kernel in WITH_NORM for algorithm in own) == contained
    for algorithm in [*bench.heuristics(), *own]:
        if algorithm.kernel or bench.microseconds(algorithm, 1) < float("inf"):
            assert bench.error(algorithm) <= limit


@on_gpu
@pytest.mark.parametrize("whose", ["cuBLASLt's", "ours"])
def test_a_table_changes_what_runs_and_not_what_comes_out(user: Path, whose: str) -> None:
    product, m = Product("fp16", 384, 128, True, "gelu"), 300
    bench = Bench(product, m)
    first, beside = bench.chosen(), Bench(product, 321).chosen()
    if not (candidates := bench.own() if whose == "ours" else bench.heuristics()):
        pytest.skip("no kernel of ours runs here")
    other = next(a for a in candidates if choice_of(a) != choice_of(first) and bench.microseconds(a, 1) < 1e6)
    machine, device = Machine.of("cuda"), torch.device("cuda")
    path = gemm_table.user_table(machine)
    assert path is not None
    # One that cuBLASLt refuses: as without a table. None: nothing was better than cuBLASLt's first proposal.
    cases = [(choice_of(other), other), ((2**64 - 1,) * 8, first), (None, bench.first_proposal())]
    try:
        for algorithm, runs in cases:
            add_rows(path, machine, [Row(product, 257, 320, algorithm)])
            gemm_table.install(device, again=True)
            assert choice_of(bench.chosen()) == choice_of(runs) and bench.error(bench.chosen()) < 1e-2
            assert choice_of(Bench(product, 321).chosen()) == choice_of(beside)
    finally:
        path.unlink()
        gemm_table.install(device, again=True)


@on_gpu
def test_tune_writes_a_row_for_each_product(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--hidden", "128", "--tokens", "100..160", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    hopper = have_warpgroups()  # two are tuned with LayerNorm and without
    assert done["made"] == (6 if hopper else 4) * len(buckets(100, 160)) and done["left"] == 0
    gemm_table.install(torch.device("cuda"), again=True)


@on_gpu
def test_a_shape_too_large_for_memory_is_named(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gpu_memory_left(2 << 30):
        assert main(["tune", "--hidden", "8192", "--tokens", "65536..65536"]) == 1
        assert "out of GPU memory" in capsys.readouterr().err
