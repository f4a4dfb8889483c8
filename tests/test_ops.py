"""What callers of single ops, of the classes and of models can get wrong: one error with words, no crash."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_ops import run
from random_calls import DTYPES, models, op_names, shrink, valid, without_positions

import ftbert

ops = torch.ops.ftbert


def test_random_calls() -> None:
    """A few hundred; `make fuzz` and `make asan-test` make more of them."""
    report = run(1_000_000, 400)
    assert report.clean, report
    assert report.answers["returned"] > 50 and sum(report.answers.values()) == 400, report


@pytest.mark.parametrize("name", [name for name in op_names() if name not in ("int8_product", "linear_e4m3", "linear_own", "linear_turned", "linear_norm")])
def test_valid_calls_return(device: str, name: str) -> None:
    """What random_calls.py makes wrong is right before."""
    arguments = valid(name, device)
    if name in ("byte_rows", "pack_weight", "quantize_q8_1") and device == "cuda":
        pytest.skip("on float32 for the CPU alone")
    if name == "gpu" and device == "cpu":
        pytest.skip("of a GPU")
    getattr(ops, name)(*arguments)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def i64(*values: int) -> torch.Tensor:
    return torch.tensor(values)


# op, which argument, what stands there, what the error says. On the CPU, where contents are looked at.
WRONG: list[tuple[str, int, Any, str]] = [
    ("add_bias_act", 0, torch.zeros(6, 64, dtype=torch.float64), "expected float32, float16 or bfloat16"),
    ("add_bias_act", 1, torch.zeros(7), r"bias: expected contiguous .* \[64\]"),
    ("add_bias_act", 2, "mish", "unknown activation 'mish'; supported: gelu"),
    ("add_bias_gate", 0, torch.zeros(6, 63), r"x: expected columns of gate and up in turns, got Float \[6, 63\]"),
    ("add_qkv_bias", 4, 0, r"qkv: expected \[tokens, \(heads \+ 2\*kv_heads\) \* head_size\] .*, got .* for 0 heads"),
    ("add_qkv_bias", 4, 2**62, "for 4611686018427387904 heads"),
    ("add_qkv_bias", 3, 3, "no step above 3, got 0 then 4"),
    ("add_qkv_bias", 3, 2**58, "seq: expected 0 to 2147483647"),
    ("add_bias_input_layernorm", 6, "batch", "kind: expected layer or rms, got batch"),
    ("add_bias_input_layernorm", 6, "layer", "kind: expected rms beside an offset or before_gamma"),
    ("add_bias_input_layernorm", 8, "twice", "rounding: expected once or before_gamma, got twice"),
    ("gpu", 0, 2**32, "device: expected 0 to 2147483647, got 4294967296"),
    ("argmax", 0, torch.zeros(6, 0), "vocab: expected 1 to 2147483647, got 0"),
    ("argmax", 0, torch.zeros(64, 6).t(), "logits: expected a contiguous tensor of rank 2"),
    ("attention", 1, i32(0, 4, 7), r"end by 6 .* got 4 then 7 at \[2\]"),
    ("attention", 1, i32(0, 5, 4), "never fall"),
    ("attention", 1, i32(1, 4, 6), r"offsets from 0 on, got 1 at \[0\]"),
    ("attention", 2, 3, "no step above 3"),
    ("attention", 4, torch.zeros(2, 16), r"relative_bias: expected \[heads, 2\*span-1\], got Float \[2, 16\]"),
    ("attention", 5, i32(0, 2, 3, 3, 0, 1), r"columns: expected rising values .* sequence 0, got 3 at \[3\]"),
    ("attention", 5, i32(-1, 2, 3, 4, 0, 1), "columns: expected rising values in"),
    ("attention_apart", 1, torch.zeros(6, 32), r"k: expected rows of 64 contiguous elements like q's, got Float \[6, 32\]"),
    ("attention_apart", 2, torch.zeros(5, 64), "v: expected as many rows as k"),
    ("attention_apart", 4, i32(7, 0), r"end_k: expected 0 <= cu_k <= end_k <= 6, got 7 and 4"),
    ("attention_apart", 7, 3, "kv_heads: expected 1 to 2"),
    ("attention_apart", 11, i32(4, 7), r"end_k: expected 0 <= cu_k <= end_k <= 6, got 4 and 7 at \[1\]"),
    ("attention_apart", 11, i32(4), "end_k: expected contiguous Int of at least 2"),
    ("embeddings_layernorm", 0, i64(*range(5), 10, *range(4)), r"input_ids: expected values in \[0, 10\), got 10 at \[5\]"),
    ("embeddings_layernorm", 1, i64(0, 0, 0, 0, 0, 2, 0, 0, 0, 0), r"token_type_ids: expected values in \[0, 2\)"),
    ("embeddings_layernorm", 2, i64(0, 1, 2, 3, 4, 10), r"token_index: expected values in \[0, 10\), got 10"),
    ("embeddings_layernorm", 3, i32(0, 1, 2, 3, 4, -1), r"positions: expected values in \[0, 10\), got -1"),
    ("embeddings_layernorm", 7, None, "gamma: expected with beta"),
    ("gather_rows", 1, i32(0, 9), "end by 6"),
    ("gather_rows", 2, "last", "kind: expected any beside rows, got last"),
    ("gather_rows", 3, None, "kind: expected first or last, or any with rows, got any"),
    ("gather_rows", 3, i64(0, 6), r"rows: expected values in \[0, 6\), got 6"),
    ("product", 1, torch.zeros(0, 64), "n, the rows of weight: expected 1 to"),
    ("padding_positions", 0, torch.zeros(2, 5, dtype=torch.int32), r"input_ids: expected contiguous Long \[batch, seq\], got Int"),
    ("padding_positions", 1, i64(0, 1, 2, 5, 3, 6, 0), r"token_index: expected rising values in \[0, 5\) for sequence 0, got 5"),
    ("padding_positions", 3, 5, "end by 5"),
    ("padding_stage", 0, torch.zeros(2, 5, dtype=torch.int32), "input_ids: expected contiguous Long"),
    ("padding_stage", 5, 5, "most_tokens: expected 6 to"),
    ("pooling", 1, i32(0, -1, 6), "never fall"),
    ("pooling", 2, "median", "unknown pooling mode"),
    ("restore_padding", 1, i32(0, 6), r"packed_index: expected values in \[-1, 6\), got 6"),
    ("rotary", 6, "none", "kind: expected layer or rms, got none"),
    ("rotary", 7, None, "q_gamma, k_gamma: expected both with a norm, and none without one"),
    ("rotary", 13, "twice", "rounding: expected once or before_gamma, got twice"),
    ("softmax", 0, torch.zeros(2, 2, 5, 4), r"scores: expected Float \[batch, heads, seq, seq\], got Float \[2, 2, 5, 4\]"),
    ("softmax", 1, i32(0, 6, 6), "no step above 5"),
    ("softmax", 5, torch.int32, "expected float32, float16 or bfloat16"),
    ("transpose", 1, i32(0, 6, 6), "no step above 5"),
    ("transpose", 2, 5, "end by 5"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "at", "wrong", "words"), WRONG, ids=[f"{row[0]}-{row[1]}-{i}" for i, row in enumerate(WRONG)])
def test_an_op_says_what_is_wrong(name: str, at: int, wrong: Any, words: str) -> None:
    arguments = valid(name, "cpu")
    arguments[at] = wrong
    with pytest.raises(RuntimeError, match=words):
        getattr(ops, name)(*arguments)


EXOTIC: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sparse": (lambda t: t.to_sparse(), "a sparse one"),
    "sparse rows": (lambda t: t.reshape(-1, 1).to_sparse_csr(), "a sparse one"),
    "quantized": (lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8), "a quantized one"),
    "nested": (lambda t: torch.nested.nested_tensor([t.flatten(), t.flatten()]), "a nested one"),
    "oneDNN": (lambda t: t.float().to_mkldnn(), "in a layout of oneDNN"),
    "no storage": (shrink, "storage is too short|expected a? ?contiguous|expected .* contiguous"),
    "complex": (lambda t: t.to(torch.complex64), "complex|expected"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", EXOTIC)
@pytest.mark.parametrize("name", [name for name in op_names() if name not in ("build_info", "busy_cores", "follow_busy_cores", "gpu", "table", "read_config")])
def test_exotic_tensors_are_named(device: str, name: str, kind: str) -> None:
    if device == "cuda" and kind in ("oneDNN", "quantized"):
        pytest.skip("for the CPU alone")
    make, words = EXOTIC[kind]
    arguments = valid(name, device)
    for at, given in enumerate(arguments):
        if isinstance(given, torch.Tensor) and given.dtype != torch.float8_e4m3fn:  # torch makes nothing of those
            with pytest.raises(RuntimeError, match=f"{words}|runs on a GPU|on the CPU") as error:
                getattr(ops, name)(*arguments[:at], make(given), *arguments[at + 1 :])
            assert len(str(error.value)) < 300


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", EXOTIC)
def test_calls_name_exotic_tensors(device: str, kind: str) -> None:
    make, words = EXOTIC[kind]
    if device == "cuda" and kind in ("oneDNN", "quantized"):
        pytest.skip("for the CPU alone")
    model = models(device)[0]
    ids = torch.ones(2, 5, dtype=torch.int64, device=device)
    flat, cu = ids.flatten(), torch.tensor([0, 5, 10], dtype=torch.int32, device=device)
    weights, config = dict(model.encoder.weights()), model.encoder.config()
    weights["embeddings.word"] = make(weights["embeddings.word"])
    for call in (
        lambda: model(make(ids)), lambda: model(ids, make(ids)), lambda: model(ids, None, make(ids)),
        lambda: model.forward_packed(make(flat), cu, 5), lambda: model.forward_packed(flat, make(cu), 5),
        lambda: model.encoder.forward(make(ids)), lambda: model.encoder.forward_packed(flat, make(cu), 5),
        lambda: torch.classes.ftbert.Encoder(weights, config, "auto"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            call()


def test_meta_tensors_have_shapes_in_ops_and_no_data_in_calls() -> None:
    model = models("cpu")[0]
    x, cu = torch.zeros(6, 64, device="meta"), torch.zeros(3, dtype=torch.int32, device="meta")
    assert ops.pooling(x, cu, "mean", True).shape == (2, 64)
    ids = torch.ones(2, 5, dtype=torch.int64, device="meta")
    for call in (
        lambda: model(ids), lambda: model(ids, output_last_hidden_state=False), lambda: model.encoder.forward(ids),
        lambda: model.forward_packed(ids[0], cu, 5), lambda: models("cpu")[1](ids),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="expected .* on meta"):
            call()


@pytest.mark.parametrize("longest", [2**31, 2**40, 2**58, 2**62, 2**63 - 1])
def test_the_longest_sequence_is_bounded_by_tokens(device: str, longest: int) -> None:
    encoder = without_positions(device)
    ids = torch.arange(5, 15, device=device)
    cu = torch.tensor([0, 7, 10], dtype=torch.int32, device=device)
    expected = encoder.forward_packed(ids, cu, 7)
    assert torch.equal(encoder.forward_packed(ids, cu, longest), expected)
    qkv = torch.randn(10, 192, device=device)
    assert torch.equal(ops.attention(qkv, cu, longest, 2), ops.attention(qkv, cu, 7, 2))
    assert encoder.forward_packed(ids[:0], cu[:1], longest).shape == (0, encoder.hidden())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_ids_and_mask(dtype: torch.dtype) -> None:
    """Integers are ids, numbers are masks; all else is an error that says so."""
    model = models("cpu")[0]
    ids = torch.ones(2, 5, dtype=torch.int64)
    try:
        other = ids.to(dtype)
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch makes none of integers")
    if dtype in (torch.int32, torch.int64):
        assert torch.equal(model(other).last_hidden_state, model(ids).last_hidden_state)
    else:
        with pytest.raises(RuntimeError, match="input_ids: expected"):
            model(other)
    try:
        assert torch.equal(model(ids, other).last_hidden_state, model(ids).last_hidden_state)
    except RuntimeError as error:
        assert "attention_mask" in str(error) or "not implemented" in str(error)


@pytest.mark.parametrize("name", ["add_bias_act", "argmax", "pooling", "restore_padding"])
def test_opcheck(name: str) -> None:
    """torch's own check of schema, fake implementation and dynamic shapes."""
    arguments = [one.clone() if isinstance(one, torch.Tensor) else one for one in valid(name, "cpu")]
    torch.library.opcheck(getattr(ops, name).default, arguments)


