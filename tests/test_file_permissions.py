"""Files and folders that belong to somebody else: what may not be read is named, and nothing is written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import make_bert

# For each line [source, scratch, kind] loads the source as the user nobody, who may read what torch and ftbert are made
# of, in a fork of its own, and prints the errors; then the exit code.
_AS_NOBODY = """
import json, multiprocessing, os, sys
import ftbert, ftbert.model
from ftbert.converters import convert
from ftbert.text import load_tokenizer
from pathlib import Path
from transformers import AutoConfig, AutoTokenizer
def as_nobody(source, scratch, kind):
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    for call in (ftbert.load, lambda folder: convert(folder, Path(scratch) / "out")) + (
        (lambda folder: load_tokenizer(Path(folder)),) if kind == "text" else ()
    ):
        try:
            call(source)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        else:
            print("loaded")
for line in sys.stdin:
    child = multiprocessing.get_context("fork").Process(target=as_nobody, args=json.loads(line))
    child.start()
    child.join()
    print("exit code", child.exitcode, flush=True)
"""


@pytest.fixture(scope="module")
def nobody() -> Iterator[Callable[..., list[str]]]:
    """nobody(source, scratch, kind) -> what as_nobody prints."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _AS_NOBODY], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(source: Path, scratch: Path, kind: str = "") -> list[str]:
            print(json.dumps([str(source), str(scratch), kind]), file=process.stdin, flush=True)
            said = []
            while (line := process.stdout.readline()) and not line.startswith("exit code"):
                said.append(line.rstrip("\n"))
            assert line == "exit code 0\n" and said, (line, said)
            return said

        yield ask
        process.stdin.close()
    assert process.returncode == 0


@pytest.fixture
def shared() -> Iterator[Path]:
    """Where everybody may read, and one may be kept out: pytest's own folders are for this user alone."""
    with tempfile.TemporaryDirectory(prefix="ftbert-shared-") as name:
        home = Path(name)
        home.chmod(0o755)
        (home / "out").mkdir()
        (home / "out").chmod(0o777)
        make_bert(hidden_size=16, num_hidden_layers=1).save_pretrained(home / "model")
        for path in (home / "model", *(home / "model").iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield home / "model"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json", "shard", "tokenizer.json"])
def test_a_file_that_may_not_be_read(shared: Path, nobody: Callable[..., list[str]], name: str) -> None:
    kind = "text" if name == "tokenizer.json" else ""
    if name == "shard":
        name = "model-00001-of-00001.safetensors"
        (shared / "model.safetensors").rename(shared / name)
        (shared / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    elif name == "pytorch_model.bin":
        (shared / "model.safetensors").rename(shared / name)
    elif kind:
        (shared / name).write_text("{}")
    (shared / name).chmod(0o600)
    mode, owner = "600", os.geteuid()
    if owner:
        (shared / name).chmod(0)
        mode = "0"
    said = nobody(shared, shared.parent / "out", kind)
    want = rf"PermissionError: \[Errno 13\] no permission to read it for uid \d+; .*{name} belongs to uid {owner} and has mode {mode}: "
    assert all(re.match(want, one) for one in (said[1:] if kind else said)), said


@pytest.mark.parametrize(
    ("where", "mode"), [("folder", 0o700), ("folder", 0o744), ("folder", 0o711), ("above", 0o700), ("above", 0o711)]
)
def test_a_folder_that_may_not_be_looked_into(
    shared: Path, nobody: Callable[..., list[str]], where: str, mode: int
) -> None:
    """Without x no file opens, without r the names cannot be read; above the folder x is enough."""
    closed = shared if where == "folder" else shared.parent
    if os.geteuid():
        pytest.skip("as another user than root the owner's own bits count")
    closed.chmod(mode)
    try:
        said = nobody(shared, shared.parent / "out")
    finally:
        closed.chmod(0o755)
    if where == "above" and mode == 0o711:
        assert said[0] == "loaded"
    else:
        want = rf"no permission to read it for uid 65534; {closed} belongs to uid 0 and has mode {mode:o}"
        assert all(one.startswith("PermissionError: ") and want in one for one in said), said
