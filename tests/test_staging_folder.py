"""convert's target: whole, in one step, never at the cost of what somebody else put there, and nothing left of kills."""

from __future__ import annotations

import errno
import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import full_disk, make_bert

from ftbert import staging_folder
from ftbert.converters.from_huggingface import convert
from ftbert.staging_folder import StagingFolder


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

        monkeypatch.setattr(staging_folder, "_exchange", fail)


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
    deliver = StagingFolder.deliver_folder

    def move(*arguments: Any) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "precious").write_text("x")
        deliver(*arguments)

    monkeypatch.setattr(StagingFolder, "deliver_folder", move)
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
    target = filled(tmp_path / "out")
    answers = iter([True, False])
    with (
        pytest.raises(FileExistsError, match="what was there before is .*out.found-") as raised,
        StagingFolder(target) as staging,
    ):
        staging.new_folder()
        staging.deliver_folder(lambda found: next(answers))
    assert names(Path(str(raised.value.strerror).rsplit(" ", 1)[-1])) == ["out"]


@pytest.mark.parametrize("link", [False, True])
def test_what_others_named_like_a_leftover_stays(source: Path, tmp_path: Path, link: bool) -> None:
    precious = tmp_path / ("precious" if link else "out.part")
    (precious / "file").mkdir(parents=True)
    if link:
        (tmp_path / "out.part").symlink_to(precious)
    with pytest.raises(FileExistsError, match="out.part: .*which ftbert did not write"):
        convert(source, tmp_path / "out")
    assert names(precious) == ["file"]


def test_a_link_as_target_stays_one(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    for force in (False, True):
        convert(source, tmp_path / "link", force=force)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists()


def left_by_a_kill(folder: Path) -> Path:
    folder.mkdir()
    (folder / "made-by-ftbert").touch()
    return folder


def test_leftovers_go_and_work_in_progress_stays(source: Path, tmp_path: Path) -> None:
    for name in ("out.part", "out.backup", "other.part"):
        (left_by_a_kill(tmp_path / name) / "new").mkdir()
        (tmp_path / name / "new" / "half").write_text("x")
    with StagingFolder(tmp_path / "out") as staging:
        (staging.new_folder() / "half").write_text("x")
        with pytest.raises(BlockingIOError, match="another process is writing it"):
            convert(source, tmp_path / "out")
        assert names(staging.folder / "new") == ["half"]
    convert(source, tmp_path / "out")
    assert names(tmp_path) == ["other.part", "out", "out.backup", "source"]


def test_a_file_system_without_locks(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", fail)
    left_by_a_kill(tmp_path / "out.part")
    with pytest.raises(OSError, match="no locks"):
        convert(source, tmp_path / "out")
    (tmp_path / "out.part" / "made-by-ftbert").unlink()
    (tmp_path / "out.part").rmdir()
    convert(source, tmp_path / "out")
    assert names(tmp_path) == ["out", "source"]


def test_an_old_target_that_had_stepped_aside_comes_back(source: Path, tmp_path: Path) -> None:
    """Killed between the two renames, where names cannot be exchanged."""
    left = left_by_a_kill(tmp_path / "out.part")
    convert(source, left / "old")
    shutil.copytree(source, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="broken"):
        convert(tmp_path / "broken", tmp_path / "out")
    with StagingFolder(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "config.json").exists() and not left.exists()


def test_a_full_disk_names_the_file(source: Path, tmp_path: Path) -> None:
    with full_disk(20_000), pytest.raises(OSError, match="File too large") as raised:
        convert(source, tmp_path / "out")
    assert str(raised.value.filename).endswith("model.safetensors")
    assert names(tmp_path) == ["source"]
