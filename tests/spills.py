"""Whether kernels spill registers, from what ptxas says of each.

As CMAKE_CUDA_COMPILER_LAUNCHER: python spills.py --compile nvcc ... -o OBJECT   runs it, keeps OBJECT.ptxas
After the build:                 python spills.py BUILD                          fails for spills that are not KNOWN
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# nvcc 13.0: a kernel's architecture, a part of its mangled name, and the most bytes of spill stores and loads.
KNOWN = [
    ("sm_90a", r"wgmma_norm_kernelI.*NormShapeILi192ELi128ELb0ELi1E.*ResultMaps", 12, 20),
    ("sm_80", r"attention_simtILi128E", 24, 36),
    ("sm_80", r"attention_simtILi80E", 8, 8),
    ("sm_80", r"norm_backward_kernelI.*TrainingShapeILi8ELi512ELi4E", 16, 12),
    ("sm_80", r"norm_forward_kernelI.*ForwardShapeILi8ELi512ELi4E", 4, 4),
    ("sm_90a", r"norm_forward_kernelI.*ForwardShapeILi8ELi512ELi4E", 8, 8),
    ("sm_80", r"norm_forward_kernelI.*ForwardShapeILi8ELi(64|128)ELi4ELi[24]ELi4E", 8, 8),
    ("sm_90a", r"norm_forward_kernelI.*ForwardShapeILi8ELi(64|128)ELi4ELi[24]ELi4E", 8, 8),
]
COMPILER = "13.0"
OF_PTXAS = re.compile(r"ptxas info|bytes stack frame")


def compile_and_keep(command: list[str]) -> int:
    if "-o" not in command or "-c" not in command:
        return subprocess.run(command, check=False).returncode
    log = Path(command[command.index("-o") + 1] + ".ptxas")
    done = subprocess.run([*command, "-Xptxas=-v"], stderr=subprocess.PIPE, text=True, check=False)
    for line in done.stderr.splitlines():
        if not OF_PTXAS.search(line):
            print(line, file=sys.stderr)
    log.write_text(done.stderr)
    return done.returncode


def spills(log: str) -> Iterator[tuple[str, str, int, int]]:
    """Architecture, kernel or function, bytes of spill stores and loads; where there are any."""
    arch = name = "?"
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '.*' for '(\w+)'", line):
            arch = found[1]
        elif found := re.search(r"Function properties for (\S+)", line):
            name = found[1]
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stores, loads = int(found[1]), int(found[2])
            if stores or loads:
                yield arch, name, stores, loads


def known(arch: str, name: str, stores: int, loads: int) -> bool:
    return any(arch == a and re.search(part, name) and stores <= s and loads <= n for a, part, s, n in KNOWN)


def readable(name: str) -> str:
    return subprocess.check_output(["c++filt", name], text=True).strip() if shutil.which("c++filt") else name


def check(build: Path) -> int:
    commands = json.loads((build / "compile_commands.json").read_text())
    objects = [build / entry["output"] for entry in commands if entry["file"].endswith(".cu")]
    logs = [Path(f"{object_}.ptxas").read_text() for object_ in objects]
    found = [spill for log in logs for spill in spills(log)]
    new = sorted({spill for spill in found if not known(*spill)})
    for arch, name, stores, loads in new:
        print(f"{arch}: {stores} bytes of spill stores, {loads} of loads: {readable(name)}")
    print(f"spills: {len(objects)} CUDA files, {len(found)} kernels spill, {len(found) - len(new)} of them known")
    if not new:
        return 0
    release = re.search(r"release ([\d.]+)", subprocess.check_output(["nvcc", "--version"], text=True))
    if release and release[1] != COMPILER:
        print(f"warning: what is known is nvcc {COMPILER}'s, this is {release[1]}")
        return 0
    return 1


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(compile_and_keep(arguments[1:]) if arguments[0] == "--compile" else check(Path(arguments[0])))
