"""Files of tuned products: whatever stands in them or around them, models load and nobody's rows are lost."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
from conftest import make_bert

import ftbert
from ftbert import user_cache as cache_module
from ftbert.tuning import Machine, Own, Product, Row, TableError, gemm_table, in_force
from ftbert.tuning.gemm_table import add_rows, read_table

HERE = Machine("Test GPU", "cuBLASLt 1.2.3", "sm_90 x 132")
THERE = Machine("Other GPU", "cuBLASLt 1.2.3", "sm_90 x 114")
NEWER, TWIN = Machine(HERE.gpu, "cuBLASLt 2.0.0", HERE.kind), Machine("Twin GPU", "cuBLASLt 2.0.0", HERE.kind)
GOOD: dict[str, Any] = {
    "dtype": "fp16", "n": 768, "k": 64, "bias": True, "activation": "none", "first": 1, "last": 64, "algorithm": "0" * 15 + "1",
    "timed": [64], "us": [3.0], "default_us": [4.0], "config": {"tile_rows": 64, "tile_columns": 64, "split_k": 1},
}  # fmt: skip


def row(first: int, last: int) -> Row:
    return Row(Product("fp16", 2304, 768), first, last, tuple(range(1, 9)), (last,), (9.0,), (10.0,))


def own_row(first: int, last: int, kernel: str = "wgmma_persistent", variant: str = "128x128") -> Row:
    return Row(Product("fp16", 2304, 768), first, last, Own(kernel, variant), (last,), (9.0,), (10.0,))


def document(**changes: Any) -> str:
    head = {"format": 3, "gpu": HERE.gpu, "cublaslt": HERE.cublaslt}
    return json.dumps(head | {"rows": [GOOD | changes]})


@pytest.fixture()
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's table belongs; nothing is there, and no other table exists."""
    monkeypatch.setenv("FTBERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FTBERT_GEMM_TABLE", raising=False)
    monkeypatch.setattr(gemm_table, "_SHIPPED", tmp_path / "shipped")
    path = gemm_table.user_table(HERE)
    assert path is not None
    path.parent.mkdir(parents=True)
    return path


