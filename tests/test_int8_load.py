"""Int8 on the CPU: how matrices and tokens are rounded, and what load, optimize and TorchScript make of a model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB_WORDS, has_int8, have_gpu, make_bert, randomise
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import ftbert
from ftbert import devices
from ftbert.checkpoint import WORD_TABLE, Checkpoint
from ftbert.converters import build_reference, open_checkpoint, source_modules, source_tensors
from ftbert.devices import check_dtype, stream_dtype
from ftbert.evaluation import SAMPLE_TEXTS
from ftbert.gpus import Gpu
from ftbert.quantization import altered, calibration_texts, int8_rows, quantize, smoothing, uint8_tokens
from ftbert.quantization.vectors import TextVectors

CPU, INT8 = torch.device("cpu"), torch.int8


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = calibration_texts()[:30]
    monkeypatch.setattr(sys.modules["ftbert.quantization.quantize"], "calibration_texts", lambda: few)
    monkeypatch.setenv("FTBERT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def plain(tmp_path: Path, tiny_bert: Callable[..., Path]) -> Path:
    (tmp_path / "models").mkdir()
    return tiny_bert(tmp_path / "models")


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    quantize(plain, tmp_path / "int8", dtype="int8")
    return tmp_path / "int8"


def quietly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


# ---- rounding --------------------------------------------------------------------------------------------------------

seeds, sizes = st.integers(0, 999), st.sampled_from([1e-30, 1e-3, 1.0, 1e30])


@settings(max_examples=30, deadline=None)
@given(seed=seeds, size=sizes)
def test_rows_come_back_within_half_a_step(seed: int, size: float) -> None:
    matrix = torch.randn(9, 40, generator=torch.Generator().manual_seed(seed)) * size
    matrix[4] = 0
    stored, scale = int8_rows(matrix)
    assert (scale > 0).all() and scale[4] == 1 and not stored[4].any()
    assert ((stored.float() * scale[:, None] - matrix).abs() <= 0.5001 * scale[:, None]).all()


@settings(max_examples=30, deadline=None)
@given(seed=seeds, size=sizes, shift=st.sampled_from([-40.0, -1.0, 0.0, 3.0]))
def test_tokens_come_back_within_a_step(seed: int, size: float, shift: float) -> None:
    x = (torch.randn(7, 40, generator=torch.Generator().manual_seed(seed)) + shift) * size
    x[3], x[:, 5] = 0, 0
    number, scale, zero = uint8_tokens(x)
    assert torch.equal(number, number.round().clamp(0, 255)) and torch.equal(zero, zero.round().clamp(0, 255))
    back = (number - zero) * scale
    assert ((back - x).abs() <= 1.001 * scale).all() and not back[3].any() and not back[:, 5].any()
    rows = torch.ops.ftbert.byte_rows(x, None)  # the kernel's: a number between two may fall to either
    assert (rows[:, :40].float() - number).abs().max() <= 1


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_is_not_a_number(number: float) -> None:
    x = torch.randn(3, 20)
    x[1, 4] = number
    stored, scale, zero = uint8_tokens(x)
    assert ((stored - zero) * scale).isnan().any(1).tolist() == [False, True, False]


@settings(max_examples=30, deadline=None)
@given(seed=seeds, dead=st.booleans(), unused=st.booleans())
def test_smoothing_evens_columns_out(seed: int, dead: bool, unused: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, matrix = torch.randn(50, 40, generator=generator), torch.randn(12, 40, generator=generator)
    x[:, 3] *= 100
    x[:, 7] *= 0 if dead else 1
    matrix[:, 9] *= 0 if unused else 1
    most = x.abs().amax(0)
    s = smoothing(matrix, most)
    assert s.isfinite().all() and (s > 0).all() and s.log().mean().abs() < 1e-4 and (not dead or s[7] == 1)
    torch.testing.assert_close((x / s) @ (matrix * s).T, x @ matrix.T, atol=1e-3, rtol=1e-4)
    ratios = (most / s / (matrix * s).abs().amax(0))[(most > 0) & matrix.any(0)]
    torch.testing.assert_close(ratios, ratios[0].expand_as(ratios), atol=0, rtol=1e-3)
    assert torch.equal(smoothing(matrix * 0, most * 0), torch.ones(40))


@pytest.mark.skipif(not have_gpu(), reason="no GPU")
def test_a_gpu_quantizes_as_the_cpu_does(plain: Path, folder: Path, tmp_path: Path) -> None:
    """Its sums have another order: a number that lies between two bytes may fall to either."""
    quantize(plain, tmp_path / "gpu", dtype="int8", device="cuda")
    got, wanted = (load_file(where / "model.safetensors") for where in (tmp_path / "gpu", folder))
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        assert got[name].dtype == want.dtype, name
        if want.dtype == INT8:
            apart = (got[name].int() - want.int()).abs()
            assert apart.max() <= 1 and apart.float().mean() < 0.01, name
        else:
            torch.testing.assert_close(got[name], want, rtol=1e-4, atol=0.0, msg=lambda words, name=name: f"{name}: {words}")


# ---- words -----------------------------------------------------------------------------------------------------------


def test_other_devices_are_refused(plain: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.Gpu, "of", staticmethod(lambda device: Gpu(75, 40, 75)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
    words = r"int8 needs a GPU of compute capability 8\.0 or above; cuda:0, NVIDIA T4 of 7\.5, computes in fp16 or fp32"
    with pytest.raises(ValueError, match=words):
        check_dtype(torch.device("cuda", 0), INT8)
    monkeypatch.setattr(devices, "build_info", lambda: {"cpu_int8": "none"})
    for dtype in ("int8", INT8):
        with pytest.raises(ValueError, match=r"int8: this CPU has no instructions .*VNNI.*; use fp32"):
            ftbert.load(plain, dtype=dtype)
    with pytest.raises(ValueError, match=r"stored in int8\. int8: this CPU .*use fp32: load the model that it was made"):
        ftbert.load(folder, dtype="auto")
    with pytest.raises(ValueError, match="use fp32"):
        ftbert.optimize(make_bert(), dtype="int8")
    assert stream_dtype(CPU, INT8) == torch.float32


# ---- models ----------------------------------------------------------------------------------------------------------


@contextmanager
def simulated(plain: Path, stored: Checkpoint) -> Iterator[Any]:
    """transformers' model of `plain` with weights and inputs of products as they are stored."""
    exact = open_checkpoint(plain)
    model = build_reference(exact, with_heads=False)
    weights, inputs = dict[str, Tensor](), dict[str, Callable[[Tensor], Tensor]]()
    for ours, names in source_modules(exact.config).items():
        smooth = stored.read(ours.replace(".weight", ".input.smooth"))
        weight = stored.read(ours, INT8).float() * stored.read(f"{ours}.scale")[:, None]
        weights |= source_tensors(exact.config, ours, weight)

        def read(x: Tensor, smooth: Tensor = smooth) -> Tensor:
            number, scale, zero = uint8_tokens(x * smooth)
            return (number - zero) * scale

        inputs |= dict.fromkeys((name.removesuffix(".weight") for name in names), read)
    if stored.config.encoder.word_type == "int8":
        words = stored.read(WORD_TABLE, INT8).float() * stored.read(f"{WORD_TABLE}.scale")[:, None]
        weights |= source_tensors(exact.config, WORD_TABLE, words)
    with altered(model, weights, inputs), torch.inference_mode():
        yield model


