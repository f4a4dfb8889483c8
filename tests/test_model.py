"""The whole model against transformers, and the properties that matter more than examples."""

from __future__ import annotations

import copy
import csv
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import check_against_transformers, check_every_mask, inputs, move
from compare import assert_close
from conftest import Place, make_bert
from safetensors.torch import load_file, save_file

import ftbert
from ftbert.devices import check_range

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "head 26": {"hidden_size": 78, "num_attention_heads": 3, "intermediate_size": 100},
    "head 80": {"hidden_size": 160, "num_attention_heads": 2, "type_vocab_size": 1},
    "head 128": {"hidden_size": 256, "num_attention_heads": 2, "hidden_act": "relu", "layer_norm_eps": 1e-5},
    "minilm": {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "hidden_act": "gelu_new"},
    "no layers": {"num_hidden_layers": 0},
    "base": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 12},
    "large": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", ["auto", "general"])
def test_equals_transformers(place: Place, shape: str, attention: str) -> None:
    if shape in ("base", "large") and place.device == "cpu" and attention == "general":
        pytest.skip("covered by smaller shapes; too slow here")
    reference = make_bert(**SHAPES[shape])
    model = ftbert.load(reference, device=place.device, dtype=place.dtype, attention=attention)
    # load() must not share what the reference then changes dtype of.
    reference = copy.deepcopy(reference)
    sizes = [(3, 37)] if shape == "large" else [(1, 1), (1, 128), (5, 37), (7, 128)]
    for batch, seq in sizes:
        check_every_mask(reference, model, batch, seq, place, shape, SHAPES[shape].get("type_vocab_size", 2))


@pytest.mark.parametrize("seq", [1, 2, 63, 64, 65, 511, 1500, 4096])
def test_long_sequences(place: Place, seq: int) -> None:
    reference = make_bert(max_position_embeddings=4096, num_hidden_layers=1)
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    check_against_transformers(reference, model, inputs(2, seq)["right"], place)


@pytest.mark.parametrize("batch", [0, 1, 7, 4096])
def test_batch_sizes(place: Place, batch: int) -> None:
    reference = make_bert(num_hidden_layers=1)
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    one = inputs(batch, 5)["right"]
    if batch == 0:
        out = model(**move(one, place))
        assert out.last_hidden_state.shape == (0, 5, 64) and out.pooler_output.shape == (0, 64)
    else:
        check_against_transformers(reference, model, one, place)


@pytest.mark.parametrize("mask", ["right", "left", "holes", "full"])
def test_real_weights_equal_transformers(place: Place, minilm_folder: Path, mask: str) -> None:
    model = ftbert.load(minilm_folder, device=place.device, dtype=place.dtype)
    check_against_transformers(model.reference(), model, inputs(9, 120, vocab=30522)[mask], place)


