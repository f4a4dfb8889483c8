"""Models in q8_0: from any source the blocks that llama.cpp makes, and transformers' logits of what they stand for."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PLACES, Place, make_bert
from families import make_model
from language_models import FAMILIES, SETTINGS, error, run
from torch import Tensor

import ftbert
from ftbert.converters import open_checkpoint
from ftbert.decoding.decoder import decoder_of
from ftbert.dtypes import Q8_0
from ftbert.quantization import in_q8_0, q8_0_blocks

CPU = Place("cpu", torch.float32)
Q8_0_PLACES = [place for place in PLACES if place.device == "cpu" or place.dtype == torch.float16]
MOST_ERROR = 1e-3  # of logits of random weights: what a product multiplies is stored in blocks too


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    return torch.ops.ftbert.dequantize_q8_0(values, scales, torch.float32)  # type: ignore[no-any-return]


# Of random weights, where those of seed 0 round another way at the beginning of a text: all behind it then differ.
SEEDS = {"smollm3": 1}


@functools.cache
def plain(family: str) -> Any:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    more = {"use_cache": True, "max_position_embeddings": 96, "vocab_size": 200, **SETTINGS[family]}
    return make_model(family, "causal_lm", 0, SEEDS.get(family, 0), **sizes, **more).eval()


@functools.cache
def reference(family: str) -> Any:
    """transformers' model with the weights that the blocks stand for, but for those that are looked up."""
    model = copy.deepcopy(plain(family))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())  # no longer the word table
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = dequantised(*q8_0_blocks(module.weight.data))
    return model


@functools.cache
def rounding_reference(family: str) -> Any:
    """The same, which rounds what is multiplied as products on the CPU do."""
    model = copy.deepcopy(reference(family))

    def rounds(_: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        numbers, scales = torch.ops.ftbert.quantize_q8_1(inputs[0].flatten(0, -2).contiguous())
        return (numbers.float() * scales.repeat_interleave(32, 1)).view_as(inputs[0])

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounds)
    return model


def mean_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).square().mean() / want.square().mean())


@functools.cache
def loaded(family: str, place: Place) -> ftbert.Model:
    return ftbert.load(plain(family), device=place.device, dtype="q8_0")


@functools.cache
def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 200, (n,), generator=generator) for n in (40, 17, 3)]


