"""The kernel that runs where no table has a row, as guessed for GPUs that are not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = Path(__file__).resolve().parent.parent / "build-cuda" / "lib"
# The members of Gpu: the compute capability of the code and the GPU's own, multiprocessors, clock in kHz, shared memory of
# a block and of a multiprocessor in KiB, and the memory's bytes a second, from NVIDIA's data sheets.
GPUS = {
    "A100": (80, 80, 108, 1410000, 163, 164, 1.94e12),
    "A10": (86, 86, 72, 1695000, 99, 100, 6.0e11),
    "A10, code for 8.0": (80, 86, 72, 1695000, 99, 100, 6.0e11),
    "L4": (89, 89, 58, 2040000, 99, 100, 3.0e11),
    "RTX 4090": (89, 89, 128, 2520000, 99, 100, 1.008e12),
}
# n, k of layers' products and their gates: BERT-base, BERT-large, ModernBERT-base, Qwen3-0.6B.
PRODUCTS = [
    (2304, 768, False), (768, 768, False), (3072, 768, False), (768, 3072, False), (3072, 1024, False),
    (1024, 1024, False), (4096, 1024, False), (1024, 4096, False), (2304, 768, True), (768, 1152, False),
    (4096, 1024, True), (6144, 1024, True), (1024, 2048, False), (1024, 3072, False),
]  # fmt: skip
ROWS = [1, 3, 8, 9, 16, 33, 64, 100, 128, 200, 256, 384, 512, 777, 1024, 2048, 4096, 9000, 16384, 1_100_000]
TYPES = [("fp16", "fp16", "fp16"), ("byte_rows", "int8", "fp16"), ("e4m3", "e4m3", "fp16")]
PROGRAM = """
import json, sys
from pathlib import Path

from ftbert import _library

_library._FOLDER = Path(sys.argv[1])  # before anything asks for it
from ftbert.gpus import Gpu
from ftbert.tuning import c_calls

gpus, products, rows, types = json.loads(sys.argv[2])
found = []
for name, (capability, own, sms, khz, block, of_sm, bandwidth) in gpus.items():
    gpu = Gpu(capability, sms, own, 0, block << 10, of_sm << 10, khz, 40 << 20, bandwidth)
    for n, k, gated in products:
        for m, words in ((m, words) for m in rows for words in types):
            product = c_calls.Product(m, n, k, words, True, "gelu" if gated else "none", False, gated, False)
            one = c_calls.guessed(gpu, product)
            able = [variant for kernel, variants in c_calls.own_kernels() if kernel == "mma_tile"
                    for variant in variants if c_calls.supports(gpu, kernel, variant, product)]
            found.append((name, words[1], sms, m, n, k, one.kernel, one.variant, able))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def guesses() -> list[Any]:
    if not (LIBRARIES / "libftbert_core.so").exists():
        pytest.skip("make cuda-compile has not built the library for GPUs")
    asked = json.dumps([GPUS, PRODUCTS, ROWS, TYPES])
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(LIBRARIES), asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def row_bytes(stored: str, k: int) -> int:
    """Of the operand that is multiplied by a matrix stored so."""
    return {"fp16": 2 * k, "int8": -(-(k + 8) // 64) * 64, "e4m3": k}[stored]


def blocks(variant: str, m: int, n: int) -> int:
    rows, columns = map(int, variant.split()[0].split("x"))
    return -(-m // rows) * -(-n // columns)


def test_no_tile_leaves_three_quarters_of_a_gpu_idle(guesses: list[Any]) -> None:
    """Unless the smallest one does."""
    ran = 0
    for name, _, sms, m, n, k, kernel, variant, able in guesses:
        if kernel == "mma_tile":
            ran += 1
            most = max(blocks(one, m, n) for one in able)
            assert blocks(variant, m, n) >= min(sms / 4, most), (name, m, n, k, variant)
    assert ran > len(guesses) / 4


def test_larger_products_have_larger_tiles(guesses: list[Any]) -> None:
    """Tens of thousands of rows are no work for tiles of 16."""
    for name, _, _, m, n, k, kernel, variant, _ in guesses:
        if kernel == "mma_tile" and m >= 4096:
            assert int(variant.split("x")[0]) >= 64, (name, m, n, k, variant)


def test_operands_of_8_bits_have_no_other_kernel(guesses: list[Any]) -> None:
    for name, stored, _, m, _, k, kernel, _, able in guesses:
        if stored != "fp16":
            computed = (stored == "int8" or GPUS[name][0] >= 89) and row_bytes(stored, k) * m <= 2**32 - 128
            assert (kernel, bool(able)) == ("mma_tile" if computed else "", computed), (name, stored)


def test_code_for_a_lesser_gpu_is_chosen_by_what_the_gpu_is(guesses: list[Any]) -> None:
    """Its tensor cores are no faster by code for 8.0."""
    of = {name: [guess[1:] for guess in guesses if guess[0] == name] for name in GPUS}
    assert of["A10, code for 8.0"] == of["A10"] != of["L4"]


def test_offsets_of_rows_have_32_bits(guesses: list[Any]) -> None:
    beyond = {(stored, m * row_bytes(stored, k) > 2**32 - 128) for _, stored, _, m, _, k, *_ in guesses}
    assert beyond == {(words[1], past) for words in TYPES for past in (False, True)}
    for name, stored, _, m, n, k, kernel, _, able in guesses:
        if m * row_bytes(stored, k) > 2**32 - 128:
            assert (kernel, able) == ("", []), (name, stored, m, n, k)
        elif stored == "fp16":
            assert able, (name, m, n, k)


def test_few_rows_are_read_by_their_kernel(guesses: list[Any]) -> None:
    """A weight that no cache holds, of up to eight rows."""
    assert {kernel for _, _, _, m, _, _, kernel, _, _ in guesses if m > 8} <= {"mma_tile", ""}
    assert {kernel for _, _, _, m, _, _, kernel, _, _ in guesses if m <= 8} <= {"mma_tile", "few_rows_lanes", ""}
