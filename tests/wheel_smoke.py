"""What an installed ftbert does in an environment of its own, without a compiler: import, embed, check, TorchScript, serve.

    python tests/wheel_smoke.py MODEL FOLDER

tests/wheels.py runs it. MODEL: a folder of all-MiniLM-L6-v2. FOLDER gets model.pt and vector.json, which a LibTorch
program of another environment is compared with. Prints one line of JSON. Imports nothing of tests/.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

IDS = [[11, 12, 13, 14, 15, 0, 0], [21, 22, 23, 24, 25, 26, 27]]  # those of examples/torchscript_cpp/main.cpp
TEXTS = ["A cat sits outside.", "Ein Hund läuft nach Hause."]


def command(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "ftbert", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ftbert {arguments[0]} failed: {done.stderr}")
    return done.stdout


def embedded(model: str, folder: Path) -> list[list[float]]:
    import numpy as np

    (folder / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    command("embed", "--no-resume", model, str(folder / "texts.txt"), str(folder / "vectors.npy"))
    vectors = np.load(folder / "vectors.npy")
    assert vectors.shape == (len(TEXTS), 384) and abs(float(np.linalg.norm(vectors[0])) - 1) < 1e-3, vectors.shape
    return [[float(value) for value in row] for row in vectors]


def scripted(model: str, folder: Path) -> float:
    """Largest difference of the saved module's result, read again."""
    import torch

    import ftbert

    module, ids = ftbert.load(model).module, torch.tensor(IDS)
    mask = (ids != 0).long()
    want = module(ids, mask)[0]
    torch.jit.script(module).save(str(folder / "model.pt"))
    got = torch.jit.load(str(folder / "model.pt"))(ids, mask)[0]
    (folder / "vector.json").write_text(json.dumps(want[0, 0].tolist()), encoding="utf-8")
    return float((got - want).abs().max())


def served(model: str, folder: Path) -> list[float]:
    """The first text's vector over HTTP."""
    log = folder / "serve.log"
    with log.open("wb") as out:
        arguments = ["serve", model, "--hostname", "127.0.0.1", "--port", "0"]
        process = subprocess.Popen([sys.executable, "-m", "ftbert", *arguments], stderr=out)
    try:
        until = time.monotonic() + 300
        while (found := re.search(r"listening on (http://127.0.0.1:\d+)", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"ftbert serve does not listen: {log.read_text()}")
            time.sleep(0.1)
        body = json.dumps({"inputs": TEXTS[:1]}).encode()
        request = urllib.request.Request(f"{found[1]}/embed", body, {"Content-Type": "application/json"})
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return [float(value) for value in json.load(answer)[0]]
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > until:  # still loading
                    raise
                time.sleep(0.2)
    finally:
        process.terminate()
        process.wait(60)


def main(model: str, folder: Path) -> None:
    import torch

    import ftbert
    from ftbert._library import build_info

    package = Path(ftbert.__file__).parent
    assert "site-packages" in package.parts, f"{package} is no installed package"
    info, vectors = build_info(), embedded(model, folder)
    parity = json.loads(command("check", "--json", model))
    difference = scripted(model, folder)
    answer = served(model, folder)
    assert max(abs(a - b) for a, b in zip(answer, vectors[0], strict=True)) < 1e-5
    assert difference < 1e-6, difference
    maps = Path("/proc/self/maps").read_text()
    runtimes = {name for name in re.findall(r"/\S+", maps) if "gomp" in name or "iomp" in name}
    assert len(runtimes) == 1, f"several OpenMP runtimes: {runtimes}"
    print(json.dumps({
        "python": sys.version.split()[0], "torch": torch.__version__, "binding": ftbert.library_path().name,
        "library": str(ftbert.library_path()), "cuda_reason": info.get("cuda_reason", ""), "cpu_isa": info["cpu_isa"],
        "check": parity, "path": os.environ["PATH"],
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
