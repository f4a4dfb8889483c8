"""The command line: exit codes, one-line errors, --json, and that --help costs nothing."""

from __future__ import annotations

import gzip
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub_model import StubModel

import ftbert
from ftbert import cli
from ftbert.cli import command


@pytest.fixture
def stub(stub: StubModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubModel:
    monkeypatch.setattr(command, "load_model", lambda options, **more: stub)
    (tmp_path / "in.txt").write_text("the cat\n\ndog\n")
    monkeypatch.chdir(tmp_path)
    return stub


def parser_of(name: str) -> command.Parser:
    from ftbert.cli.program import _parser

    commands = next(one for one in _parser()._actions if one.dest == "command")
    return commands.choices[name]  # type: ignore[no-any-return, index, call-overload]


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that must fail with code 1."""
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ftbert: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["embed", "m", "in.txt"],
        ["check", "m", "--device", "tpu"],
        ["check", "m", "--device", "cuda:x"],
        ["check", "m", "--dtype", "int4"],
        ["embed", "m", "in.txt", "out.npy", "--max-tokens", "0"],
        ["embed", "m", "in.txt", "out.npy", "--max-tokens", "many"],
        ["embed", "m", "in.txt", "out.npy", "--pooling", "avg"],
        ["embed", "m", "in.txt", "out.npy", "--device", "cpu,tpu"],
        ["embed", "m", "in.txt", "out.npy", "--device", "cuda:*,cuda:1"],
        ["check", "m", "--device", "cuda:0,cuda:1"],
        ["check", "m", "--device", "cuda:*"],
    ],
)
def test_wrong_usage_is_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: ftbert" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "words"), [
    (["embed", "m", "in.txt", "out.npy", "--poling", "cls"], "unrecognized arguments: --poling cls; --poling: did you mean --pooling?"),
    (["info", "m", "--unheard-of"], "unrecognized arguments: --unheard-of"),
    (["serve", "m", "--prot=80"], "--prot: did you mean --port?"),
    (["tune", "m", "--tokns", "1..2"], "--tokns: did you mean --tokens?"),
    (["quantize", "m", "n", "--text", "a", "b"], "unrecognized arguments: b"),
    (["generate", "m", "-ngl", "99", "-p", "text"], "-ngl: --device cuda has all layers there"),
    (["generate", "m", "-p", "text"], "-p: PROMPT comes after MODEL"),
    (["generate", "m", "text", "--num_beams", "4"], "--num_beams: there are no beams: --temperature draws"),
    (["generate", "m", "text", "--max_new_tokens=4"], "--max_new_tokens: did you mean --max-new-tokens?"),
    (["chat", "m", "--ctx-size", "2048"], "--ctx-size: the context is the model's; -n bounds the text"),
])  # fmt: skip
def test_unknown_flags_are_answered_by_their_command(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and words in err
    assert err.startswith(f"usage: ftbert {arguments[0]} ") and f"ftbert {arguments[0]}: error: " in err


@pytest.mark.parametrize(
    ("arguments", "usage", "wrong", "nearest"),
    [
        (["embd", "m"], "usage: ftbert [", "invalid choice: 'embd'", "embed"),
        (["check", "m", "--dtype=fp61"], "usage: ftbert check [", "invalid choice: 'fp61'", "fp16"),
    ],
)
def test_the_nearest_word_is_named(
    arguments: list[str], usage: str, wrong: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    err = capsys.readouterr().err
    assert stopped.value.code == 2
    assert err.startswith(usage)
    assert wrong in err
    assert f"; did you mean {nearest}?" in err


@pytest.mark.parametrize("command", ["convert", "quantize", "embed", "check", "bench", "tune", "info"])
def test_help_explains_every_argument(command: str) -> None:
    for action in parser_of(command)._actions:
        assert action.help, f"{command} {action.option_strings or action.dest}"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from ftbert import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("convert", "quantize", "embed", "check", "bench", "info"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--prompt", "the "], {"prompt": "the "}),
        (["--max-length", "3"], {"max_length": 3}),
        (["--truncate-dim", "5"], {"truncate_dim": 5}),
        (["--prompt-name", "document"], {"prompt_name": "document"}),
        (["--max-length", "3", "--long-texts", "mean"], {"max_length": 3, "long_texts": "mean"}),
        (["--precision", "ubinary"], {"precision": "ubinary"}),
    ],
)
def test_embed_takes_the_options_of_encode(stub: StubModel, arguments: list[str], options: dict[str, Any]) -> None:
    assert cli.main(["embed", "model", "in.txt", "out.npy", *arguments]) == 0
    assert np.array_equal(np.load("out.npy"), stub.encode(["the cat", "", "dog"], **options))


def test_embed_refuses_an_unknown_prompt(stub: StubModel, capsys: pytest.CaptureFixture[str]) -> None:
    err = failed(capsys, "embed", "model", "in.txt", "out.npy", "--prompt-name", "x")
    assert "prompt_name must be one of 'query', 'document'; got 'x'" in err


def test_embed_reports(stub: StubModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["embed", "model", "in.txt", "out.npy"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("out.npy: 3 records x 16; 9 tokens in ")
    assert err == ""
    assert np.load("out.npy").shape == (3, 16)
    assert cli.main(["embed", "model", "in.txt", "out.npy", "--json", "--no-normalize"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 3
    assert cli.main(["embed", "model", "in.txt", "in.t?t", "out.npy", "--max-length", "3"]) == 0
    assert "6 records x 16, 2 longer than the maximum length and truncated; " in capsys.readouterr().out
    assert cli.main(["embed", "model", "in.txt", "out.npy", "--progress"]) == 0
    assert "3 texts, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.txt", "out.npy"], "none.txt: No such file or directory"),
        (["in.txt", "none/out.npy"], "the folder none does not exist"),
        (["in.txt", "out.csv"], "cannot write .csv"),
        (["in.md", "out.npy"], "cannot read .md"),
    ],
)
def test_embed_refuses_before_loading(
    arguments: list[str],
    words: str,
    stub: StubModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(options: Any, **more: Any) -> Any:
        raise AssertionError("loaded a model")

    monkeypatch.setattr(command, "load_model", load)
    assert words in failed(capsys, "embed", "model", *arguments)


def test_ctrl_c_keeps_the_work(stub: StubModel, capsys: pytest.CaptureFixture[str]) -> None:
    stub.fail_at, stub.error = 1, KeyboardInterrupt()
    arguments = ["embed", "model", "in.txt", "out.npy", "--batch-records", "1"]
    assert cli.main(arguments) == 130
    assert "out.npy.part is kept" in capsys.readouterr().err
    assert not Path("out.npy").exists()
    stub.fail_at = -1
    assert cli.main(arguments) == 0
    assert "1 of them from an earlier run" in capsys.readouterr().out


def test_sigterm_keeps_the_work(stub: StubModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before, compute = signal.getsignal(signal.SIGTERM), stub.forward_packed

    def told_to_end(*given: Any, **named: Any) -> Any:
        if stub.calls:
            signal.raise_signal(signal.SIGTERM)
        return compute(*given, **named)

    monkeypatch.setattr(stub, "forward_packed", told_to_end)
    assert cli.main(["embed", "model", "in.txt", "out.npy", "--batch-records", "1"]) == 143
    assert "out.npy.part is kept, the same command goes on from there" in capsys.readouterr().err
    assert not Path("out.npy").exists() and signal.getsignal(signal.SIGTERM) == before


def test_ranges_that_are_measured_are_told_of(stub: StubModel, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["embed", "model", "in.txt", "out.npy", "--precision", "int8", "--ranges", "r.npy"]
    for told in (True, False):
        assert cli.main(arguments) == 0
        assert ("r.npy does not exist: it is measured over the first 8192 texts" in capsys.readouterr().err) == told


def test_debug_shows_the_traceback(
    stub: StubModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.fail_at, stub.error = 0, KeyError("several\nlines")
    err = failed(capsys, "embed", "model", "in.txt", "out.npy")
    assert err == "ftbert: error: KeyError: 'several\\nlines' (FTBERT_DEBUG=1 shows where)\n"
    monkeypatch.setenv("FTBERT_DEBUG", "1")
    assert cli.main(["embed", "model", "in.txt", "out.npy"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_whole_way_on_a_real_model(
    minilm_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> Any:
        assert cli.main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    folder = tmp_path / "model"
    first = [sys.executable, "-m", "ftbert", "convert", str(minilm_folder), str(folder), "--json"]
    assert json.loads(subprocess.run(first, capture_output=True, check=True).stdout)["target"] == str(folder)
    assert set(run("info", str(folder))) == {"build", "model"}
    checked = run("check", str(folder), "--device", "cpu", "--dtype", "fp32")
    assert checked["passed"]
    assert [m["mask"] for m in checked["masks"]] == ["right", "left", "holes"]
    assert all(m["max_abs_diff"] <= 2e-5 and m["padding_is_zero"] for m in checked["masks"])
    (tmp_path / "in.txt").write_text("one\ntwo\n")
    assert run("embed", str(folder), str(tmp_path / "in.txt"), str(tmp_path / "out.npy"))["hidden"] == 384


def test_bench_on_a_tiny_model(tiny_bert: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batch", "4", "--longest", "16", "--rounds", "2", "--device", "cpu", "--json"]
    assert cli.main(["bench", str(tiny_bert(tmp_path)), *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [batch["name"] for batch in result["batches"]] == ["ragged", "full"]
    names = [timing["name"] for timing in result["batches"][0]["timings"]]
    assert names == ["transformers", "transformers, one by one", "ftbert"]


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed(capsys, "info", str(tmp_path / "none"))
    failed(capsys, "check", str(tmp_path))


@pytest.mark.parametrize("command", ["convert", "quantize", "embed", "generate", "check", "bench", "tune", "info"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert f" ftbert {command} " in out.split("example")[-1]
    for option in ("--device", "--dtype", "--pooling", "--column"):
        assert out.count(option) == 0 or "default" in out.split(f"  {option} ")[1].split("\n  --")[0]


def pipe(data: bytes = b"") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data))


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("txt", b"\xef\xbb\xbfthe cat\n\ndog\n"),
        ("jsonl", b'{"text": "the cat"}\n{"text": ""}\n{"text": "dog"}'),
        ("csv", b'\xef\xbb\xbftext\n"the cat"\n""\ndog\n'),
    ],
)
def test_standard_input_to_standard_output(
    stub: StubModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, data: bytes
) -> None:
    out = pipe()
    monkeypatch.setattr(sys, "stdin", pipe(data))
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["embed", "model", "-", "-", "--input-format", kind, "--batch-records", "2"]) == 0
    out.flush()
    rows = [json.loads(line) for line in out.buffer.getvalue().splitlines()]
    assert [row["text"] for row in rows] == ["the cat", "", "dog"] and len(rows[0]["embedding"]) == 16
    assert "3 records x 16" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["in.txt", "model"]


def test_packed_lines(stub: StubModel) -> None:
    Path("in.jsonl.gz").write_bytes(gzip.compress(b'{"text": "cat"}\n{"text": "dog"}\n'))
    assert cli.main(["embed", "model", "in.jsonl.gz", "out.jsonl.gz", "--batch-records", "1"]) == 0
    rows = [json.loads(line) for line in gzip.decompress(Path("out.jsonl.gz").read_bytes()).splitlines()]
    assert [row["text"] for row in rows] == ["cat", "dog"]


def test_a_broken_gz(stub: StubModel, capsys: pytest.CaptureFixture[str]) -> None:
    for data in (b"no gz", gzip.compress(b"text\n" * 99)[:-9]):
        Path("in.txt.gz").write_bytes(data)
        assert "in.txt.gz: not a whole .gz file" in failed(capsys, "embed", "model", "in.txt.gz", "out.npy")


def test_skipped_records_are_listed(stub: StubModel, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.jsonl").write_text('{"body": "cat"}\n{\n{"body": 1}\n{"body": "dog"}\n')
    arguments = ["embed", "model", "in.jsonl", "out.npy", "--column", "body", "--batch-records", "1"]
    assert "in.jsonl: line 2: not valid JSON" in failed(capsys, *arguments)
    arguments.append("--skip-bad")
    stub.fail_at = 1
    assert cli.main(arguments) == 1  # the list goes on too where the work does
    stub.fail_at = -1
    assert cli.main(arguments) == 0
    assert "2 skipped (see out.npy.skipped.jsonl)" in capsys.readouterr().out
    rows = [json.loads(line) for line in Path("out.npy.skipped.jsonl").read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in rows] == [("in.jsonl", 2), ("in.jsonl", 3)]
    assert "must be a string" in rows[1]["reason"]
    Path("in.jsonl").write_text('{"body": "cat"}\n')
    assert cli.main(arguments) == 0 and not Path("out.npy.skipped.jsonl").exists()


@pytest.mark.parametrize(("line", "warned"), [(b'{"text": "a"}', True), (b"{a brace}", False), (b"a", False)])
def test_json_lines_that_are_read_as_text_are_noticed(
    stub: StubModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: bytes, warned: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", pipe(line + b"\n" + line + b"\n"))
    assert cli.main(["embed", "model", "-", "out.npy"]) == 0
    assert capsys.readouterr().err.count("--input-format jsonl") == warned


def test_a_full_standard_output_is_named() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ftbert", "info"], cwd=Path(__file__).parents[1],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert "ftbert: error: standard output: No space left on device" in done.stderr


def test_version_names_commit_and_build(tmp_path: Path) -> None:
    """Of a checkout git's commit, of what is installed the one that CMake recorded; and it imports no torch."""
    program = (
        "import sys; from ftbert.cli import main\ntry: main(['--version'])\nfinally: assert 'torch' not in sys.modules"
    )

    def told(root: Path) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            env={"PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    root = Path(__file__).parents[1]
    if (root / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout
        assert f"(commit {head[:12]}" in told(root)
    package = tmp_path / "ftbert"
    (package / "lib").mkdir(parents=True)
    for found in (root / "ftbert").iterdir():
        if found.name != "lib":
            target = root / "ftbert" / found.name
            (package / found.name).symlink_to(target) if found.name != "version.py" else (
                package / found.name
            ).write_text(target.read_text())
    assert told(tmp_path) == f"ftbert {ftbert.__version__} (no compiled library)\n"
    for release in ("2.13", "2.9"):
        (package / "lib" / f"libftbert_torch-{release}.so").touch()
    (package / "lib" / "build.json").write_text('{"commit": "0123456789ab", "cuda": "13.0", "archs": "80 90a"}')
    build = "commit 0123456789ab; built for CUDA 13.0, GPUs of capability 80 90a; torch 2.9, 2.13"
    assert told(tmp_path) == f"ftbert {ftbert.__version__} ({build})\n"
    (package / "lib" / "build.json").write_text('{"commit": "", "cuda": "", "archs": ""}')
    assert told(tmp_path) == f"ftbert {ftbert.__version__} (built for the CPU; torch 2.9, 2.13)\n"
