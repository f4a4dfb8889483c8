"""Makes wheels and tries them: `make wheels`, `make wheels-test`.

    python tests/wheels.py headers FOLDER torch-2.13.0-*.whl     what a binding is compiled and linked with
    python tests/wheels.py repair OUT ftbert-*.whl               the lowest manylinux tag, and whether it is small enough
    python tests/wheels.py test --model MINILM --environments FOLDER --wheels dist/*.whl -- 3.10:2.9.1 3.11:2.13.0

`test` installs each wheel beside each Python:torch, environments that are kept, runs tests/wheel_smoke.py there without
a compiler on the PATH, and lets LibTorch of each torch read what another one saved. A Python that is not here, or a torch
that a wheel refuses in words, is a line that says so. Exit code 1 where something fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MOST_MB = {"cpu": 15, "cu": 120}  # by the first letters of a wheel's label
EXCLUDED = ("libtorch*.so", "libc10*.so", "libcublas*.so.*", "libgomp.so.*", "libftbert_core.so")
# One that every machine with PyTorch has; the binding is compiled with the first where it is not in the package.
COMPILERS = ("c++", "g++")


class Environment(NamedTuple):
    """python: its program. site: its site-packages."""

    name: str
    torch: str
    python: Path
    site: Path


# ---- headers ---------------------------------------------------------------------------------------------------------


def headers(folder: Path, wheel: Path) -> None:
    """Of a wheel of torch: headers, the two libraries that a binding is linked with, and version.py, last."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for name in names:
            if name.startswith("torch/include/") or name in ("torch/lib/libc10.so", "torch/lib/libtorch_cpu.so"):
                archive.extract(name, folder)
        archive.extract("torch/version.py", folder)


# ---- repair ----------------------------------------------------------------------------------------------------------


def repair(out: Path, wheel: Path) -> int:
    excluded = [word for name in EXCLUDED for word in ("--exclude", name)]
    with tempfile.TemporaryDirectory() as scratch:
        command = ["auditwheel", "repair", "-z", "9", *excluded, "-w", scratch, str(wheel)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
            return 1
        (made,) = Path(scratch).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob(f"{made.name.split('-py3')[0]}-*.whl"):
            old.unlink()
        made = Path(shutil.move(made, out))
    label = made.name.split("-")[1].partition("+")[2]
    most = next((size for start, size in MOST_MB.items() if label.startswith(start)), None)
    megabytes = made.stat().st_size / 1e6
    print(f"{made}: {megabytes:.1f} MB{f', at most {most}' if most else ''}")
    return int(most is not None and megabytes > most)


# ---- test ------------------------------------------------------------------------------------------------------------


def find_python(version: str) -> Path | None:
    """python3.10 on the PATH or of pyenv, where it runs."""
    names = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for name in filter(None, names):
        said = subprocess.run([name, "-c", "import sys, ssl; print(sys.executable)"], capture_output=True, text=True)
        if said.returncode == 0:
            return Path(said.stdout.strip())
    return None


def environment(folder: Path, python: str, torch: str) -> Environment | None:
    """Made where it is not there: a venv with that torch."""
    where = folder / f"python{python}-torch{torch}"
    program = where / "bin" / "python"
    if not (where / ".torch").exists():
        found = find_python(python)
        if found is None:
            return None
        shutil.rmtree(where, ignore_errors=True)
        print(f"== installing torch {torch} into {where}", flush=True)
        subprocess.run([found, "-m", "venv", where], check=True)
        pip(program, "install", "--no-compile", f"torch=={torch}")
        (where / ".torch").touch()
    (site,) = where.glob("lib/python*/site-packages")
    return Environment(where.name, torch, program, site)


def pip(python: Path, *arguments: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(command, check=True, env=environment)


def bare(scratch: Path, **more: str) -> dict[str, str]:
    """An environment whose PATH has no program, and whose cache is empty."""
    (scratch / "bin").mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS")}
    return {**kept, "PATH": str(scratch / "bin"), "FTBERT_CACHE": str(scratch / "cache"), **more}


def install(one: Environment, wheel: Path) -> None:
    pip(one.python, "install", "--no-compile", f"{wheel}[serve]")  # what it depends on, once
    pip(one.python, "install", "--no-compile", "--no-deps", "--force-reinstall", str(wheel))


def smoke(one: Environment, model: Path, scratch: Path) -> tuple[dict[str, Any] | None, str]:
    """What tests/wheel_smoke.py says; None and its last line where it fails."""
    scratch.mkdir(parents=True, exist_ok=True)
    command = [one.python, ROOT / "tests" / "wheel_smoke.py", model, scratch]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=bare(scratch), cwd=scratch)
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1]), ""


