"""Scripts a model, saves it, runs the C++ program on it and compares the vector it prints.

    python examples/torchscript_cpp/save_and_compare.py MODEL [BUILD_FOLDER]

MODEL: what ftbert.load takes. The program is built with CMake into BUILD_FOLDER (default build-examples/torchscript).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import ftbert

HERE = Path(__file__).resolve().parent
IDS = torch.tensor([[11, 12, 13, 14, 15, 0, 0], [21, 22, 23, 24, 25, 26, 27]])


def build(folder: Path) -> Path:
    """The program, compiled against the LibTorch inside the torch package."""
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", str(HERE), "-B", str(folder), prefix], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder / "run_scripted"


def compare(model: ftbert.Model, folder: Path) -> float:
    """Largest difference between Python's vector and the one that the C++ program prints."""
    program = build(folder)
    file = folder / "model.pt"
    torch.jit.script(model.module).save(str(file))
    printed = subprocess.run(
        [str(program), str(ftbert.library_path()), str(file)], check=True, capture_output=True, text=True
    ).stdout
    got = torch.tensor([float(line) for line in printed.split()])
    hidden = model.module(IDS, (IDS != 0).long())[0]
    return float((got - hidden[0, 0]).abs().max())


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        sys.exit(__doc__)
    folder = Path(arguments[1] if len(arguments) > 1 else HERE.parent.parent / "build-examples" / "torchscript")
    difference = compare(ftbert.load(arguments[0]), folder)
    print(f"C++ and Python differ by {difference:.1e}")
    return int(difference > 1e-6)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
