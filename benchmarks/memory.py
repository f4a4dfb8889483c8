"""Peak memory of one BERT-base forward, and whether memory stays flat, each in a fresh process.

    python benchmarks/memory.py [--device cuda --dtype fp16] [--json]

On the CPU:

Peak: VmHWM after loading and a 16x128 forward, above that of a process that has imported torch alone; the allowance is
the weights plus 150 MB. Flat: a small model called with changing shapes, resident memory after 100 calls, when each
of the CPU GEMM library's few kernels has been compiled (gemm_rows in csrc/gemm/gemm.h), and after 1,000 more
(at most 16 MiB more: malloc keeps holes between results of changing size). In int8, from a folder of the benchmark's
(quantized.py): the peak, and what is resident behind that forward; of a CPU without such products, why not.

On a GPU: what a 32x512 forward allocates above the weights, in buffers of [tokens, hidden], beside transformers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from machine import attempt  # noqa: E402

MIB = 1 << 20

# Each prints bytes. `folder` is a HuggingFace folder; `peak()` and `now()` read /proc/self/status.
PRELUDE = """
import sys; sys.path.insert(0, {root!r})
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
import torch
torch.set_num_threads(2)
folder = {folder!r}
"""
IMPORT_ONLY = "print(status('VmHWM'))"
FTBERT_FORWARD = """
import ftbert
model = ftbert.load(folder)
with torch.inference_mode():
    model(torch.randint(1000, 30000, (16, 128)))
print(status('VmHWM'))
"""
FTBERT_MODULE_FORWARD = """
import ftbert
model = ftbert.load(folder)
with torch.inference_mode():
    model.module(torch.randint(1000, 30000, (16, 128)))
print(status('VmHWM'))
"""
INT8_FORWARD = """
import ftbert
model = ftbert.load(folder, dtype="int8")
with torch.inference_mode():
    model.module(torch.randint(1000, 30000, (16, 128)))
print(status('VmRSS'), status('VmHWM'))
"""
TRANSFORMERS_IMPORT = "import transformers.models.bert.modeling_bert\nprint(status('VmHWM'))"
TRANSFORMERS_FORWARD = """
from transformers import BertModel
model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
with torch.inference_mode():
    model(torch.randint(1000, 30000, (16, 128)))
print(status('VmHWM'))
"""
FLAT = """
import random
import ftbert
model = ftbert.load(folder)
random.seed(0)
def calls(n):
    for _ in range(n):
        batch, seq = random.randint(1, 24), random.randint(1, 200)
        ids = torch.randint(5, 900, (batch, seq))
        mask = (torch.arange(seq) < torch.randint(1, seq + 1, (batch, 1))).long()
        model(ids, mask)
with torch.inference_mode():
    rss = []
    for n in 100, 500, 500:
        calls(n)
        rss.append(status('VmRSS'))
print(*rss)
"""


# Of one forward after a first one; `model` was made.
DEVICE_PEAK = """
torch.set_grad_enabled(False)
ids = torch.randint(1000, 30000, (32, 512), device=device)
model(ids)
torch.cuda.synchronize()
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
model(ids)
torch.cuda.synchronize()
print(torch.cuda.max_memory_allocated() - before)
"""
FTBERT_ON_DEVICE = """
import ftbert
model = ftbert.load(folder, device=device, dtype=dtype)
"""
TRANSFORMERS_ON_DEVICE = """
from transformers import BertModel
model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval().to(device, dtype)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "fp16", "bf16"], default="fp16", help="on a GPU")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    return cpu_memory(options) if options.device == "cpu" else device_memory(options)