def only_in(library: Path) -> set[str]:
    """The ops of a process that has loaded it alone."""
    program = f"""import torch
torch.ops.load_library({str(library)!r})
print(*(name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("ftbert::")))"""
    return set(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split())


def test_the_installed_library_has_the_ops_of_the_package_alone() -> None:
    shipped = only_in(ftbert.library_path())
    text = "".join(path.read_text(encoding="utf-8") for path in (Path(__file__).parents[1] / "ftbert").rglob("*.py"))
    assert {name for name in shipped if not re.search(rf"\b{name}\b", text)} == set()
    named = set(re.findall(r"torch\.ops\.ftbert\.(\w+)", text))
    assert named <= shipped < set(op_names()) and len(shipped) <= 26


SCHEMAS = "add_bias_act_ add_bias_input_layernorm attention attention_apart gather_rows padding padding_stage repeat_prefix rotary store_keys_values"


@pytest.mark.parametrize("name", SCHEMAS.split())
def test_schemas_say_what_is_written(name: str) -> None:
    arguments = [one.clone() if isinstance(one, torch.Tensor) else one for one in valid(name, "cpu")]
    torch.library.opcheck(getattr(ops, name).default, arguments, test_utils="test_schema")


@pytest.mark.parametrize("name", ["add_bias_act_", "repeat_prefix", "store_keys_values"])
def test_ops_that_write_refuse_what_torch_has_not_computed(name: str) -> None:
    """torch's fallback for such tensors ends the process behind an op that returns nothing."""
    given = valid(name, "cpu")
    for at, one in enumerate(given):
        if not isinstance(one, torch.Tensor):
            continue
        unresolved = [torch._efficientzerotensor(one.shape, dtype=one.dtype)]
        if one.is_floating_point():
            unresolved.append(torch.randn(one.shape, dtype=torch.complex64).conj().imag)
        for other in unresolved:
            with pytest.raises(RuntimeError, match="expected tensors that torch has computed"):
                getattr(torch.ops.ftbert, name)(*given[:at], other, *given[at + 1 :])