def test_stsb_spearman(place: Place, minilm_folder: Path, stsb_test: Path) -> None:
    from scipy.stats import spearmanr

    with open(stsb_test, encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    model = ftbert.load(minilm_folder, device=place.device, dtype=place.dtype)
    a, b = (model.encode([row[i] for row in rows], pooling="mean") for i in (5, 6))
    score = spearmanr((a * b).sum(1), [float(row[4]) for row in rows]).statistic
    assert len(rows) == 1379
    assert abs(score - 0.8203) <= (0.0002 if place.dtype == torch.float32 else 0.0005), score


# ---- properties ----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(place: Place) -> ftbert.Model:
    return ftbert.load(make_bert(), device=place.device, dtype=place.dtype)


def test_padding_content_is_irrelevant(model: ftbert.Model, place: Place) -> None:
    for name, batch in inputs(6, 50).items():
        batch = move(batch, place)
        first = model(**batch).last_hidden_state
        pad = batch["attention_mask"] == 0
        batch["input_ids"][pad], batch["token_type_ids"][pad] = -(10**15), 10**15
        assert torch.equal(first, model(**batch).last_hidden_state), name


def test_small_results_hold_no_more_memory_than_they_show(model: ftbert.Model, place: Place) -> None:
    out = model(torch.zeros(2, 5, dtype=torch.int64, device=place.device))
    for result in (out.last_hidden_state, out.pooler_output):
        assert result.untyped_storage().nbytes() <= 1.2 * result.nbytes


def test_batch_equals_single(model: ftbert.Model, place: Place) -> None:
    # A GEMM of another m may sum in another order: equal to rounding in 16 bit, to 1e-6 in fp32.
    limit = 1e-6 if place.dtype == torch.float32 else 16 * place.eps
    relative = 0 if place.device == "cpu" else 1e-6
    for name, batch in inputs(9, 60).items():
        batch = move(batch, place)
        together = model(**batch).last_hidden_state
        for i in range(9):
            alone = model(**{key: value[i : i + 1] for key, value in batch.items()}).last_hidden_state
            assert_close(together[i : i + 1], alone, atol=limit, rtol=relative, what=f"{name}, sentence {i}")


# Around the sizes in which the CPU's products take rows (gemm_rows): a single piece or pass, and several.
@pytest.mark.parametrize("tokens", [1, 5, 47, 50, 66, 81, 100, 257, 700, 767, 769, 1500])
def test_any_number_of_tokens(model: ftbert.Model, place: Place, tokens: int) -> None:
    # On a GPU another m may be another algorithm, which sums in another order.
    limit = 1e-6 if place.device == "cpu" else 16 * place.eps if place.dtype != torch.float32 else 4e-6
    lengths = [50] * (tokens // 50) + ([tokens % 50] if tokens % 50 else [])
    ids = torch.randint(1, 90, (tokens,), device=place.device)
    cu = torch.tensor([0, *lengths], device=place.device).cumsum(0).int()
    together = model.forward_packed(ids, cu, 50)
    begin = 0
    for i, length in enumerate(lengths):
        alone = model(ids[None, begin : begin + length]).last_hidden_state[0]
        assert_close(together[begin : begin + length], alone, atol=limit, rtol=1e-6, what=f"sentence {i} of {tokens}")
        begin += length


def test_run_to_run_identical(model: ftbert.Model, place: Place) -> None:
    batch = move(inputs(9, 60)["holes"], place)
    first = model(**batch).last_hidden_state
    for _ in range(20):
        assert torch.equal(first, model(**batch).last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float16])
def test_mask_dtypes(model: ftbert.Model, place: Place, dtype: torch.dtype) -> None:
    batch = move(inputs(4, 30)["holes"], place)
    expected = model(**batch).last_hidden_state
    batch["attention_mask"] = batch["attention_mask"].to(dtype)
    assert torch.equal(expected, model(**batch).last_hidden_state)
    batch["attention_mask"] = batch["attention_mask"].cpu()  # allowed on a GPU too: then nobody waits for it
    batch["input_ids"], batch["token_type_ids"] = batch["input_ids"].int(), batch["token_type_ids"].int()
    assert torch.equal(expected, model(**batch).last_hidden_state)
    strided = {key: value.t().contiguous().t() for key, value in batch.items()}
    assert torch.equal(expected, model(**strided).last_hidden_state)


def test_four_threads_get_what_one_gets(model: ftbert.Model, place: Place) -> None:
    batches = [move(inputs(3 + i, 20 + 9 * i)["holes"], place) for i in range(4)]
    expected = [model(**batch).last_hidden_state for batch in batches]

    def work(i: int) -> None:
        stream = torch.cuda.Stream() if place.device == "cuda" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for turn in range(25):
                got = model(**batches[(i + turn) % 4]).last_hidden_state
                assert torch.equal(got, expected[(i + turn) % 4]), f"thread {i}, turn {turn}"

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_to_another_dtype_and_back(place: Place) -> None:
    reference = make_bert()
    model = ftbert.load(reference)
    moved = model.to(place.device, place.dtype)
    assert moved.device.type == place.device and moved.dtype == place.dtype and model.device.type == "cpu"
    direct = ftbert.load(reference, device=place.device, dtype=place.dtype)
    batch = move(inputs(4, 30)["holes"], place)
    assert torch.equal(moved(**batch).last_hidden_state, direct(**batch).last_hidden_state)


def test_weights_survive_packing(place: Place) -> None:
    """What the class gives back (and pickles) is bit for bit what it was built from."""
    reference = make_bert()
    weights = dict(ftbert.load(reference, device=place.device, dtype=place.dtype).encoder.weights())
    for name, tensor in ftbert.load(reference).checkpoint.items(place.dtype):
        assert torch.equal(weights[name].cpu(), tensor), name


# ---- bad input -----------------------------------------------------------------------------------------------------


def test_bad_input_is_named(model: ftbert.Model, place: Place) -> None:
    ids = torch.randint(0, 120, (3, 10), device=place.device)
    mask = torch.ones_like(ids)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        (r"input_ids: expected int64 or int32 \[batch, seq\], got Float", (ids.float(),)),
        (r"input_ids: expected .*, got Long \[10\]", (ids[0],)),
        (r"attention_mask: expected the shape of input_ids", (ids, mask[:, :9])),
        (r"attention_mask: expected the shape of input_ids", (ids, mask[:2])),
        (r"attention_mask: expected values 0 and 1, got 3 at \[1, 4\]", (ids, mask.index_put((torch.tensor(1), torch.tensor(4)), torch.tensor(3)))),
        (r"attention_mask: expected values 0 and 1, got 0.25 at \[0, 0\]", (ids, mask.float() * 0.25)),
        (r"token_type_ids: expected the shape", (ids, mask, mask[:, :3])),
        (r"input_ids: expected ids in \[0, 120\), the vocabulary, got 120 at \[2, 9\]", (ids.index_put((torch.tensor(2), torch.tensor(9)), torch.tensor(120)), mask)),
        (r"input_ids: expected ids in \[0, 120\), the vocabulary, got -1 at", (ids - 200 + 199 - ids, mask)),
        (r"token_type_ids: expected ids in \[0, 2\), got 2 at \[0, 0\]", (ids, mask, mask * 2)),
        (r"sequence of 129 tokens: the model has positions for 128", (torch.zeros(1, 129, dtype=torch.int64, device=place.device),)),
    ]  # fmt: skip
    for message, arguments in cases:
        with pytest.raises(RuntimeError, match=message):
            model(*arguments)
    assert model(ids, mask).last_hidden_state.isfinite().all(), "an error must leave the model usable"


