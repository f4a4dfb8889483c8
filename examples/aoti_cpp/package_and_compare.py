"""Packages a model with AOTInductor, runs the C++ program on the package and compares the rows it prints.

    python examples/aoti_cpp/package_and_compare.py MODEL [BUILD_FOLDER [DEVICE]]

MODEL: what ftbert.load takes. The program is built with CMake into BUILD_FOLDER (default build-examples/aoti), the
package lies beside it. DEVICE: cpu or cuda, where the package will run (default cpu).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import ftbert

HERE = Path(__file__).resolve().parent
BATCHES = [[[11, 12, 13, 14, 15], [21, 22, 23, 24, 25, 26, 27]], [[31, 32, 33], [41], [51, 52, 53, 54, 55, 56, 57, 58]]]


def package(model: ftbert.Model, file: Path) -> None:
    """model.module for any batch and length, compiled for the model's device and written with its weights."""
    ids = torch.ones(2, 8, dtype=torch.long, device=model.encoder.device())  # two and eight: numbers other than 0 and 1
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    program = torch.export.export(model.module, (ids, torch.ones_like(ids)), dynamic_shapes=(free, free))
    torch._inductor.aoti_compile_and_package(program, package_path=str(file))


def build(folder: Path) -> Path:
    """The program, compiled against the LibTorch inside the torch package."""
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", str(HERE), "-B", str(folder), prefix], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder / "run_package"


def compare(model: ftbert.Model, folder: Path) -> float:
    """Largest difference between Python's first rows and those that the C++ program prints, over BATCHES."""
    program, file = build(folder), folder / "model.pt2"
    package(model, file)
    lines = "\n\n".join("\n".join(" ".join(map(str, text)) for text in batch) for batch in BATCHES)
    command = [str(program), str(ftbert.library_path()), str(file)]
    printed = subprocess.run(command, input=lines, check=True, capture_output=True, text=True).stdout
    got = torch.tensor([[float(value) for value in line.split()] for line in printed.splitlines()])
    return float((got - torch.cat([first_rows(model, batch) for batch in BATCHES])).abs().max())


def first_rows(model: ftbert.Model, batch: list[list[int]]) -> torch.Tensor:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in batch], batch_first=True)
    ids = ids.to(model.encoder.device())
    hidden: torch.Tensor = model.module(ids, (ids != 0).long())[0]
    return hidden[:, 0].float().cpu()


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 3:
        sys.exit(__doc__)
    folder = Path(arguments[1] if len(arguments) > 1 else HERE.parent.parent / "build-examples" / "aoti")
    difference = compare(ftbert.load(arguments[0], device=arguments[2] if len(arguments) > 2 else "cpu"), folder)
    print(f"C++ and Python differ by {difference:.1e}")
    return int(difference > 1e-6)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
