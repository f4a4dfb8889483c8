"""One library for every CPU: kernels for several instruction sets, one set chosen at load."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from byte_row_parts import byte_rows
from conftest import make_bert

from ftbert._library import build_info

ROOT = Path(__file__).resolve().parent.parent
SETS = ("avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
# A fork for each set: the library chooses when it is loaded, and what takes long to import it does not see.
PROGRAM = """
import multiprocessing, os, sys, torch, transformers.modeling_outputs

def one(name):
    os.environ["FTBERT_MAX_CPU_ISA"] = name
    import ftbert
    from ftbert._library import build_info, library_path
    torch.ops.load_library(str(library_path().with_name("libftbert_test.so")))
    ids = torch.arange(5, 95).view(3, 30)
    mask = (torch.arange(30) < torch.tensor([[30], [17], [1]])).long()
    vectors = ftbert.load(sys.argv[1])(ids, mask).last_hidden_state
    random = torch.Generator().manual_seed(0)
    x, values = torch.randn(11, 192, generator=random), torch.randint(-128, 128, (40, 192), generator=random).to(torch.int8)
    blocks = torch.ops.ftbert.product(x, values, scales=torch.rand(40, 6, generator=random).half())
    info, rows = build_info(), torch.load(os.path.join(sys.argv[1], "rows"))
    sums = info["cpu_int8"] != "none" and torch.ops.ftbert.int8_product(rows, values, torch.ones(40), None, "none", False)
    torch.save((info["cpu_isa"], vectors, blocks, sums), os.path.join(sys.argv[1], name))

for name in sys.argv[2:]:
    child = multiprocessing.get_context("fork").Process(target=one, args=(name,))
    child.start()
    child.join()
    print(name, child.exitcode, flush=True)
"""
x86 = pytest.mark.skipif(build_info()["cpu_isa"] not in SETS, reason="the sets are those of x86-64")
BUILT = build_info()["cpu_isas"].split(", ")
all_sets = pytest.mark.skipif(len(BUILT) < len(SETS), reason=f"this build has {', '.join(BUILT)} alone: make test-build")


@x86
@all_sets
def test_each_set_gives_the_same(tmp_path: Path) -> None:
    """And an unknown one is an error."""
    # Sizes that fill neither vectors nor panels, nor tiles.
    make_bert(hidden_size=120, num_attention_heads=5, intermediate_size=200).save_pretrained(tmp_path)
    torch.save(byte_rows(torch.randint(0, 256, (11, 192)), torch.ones(11), torch.randint(0, 256, (11,))), tmp_path / "rows")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *SETS, "sse9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [*(f"{name} 0" for name in SETS), "sse9 1"], done.stderr
    assert f"FTBERT_MAX_CPU_ISA: expected one of {', '.join(SETS)}, got sse9" in done.stderr
    made = {}
    for name in SETS:
        used, *found = torch.load(tmp_path / name)
        assert SETS.index(used) <= SETS.index(name)  # this CPU may have less
        made.setdefault(used, found)
    vectors, blocks, sums = made["avx2"]
    for used, found in made.items():
        np.testing.assert_allclose(found[0].numpy(), vectors.numpy(), atol=1e-5)
        assert torch.equal(found[1], blocks)
        assert found[2] is False if used == "avx512" else torch.equal(found[2], sums)


@x86
def test_a_set_that_was_not_built_is_named() -> None:
    """A build of one set, held to less than that."""
    if len(BUILT) == len(SETS):
        pytest.skip("this build has all sets")
    if "avx2" in BUILT:
        pytest.skip("this build has the least set")
    program = "from ftbert._library import build_info; build_info()"
    held = {**os.environ, "FTBERT_MAX_CPU_ISA": "avx2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=held)
    said = f"this build has CPU kernels for {', '.join(BUILT)}, and FTBERT_MAX_CPU_ISA asks for avx2 or less"
    assert done.returncode and said in done.stderr and "FTBERT_CPU_ISAS=ALL" in done.stderr


# What needs no CPU's kernels, then what does.
LACKING = """
import json, torch, ftbert
from ftbert._library import build_info

print(json.dumps(build_info()))
torch.ops.ftbert.pooling(torch.ones(3, 8), torch.tensor([0, 3], dtype=torch.int32), "mean", False)
"""


@x86
@pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="no qemu-x86_64 (Debian's qemu-user)")
def test_a_cpu_without_avx_is_told() -> None:
    """The library loads there, for GPUs, and the first call on the CPU is an error, no illegal instruction."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    # Whatever kernels somebody asked OpenBLAS for, it is to take those of this CPU.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    done = subprocess.run(
        ["qemu-x86_64", "-cpu", "Nehalem", os.path.realpath(sys.executable), "-c", LACKING],
        capture_output=True, text=True, check=False, env={**kept, "PYTHONPATH": path},
    )  # fmt: skip
    reason = (
        "this CPU lacks AVX2, FMA, BMI1, BMI2; on the CPU ftbert needs x86-64-v3, as of Intel Haswell (2013) or AMD Zen "
        "(2017)"
    )
    assert done.returncode == 1 and done.stdout, done.stderr
    info = json.loads(done.stdout)
    assert [info[name] for name in ("cpu_isa", "cpu_int8", "cpu_gemm", "cpu_reason")] == ["none"] * 3 + [reason]
    assert info["cpu_isas"] and info["cuda"] in ("yes", "no")
    assert done.stderr.splitlines()[-1] == f"RuntimeError: {reason}"


@x86
@pytest.mark.skipif(not shutil.which("nm"), reason="no nm")
def test_sets_share_no_code() -> None:
    """A function that two sets define under one name is linked once, with the instructions of either."""
    checked = 0
    for name in SETS[:-1]:  # amx is compiled with avx512_bf16
        objects = list((ROOT / "build" / "CMakeFiles" / f"ftbert_{name}.dir").rglob("*.o"))
        for file in objects:
            done = subprocess.run(["nm", "-C", "--defined-only", file], capture_output=True, text=True, check=True)
            # Other than local ones; the data that leads to the handler of exceptions is no code.
            symbols = re.findall(r"^[0-9a-f]+ [^a-z\n] (.*)", done.stdout, re.MULTILINE)
            strangers = [s for s in symbols if f"ftbert::{name}::" not in s and "__gxx_personality" not in s]
            assert strangers == [], file
            # What runs when the library is loaded would run on every CPU.
            assert "_GLOBAL__sub_I_" not in done.stdout, file
            checked += len(symbols)
    if not checked:
        pytest.skip("built elsewhere: no objects in build/")
