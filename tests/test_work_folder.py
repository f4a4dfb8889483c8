"""convert's target: whole, in one step, never at the cost of what somebody else put there, and nothing left of kills."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import full_disk, make_bert

from ftbert.checkpoint import atomic_folder as work_folder
from ftbert.checkpoint import put_in_place
from ftbert.converters import from_huggingface
from ftbert.converters.from_huggingface import convert


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_bert(hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture(params=["exchange", "no exchange"])
def files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a file system that exchanges two names."""
    if request.param == "no exchange":

        def fail(one: Path, other: Path) -> None:
            raise OSError(errno.EINVAL, "no such flag")

        monkeypatch.setattr(work_folder, "_exchange", fail)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def filled(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / folder.name).write_text("")
    return folder


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_appears_meanwhile_stays(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    def move(*arguments: Any) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "precious").write_text("x")
        put_in_place(*arguments)

    monkeypatch.setattr(from_huggingface, "put_in_place", move)
    with pytest.raises(FileExistsError, match="out: "):
        convert(source, tmp_path / "out", force=force)
    assert (tmp_path / "out" / "precious").read_text() == "x"
    assert names(tmp_path) == ["out", "source"]


def test_files_of_others_in_a_checkpoint_are_not_removed(source: Path, tmp_path: Path, files: None) -> None:
    out = convert(source, tmp_path / "out")
    (out / "notes.md").write_text("mine")
    with pytest.raises(FileExistsError, match="holds 'notes.md', which ftbert did not write"):
        convert(source, out, force=True)
    assert (out / "notes.md").exists()
    (out / "notes.md").unlink()
    convert(source, out, force=True)
    assert names(tmp_path) == ["out", "source"]


def test_what_comes_between_two_looks_is_kept(tmp_path: Path, files: None) -> None:
    new, target = filled(tmp_path / "work" / "new"), filled(tmp_path / "out")
    answers = iter([True, False])
    with pytest.raises(FileExistsError, match="what was there before is .*out.found-") as raised:
        put_in_place(new, target, lambda found: next(answers))
    assert names(Path(str(raised.value.strerror).rsplit(" ", 1)[-1])) == ["out"]


def test_what_others_named_like_a_leftover_stays(source: Path, tmp_path: Path) -> None:
    (tmp_path / "precious" / "file").mkdir(parents=True)
    (tmp_path / ".out.ftbert-0123abcd").symlink_to(tmp_path / "precious")
    convert(source, tmp_path / "out")
    assert names(tmp_path / "precious") == ["file"]


def test_a_link_as_target_stays_one(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    for force in (False, True):
        convert(source, tmp_path / "link", force=force)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists()


def test_leftovers_go_and_work_in_progress_stays(source: Path, tmp_path: Path) -> None:
    for name in (".out.ftbert-0123abcd", ".out.backup", ".other.ftbert-0123abcd"):
        (tmp_path / name / "new").mkdir(parents=True)
    with work_folder.work_folder(tmp_path / "out") as busy:
        (busy / "half").write_text("x")
        convert(source, tmp_path / "out")
        assert (busy / "half").exists()
    assert names(tmp_path) == [".other.ftbert-0123abcd", ".out.backup", "out", "source"]


def test_an_old_target_that_had_stepped_aside_comes_back(source: Path, tmp_path: Path) -> None:
    """Killed between the two renames, where names cannot be exchanged."""
    left = tmp_path / ".out.ftbert-0123abcd"
    left.mkdir()
    convert(source, left / "old")
    shutil.copytree(source, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="broken"):
        convert(tmp_path / "broken", tmp_path / "out")
    with work_folder.work_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "config.json").exists() and not left.exists()


def test_a_full_disk_names_the_file(source: Path, tmp_path: Path) -> None:
    with full_disk(20_000), pytest.raises(OSError, match="File too large") as raised:
        convert(source, tmp_path / "out")
    assert str(raised.value.filename).endswith("model.safetensors")
    assert names(tmp_path) == ["source"]
