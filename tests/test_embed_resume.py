"""embed_file goes on where an earlier run ended, with the same source, model and settings only."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embed_sources import TEXTS, interrupted, write_source
from stub_model import StubModel

from ftbert.files import embed_file, staging_path


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
@pytest.mark.parametrize("target", ["out.npy", "out.jsonl", "out.parquet"])
@pytest.mark.parametrize("source", ["in.txt", "in.jsonl", "in.csv", "in.parquet"])
def test_goes_on_after_an_interruption(
    tmp_path: Path, stub: StubModel, source: str, target: str, error: BaseException
) -> None:
    path, out = write_source(tmp_path / source, TEXTS), tmp_path / target
    whole = tmp_path / f"whole{out.suffix}"
    embed_file(stub, path, whole, batch_records=7)
    interrupted(stub, path, out, error)
    stub.calls.clear()
    stats = embed_file(stub, path, out, batch_records=7)
    assert stats.resumed == 35
    assert sum(map(len, stub.calls)) == 15
    assert out.read_bytes() == whole.read_bytes()


def test_what_was_written_after_the_manifest_is_cut_off(tmp_path: Path, stub: StubModel) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"
    interrupted(stub, path, out, RuntimeError())
    with (staging_path(out) / "rows.npy").open("ab") as file:
        file.write(b"half a chunk")
    assert embed_file(stub, path, out, batch_records=7).resumed == 35
    assert np.array_equal(np.load(out), stub.encode(TEXTS))


OTHER_SETTINGS: dict[str, Any] = {
    "pooling": "cls", "normalize": False, "max_tokens": 99, "prompt": "cat ", "max_length": 4, "truncate_dim": 3,
    "batch_records": 8, "long_texts": "mean", "precision": "ubinary",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_another_setting_is_refused(tmp_path: Path, stub: StubModel, name: str) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"
    interrupted(stub, path, out, RuntimeError())
    options = {name: OTHER_SETTINGS[name]}
    with pytest.raises(ValueError, match=f"another {name}.*--no-resume"):
        embed_file(stub, path, out, **{"batch_records": 7, **options})
    assert embed_file(stub, path, out, batch_records=7).resumed == 35
    stats = embed_file(stub, path, out, **{"batch_records": 7, **options}, resume=False)
    assert (stats.resumed, stats.records, stats.hidden) == (0, 50, {"truncate_dim": 3, "precision": 2}.get(name, 16))
    assert np.array_equal(np.load(out), stub.encode(TEXTS, **(options if name != "batch_records" else {})))


@pytest.mark.parametrize("source", ["in.txt", "in.jsonl", "in.csv", "in.parquet"])
def test_another_source_of_the_same_size_and_time_is_refused(tmp_path: Path, stub: StubModel, source: str) -> None:
    path, out = write_source(tmp_path / source, TEXTS), tmp_path / "out.npy"
    interrupted(stub, path, out, RuntimeError())
    before = path.stat()
    write_source(path, [*TEXTS[:3], *reversed(TEXTS[3:])])
    if source != "in.parquet":  # compressed, it has another size
        assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match=r"(changed since|another source size).*--no-resume"):
        embed_file(stub, path, out, batch_records=7)
    assert embed_file(stub, path, out, batch_records=7, resume=False).resumed == 0
    assert np.array_equal(np.load(out), stub.encode([*TEXTS[:3], *reversed(TEXTS[3:])]))


def test_another_source_or_model_is_refused_and_damage_starts_again(tmp_path: Path, stub: StubModel) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"

    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: write_source(path, [*TEXTS, "cat"]), "another source size, source time.*--no-resume"),
        (lambda: (tmp_path / "model" / "config.json").write_text("{}"), "another model.*--no-resume"),
        (lambda: (tmp_path / "model" / "bpe.codes").write_text("a b"), "another model.*--no-resume"),
    ]
    for change, words in refused:
        interrupted(stub, path, out, RuntimeError())
        change()
        with pytest.raises(ValueError, match=words):
            embed_file(stub, path, out, batch_records=7)
        assert staging_path(out).exists()
        assert embed_file(stub, path, out, batch_records=7, resume=False).records == 51
        out.unlink()
    damaged: list[tuple[Callable[[], object], str]] = [
        (lambda: (staging_path(out) / "rows.npy").unlink(), "files are damaged"),
        (lambda: (staging_path(out) / "manifest.json").write_text('{"made_with"'), "manifest is broken"),
    ]
    for change, words in damaged:
        interrupted(stub, path, out, RuntimeError())
        change()
        with pytest.warns(UserWarning, match=words):
            stats = embed_file(stub, path, out, batch_records=7)
        assert (stats.resumed, stats.records) == (0, 51)
        out.unlink()


# Resuming can be refused; a prompt that the folder lacks is no other setting.
@pytest.mark.parametrize(("given", "resumed"), [({"resume": False}, 0), ({"prompt_name": "document"}, 35)])
def test_no_warning_and_so_much_resumed(tmp_path: Path, stub: StubModel, given: dict[str, Any], resumed: int) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"
    interrupted(stub, path, out, RuntimeError())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert embed_file(stub, path, out, batch_records=7, **given).resumed == resumed


@pytest.mark.parametrize("name", ["mine", "rows.npy", "manifest.json"])  # two are called as ours would be
def test_a_folder_of_somebody_else_is_not_emptied(tmp_path: Path, stub: StubModel, name: str) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"
    folder = staging_path(out)
    folder.mkdir()
    (folder / name).write_text("mine")
    for resume in (True, False):
        with pytest.raises(FileExistsError, match=f"holds '{name}', which ftbert did not write"):
            embed_file(stub, path, out, resume=resume)
    assert (folder / name).read_text() == "mine" and not out.exists()
    (folder / name).unlink()
    assert embed_file(stub, path, out).records == 50  # an empty one holds nothing to lose


@pytest.mark.parametrize("what", ["a link", "a file", "a broken link"])
def test_a_place_of_unfinished_work_that_is_taken(tmp_path: Path, stub: StubModel, what: str) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rows.npy").write_text("mine")
    if what == "a file":
        staging_path(out).write_text("mine")
    else:
        staging_path(out).symlink_to("elsewhere" if what == "a link" else "nowhere")
    with pytest.raises(FileExistsError, match="out.npy.part: .*is no folder, which ftbert did not write"):
        embed_file(stub, path, out)
    assert (tmp_path / "elsewhere" / "rows.npy").read_text() == "mine" and not out.exists() and stub.calls == []


def test_ranges_are_part_of_what_work_was_made_with(tmp_path: Path, stub: StubModel) -> None:
    path, out, file = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy", tmp_path / "r.npy"
    np.save(file, np.stack([-np.ones(16), np.ones(16)]))
    given: dict[str, Any] = {"precision": "int8", "ranges": file}
    interrupted(stub, path, out, RuntimeError(), **given)
    np.save(file, np.stack([-np.ones(16), np.ones(16) / 2]))
    with pytest.raises(ValueError, match="another ranges.*--no-resume"):
        embed_file(stub, path, out, batch_records=7, **given)
    np.save(file, np.stack([-np.ones(16), np.ones(16)]))
    assert embed_file(stub, path, out, batch_records=7, **given).resumed == 35
