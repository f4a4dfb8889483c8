"""Models with fp8 matrices on GPUs from 8.9 on: against float32, and what holds of every model."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Place
from fp8_models import FAMILIES, make_folder, quiet  # noqa: F401
from own_kernels import multiplies
from torch import Tensor
from torch.nn.functional import cosine_similarity

import ftbert
from ftbert.dtypes import FP8
from ftbert.quantization import quantize

WORDS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@pytest.fixture
def ada(place: Place) -> Place:
    if place.device == "cpu" or place.dtype == torch.float32 or not multiplies("e4m3"):
        pytest.skip("for 16-bit streams on GPUs from 8.9 on")
    return place


_MADE: dict[tuple[str, torch.dtype], tuple[Path, Path]] = {}


@pytest.fixture(params=FAMILIES)
def folders(request: pytest.FixtureRequest, ada: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder stored in the place's type, and the same in fp8."""
    key = (request.param, ada.dtype)
    if key not in _MADE:
        home = tmp_path_factory.mktemp("fp8")
        plain = make_folder(request.param, "encoder", ada.dtype, home / "plain")
        quantize(plain, home / "fp8", any_loss=True, device="cuda")
        _MADE[key] = plain, home / "fp8"
    return _MADE[key]


def batch(rows: int = 5, seq: int = 40) -> tuple[Tensor, Tensor]:
    """Ids and a mask with padding on the right."""
    ids = torch.randint(5, 100, (rows, seq), generator=torch.Generator().manual_seed(rows))
    lengths = torch.linspace(seq, 3, rows).long()
    return ids.cuda(), (torch.arange(seq) < lengths[:, None]).long().cuda()


def hidden(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return model(ids, mask).last_hidden_state  # type: ignore[no-any-return]


def check_close(got: Tensor, want: Tensor, mask: Tensor, mean: float = 0.99, worst: float = 0.9) -> None:
    """Cosines of kept tokens. Of random weights in fp8 alone the worst are 0.9997 (BERT), 0.994, 0.985 (Qwen3)."""
    kept = mask.bool().cpu()
    cosines = cosine_similarity(got.double().cpu()[kept], want.double().cpu()[kept], dim=-1)
    assert cosines.mean() > mean and cosines.min() > worst


def test_close_to_float32(folders: tuple[Path, Path], ada: Place) -> None:
    plain, stored = folders
    exact = ftbert.load(plain)
    for seq in (3, 40, 50):
        ids, mask = batch(seq=seq)
        want = hidden(exact, ids.cpu(), mask.cpu())
        for dtype in ("fp8", "auto", WORDS[ada.dtype]):
            model = ftbert.load(stored, "cuda", dtype)
            got = hidden(model, ids, mask)
            assert model.dtype == FP8 and got.dtype == ada.dtype and "e4m3" in model.info()["products"]
            check_close(got, want, mask)
            assert not got[~mask.bool()].any()


def test_a_batch_is_its_rows_and_padding_says_nothing(folders: tuple[Path, Path]) -> None:
    model = ftbert.load(folders[1], "cuda", "fp8")
    ids, mask = batch()
    got = hidden(model, ids, mask)
    assert torch.equal(got, hidden(model, ids, mask))
    assert torch.equal(got, hidden(model, torch.where(mask.bool(), ids, 7), mask))
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = hidden(model, ids[row : row + 1, :length], mask[row : row + 1, :length])
        check_close(got[row : row + 1, :length], alone, mask[row : row + 1, :length], 0.999, 0.99)


def test_comes_back_from_files_and_pickles(folders: tuple[Path, Path]) -> None:
    model = ftbert.load(folders[1], "cuda", "fp8")
    ids, mask = batch()
    want = hidden(model, ids, mask)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model.module), file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(ids, mask)[0], want)
    again = pickle.loads(pickle.dumps(model))
    assert again.dtype == FP8 and torch.equal(hidden(again, ids, mask), want)
    for name, weight in dict(again.encoder.weights()).items():
        assert torch.equal(weight.float(), dict(model.encoder.weights())[name].float())


def test_a_plain_folder_becomes_fp8(folders: tuple[Path, Path], ada: Place) -> None:
    plain, stored = folders
    model, ready = ftbert.load(plain, "cuda", "fp8"), ftbert.load(stored, "cuda", "fp8")
    ids, mask = batch()
    want = hidden(ready, ids, mask)
    check_close(hidden(model, ids, mask), want, mask, 0.999, 0.99)
    assert torch.equal(hidden(ftbert.load(plain, "cuda", "fp8"), ids, mask), hidden(model, ids, mask))  # from the cache
    assert model.dtype == FP8 and model.folder == plain and "float8_e4m3fn" in repr(model)
    exact = hidden(ftbert.load(plain), ids.cpu(), mask.cpu())
    theirs = model.reference()(input_ids=ids.cpu(), attention_mask=mask.cpu()).last_hidden_state
    check_close(theirs.detach(), exact, mask, 0.9999, 0.9999)
    texts = ["a text", "another one, which is longer"]
    vectors = model.encode(texts, convert_to_tensor=True)
    assert cosine_similarity(vectors.cpu(), ftbert.load(plain).encode(texts, convert_to_tensor=True)).min() > 0.99


def test_to(folders: tuple[Path, Path], ada: Place) -> None:
    plain, stored = folders
    ids, mask = batch()
    model, wide = ftbert.load(plain, "cuda", "fp8"), ftbert.load(plain, "cuda", ada.dtype)
    want, exact = hidden(model, ids, mask), hidden(wide, ids, mask)
    assert torch.equal(hidden(model.to("cuda"), ids, mask), want)
    assert torch.equal(hidden(wide.to(dtype="fp8"), ids, mask), want)
    assert torch.equal(hidden(model.to(dtype=ada.dtype), ids, mask), exact)
    assert model.to("cpu", "fp32").dtype == torch.float32
    with pytest.raises(ValueError, match="on the CPU ftbert computes in fp32, or bf16"):
        model.to("cpu")
    with pytest.raises(ValueError, match="load the model that it was made from"):
        ftbert.load(stored, "cuda", "fp8").to(dtype="fp32")
    with pytest.raises(RuntimeError):
        model.module.cpu()
    assert torch.equal(hidden(model, ids, mask), want), "an error must leave the model as it was"


def test_live_models(folders: tuple[Path, Path], ada: Place) -> None:
    from transformers import AutoModel

    plain, _ = folders
    ids, mask = batch()
    live = AutoModel.from_pretrained(plain, dtype=ada.dtype).cuda().eval()
    want = hidden(ftbert.load(plain), ids.cpu(), mask.cpu())
    check_close(hidden(ftbert.load(live, "cuda", "fp8"), ids, mask), want, mask)
    got = ftbert.optimize(live, dtype="fp8")(input_ids=ids, attention_mask=mask).last_hidden_state
    check_close(got, want, mask)
    assert got.dtype == ada.dtype
    assert not live.forward.fallbacks and "e4m3" in live.forward.info()["products"]


def test_heads_are_those_of_the_plain_model(ada: Place, tmp_path: Path) -> None:
    folder = make_folder("bert", "sequence_classification", ada.dtype, tmp_path / "classifier")
    model, exact = ftbert.load(folder, "cuda", "fp8"), ftbert.load(folder)
    ids, mask = batch()
    got, want = model(ids, mask).logits, exact(ids.cpu(), mask.cpu()).logits
    assert got.dtype == ada.dtype
    assert (got.float().cpu() - want).abs().max() < 0.2 * max(1.0, float(want.abs().max()))
