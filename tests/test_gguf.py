"""GGUF files as models: every architecture against transformers, the face, and real weights."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close
from families import make_batch, masks_of
from tokenizers_offline import write as write_tokenizer

import ftbert
from ftbert.cli import main
from ftbert.converters import open_checkpoint
from ftbert.converters.gguf_file import read_gguf
from ftbert.quantization import in_q8_0
from ftbert.text import load_tokenizer

gguf = pytest.importorskip("gguf")
from gguf_models import MODELS, all_as, make, vocabulary, write  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.no_grad()
def check(model: ftbert.Model, reference: Any, limit: float) -> None:
    """Hidden states of kept tokens, and a decoder's logits."""
    for mask in masks_of(reference):
        batch = make_batch(reference, "encoder", mask)
        kept = batch["attention_mask"].bool()
        got, wanted = model(**batch).last_hidden_state, reference.base_model(**batch).last_hidden_state
        assert_close(got[kept], wanted[kept], atol=limit, what=f"mask {mask}")
        if type(reference).__name__.endswith("ForCausalLM"):
            logits = model.head("causal_lm")(got, model.encoder.weight("embeddings.word"))
            assert_close(logits[kept], reference(**batch).logits[kept], atol=2 * limit, what="logits")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("arch", MODELS)
def test_a_file_is_the_model_that_it_was_written_from(arch: str, which: int, tmp_path: Path) -> None:
    """The numbers that transformers gives, and the config and tensors of the live model bit for bit; 1 is added to norms
    of Gemma in a file, and what it rounds off is lost."""
    reference = make(arch, which)
    path = write(reference, tmp_path / "m.gguf", arch, version=3 - which)
    model = ftbert.load(path)
    check(model, reference, 3e-5)
    live, found = open_checkpoint(reference), model.checkpoint
    ours = {name: found.read(name) for name in found.tensors}
    wanted = {name: live.read(name) for name in live.tensors if not name.startswith("pooler")}
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        rounding = 2e-7 if arch.startswith("gemma") and "norm" in name else 0
        assert_close(ours[name], tensor, atol=rounding, what=name)
    layers, others = (one.config.encoder.to_json() for one in (found, live))
    assert layers | {"pooler": None} == others | {"pooler": None}


@pytest.mark.parametrize("arch", ["bert", "nomic-bert"])
def test_a_table_of_one_row_is_a_vector_in_the_file(arch: str, tmp_path: Path) -> None:
    reference = make(arch, type_vocab_size=1)
    check(ftbert.load(write(reference, tmp_path / "m.gguf", arch)), reference, 3e-5)


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
YARN_BY = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "attention_factor": 1.5 * (0.1 * math.log(4) + 1)}
SCALED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no type": (LINEAR, {"type": None}),
    "the older key": (LINEAR, {"type": None, "factor": None, "../scale_linear": 4.0}),
    "two keys": (LINEAR, {"../scale_linear": 9.0}),
    "none": (LINEAR | {"rope_type": "default"}, {"type": "none", "factor": 4.0}),
    "a factor of 0": (LINEAR | {"rope_type": "default"}, {"factor": 0.0}),
    "attn_factor": (YARN_BY, {"attn_factor": 1.5, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}),
}  # fmt: skip


@pytest.mark.parametrize("what", SCALED)
def test_positions_are_scaled_as_llama_cpp_does(what: str, tmp_path: Path) -> None:
    rope, said = SCALED[what]
    reference = make("qwen2", rope_parameters=rope)
    extra = {f"qwen2.rope.scaling.{key}".replace("scaling.../", ""): value for key, value in said.items()}
    check(ftbert.load(write(reference, tmp_path / "m.gguf", "qwen2", extra=extra)), reference, 3e-5)


def test_modernbert_without_a_window_and_with_silu(tmp_path: Path) -> None:
    reference = make("modern-bert", hidden_activation="silu", layer_types=["full_attention"] * 4)
    extra = {"modern-bert.hidden_activation": "silu", "modern-bert.attention.sliding_window": None,
             "modern-bert.attention.sliding_window_pattern": 3}  # fmt: skip
    check(ftbert.load(write(reference, tmp_path / "m.gguf", "modern-bert", extra=extra)), reference, 3e-5)