def off(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@has_int8
def test_load_computes_what_is_simulated(plain: Path, folder: Path) -> None:
    ids = torch.randint(5, 70, (3, 17), generator=torch.Generator().manual_seed(0))
    exact = ftbert.load(plain)(ids).last_hidden_state
    with pytest.warns(UserWarning, match="made int8 by calibration"):
        made = ftbert.load(plain, dtype="int8")
    models = [made, ftbert.load(folder, dtype="int8"), ftbert.load(folder, dtype="auto")]
    with simulated(plain, open_checkpoint(folder)) as simulation:
        want = simulation(input_ids=ids).last_hidden_state
    # Attention in float32, as it is simulated; the fused path has bf16 pairs behind int8 where the CPU has instructions.
    got = ftbert.load(folder, dtype="int8", attention="general")(ids).last_hidden_state
    # A number that lies between two bytes may fall to either, and moves those behind it.
    assert off(got, want) < 0.25 * off(want, exact) + 0.003
    for model in models:
        got = model(ids).last_hidden_state
        assert model.dtype == INT8 and got.dtype == torch.float32 and torch.equal(got, models[0](ids).last_hidden_state)
        assert 1e-4 < off(got, exact) < 0.1
        assert torch.equal(model(ids[1:2, :9]).last_hidden_state[0], model(ids[:, :9]).last_hidden_state[1])
    assert "in int8" in made.info()["products"] and made.to(dtype="fp32").dtype == torch.float32
    stored = "stored in int8; dtype='int8' or 'auto' loads it. For {} load the model"
    of_bf16 = stored.format("bf16") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "no products in bf16 on this CPU"
    for dtype, words in (("fp32", stored.format("fp32")), ("bf16", of_bf16)):
        with pytest.raises(ValueError, match=words):
            ftbert.load(folder, dtype=dtype)
    with pytest.raises(ValueError, match="For fp32 load the model that it was made from"):
        models[1].to(dtype="fp32")


@has_int8
def test_the_word_table_is_stored_so_unless_a_head_multiplies_by_it(folder: Path, plain: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, BertForMaskedLM

    exact, stored = open_checkpoint(plain).read(WORD_TABLE), open_checkpoint(folder).read(WORD_TABLE, INT8)
    scale = open_checkpoint(folder).read(f"{WORD_TABLE}.scale")
    assert ((stored.float() * scale[:, None] - exact).abs() <= 0.5001 * scale[:, None]).all()
    assert ftbert.load(folder, dtype="int8").info()["word_table"] == "int8"
    assert quantize(plain, tmp_path / "kept", dtype="int8", keep=[WORD_TABLE]).kept == {WORD_TABLE: "asked for"}
    torch.manual_seed(0)
    BertForMaskedLM(AutoConfig.from_pretrained(plain)).eval().save_pretrained(plain)
    assert quantize(plain, tmp_path / "tied", dtype="int8").kept == {WORD_TABLE: "a head multiplies by it"}
    ids = torch.randint(5, 70, (2, 9), generator=torch.Generator().manual_seed(0))
    want, got = (ftbert.load(one, dtype="auto")(ids).logits for one in (plain, tmp_path / "tied"))
    assert 1e-4 < off(got, want) < 0.1 and "word_table" not in ftbert.load(tmp_path / "tied", dtype="auto").info()


@has_int8
@pytest.mark.parametrize(("hidden", "keep"), [(8, []), (64, ["layers.0.ffn.up", "layers.1.ffn.up"])])
def test_a_gated_product_in_float_before_one_in_int8(hidden: int, keep: list[str], plain: Path, tmp_path: Path) -> None:
    """Fewer than 16 columns are not stored in int8; behind them the last product of a block is."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(vocab_size=len(VOCAB_WORDS), hidden_size=hidden, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    randomise(LlamaModel(config), 0).save_pretrained(plain)
    stored = quantize(plain, tmp_path / "stored", dtype="int8", keep=keep).kept
    assert "layers.0.ffn.up.weight" in stored and "layers.0.ffn.down.weight" not in stored
    ids = torch.randint(5, 70, (2, 11), generator=torch.Generator().manual_seed(0))
    want, got = (ftbert.load(one, dtype="auto")(ids).last_hidden_state for one in (plain, tmp_path / "stored"))
    assert 1e-4 < off(got, want) < 0.1


@has_int8
def test_a_live_model(plain: Path) -> None:
    from transformers import AutoModel

    live = AutoModel.from_pretrained(plain).eval()
    ids = torch.randint(5, 70, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = live(input_ids=ids).last_hidden_state
    with pytest.warns(UserWarning, match="made int8 .* of a live model"):
        loaded = ftbert.load(live, dtype="int8")
    got = loaded(ids).last_hidden_state
    assert 1e-4 < off(got, want) < 0.1
    quietly(ftbert.optimize, live, dtype="int8")
    with torch.inference_mode():
        torch.testing.assert_close(live(input_ids=ids).last_hidden_state, got)
    for model, dtype in ((loaded, "fp32"), (ftbert.load(make_bert()), "int8")):
        with pytest.raises(ValueError, match="weights of a live model do not become int8, or cease to be, here"):
            model.to(dtype=dtype)


@has_int8
def test_a_scripted_module_keeps_its_bytes(folder: Path, tmp_path: Path) -> None:
    model = ftbert.load(folder, dtype="int8", heads=False)
    ids = torch.randint(5, 70, (2, 11), generator=torch.Generator().manual_seed(0))
    torch.jit.script(model.module).save(str(tmp_path / "int8.pt"))
    got = torch.jit.load(str(tmp_path / "int8.pt"))(ids)[0]
    assert torch.equal(got, model(ids).last_hidden_state)


@has_int8
@pytest.mark.parametrize("name", ["layers.1.ffn.up.weight.scale", "layers.1.ffn.up.input.smooth"])
def test_broken_folders_are_named(folder: Path, name: str) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {name: -tensors[name]}, weights)
    with pytest.raises(ValueError, match=f"{name}: scales are finite and above 0"):
        ftbert.load(folder, dtype="int8")
    save_file({key: one for key, one in tensors.items() if key != name}, weights)
    with pytest.raises(ValueError, match=f"missing {name}"):
        ftbert.load(folder, dtype="int8")
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, weights)
    with pytest.raises(ValueError, match=f"{name}: the config asks for"):
        ftbert.load(folder, dtype="int8")
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        ftbert.load(folder, dtype="int8")


@has_int8
def test_a_row_of_zeros_gives_its_bias(plain: Path, tmp_path: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    tensors["encoder.layer.0.intermediate.dense.weight"][3:9] = 0
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantize(plain, tmp_path / "zeros", SAMPLE_TEXTS, dtype="int8")
    stored = load_file(tmp_path / "zeros" / "model.safetensors")
    assert (stored["layers.0.ffn.up.weight.scale"][3:9] == 1).all() and not stored["layers.0.ffn.up.weight"][3:9].any()
    ids = torch.arange(5, 25)[None]
    got = ftbert.load(tmp_path / "zeros", dtype="int8")(ids).last_hidden_state
    assert off(got, ftbert.load(plain)(ids).last_hidden_state) < 0.1


# ---- a real model ----------------------------------------------------------------------------------------------------


def sentences(path: Path, count: int) -> tuple[list[str], Tensor]:
    """Of STS-B's test set: both sentences of each pair, and the pairs' scores."""
    rows = [line.rstrip("\n").split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    chosen = rows[:: len(rows) // count][:count]
    return [text for row in chosen for text in row[5:7]], torch.tensor([float(row[4]) for row in chosen])


def spearman(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([values.argsort().argsort().double() for values in (one, other)]))[0, 1])


def test_minilm_on_real_sentences(
    minilm_folder: Path, stsb_test: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.undo()  # all of the package's texts
    result = quantize(minilm_folder, tmp_path / "int8", dtype="int8")
    assert result.kept == {} and result.mean_cosine >= 0.9991 and result.worst_cosine >= 0.9955
    texts, scores = sentences(stsb_test, 150)
    rows = [torch.tensor(ids) for ids in AutoTokenizer.from_pretrained(minilm_folder)(texts)["input_ids"]]
    exact = TextVectors(build_reference(open_checkpoint(minilm_folder), with_heads=False), "mean")(rows)
    with simulated(minilm_folder, open_checkpoint(tmp_path / "int8")) as model:
        ours = TextVectors(model, "mean")(rows)
    cosines = (exact * ours).sum(1)
    assert cosines.mean() >= 0.999 and cosines.min() >= 0.995
    judged = [spearman((found[0::2] * found[1::2]).sum(1), scores) for found in (exact, ours)]
    assert judged[1] == pytest.approx(judged[0], abs=0.002)