@pytest.fixture(params=Q8_0_PLACES, ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.param
    if found.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return found


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_stored_weights(place: Place, family: str) -> None:
    of = decoder_of(loaded(family, place), 3, 48)
    with torch.no_grad():
        for slot, ids in enumerate(texts()):
            got = run(of, place, [slot], [ids])[0]
            assert mean_error(got, reference(family)(ids[None]).logits[0]) < MOST_ERROR


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_lost_beside_what_rounding_loses(family: str) -> None:
    """A number next to a half may be rounded the other way, which changes its position and those behind it a little;
    others are equal."""
    of = decoder_of(loaded(family, CPU), 3, 48)
    with torch.no_grad():
        for slot, ids in enumerate(texts()):
            got, want = run(of, CPU, [slot], [ids])[0], rounding_reference(family)(ids[None]).logits[0]
            errors = (got - want).square().mean(-1) / want.square().mean(-1)
            assert errors.median() < 1e-10 and errors.mean() < MOST_ERROR / 4


def test_any_cut_gives_what_one_call_gives(place: Place) -> None:
    model = loaded("llama", place)
    alone, together = decoder_of(model, 3, 48), decoder_of(model, 3, 48)
    whole = [run(alone, place, [slot], [ids])[0] for slot, ids in enumerate(texts())]
    for got, want in zip(run(together, place, [2, 0, 1], texts()), whole, strict=True):
        assert mean_error(got, want) < MOST_ERROR / 2
    steps = decoder_of(model, 1, 48)
    first, *rest = texts()[0].split([9, *[1] * 31])
    parts = [run(steps, place, [0], [first])[0], *(run(steps, place, [0], [one])[0] for one in rest)]
    assert mean_error(torch.cat(parts), whole[0]) < MOST_ERROR / 2


def test_a_text_is_generated_alone_as_in_a_batch() -> None:
    """On the CPU to the bit: sums of a row do not hang on how many there are."""
    model = loaded("qwen3", CPU)
    made = [run(decoder_of(model, 3, 48), CPU, [slot], [ids], all_rows=False)[0] for slot, ids in enumerate(texts())]
    both = run(decoder_of(model, 3, 48), CPU, [0, 1, 2], texts(), all_rows=False)
    assert [int(one.argmax()) for one in both] == [int(one.argmax()) for one in made]


def test_encoders_too(place: Place) -> None:
    exact = make_bert(hidden_size=128, num_attention_heads=4, intermediate_size=256).eval()
    stored = copy.deepcopy(exact)
    for module in stored.encoder.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = dequantised(*q8_0_blocks(module.weight.data))
    ids = torch.arange(5, 95).view(3, 30)
    with torch.no_grad():
        want = stored(ids).last_hidden_state
    got = ftbert.load(exact, device=place.device, dtype="q8_0")(ids.to(place.device)).last_hidden_state
    assert mean_error(got.float().cpu(), want) < MOST_ERROR


# ---- what is stored --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "qwen3", "bert"])
def test_the_blocks_of_a_file_of_llama_cpp_are_kept(arch: str, tmp_path: Path) -> None:
    """To the byte, also of queries and keys, whose rows stand there in another order."""
    gguf = pytest.importorskip("gguf")
    from gguf_models import all_as, make, write

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2 if arch == "bert" else 4}
    path = write(make(arch, **sizes), tmp_path / "m.gguf", arch, all_as("Q8_0"))
    file = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    model = ftbert.load(path, dtype="q8_0")
    held = model.encoder.weights()
    assert model.info()["products"].startswith("qkv, out, up, down of layers 0-") and model.dtype == Q8_0
    parts = {"attention.qkv": ["attn_q", "attn_k", "attn_v"], "attention.out": ["attn_output"], "ffn.down": ["ffn_down"],
             "ffn.up": ["ffn_up"] if arch == "bert" else ["ffn_gate", "ffn_up"]}  # fmt: skip
    for layer in range(model.config.depth):
        for ours, theirs in parts.items():
            name = f"layers.{layer}.{ours}.weight"
            values, scales = held[name], held[f"{name}.scale"]
            whole = np.concatenate([scales.numpy()[..., None].view(np.uint8), values.numpy().view(np.uint8).reshape(*scales.shape, 32)], 2)
            rows = [row.tobytes() for row in whole.reshape(len(whole), -1)]
            wanted = [row.tobytes() for one in theirs for row in file[f"blk.{layer}.{one}.weight"]]
            assert rows == wanted or (len(theirs) > 1 and sorted(rows) == sorted(wanted))
            assert torch.equal(dequantised(values, scales), open_checkpoint(path).read(name))


def test_auto_keeps_what_a_decoders_file_is_mostly_in(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from gguf_models import all_as, make, write

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}

    def auto(arch: str, kind: Any) -> torch.dtype:
        path = write(make(arch, **sizes), tmp_path / f"{arch}.gguf", arch, kind)
        return ftbert.load(path, dtype="auto").dtype

    assert auto("llama", all_as("Q8_0")) == Q8_0
    assert auto("llama", lambda name, data: "F32" if data.ndim == 1 or "attn" in name else "Q8_0") == Q8_0
    odd = write(make("llama", hidden_size=96, intermediate_size=160, num_attention_heads=4), tmp_path / "odd.gguf", "llama", all_as("Q8_0"))
    assert ftbert.load(odd, dtype="auto").dtype == torch.float32  # no product takes blocks of such matrices
    assert auto("llama", all_as("Q4_0")) == auto("qwen3", all_as("Q5_1")) == Q8_0
    assert auto("bert", all_as("Q8_0")) == auto("llama", all_as("F16")) == torch.float32