def device_memory(options: argparse.Namespace) -> int:
    dtype = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[options.dtype]
    placed = f"device, dtype = {options.device!r}, torch.{dtype}\n"
    buffer = 32 * 512 * 768 * (4 if options.dtype == "fp32" else 2)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        make_models(base, Path(folder, "small"))
        peaks = {
            "ftbert": measure(placed + FTBERT_ON_DEVICE + DEVICE_PEAK, base),
            "transformers": measure(placed + TRANSFORMERS_ON_DEVICE + DEVICE_PEAK, base),
        }
    if options.json:
        print(json.dumps({"buffer": buffer, "above_weights": peaks}))
    else:
        print(f"\nBERT-base 32x512 {options.dtype}, peak above the weights:")
        for name, peak in peaks.items():
            print(f"  {name:<16}{peak / MIB:>7.0f} MiB, {peak / buffer:.2f} buffers of [tokens, hidden]")
    return int(peaks["ftbert"] > 12 * buffer)


def cpu_memory(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        base, small = Path(folder, "base"), Path(folder, "small")
        make_models(base, small)
        int8 = attempt(lambda: measure_int8(base))
        weights = (base / "model.safetensors").stat().st_size
        torch_alone = measure(IMPORT_ONLY, base)
        above = {
            "ftbert, transformers' output class": measure(FTBERT_FORWARD, base) - torch_alone,
            "ftbert, module alone": measure(FTBERT_MODULE_FORWARD, base) - torch_alone,
            "importing transformers' BERT": measure(TRANSFORMERS_IMPORT, base) - torch_alone,
            "transformers": measure(TRANSFORMERS_FORWARD, base) - torch_alone,
        }
        rss = measure_all(FLAT, small)
    in_int8: dict[str, Any] = {"failed": int8}
    if not isinstance(int8, str):
        in_int8 = {"weights": int8[0], "resident": int8[1] - torch_alone, "peak": int8[2] - torch_alone}
    growth = rss[-1] - rss[0]
    allowance = weights + 150 * MIB
    if options.json:
        facts = {"weights": weights, "torch_alone": torch_alone, "above_torch": above, "allowed": allowance}
        facts |= {"int8": in_int8}
        print(json.dumps(facts | {"rss_after_100_600_1100_calls": rss}))
    else:
        print(f"\nBERT-base 16x128, peak memory above a process with torch ({torch_alone / MIB:.0f} MiB):")
        print(f"  {'weights':<40}{weights / MIB:>7.0f} MiB")
        print(f"  {'allowed: weights + 150 MiB':<40}{allowance / MIB:>7.0f} MiB")
        for name, value in above.items():
            print(f"  {name:<40}{value / MIB:>7.0f} MiB")
        for name, value in in_int8.items():
            print(f"  int8, {name + ':':<34}{value if name == 'failed' else f'{value / MIB:>7.0f} MiB'}")
        print("small model, changing shapes, resident after 100, 600 and 1,100 calls:")
        print("  " + ", ".join(f"{value / MIB:.1f}" for value in rss) + " MiB")
    return int(above["ftbert, module alone"] > allowance or growth > 16 * MIB)


def make_models(base: Path, small: Path) -> None:
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(), add_pooling_layer=False).save_pretrained(base)
    tiny = BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )
    BertModel(tiny, add_pooling_layer=False).save_pretrained(small)


def measure_int8(base: Path) -> list[int]:
    """Of the same model in int8: bytes of its file, and those of a process that computed with it, resident and peak."""
    import torch
    from quantized import quantized_folder
    from transformers import BertModel

    model = BertModel.from_pretrained(base, add_pooling_layer=False).eval()
    folder = quantized_folder(model, torch.int8)
    return [(folder / "model.safetensors").stat().st_size, *measure_all(INT8_FORWARD, folder)]


def measure(program: str, folder: Path) -> int:
    return measure_all(program, folder)[-1]


def measure_all(program: str, folder: Path) -> list[int]:
    code = PRELUDE.format(root=str(ROOT), folder=str(folder)) + program
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the measured process failed: {done.stderr.strip().splitlines()[-1]}\n{done.stderr}")
    return [int(word) for word in done.stdout.split()]


if __name__ == "__main__":
    sys.exit(main())