def libtorch_program(one: Environment, scratch: Path) -> Path:
    """examples/torchscript_cpp for the LibTorch inside that torch package."""
    program, torch = scratch / "run_scripted", one.site / "torch"
    if not program.exists():
        includes = [f"-I{torch / part}" for part in ("include", "include/torch/csrc/api/include")]
        linked = [f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
        rest = ["-D_GLIBCXX_USE_CXX11_ABI=1", f"-Wl,-rpath,{torch / 'lib'}", "-Wl,--allow-shlib-undefined"]
        source = ROOT / "examples" / "torchscript_cpp" / "main.cpp"
        compiler = next(filter(shutil.which, COMPILERS))
        subprocess.run([compiler, "-std=c++20", *includes, source, "-o", program, *linked, *rest], check=True)
    return program


def read_elsewhere(reader: Environment, library: Path, scratch: Path, written: Path) -> str:
    """"" where that LibTorch computes from model.pt what its writer did, else what is wrong."""
    program = libtorch_program(reader, scratch)
    command = [program, library, written / "model.pt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=bare(scratch))
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed"])[0]
    want = json.loads((written / "vector.json").read_text())
    got = [float(line) for line in done.stdout.split()]
    worst = max(abs(a - b) for a, b in zip(got, want, strict=True))
    return "" if worst < 1e-5 else f"differs by {worst:.1e}"


def unknown_release(one: Environment, wheel: Path, scratch: Path) -> Iterator[str]:
    """The package without the binding for that torch: compiled once, in words; refused in words without a compiler."""
    target, program = scratch / "package", "import ftbert; ftbert.load_library(); print(ftbert.library_path())"
    pip(one.python, "install", "--no-compile", "--no-deps", "--target", str(target), str(wheel))
    release = ".".join(one.torch.split(".")[:2])
    (target / "ftbert" / "lib" / f"libftbert_torch-{release}.so").unlink()

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        command, kept = [one.python, "-c", program], bare(scratch, PYTHONPATH=str(target), **more)
        return subprocess.run(command, capture_output=True, text=True, check=False, env=kept, cwd=scratch)

    refused = run()
    if "and none is here" not in refused.stderr:
        yield f"without a compiler: {refused.stderr[-300:]}"
    for turn in ("first", "second"):
        done = run(PATH=os.environ["PATH"])
        if done.returncode or not done.stdout.startswith(str(scratch / "cache")):
            yield f"{turn} import: {done.stderr[-500:]}"
            return
        if ("ftbert: building ftbert_torch-" in done.stderr) != (turn == "first"):
            yield f"{turn} import said {done.stderr[-300:]!r}"


def test(model: Path, folder: Path, wheels: list[Path], pairs: list[str]) -> int:
    failed, rows = 0, list[tuple[str, ...]]()

    def note(wheel: Path, name: str, what: str, result: str, bad: bool) -> None:
        nonlocal failed
        failed += bad
        rows.append((wheel.name.split("-")[1], name, what, ("FAILED: " if bad else "") + result))
        print("  ".join(rows[-1]), flush=True)

    environments = []
    for python, _, torch in (pair.partition(":") for pair in pairs):
        if (one := environment(folder, python, torch)) is None:
            print(f"SKIPPED: torch {torch} with Python {python}, which is not here", flush=True)
        else:
            environments.append(one)
    for wheel in wheels:
        with tempfile.TemporaryDirectory() as temporary:
            scratch, ran = Path(temporary), list[tuple[Environment, Path]]()
            for one in environments:
                install(one, wheel)
                said, why = smoke(one, model, scratch / one.name)
                refused = said is None and "+cu" in wheel.name and "takes cuBLAS from torch's packages" in why
                what = "import, embed, check, TorchScript, serve"
                if said is None:
                    note(wheel, one.name, what, f"refused in words: {why}" if refused else why, not refused)
                    continue
                worst = max(mask["max_abs_diff"] for mask in said["check"]["masks"])
                result = f"{said['binding']}, {said['cpu_isa']}, check {worst:.1e}"
                note(wheel, one.name, what, result, not said["check"]["passed"])
                ran.append((one, Path(said["library"])))
            for index, (reader, library) in enumerate(ran):
                writer, _ = ran[index - 1]
                why = read_elsewhere(reader, library, scratch / reader.name, scratch / writer.name)
                what = f"LibTorch reads model.pt of {writer.name}"
                note(wheel, reader.name, what, why or "the same vector", bool(why))
            if ran and "+cu" not in wheel.name:
                one = ran[-1][0]
                wrong = list(unknown_release(one, wheel, scratch / "unknown"))
                note(wheel, one.name, "a binding compiled at import", "; ".join(wrong) or "once, in words", bool(wrong))
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("headers", "repair"):
        one = commands.add_parser(name)
        one.add_argument("folder", type=Path)
        one.add_argument("wheel", type=Path)
    tried = commands.add_parser("test")
    tried.add_argument("--model", type=lambda text: Path(text).resolve(), required=True)
    tried.add_argument("--environments", type=lambda text: Path(text).resolve(), required=True)
    tried.add_argument("--wheels", type=lambda text: Path(text).resolve(), nargs="+", required=True)
    tried.add_argument("pairs", nargs="+")
    options = parser.parse_args()
    if options.command == "headers":
        headers(options.folder, options.wheel)
        return 0
    if options.command == "repair":
        return repair(options.folder, options.wheel)
    return test(options.model, options.environments, options.wheels, options.pairs)


if __name__ == "__main__":
    sys.exit(main())