def test_bad_packed_input_is_named(model: ftbert.Model, place: Place) -> None:
    ids = torch.randint(0, 120, (10,), device=place.device)
    cu = torch.tensor([0, 4, 10], dtype=torch.int32, device=place.device)
    with pytest.raises(RuntimeError, match=r"cu_seqlens: expected int32 \[batch\+1\]"):
        model.forward_packed(ids, cu.long(), 6)
    with pytest.raises(RuntimeError, match="sequence of 129 tokens"):
        model.forward_packed(ids, cu, 129)
    if place.device == "cpu":  # on a GPU nobody may look at the contents
        with pytest.raises(RuntimeError, match="from 0 to 10 .*, got 0 to 9"):
            model.forward_packed(ids, torch.tensor([0, 4, 9], dtype=torch.int32), 6)
        with pytest.raises(RuntimeError, match="no step above max_seqlen 5, got 4 to 10 at sequence 1"):
            model.forward_packed(ids, cu, 5)
        with pytest.raises(RuntimeError, match="vocabulary, got 999"):
            model.forward_packed(ids * 0 + 999, cu, 6)
    else:
        out = model.forward_packed(torch.where(torch.arange(10, device="cuda") == 7, 999, ids), cu, 6)
        assert out[4:].isnan().all() and out[:4].isfinite().all(), "an impossible id poisons its own sentence only"


def test_wrong_device_is_named(place: Place) -> None:
    if place.device == "cpu":
        pytest.skip("needs two devices")
    model = ftbert.load(make_bert(), device="cuda", dtype=place.dtype)
    with pytest.raises(RuntimeError, match="input_ids: the model is on cuda:0, got Long .* on cpu"):
        model(torch.zeros(1, 3, dtype=torch.int64))
    ids = torch.zeros(1, 3, dtype=torch.int64, device="cuda")
    with pytest.raises(RuntimeError, match="token_type_ids: the model is on cuda:0"):
        model(ids, None, ids.cpu())


def test_devices_and_dtypes_that_are_none_are_named() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "fp16"}, "on the CPU ftbert computes in fp32, or bf16 for the products; fp16 needs a GPU"),
        ({"dtype": "int4"}, "dtype: expected fp32, fp16, bf16, fp8, int8 or q8_0"),
        ({"device": "mps"}, "device: expected cpu or cuda"),
        ({"device": "gpu"}, "device: expected cpu, cuda or cuda:N, got 'gpu'"),
    ]
    for given, words in wrong:
        with pytest.raises(ValueError, match=words):
            ftbert.load(make_bert(), **given)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="no CUDA|sees no GPU"):
            ftbert.load(make_bert(), device="cuda")
    model = ftbert.load(make_bert())
    with pytest.raises(TypeError, match=r"to\(dtype=torch.bfloat16\)"):
        model.to(torch.bfloat16)  # type: ignore[arg-type]
    assert "layers of" in repr(model) and "torch.float32 on cpu" in repr(model)


