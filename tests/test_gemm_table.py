"""Files of tuned products: whatever stands in them or around them, models load and nobody's rows are lost."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tables import HERE, row

from ftbert.tuning import Machine, Own, Product, Row, gemm_table, in_force, merge
from ftbert.tuning.gemm_table import add_rows, read_table
from ftbert.user_cache import cache_folder

THERE = Machine("Other GPU", "cuBLASLt 1.2.3", "sm_90 x 114")
NEWER, TWIN = Machine(HERE.gpu, "cuBLASLt 2.0.0", HERE.kind), Machine("Twin GPU", "cuBLASLt 2.0.0", HERE.kind)
OURS = Own("wgmma_persistent", "128x128")
GOOD: dict[str, Any] = {
    "dtype": "fp16", "n": 768, "k": 64, "bias": True, "activation": "none", "first": 1, "last": 64, "algorithm": "0" * 15 + "1",
    "timed": [64], "us": [3.0], "default_us": [4.0],
}  # fmt: skip


def document(**changes: Any) -> str:
    head = {"format": gemm_table.FORMAT, "gpu": HERE.gpu, "cublaslt": HERE.cublaslt}
    return json.dumps(head | {"rows": [GOOD | changes]})


def silently_in_force(machine: Machine) -> list[Row]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return in_force(machine)


def test_rows_survive_a_file(tmp_path: Path) -> None:
    rows = [
        row(1, 16),
        row(17, 32, runs=None),
        row(33, 48, runs=OURS),
        row(1, 16, Product("bf16", 768, 768, True, "gelu_tanh")),
        row(1, 16, Product("bf16", 768, 768, True, layernorm=True)),
        row(1, 16, Product("bf16", 768, 768, prenorm=True)),
        row(1, 16, Product("bf16", 768, 768, True, "silu", gated=True)),
        row(1, 16, Product("e4m3 e4m3 bf16", 768, 768)),
    ]
    add_rows(tmp_path / "t.json", HERE, rows)
    machine, found = read_table(tmp_path / "t.json")
    assert machine == HERE and found == sorted(rows, key=lambda r: (r.product, r.first))


def test_new_rows_replace_old_ones_where_they_overlap(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    add_rows(path, HERE, [row(1, 16), row(17, 32), row(33, 48)])
    add_rows(path, HERE, [row(10, 20, runs=(1, 2), us=5.0)])
    found = [(r.first, r.last, r.timed, r.us) for r in read_table(path)[1]]
    assert found == [(1, 9, (), ()), (10, 20, (20,), (5.0,)), (21, 48, (32, 48), (9.0, 9.0))]
    other = Product("bf16", 2304, 768, bias=True)
    assert len(merge([row(1, 99)], [row(5, 6), row(5, 6, other)])) == 2


def test_the_tables_that_come_with_the_package() -> None:
    shipped = list((Path(gemm_table.__file__).parent / "gemm_tables").glob("*.json"))
    assert shipped
    for path in shipped:
        machine, rows = read_table(path)
        assert path.name == machine.file_name and machine.kind
        for r in rows:
            assert gemm_table.is_known(r), r  # a kernel that this build has
            assert r.timed and all(r.first <= m <= r.last for m in r.timed), r
            assert sum(r.us) <= sum(r.default_us), r


def test_order_of_sources(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert silently_in_force(HERE) == []
    add_rows(tmp_path / "shipped" / HERE.file_name, HERE, [row(1, 16, us=1.0), row(17, 32, us=1.0)])
    add_rows(user, HERE, [row(1, 16, runs=None, us=2.0)])
    # Also a row that says "no better" hides the one below it.
    assert [r.us for r in in_force(HERE)] == [(2.0,), (1.0,)]
    add_rows(tmp_path / "mine.json", HERE, [row(5, 20, runs=(3,), us=3.0)])
    monkeypatch.setenv("FTBERT_GEMM_TABLE", str(tmp_path / "mine.json"))
    assert [(r.first, r.last, r.us) for r in in_force(HERE)] == [(1, 4, ()), (5, 20, (3.0,)), (21, 32, (1.0,))]
    monkeypatch.setenv("FTBERT_GEMM_TABLE", "off")
    assert in_force(HERE) == []


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [("FTBERT_CACHE", "file", "Not a directory"), ("FTBERT_GEMM_TABLE", "none.json", "No such file")],
)
def test_a_table_that_cannot_be_opened(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    add_rows(tmp_path / "shipped" / HERE.file_name, HERE, [row(1, 16)])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variable, str(tmp_path / value))
    with pytest.warns(UserWarning, match=f"is ignored: .*{words}"):
        assert in_force(HERE) == [row(1, 16)]


HOSTILE = {
    "not json": "{",
    "rows missing": json.dumps({"format": gemm_table.FORMAT}),
    "a row without m": json.dumps({"format": gemm_table.FORMAT, "rows": [{"dtype": "fp16"}]}),
    "no such dtype": document(dtype="int4"),
    "two dtypes": document(dtype="fp16 fp16"),
    "dtype is a list": document(dtype=["fp16"]),
    "no such activation": document(activation="gulp"),
    "first is a bool": document(first=True),
    "first is 0": document(first=0),
    "first after last": document(first=65),
    "n is beyond 2^31": document(n=1 << 70),
    "k is a text": document(k="64"),
    "algorithm is no hexadecimal": document(algorithm="x" * 16),
    "kernel is a number": document(kernel=7, variant="64x64"),
    "a kernel without a variant": document(kernel="wgmma_tile"),
    "variant is no text": document(kernel="wgmma_tile", variant="\ud800"),
    "variant has 400 letters": document(kernel="wgmma_tile", variant="x" * 400),
    "us is 0": document(us=[0.0]),
    "us is not a number": document(us=[float("nan")]),
    "us has 400 digits": document(us=[10**400]),
    "fewer times than m": document(us=[]),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_in_a_file_breaks_who_reads_it(user: Path, what: str) -> None:
    user.parent.mkdir(parents=True)
    user.write_text(HOSTILE[what], encoding="utf-8")
    with pytest.warns(UserWarning, match="is ignored: ") as said:
        assert in_force(HERE) == []
    assert len(str(said[0].message)) < 400
    assert silently_in_force(HERE) == []  # said once
    with pytest.warns(UserWarning, match="kept as"):
        add_rows(user, HERE, [row(1, 16)])
    assert in_force(HERE) == [row(1, 16)]
    assert user.with_name(user.name + ".old").read_text(encoding="utf-8") == HOSTILE[what]


@pytest.mark.parametrize("format", [1, 2, 3, None])
def test_earlier_formats_are_one_warning_that_says_what_to_do(user: Path, format: int | None) -> None:
    user.parent.mkdir(parents=True)
    user.write_text(json.dumps({"format": format, "rows": [GOOD]}), encoding="utf-8")
    with pytest.warns(UserWarning, match=f"is ignored: its format is {format}, .* `ftbert tune` makes it anew"):
        assert in_force(HERE) == []
    assert silently_in_force(HERE) == []


def test_the_row_that_these_change_is_good(user: Path) -> None:
    user.parent.mkdir(parents=True)
    user.write_text(document(), encoding="utf-8")
    (found,) = in_force(HERE)
    assert found.as_dict() == GOOD and found.gain == pytest.approx(1 / 3)


@pytest.mark.parametrize("machine", [NEWER, TWIN])
def test_rows_of_our_own_kernels_hold_elsewhere(user: Path, machine: Machine) -> None:
    """For every cuBLASLt, and for GPUs of one architecture with as many multiprocessors."""
    add_rows(user, HERE, [row(1, 16, runs=OURS), row(17, 32), row(33, 64)])
    with pytest.warns(UserWarning, match="used in part: it was made for Test GPU, cuBLASLt 1.2.3") as said:
        assert in_force(machine) == [row(1, 16, runs=OURS)]
    assert "1 of 2 rows are not used, up to 11% slower: `ftbert tune` makes them anew" in str(said[0].message)
    assert silently_in_force(machine) == [row(1, 16, runs=OURS)]  # said once
    assert silently_in_force(THERE) == []  # with other multiprocessors nothing holds
    add_rows(user.with_name(machine.file_name), machine, [row(1, 8, runs=OURS)])
    assert silently_in_force(machine) == [row(1, 8, runs=OURS)]  # its own goes before one that fits in part
    os.replace(user, user.with_name(THERE.file_name))
    with pytest.warns(UserWarning, match="is ignored: it was made for Test GPU.* 2 of 2 rows are not used"):
        assert in_force(THERE) == []


@pytest.mark.parametrize(("kernel", "variant"), [("gone", "128x128"), ("wgmma_persistent", "64x1")])
def test_kernels_that_are_no_more(user: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, variant: str) -> None:
    built = SimpleNamespace(is_known=lambda *one: Own(*one) == OURS)
    monkeypatch.setattr(gemm_table, "tuner_module", lambda: built)
    add_rows(user, HERE, [row(1, 16, runs=OURS), row(17, 32, runs=Own(kernel, variant))])
    with pytest.warns(UserWarning, match="1 rows name kernels that this ftbert does not have; 1 of 2 rows are not used"):
        assert in_force(HERE) == [row(1, 16, runs=OURS)]


@pytest.mark.parametrize("who", ["others", "above", "file", "owner"])
def test_where_others_may_write_nothing_is_read(user: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    before = os.umask(0)
    try:
        add_rows(user, HERE, [row(1, 16)])
    finally:
        os.umask(before)
    assert in_force(HERE) == [row(1, 16)]
    if who != "owner":
        {"above": user.parent.parent, "others": user.parent, "file": user}[who].chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(user.parent, 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.warns(UserWarning, match="is ignored: .*(others can write to|belongs to another user)"):
        assert in_force(HERE) == []


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTBERT_CACHE", "/a/b")
    assert cache_folder() == Path("/a/b")
    monkeypatch.setenv("FTBERT_CACHE", "off")
    assert cache_folder() is None
    monkeypatch.delenv("FTBERT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/ftbert")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/ftbert")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 1 << 30)  # a container's user without an entry
    assert cache_folder() is None


def test_a_write_that_fails_leaves_the_table_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    add_rows(path, HERE, [row(1, 16)])
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"No space left.*t\.json"):
        patch.setattr(os, "fsync", full)
        add_rows(path, HERE, [row(17, 32)])
    assert path.read_bytes() == before
    add_rows(path, HERE, [row(17, 32)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json", "t.json.lock"]


def _add_many(path: Path, number: int) -> None:
    for i in range(20):
        add_rows(path, HERE, [row(i + 1, i + 1, Product("fp16", number + 1, 8))])


def test_concurrent_tuners_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(_add_many, [(path, number) for number in range(4)], chunksize=1)
    assert sum(len(r.timed) for r in read_table(path)[1]) == 80
