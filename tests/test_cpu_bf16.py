"""dtype="bf16" on the CPU: products in bf16 with float sums, everything between them and the results in float32."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from compare import assert_close, assert_no_worse
from conftest import make_bert
from families import LAYERED, make_batch, make_model, masks_of

import ftbert
from ftbert._library import build_info, load_library
from ftbert.evaluation import check

load_library()
ops = torch.ops.ftbert

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no instructions for bf16"
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("family", LAYERED)
@pytest.mark.parametrize("mask", ["right", "left", "holes"])
def test_no_worse_than_transformers_in_bf16(family: str, mask: str) -> None:
    reference = make_model(family, "encoder", 0)
    if mask not in masks_of(reference):
        pytest.skip("windows of columns there, of kept tokens here")
    batch = make_batch(reference, "encoder", mask)
    kept = batch["attention_mask"].bool()
    with torch.inference_mode():
        want = reference.double()(**batch).last_hidden_state[kept]
        theirs = reference.bfloat16()(**batch).last_hidden_state[kept]
    model = ftbert.load(reference.float(), dtype="bf16")
    out = model(**batch).last_hidden_state
    assert model.dtype == torch.bfloat16 and out.dtype == torch.float32
    assert not out[~kept].any()
    assert (out[kept] - want).square().mean().sqrt() > 1e-5  # that of float32 is smaller
    assert_no_worse(out[kept], theirs, want)
    assert torch.equal(out, model(**batch).last_hidden_state)


def test_all_ways_to_call_agree() -> None:
    reference = make_bert(num_hidden_layers=3)
    model = ftbert.load(reference, dtype="bf16")
    ids, lengths = torch.randint(5, 99, (4, 24)), [24, 7, 1, 16]
    mask = (torch.arange(24)[None] < torch.tensor(lengths)[:, None]).long()
    out = model(ids, mask)
    packed, cu = ids[mask.bool()], torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    assert torch.equal(model.forward_packed(packed, cu, 24), out.last_hidden_state[mask.bool()])
    first = model.forward_packed(packed, cu, 24, want="first")
    torch.testing.assert_close(first, out.last_hidden_state[:, 0], atol=4e-2, rtol=0)
    last = model.forward_packed(packed, cu, 24, want="last")
    assert torch.equal(model.forward_packed(packed, cu, 24, want="rows", rows=cu[1:] - 1), last)
    torch.testing.assert_close(last, out.last_hidden_state[mask.bool()][cu[1:] - 1], atol=4e-2, rtol=0)
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, :length]).last_hidden_state[0]
        torch.testing.assert_close(alone, out.last_hidden_state[row, :length], atol=4e-2, rtol=0)
    general = ftbert.load(reference, dtype="bf16", attention="general")(ids, mask)
    torch.testing.assert_close(general.last_hidden_state, out.last_hidden_state, atol=6e-2, rtol=0)


def test_moving_saving_and_scripting_keep_it() -> None:
    exact = ftbert.load(make_bert())
    model = exact.to(dtype="bf16")
    ids = torch.randint(5, 99, (2, 9))
    want = model(ids).last_hidden_state
    assert model.info()["products"] == "bf16" and "products" not in exact.info()
    assert not torch.equal(want, exact(ids).last_hidden_state)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model.module), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert torch.equal(loaded(ids)[0], want)
    assert loaded.encoder.matrix_dtype() == "bf16"
    weights = model.encoder.weights()
    kinds = {name: t.dtype for name, t in weights.items()}
    assert kinds["embeddings.word"] == torch.float32
    assert {kinds[name] for name in kinds if "layers.0" in name and name.endswith(".weight")} >= {torch.bfloat16}
    back = model.to(dtype="fp32")
    assert back.dtype == torch.float32 and "products" not in back.info()


def test_heads_and_optimize() -> None:
    reference = make_model("bert", "sequence_classification", 0)
    batch = make_batch(reference, "sequence_classification", "right")
    with torch.inference_mode():
        want = reference(**batch).logits
    got = ftbert.load(reference, dtype="bf16")(**batch).logits
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=2e-2, rtol=0)
    ftbert.optimize(reference, dtype="bf16")
    with torch.inference_mode():
        optimized = reference(**batch).logits
    torch.testing.assert_close(optimized, want, atol=2e-2, rtol=0)
    assert not torch.equal(optimized, want)


def test_weights_of_two_kinds_only_where_they_belong() -> None:
    encoder = ftbert.load(make_bert()).encoder
    weights, config = dict(encoder.weights()), encoder.config()
    matrices = [name for name, t in ftbert.load(make_bert(), dtype="bf16").encoder.weights().items() if t.dtype != torch.float32]
    others = [name for name in weights if name not in matrices and name != "embeddings.word"]
    for name in ("embeddings.word", others[-1]):
        with pytest.raises(RuntimeError, match="expected .*Float|in fp32"):
            torch.classes.ftbert.Encoder(weights | {name: weights[name].bfloat16()}, config, "auto")
    fp16 = weights | {matrices[-1]: weights[matrices[-1]].half()}
    with pytest.raises(RuntimeError, match=f"{matrices[-1]}: no product on cpu multiplies fp32 by a matrix stored as fp16"):
        torch.classes.ftbert.Encoder(fp16, config, "auto")


def test_each_matrix_is_multiplied_as_it_is_stored() -> None:
    """Rounding one matrix more moves the result by less than rounding all of them does."""
    model = ftbert.load(make_bert(), dtype="bf16")
    exact, rounded = dict(ftbert.load(make_bert()).encoder.weights()), dict(model.encoder.weights())
    ids = torch.arange(5, 17)[None]

    def run(*fp32: str) -> torch.Tensor:
        weights = rounded | {name: exact[name] for name in fp32}
        encoder = torch.classes.ftbert.Encoder(weights, model.encoder.config(), "auto")
        stored = [str(t.dtype).replace("torch.", "") for name, t in weights.items() if t.dim() == 2 and not name.startswith("emb")]
        many, few = stored.count("bfloat16"), stored.count("float32")
        assert encoder.info()["products"] == (f"bf16 {many}, fp32 {few}" if few else "bf16")
        return encoder.forward(ids)[0]  # type: ignore[no-any-return]

    down, rest = "layers.1.ffn.down.weight", model(ids).last_hidden_state
    want = ftbert.load(make_bert())(ids).last_hidden_state
    most = (rest - want).abs().max()
    assert torch.equal(run(), rest)
    for names in ((down,), (down, "layers.0.attention.qkv.weight"), ("layers.0.ffn.up.weight",)):
        got = run(*names)
        assert not torch.equal(got, rest)
        assert (got - want).abs().max() < 1.5 * most


def test_the_real_minilm(minilm_folder: Path) -> None:
    exact, model = ftbert.load(minilm_folder), ftbert.load(minilm_folder, dtype="bf16")
    report = check(model)
    assert report.passed, str(report)
    texts = ["a dog plays in the grass", "two men play chess", "it rains", "the bank of the river " * 20]
    assert (exact.encode(texts) * model.encode(texts)).sum(1).min() > 0.999


@functools.cache
def attention_products() -> str:
    """By the CPU; tiles also have to be granted."""
    return ftbert.load(make_bert(num_hidden_layers=1), dtype="bf16").info()["attention_products"]


def test_tiles_are_taken_where_there_are_some() -> None:
    held = os.environ.get("FTBERT_MAX_CPU_ISA", "amx") != "amx"
    if held or not (torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()):
        pytest.skip("no AMX, or held to less")
    assert build_info()["cpu_isa"] == "amx"
    assert attention_products() == "bf16, AMX tiles"
    size = {"hidden_size": 48, "num_attention_heads": 2}  # heads of 24 do not fill tiles
    assert ftbert.load(make_bert(**size), dtype="bf16").info()["attention_products"] == "bf16"
    assert ftbert.load(make_bert(), dtype="bf16", attention="general").info()["attention_products"] == "fp32"
    assert "attention_products" not in ftbert.load(make_bert()).info()


def test_attention_on_a_cpu_without_tiles() -> None:
    """The tests of attention below, held to avx512_bf16 in a process of its own, since that is read once."""
    if attention_products() != "bf16, AMX tiles":
        pytest.skip("no AMX, or held to less")
    command = [sys.executable, "-m", "pytest", "-q", "-k", "rounds_its or relative_bias", __file__]
    held = {**os.environ, "FTBERT_MAX_CPU_ISA": "avx512_bf16"}
    done = subprocess.run(command, env=held, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout


@pytest.mark.parametrize("lengths", [[1], [2, 17, 33], [128, 0, 5], [300]], ids=str)
@pytest.mark.parametrize("heads,head_size", [(3, 1), (2, 17), (2, 26), (12, 32), (3, 64), (1, 80), (2, 128), (1, 288), (1, 300)])
def test_attention_rounds_its_operands_alone(lengths: list[int], heads: int, head_size: int) -> None:
    qkv = torch.randn(sum(lengths), 3 * heads * head_size)
    cu = reference.offsets(lengths)
    exact = reference.attention(qkv, lengths, heads)
    got = ops.attention(qkv, cu, max(lengths), heads, bf16=True)
    assert torch.equal(got, ops.attention(qkv, cu, max(lengths), heads, bf16=True))
    # Probabilities and values are rounded to 8 bits, and so are the scores' operands, of which head_size are summed.
    assert_close(got, exact, atol=4e-2, rtol=8e-3)
    rounded = reference.attention(qkv.bfloat16(), lengths, heads)
    assert_no_worse(got, rounded.bfloat16(), exact)
    if attention_products() != "fp32":
        assert not torch.equal(got, ops.attention(qkv, cu, max(lengths), heads))


def test_attention_in_bf16_with_relative_bias_and_neighbours() -> None:
    heads, size, lengths = 2, 32, [41, 20, 3]
    qkv, table = torch.randn(64, 3 * heads * size), torch.randn(heads, 2 * 64 - 1)
    cu = reference.offsets(lengths)
    got = ops.attention(qkv, cu, 41, heads, table, bf16=True)
    assert_close(got, ops.attention(qkv, cu, 41, heads, table).double(), atol=4e-2, rtol=8e-3)
    columns = torch.cat([torch.arange(n) + 2 * (torch.arange(n) > n // 2) for n in lengths]).int()
    gaps = ops.attention(qkv, cu, 41, heads, table, columns, True)
    assert_close(gaps, ops.attention(qkv, cu, 41, heads, table, columns).double(), atol=4e-2, rtol=8e-3)
    assert not torch.equal(gaps, got)
    for first, last in ((0, 41), (41, 61), (61, 64)):
        among = torch.full_like(qkv, float("nan"))
        among[first:last] = qkv[first:last]
        assert torch.equal(ops.attention(among, cu, 41, heads, table, bf16=True)[first:last], got[first:last])