def test_fp16_of_a_model_that_outgrows_it_warns() -> None:
    with pytest.warns(UserWarning, match="65504.*bf16"):
        check_range(True, torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_range(True, torch.bfloat16)
        check_range(False, torch.float16)


def test_a_dtype_that_is_wider_again_has_the_checkpoint_s_weights(tmp_path: Path) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("no bf16 on this CPU")
    theirs = make_bert()
    theirs.save_pretrained(tmp_path)
    ids = torch.arange(5, 17)[None]
    expected = ftbert.load(tmp_path)(ids).last_hidden_state
    back = ftbert.load(tmp_path, dtype="bf16", attention="general").to(dtype="fp32")
    assert_close(back(ids).last_hidden_state, expected, atol=1e-5)
    assert back.info()["attention"] == "general"
    with pytest.warns(UserWarning, match="rounded"):
        rounded = ftbert.load(theirs, dtype="bf16").to(dtype="fp32")
    assert 1e-4 < (rounded(ids).last_hidden_state - expected).abs().max() < 0.1


@pytest.mark.parametrize(
    "source,error,words",
    [
        (None, TypeError, "a folder, an .onnx or .gguf file, a hub id or a transformers model"),
        (3, TypeError, "got <class 'int'>"),
        ("", FileNotFoundError, "expected a model folder .* got ''"),
        ("model.safetensors", ValueError, "the folder that holds the weights"),
    ],
)
def test_load_says_what_it_takes(source: Any, error: type[Exception], words: str, tmp_path: Path) -> None:
    if source == "model.safetensors":
        (tmp_path / source).touch()
        source = str(tmp_path / source)
    with pytest.raises(error, match=words):
        ftbert.load(source)


def test_the_module_moves_as_torch_modules_do(place: Place) -> None:
    model = ftbert.load(make_bert())
    around = torch.nn.Sequential(model.module)
    assert around.float().to("cpu") is around
    for moving in (lambda: around.to("meta"), around.double):
        with pytest.raises(RuntimeError, match="computes on cpu and cuda"):
            moving()
    for moving in (around.half, around.bfloat16):
        with pytest.raises(RuntimeError, match="only products take 16 bits"):
            moving()
    ids = torch.arange(5, 17)[None]
    expected = model(ids).last_hidden_state
    around.to(place.device, place.dtype)
    hidden, _ = around[0](ids.to(place.device))
    assert hidden.dtype == place.dtype and str(hidden.device).startswith(place.device) and model.device == hidden.device
    assert_close(hidden, expected, atol=1e-5 if place.dtype == torch.float32 else 100 * place.eps)


def test_weights_that_are_no_real_numbers_are_refused(tmp_path: Path) -> None:
    """Codes of a quantized model would load as if they were its weights."""
    make_bert().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "encoder.layer.1.output.dense.weight"
    save_file(weights | {name: (10 * weights[name]).to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} is stored as torch.int8; quantized weights need their scales"):
        ftbert.load(tmp_path)


def test_what_is_no_tensor_is_named(place: Place) -> None:
    model = ftbert.load(make_bert(), device=place.device, dtype=place.dtype)
    ids = torch.ones(1, 4, dtype=torch.int64, device=place.device)
    wrong: dict[str, tuple[Any, ...]] = {
        "input_ids": (None,), "attention_mask": (ids, [[1]]), "token_type_ids": (ids, None, "a"),
    }  # fmt: skip
    for name, arguments in wrong.items():
        with pytest.raises(TypeError, match=rf"{name}: expected a torch tensor \[batch, seq\], got"):
            model(*arguments)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_dtype_that_the_weights_are_stored_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype) -> None:
    from ftbert import devices
    from ftbert.gpus import Gpu

    make_bert().to(stored).save_pretrained(tmp_path / "theirs")
    for speed in (0.5, 1.05, 1.2):
        monkeypatch.setitem(devices._measured, torch.bfloat16, speed)
        fast = torch.ops.mkldnn._is_mkldnn_bf16_supported() and speed < 1.1
        want = stored if stored == torch.bfloat16 and fast else torch.float32
        for source in (tmp_path / "theirs", make_bert().to(stored)):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert ftbert.load(source, dtype="auto").dtype == want
    for capability, lost in ((90, torch.float64), (80, torch.float64), (75, torch.bfloat16)):
        gpu = Gpu(capability, 40, capability)
        monkeypatch.setattr(Gpu, "of", lambda device, gpu=gpu: gpu)
        on_gpu = devices.stored_dtype(torch.device("cuda", 0), stored)
        assert on_gpu == (torch.float32 if stored in (torch.float64, lost) else stored)
    with pytest.raises(ValueError, match="expected fp32, fp16, bf16, fp8, int8 or q8_0"):
        ftbert.load(tmp_path / "theirs", dtype="int4")