def test_without_a_dtype_a_quantised_decoder_is_in_q8_0(tmp_path: Path) -> None:
    """Not one for vectors, nor an encoder: their numbers are exact unless another dtype is asked for."""
    pytest.importorskip("gguf")
    from gguf_models import all_as, make, write

    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}

    def usual(arch: str, kind: str, **extra: Any) -> torch.dtype:
        path = write(make(arch, **sizes), tmp_path / f"{arch}.gguf", arch, all_as(kind), extra={f"{arch}.{k}": v for k, v in extra.items()})
        return ftbert.load(path).dtype

    assert usual("llama", "Q4_0") == usual("llama", "Q8_0") == Q8_0
    assert usual("llama", "F16") == usual("bert", "Q8_0") == usual("qwen3", "Q8_0", pooling_type=3) == torch.float32
    assert ftbert.load(tmp_path / "llama.gguf", dtype="fp32").dtype == torch.float32


@pytest.mark.parametrize("source", ["gguf", "folder"])
def test_convert_to_q8_0(source: str, tmp_path: Path) -> None:
    """The blocks, logits and texts of the source in q8_0, in a folder that is loaded so without a word."""
    from ftbert.cli import main

    if source == "gguf":
        pytest.importorskip("gguf")
        from gguf_models import all_as, make, write

        sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
        path = write(make("llama", **sizes), tmp_path / "m.gguf", "llama", all_as("Q8_0"))
    else:
        path = tmp_path / "m"
        plain("qwen3").save_pretrained(path)
    for given, target in ((path, "once"), (tmp_path / "once", "again")):
        assert main(["convert", str(given), str(tmp_path / target), "--dtype", "q8_0"]) == 0
    wanted = ftbert.load(path, dtype="q8_0")
    for target in ("once", "again"):
        model = ftbert.load(tmp_path / target)
        assert model.dtype == Q8_0
        ids = torch.arange(5, 37)[None]
        assert torch.equal(model(ids).last_hidden_state, wanted(ids).last_hidden_state)
        assert model.generate_ids([[5, 6, 7]], max_new_tokens=9) == wanted.generate_ids([[5, 6, 7]], max_new_tokens=9)
        with pytest.raises(ValueError, match="stored in q8_0; dtype='q8_0' or 'auto' loads it"):
            ftbert.load(tmp_path / target, dtype="fp32")