HOSTILE = {
    "not json": "{",
    "empty": "",
    "binary": "\0\x01",
    "a list": "[]",
    "rows missing": json.dumps({"format": 3}),
    "another format": json.dumps({"format": 99, "rows": []}),
    "an earlier format": json.dumps({"format": 2, "rows": [GOOD]}),
    "no such dtype": document(dtype="int4"),
    "deep": "[" * 100_000,
    "first is infinite": document(first=float("inf")),
    "first is a fraction": document(first=1.5),
    "first is a bool": document(first=True),
    "first is 0": document(first=0),
    "first after last": document(first=65),
    "last has 400 digits": document(last=10**400),
    "n is beyond 2^31": document(n=1 << 70),
    "k is a text": document(k="64"),
    "dtype is a list": document(dtype=["fp16"]),
    "activation is a list": document(activation=[1]),
    "no such activation": document(activation="gulp"),
    "algorithm is a number": document(algorithm=7),
    "algorithm is no hexadecimal": document(algorithm="x" * 16),
    "kernel is a number": document(kernel=7, variant="64x64"),
    "a kernel without a variant": document(kernel="wgmma_tile"),
    "variant has 400 letters": document(kernel="wgmma_tile", variant="x" * 400),
    "timed is a number": document(timed=64),
    "us has no end": document(us=[float("inf")]),
    "us is 0": document(us=[0.0]),
    "us is negative": document(default_us=[-4.0]),
    "us has 400 digits": document(us=[10**400]),
    "us is not a number": document(us=[float("nan")]),
    "fewer times than m": document(us=[]),
    "a tile without columns": document(config={"tile_rows": 64, "split_k": 1}),
    "a tile of 0 columns": document(config={"tile_rows": 64, "tile_columns": 0, "split_k": 1}),
    "split_k is 0": document(config={"tile_rows": 64, "tile_columns": 64, "split_k": 0}),
    "config is a list": document(config=[1]),
    "config has an infinite value": document(config={"tile": float("inf")}),
    "a row without m": json.dumps({"format": 3, "rows": [{"dtype": "fp16"}]}),
    "rows are numbers": json.dumps({"format": 3, "rows": [1]}),
    "format is a list": json.dumps({"format": [[]] * 999, "rows": []}),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_in_a_file_breaks_who_reads_it(user: Path, what: str) -> None:
    user.write_text(HOSTILE[what], encoding="utf-8")
    with pytest.warns(UserWarning, match="is ignored: ") as said:
        assert in_force(HERE) == []
    assert len(str(said[0].message)) < 400
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert in_force(HERE) == []  # said once
    with pytest.warns(UserWarning, match="kept as"):
        add_rows(user, HERE, [row(1, 16)])
    assert in_force(HERE) == [row(1, 16)]


def test_the_row_that_these_change_is_good(user: Path) -> None:
    user.write_text(document(), encoding="utf-8")
    (found,) = in_force(HERE)
    assert found.as_dict() == GOOD and found.gain == pytest.approx(1 / 3)


@pytest.mark.parametrize("machine", [NEWER, TWIN])
def test_rows_of_our_own_kernels_hold_elsewhere(user: Path, machine: Machine) -> None:
    """For every cuBLASLt, and for GPUs of one architecture with as many multiprocessors."""
    add_rows(user, HERE, [own_row(1, 16), row(17, 32), row(33, 64)])
    with pytest.warns(UserWarning, match="used in part: it was made for Test GPU, cuBLASLt 1.2.3") as said:
        assert in_force(machine) == [own_row(1, 16)]
    assert "1 of 2 rows are not used, up to 11% slower: `ftbert tune` makes them anew" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert in_force(machine) == [own_row(1, 16)]  # said once
        assert in_force(THERE) == []  # with other multiprocessors nothing holds
        add_rows(user.with_name(machine.file_name), machine, [own_row(1, 8)])
        assert in_force(machine) == [own_row(1, 8)]  # its own goes before one that fits in part


class Built:
    """A tuner's module with one kernel."""

    @staticmethod
    def is_known(kernel: str, variant: str) -> bool:
        return (kernel, variant) == ("wgmma_persistent", "128x128")


@pytest.mark.parametrize(("kernel", "variant"), [("gone", "128x128"), ("wgmma_persistent", "64x1")])
def test_kernels_that_are_no_more(user: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, variant: str) -> None:
    monkeypatch.setattr(gemm_table, "tuner_module", Built)
    add_rows(user, HERE, [own_row(1, 16), own_row(17, 32, kernel, variant)])
    with pytest.warns(UserWarning, match="1 rows name kernels that this ftbert does not have; 1 of 2 rows are not used"):
        assert in_force(HERE) == [own_row(1, 16)]


def test_a_large_file_and_a_pipe_are_not_read(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(user)
    with pytest.raises(TableError, match="it is no file"):
        read_table(user)
    user.unlink()
    user.write_text(document(), encoding="utf-8")
    monkeypatch.setattr(gemm_table, "_MOST_BYTES", 9)
    with pytest.raises(TableError, match="it has more than"):
        read_table(user)


def test_every_table_set_aside_is_kept(tmp_path: Path) -> None:
    """One file for two GPUs in turns: the first one's rows are still somewhere."""
    path = tmp_path / "t.json"
    for i, machine in enumerate((HERE, THERE, HERE, THERE)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            add_rows(path, machine, [row(16 * i + 1, 16 * i + 16)])
    found = {one.name: read_table(one) for one in tmp_path.glob("t.json*") if not one.name.endswith(".lock")}
    assert {name: (owner, [r.first for r in rows]) for name, (owner, rows) in found.items()} == {
        "t.json.old": (HERE, [1]), "t.json.old2": (THERE, [17]), "t.json.old3": (HERE, [33]), "t.json": (THERE, [49]),
    }  # fmt: skip


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "t.json", tmp_path / "elsewhere" / "t.json"
    link.symlink_to(target)
    for i in range(2):
        add_rows(link, HERE, [row(16 * i + 1, 16 * i + 16)])
    assert link.is_symlink() and len(read_table(target)[1]) == 1 and read_table(target)[1][0].last == 32


def test_a_write_that_fails_leaves_the_table_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    add_rows(path, HERE, [row(1, 16)])
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        add_rows(path, HERE, [row(17, 32)])
    assert path.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["t.json", "t.json.lock"]


def test_the_mode_is_the_users(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        add_rows(tmp_path / "t.json", HERE, [row(1, 16)])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "t.json").stat().st_mode) == 0o600


def test_without_locks_rows_are_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    add_rows(tmp_path / "t.json", HERE, [row(1, 16)])
    assert len(read_table(tmp_path / "t.json")[1]) == 1


def test_nobody_knows_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a container's user without an entry."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FTBERT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert cache_module.cache_folder() is None and gemm_table.user_table(HERE) is None
    make_bert().save_pretrained(tmp_path / "bert")
    ftbert.load(tmp_path / "bert")