@pytest.mark.parametrize("arch", ["bert", "llama", "qwen3"])
def test_blocks_stay_as_they_are_stored(arch: str, tmp_path: Path) -> None:
    """Made anew of the dequantised numbers, blocks without a 127 would get other scales; only those that q8_0_blocks
    could not have made are: with a -128, or a scale below 0."""
    config = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
    path = write(make(arch, **config), tmp_path / "m.gguf", arch, all_as("Q8_0"))
    tensors = read_gguf(path).tensors
    with path.open("r+b") as writable:
        for name, tensor in tensors.items():
            if tensor.type.name != "Q8_0":
                continue
            blocks = np.fromfile(path, np.uint8, tensor.size, offset=tensor.start).reshape(-1, 34)
            blocks[:, 2:] = (blocks[:, 2:].view(np.int8) // 2).view(np.uint8)
            if "blk.1." in name:
                blocks[0, :2] ^= np.array([0, 128], np.uint8)
                blocks[1, 2] = 128
            writable.seek(tensor.start)
            writable.write(blocks.tobytes())
    checkpoint = open_checkpoint(path)
    stored = in_q8_0(checkpoint)
    names = [spec.name for spec in stored.config.encoder.weight_specs() if spec.matrix and spec.stored == "q8_0"]
    assert len(names) == 4 * stored.config.encoder.depth
    for name in names:
        numbers, scales = stored.read(name, torch.int8), stored.read(f"{name}.scale", torch.float16)
        again = numbers.float() * scales.float().repeat_interleave(32, 1)
        whole = checkpoint.read(name)
        if name.startswith("layers.1."):
            assert scales.min() >= 0 and numbers.min() >= -127
            assert_close(again, whole, atol=float(whole.abs().max()) / 100, what=name)
        else:
            assert numbers.abs().max() < 127 and torch.equal(again, whole), name



# The rms of what a type rounds off these models' results, of that of the results, and some more.
ROUNDING = {"F16": 2e-3, "BF16": 1.5e-2, "Q8_0": 2.5e-2, "Q5_1": 0.25, "Q4_0": 0.4}


@torch.no_grad()
@pytest.mark.parametrize("kind", ROUNDING)
@pytest.mark.parametrize("arch", ["bert", "llama", "gemma3"])
def test_other_types_are_rounded_and_nothing_else(arch: str, kind: str, tmp_path: Path) -> None:
    reference = make(arch)
    model = ftbert.load(write(reference, tmp_path / "m.gguf", arch, all_as(kind)))
    check(model, model.reference(), 3e-5)
    ids = torch.arange(5, 69).view(2, 32)
    got, wanted = model(ids).last_hidden_state, reference.base_model(ids).last_hidden_state
    assert 0 < float((got - wanted).norm() / wanted.norm()) < ROUNDING[kind]
    told = model.info().get("dequantised", "")
    assert f" of {kind}" in told and "to fp32" in told if kind.startswith("Q") else told == ""


def test_what_stands_behind_the_encoder(tmp_path: Path) -> None:
    """A reranker's head is left out with a warning: llama.cpp computes it of other rows than transformers."""
    path = write(make("bert"), tmp_path / "m.gguf", "bert", tensors={"cls.output.weight": np.ones((1, 96), np.float32)})
    with pytest.warns(UserWarning, match="the task head is left out .*cls.output.weight"):
        ftbert.load(path)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], str]] = {
    "architecture": ({"general.architecture": "gpt2"}, {}, "architecture 'gpt2' is not supported; supported: bert, gemma, gemma-emb"),
    "a part": ({"split.count": 3}, {}, "split.count is 3: expected the name of one of 3 parts, m-00001-of-00003.gguf"),
    "an adapter": ({"general.type": "adapter"}, {}, "of type 'adapter', no model"),
    "experts": ({"llama.expert_count": 8}, {}, "choose among experts"),
    "layers": ({"llama.block_count": 1 << 30}, {}, "block_count 1073741824, and tensors of 2 layers"),
    "another tensor": ({}, {"blk.0.attn_sinks.weight": np.ones(3, np.float32)}, "1 tensors are none of this architecture: 'blk.0"),
    "a layer more": ({"llama.block_count": 3}, {"blk.2.attn_q.weight": np.ones((96, 96), np.float32)}, "missing .*layers.2.self_attn.k"),
    "shape": ({"llama.feed_forward_length": 128}, {}, r"the config asks for \[128, 96\], the file has \[64, 96\]"),
    "no heads": ({"llama.attention.head_count": 0}, {}, "head_count 0: expected at least 1"),
    "heads": ({"llama.attention.head_count_kv": 7}, {}, "kv_heads: 7 does not divide heads 3"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, {}, "rope.scaling.type 'longrope' is not supported: only none"),
    "factors": ({}, {"rope_freqs.weight": np.linspace(1, 9, 16, dtype=np.float32)}, "none of Llama 3's rule"),
    "other factors": ({}, {"rope_freqs.weight": np.ones(5, np.float32)}, r"\[5\] factors for heads of 32"),
    "a text": ({"llama.block_count": "two"}, {}, "llama.block_count: expected a whole number, got 'two'"),
    "eps": ({"llama.attention.layer_norm_rms_epsilon": None}, {}, "metadata lack llama.attention.layer_norm_rms_eps"),
    "amplitude": ({"llama.rope.scaling.attn_factor": 1.19}, {}, "rope.scaling.attn_factor 1.19 is supported in a scaling by yarn"),
    "yarn's mix": ({"llama.rope.scaling.yarn_ext_factor": 0.5}, {}, "rope.scaling.yarn_ext_factor 0.5 is not supported"),
    "clamped": ({"llama.attention.clamp_kqv": 8.0}, {}, "attention.clamp_kqv 8.0 is not supported: only 0"),
    "logits": ({"llama.logit_scale": 0.5}, {}, "logit_scale 0.5 is not supported: only 1 or 0"),
    "sections": ({"llama.rope.dimension_sections": [8, 8, 0, 0]}, {}, "rope.dimension_sections .* is not supported: only 0"),
    "capped": ({"llama.final_logit_softcapping": 30.0}, {}, "final_logit_softcapping 30.0 is not supported: only 0"),
    "a window": ({"llama.attention.sliding_window": 8}, {}, "attention.sliding_window 8 is not supported"),
    "activation": ({"llama.hidden_activation": "relu"}, {}, "hidden_activation 'relu' is not supported: only silu"),
    "a reranker": ({"llama.pooling_type": 4}, {}, r"a reranker \(llama.pooling_type 4, rank\), of which no table says the head"),
    "layers of two sizes": ({"llama.attention.head_count_kv": [1, 3]}, {}, "head_count_kv a list of 2 is not supported: layers of one size"),
    "a short list": ({"llama.feed_forward_length": [64]}, {}, "feed_forward_length: 1 values for 2 layers"),
    "pooling": ({"llama.pooling_type": 9}, {}, "pooling_type 9 is not known; known: 1, 2, 3, 4"),
    "below 0": ({"llama.embedding_length": -1}, {}, "llama.embedding_length: expected at least 0, got -1"),
    "no width": ({"llama.embedding_length": 0}, {}, "expected at least 1"),
    "partial": ({"llama.rope.dimension_count": 16}, {}, "dimension_count 16 is not supported: only 32"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_model_that_runs_is_refused(what: str, tmp_path: Path) -> None:
    extra, tensors, words = REFUSED[what]
    model = make("llama", 0, rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    path = write(model, tmp_path / "m.gguf", "llama", extra=extra, tensors=tensors)
    with pytest.raises(ValueError, match=words) as caught:
        ftbert.load(path)
    assert str(path) in str(caught.value)


def test_entries_that_change_nothing_are_read_over(tmp_path: Path) -> None:
    said = {"vocab_size": 7, "tensor_data_layout": "Meta AI original pth", "attention.clamp_kqv": 0.0, "logit_scale": 1.0,
            "rope.scaling.finetuned": True, "rope.scaling.original_context_length": 9, "use_parallel_residual": False,
            "attention.sliding_window": 4096, "rope.dimension_sections": [0, 0, 0, 0], "of_a_user": 3}  # fmt: skip
    reference = make("llama")
    path = write(reference, tmp_path / "m.gguf", "llama", extra={f"llama.{key}": value for key, value in said.items()})
    check(ftbert.load(path), reference, 3e-5)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {kind: write(make("bert"), tmp_path / f"{kind}.gguf", "bert", all_as(kind)) for kind in ("Q8_0", "Q4_0")}
    monkeypatch.setitem(sys.modules, "gguf", None)
    ftbert.load(paths["Q8_0"])
    with pytest.raises(ImportError, match=r"Q4_0.gguf: .*type Q4_0 is dequantised by the package gguf: pip install gguf, or .*ftbert\[gguf\]"):
        ftbert.load(paths["Q4_0"])


# ---- the face -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT in Q8_0 with its tokenizer, pooled by the first token."""
    folder = tmp_path_factory.mktemp("embedder")
    extra = vocabulary(write_tokenizer(folder / "tokenizer", "bert"), "bert") | {"bert.pooling_type": 2}
    return write(make("bert", vocab_size=300), folder / "bge.gguf", "bert", all_as("Q8_0"), extra)


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    status = main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_commands(embedder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = told(capsys, "info", embedder)[1]["model"]
    assert info["architecture"] == "bert" and info["dequantised"] == "to fp32: 15 of Q8_0 (of 37 tensors)"
    status, result = told(capsys, "check", embedder)
    assert status == 0 and result["texts"]["different_ids"] == 0
    (tmp_path / "texts.txt").write_text("hello world\nthe end\n")
    assert main(["embed", str(embedder), str(tmp_path / "texts.txt"), str(tmp_path / "out.npy")]) == 0
    assert main(["convert", str(embedder), str(tmp_path / "ours")]) == 0
    model, converted = ftbert.load(embedder), ftbert.load(tmp_path / "ours")
    texts = ["hello world", "the end"]
    vectors = model.encode(texts)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), vectors, atol=1e-5)
    np.testing.assert_array_equal(converted.encode(texts), vectors)
    first = model.encode(texts, output_value="token_embeddings", normalize=False)[0][0]
    np.testing.assert_allclose(vectors[0], first / np.linalg.norm(first), atol=1e-6)


@pytest.mark.parametrize("width", [96, 128])
def test_a_decoder_is_checked(width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokenizer puts nothing around a text, so that an empty one has no token. Matrices of 128 columns are in q8_0,
    of 96 in fp32."""
    extra = vocabulary(write_tokenizer(tmp_path / "tokenizer", "roberta"), "gpt2") | {"tokenizer.ggml.pre": "qwen2"}
    sizes = {"hidden_size": width, "intermediate_size": width, "num_attention_heads": 4}
    path = write(make("qwen3", vocab_size=400, **sizes), tmp_path / "m.gguf", "qwen3", all_as("Q4_0"), extra)
    status, result = told(capsys, "check", path)
    assert status == 0 and result["dtype"] == ("q8_0" if width == 128 else "float32")
    assert result["texts"]["texts"] > 0 and result["texts"]["different_ids"] == 0


def test_folders_and_what_is_written_beside(embedder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(embedder.read_bytes())
    model = ftbert.load(tmp_path)
    folder = Path(model.folder)  # type: ignore[arg-type]
    assert folder.is_dir() and tmp_path not in folder.parents
    del model
    assert not folder.exists()
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"several GGUF files \(a.gguf, b.gguf\); name one of them"):
        ftbert.load(tmp_path)
    ftbert.load(tmp_path, filename="a.gguf")
    ftbert.load(tmp_path, gguf_file="a.gguf")  # transformers' word
    (tmp_path / "a.gguf").rename(tmp_path / "A.GGUF")
    ftbert.load(tmp_path / "A.GGUF")
    with pytest.raises(FileNotFoundError, match=r"no file 'c.gguf' there; its .gguf files are A.GGUF, b.gguf"):
        ftbert.load(tmp_path, filename="c.gguf")
    with pytest.raises(ValueError, match="revision: is for a model of the hub"):
        ftbert.load(embedder, revision="main")


def test_another_file_is_another_model_to_embed(embedder: Path, tmp_path: Path) -> None:
    """A file that is embedded in part is not gone on with by another quantisation of the same weights."""
    from ftbert.files.embed import _model_identity

    other = tmp_path / embedder.name
    other.write_bytes(embedder.read_bytes())
    one, same, another = (_model_identity(ftbert.load(path)) for path in (embedder, embedder, other))
    assert one == same != another


# ---- real weights ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Path:
    path = os.environ.get("FTBERT_TEST_SMOLLM2")
    if not path or not Path(path).exists():
        pytest.skip("FTBERT_TEST_SMOLLM2 does not name the real .gguf file (make models-modern fetches it)")
    return Path(path)


@torch.no_grad()
def test_smollm2_is_what_transformers_reads(smollm2: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    said = load_gguf_checkpoint(smollm2)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**said["config"], attn_implementation="sdpa"))
    theirs.load_state_dict(load_gguf_checkpoint(smollm2, True, theirs)["tensors"], strict=False)
    theirs.tie_weights()
    theirs.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = ftbert.load(smollm2, dtype="fp32")
    source = model.checkpoint.source
    for name, tensor in theirs.model.state_dict().items():
        assert torch.equal(source.read(f"model.{name}"), tensor), name
    texts = ["The capital of France is Paris.", "In 2024, 3.14 was still\n\nless than \u03c0, which nobody minded."]
    tokenizer = load_tokenizer(Path(model.folder))  # type: ignore[arg-type]
    rows = tokenizer(texts)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(rows[1][:10]) == ["In", "\u0120", "2", "0", "2", "4", ",", "\u0120", "3", "."]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    ids, mask = torch.full((2, 32), 2), torch.zeros(2, 32, dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, 32 - len(row) :], mask[place, 32 - len(row) :] = torch.tensor(row), 1
    kept = mask.bool()
    got, wanted = model(ids, mask).last_hidden_state[kept], theirs.model(ids, mask).last_hidden_state[kept]
    # Entries reach 34 behind a stream of 25,000: the limit counts in the largest, as in test_real_decoders.py.
    assert_close(got, wanted, atol=2e-5 * float(wanted.abs().max()), what="hidden states")
    vectors = model.encode(texts, normalize=False, show_progress_bar=False)
    assert_close(torch.from_numpy(vectors), torch.stack([wanted[len(rows[0]) - 1], wanted[-1]]), atol=1e-3, what="vectors")