def test_a_folder_in_a_type_that_was_asked_for_is_loaded_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of "auto"; one that convert left in the type of its source is exact."""
    from ftbert import devices
    from ftbert.converters import convert

    monkeypatch.setattr(devices, "_is_slow", lambda dtype: False)
    make_bert().to(torch.bfloat16).save_pretrained(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "asked", dtype=torch.bfloat16)
    convert(tmp_path / "m", tmp_path / "kept")
    auto = ftbert.load(tmp_path / "m", dtype="auto").dtype
    assert ftbert.load(tmp_path / "asked").dtype == auto
    assert ftbert.load(tmp_path / "kept").dtype == ftbert.load(tmp_path / "m").dtype == torch.float32
    assert ftbert.load(tmp_path / "asked", dtype="fp32").dtype == torch.float32


def test_a_matrix_that_no_product_takes_stays_and_is_told() -> None:
    model = make_bert(hidden_size=128, num_attention_heads=4, intermediate_size=100)
    info = ftbert.load(model, dtype="q8_0").info()
    assert "qkv, out of layers 0-1 in q8_0" in info["products"]
    assert "down of layers 0-1 (128 rows and 100 columns are not multiples of 8 and 64)" in info["kept"]
    with pytest.raises(ValueError, match="no matrix of its layers could be stored in q8_0"):
        ftbert.load(make_bert(hidden_size=96, num_attention_heads=3, intermediate_size=100), dtype="q8_0")


def test_a_weight_that_is_no_number() -> None:
    model = make_bert(hidden_size=128, num_attention_heads=4, intermediate_size=256)
    model.encoder.layer[1].output.dense.weight.data[3, 7] = torch.nan
    with pytest.raises(ValueError, match=r"layers.1.ffn.down.weight holds numbers that are not finite"):
        ftbert.load(model, dtype="q8_0")


# ---- the class -------------------------------------------------------------------------------------------------------


@functools.cache
def small() -> tuple[dict[str, Tensor], str]:
    """The weights of an encoder in q8_0, and its config."""
    stored = in_q8_0(open_checkpoint(make_bert(hidden_size=128, num_attention_heads=4, intermediate_size=256)))
    kinds = {"q8_0": torch.int8, "fp16": torch.float16}
    specs = stored.config.encoder.weight_specs()
    return {spec.name: stored.read(spec.name, kinds.get(spec.stored, torch.float32)) for spec in specs}, stored.config.encoder.text()


def test_plain_or_packed_is_the_same(place: Place) -> None:
    stream = torch.float32 if place.device == "cpu" else place.dtype
    given, config = small()
    given = {name: one.to(place.device, one.dtype if one.dtype != torch.float32 else stream) for name, one in given.items()}
    blocks = {name for name, one in given.items() if one.dtype == torch.int8}
    packed = {name: torch.ops.ftbert.pack_q8_0(one, given[f"{name}.scale"]) if name in blocks else one
              for name, one in given.items() if name.removesuffix(".scale") not in blocks or name in blocks}  # fmt: skip
    assert len(packed) == len(given) - len(blocks)
    for weights in (given, packed):
        held = torch.classes.ftbert.Encoder(weights, config, "auto").weights()
        assert held.keys() == given.keys()
        assert all(torch.equal(held[name], one) and held[name].dtype == one.dtype for name, one in given.items())


UP = "layers.1.ffn.up.weight"


@pytest.mark.parametrize("changes,words", [
    ({f"{UP}.scale": None}, rf"missing: {UP}.scale \[256, 4\]"),
    ({f"{UP}.scale": torch.ones(256).half()}, rf"{UP}.scale: expected \[256, 4\], got \[256\]"),
    ({f"{UP}.scale": torch.ones(256, 4)}, rf"{UP}.scale: expected Half on cpu, got Float"),
    ({UP: torch.zeros(256, 128)}, rf"{UP}: expected Char on cpu, got Float"),
    ({UP: torch.zeros(256, 64, dtype=torch.int8)}, rf"{UP}: expected \[256, 128\], got \[256, 64\]"),
    ({UP: torch.zeros(100, dtype=torch.uint8), f"{UP}.scale": None}, rf"{UP}: expected \[256, 128\], got \[100\]"),
    ({UP: torch.zeros(256 * 4 * 34, dtype=torch.uint8)}, rf"extra: {UP}.scale"),
])  # fmt: skip
def test_weights_that_do_not_fit(changes: dict[str, Tensor | None], words: str) -> None:
    given, config = small()
    weights = {name: one for name, one in (given | changes).items() if one is not None}
    with pytest.raises(RuntimeError, match=words):
        torch.classes.ftbert.Encoder(weights, config, "auto")


def test_torchscript_and_pickle(place: Place, tmp_path: Path) -> None:
    model, ids = loaded("llama", place), texts()[0][None].to(place.device)
    want = model.module(ids)[0]
    torch.jit.script(model.module).save(str(tmp_path / "q8_0.pt"))
    assert torch.equal(torch.jit.load(str(tmp_path / "q8_0.pt"))(ids)[0], want)
    for other in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):
        assert other.encoder.matrix_dtype() == "q8_0" and torch.equal(other(ids)[0], want)


def test_a_head_in_blocks(place: Place) -> None:
    model = loaded("llama", place)
    values, scales = (one.to(place.device) for one in q8_0_blocks(plain("llama").lm_head.weight.detach()))
    made = torch.classes.ftbert.Decoder(model.encoder, values, None, 1, 48, scales)
    assert torch.equal(run(made, place, [0], texts()[:1])[0], run(decoder_of(model, 1, 48), place, [0], texts()[:1])[0])
    for wrong in (None, scales.float(), scales[:, :1], scales[1:]):
        with pytest.raises(RuntimeError, match="weight: expected|scale: expected float16"):
            torch.classes.ftbert.Decoder(model.encoder, values, None, 1, 48, wrong)


def test_a_patched_model() -> None:
    exact = make_bert(hidden_size=128, num_attention_heads=4, intermediate_size=256).eval()
    ids = torch.arange(5, 95).view(3, 30)
    want = ftbert.load(exact, dtype="q8_0")(ids).last_hidden_state
    with torch.no_grad():
        got = ftbert.optimize(exact, dtype="q8_0")(ids).last_hidden_state
    assert error(got.flatten(0, 1), want.flatten(0, 1)) < 1e-9
