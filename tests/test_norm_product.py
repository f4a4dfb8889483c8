"""Products that contain the LayerNorm behind them (wgmma_layernorm), forced on whole models by a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import (
    check_against_transformers,
    check_every_mask,
    check_on_threads,
    first_kept,
    inputs,
    kernels,
    packed,
    ragged,
)
from compare import assert_close
from conftest import Place, first_of, have_gpu, make_bert
from own_kernels import VARIANTS

import ftbert
from ftbert.tuning import WITH_LAYERNORM, Bench, Machine, Own, Product, Row, gemm_table, products_of_shape
from ftbert.tuning.gemm_table import add_rows

pytestmark = pytest.mark.skipif(
    not have_gpu() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU with warpgroup instructions"
)

HALF = torch.float16
SHAPES: dict[str, dict[str, Any]] = {
    "384": {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
    "1024": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 320},
}
Force = Callable[..., None]


@pytest.fixture
def force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Force]:
    """force(config, variant, of_down): the products before a LayerNorm run that variant, at every m, or the second one
    another; "": none does."""
    path, device = tmp_path / "table.json", torch.device("cuda")
    monkeypatch.setenv("FTBERT_GEMM_TABLE", str(path))
    monkeypatch.setenv("FTBERT_DEFERRED_NORM", "off")

    def put(config: Any, variant: str, of_down: str | None = None) -> None:
        rows = []
        for dtype in ("fp16", "bf16"):
            _, out, _, down = products_of_shape(config.hidden_size, config.intermediate_size, "gelu", dtype)
            for product, of in ((out, variant), (down, variant if of_down is None else of_down)):
                rows.append(Row(product, 1, 1 << 20, own(product, of) if of else None))
        path.unlink(missing_ok=True)
        add_rows(path, Machine.of("cuda"), rows)
        gemm_table.install(device, again=True)

    yield put
    monkeypatch.undo()
    gemm_table.install(device, again=True)


def own(product: Product, variant: str) -> Own:
    if not any(a.kernel == WITH_LAYERNORM and a.variant == variant for a in Bench(product, 64).own()):
        pytest.skip(f"{product} has no variant {variant}")
    return Own(WITH_LAYERNORM, variant)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS.get(WITH_LAYERNORM, []))
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers(force: Force, shape: str, variant: str, dtype: torch.dtype) -> None:
    reference = make_bert(**SHAPES[shape])
    force(reference.config, variant)
    model = ftbert.load(reference, device="cuda", dtype=dtype)
    for batch, seq in ((1, 1), (2, 17), (7, 64), (40, 128)):
        check_every_mask(reference, model, batch, seq, Place("cuda", dtype))


@pytest.mark.parametrize("own_graphs", [False, True])
def test_runs_where_the_table_says_so_and_gives_the_same_bits(force: Force, own_graphs: bool) -> None:
    reference = make_bert(**SHAPES["384"], num_hidden_layers=3)
    call = packed([17, 64, 3, 100])
    got = {}
    for variant in ("", "128x192 single", "64x192"):
        force(reference.config, variant)
        model = ftbert.load(reference, device="cuda", dtype=HALF)
        model.use_cuda_graphs(own_graphs)
        assert kernels("wgmma_layernorm", lambda model=model: model.forward_packed(*call)) == (6 if variant else 0)  # type: ignore[misc]
        got[variant] = model.forward_packed(*call).clone()
        for _ in range(5):
            assert torch.equal(model.forward_packed(*call), got[variant])
    for variant in ("128x192 single", "64x192"):
        assert_close(got[variant], got[""], atol=64 * torch.finfo(HALF).eps)


def test_more_turns_than_marks(force: Force) -> None:
    """A product is known by its turn, which begins anew after 255."""
    reference = make_bert(**SHAPES["384"] | {"intermediate_size": 64}, num_hidden_layers=140)
    call, got = packed([33, 100, 128]), {}
    for variant in ("", "128x192 together"):
        force(reference.config, variant)
        got[variant] = ftbert.load(reference, device="cuda", dtype=HALF).forward_packed(*call).float()
    cosine = torch.cosine_similarity(got["128x192 together"], got[""], dim=-1)
    assert cosine.min() > 0.999


@pytest.mark.parametrize(
    "variants",
    [("128x192 single", "128x128"), ("128x128", "128x192 single"), ("64x128", ""), ("", "128x192 together"),
     ("64x192", "128x128 single")],
)  # fmt: skip
def test_products_of_different_tiles_share_what_they_tell(force: Force, variants: tuple[str, str]) -> None:
    reference = make_bert(**SHAPES["384"], num_hidden_layers=5)
    force(reference.config, *variants)
    model = ftbert.load(reference, device="cuda", dtype=HALF)
    for one in (inputs(3, 50)["right"], inputs(64, 100)["holes"]):
        check_against_transformers(reference, model, one, Place("cuda", HALF))


@pytest.mark.parametrize("mask", ["full", "right", "mostly empty"])
@pytest.mark.parametrize("variant", ["128x192 single", "64x128"])
def test_the_last_layer_of_first_tokens_alone(force: Force, variant: str, mask: str) -> None:
    """It has as many rows as texts, empty ones too, which can be more than there are tokens."""
    reference = make_bert(**SHAPES["384"])
    force(reference.config, variant)
    model = ftbert.load(reference, device="cuda", dtype=HALF)
    ids, kept = ragged(mask, Place("cuda", HALF), batch=200, seq=31)
    whole, first = model.module(ids, kept)[0], first_of(model.module, ids, kept)[0]
    assert_close(first, first_kept(whole, kept), atol=16 * torch.finfo(HALF).eps, rtol=16 * torch.finfo(HALF).eps)


def test_threads_and_streams(force: Force) -> None:
    reference = make_bert(**SHAPES["384"])
    force(reference.config, "128x192 single")
    model = ftbert.load(reference, device="cuda", dtype=HALF)
    check_on_threads(model, [packed(lengths) for lengths in ([3], [64] * 40, [128] * 70, [100, 7])], threads=4, rounds=30)
