"""Fine-tune a sentence encoder on scored pairs with and without ftbert's norms: one line, the same losses.

    .venv/bin/python examples/finetune_norm.py .models/minilm-l6 .models/.../sts_b/sts-train.csv

Takes a HuggingFace folder or hub id and STS-B's file (score 0 to 5 in the fifth column, sentences in the next two), and
the steps (default: 6). On a GPU, where there is one, under bf16 autocast, it also prints the memory of each run.
"""

from __future__ import annotations

import csv
import sys
import time
from itertools import islice
from typing import Any

import torch
from torch.nn.functional import cosine_similarity, mse_loss
from transformers import AutoModel, AutoTokenizer

from ftbert import norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIRS, LONGEST = 8, 32  # pairs of a step, tokens of a text


def losses(folder: str, batches: list[tuple[Any, torch.Tensor]], patched: bool) -> list[float]:
    torch.manual_seed(0)  # of dropout
    model = AutoModel.from_pretrained(folder).to(DEVICE).train()
    if patched:
        norm.patch(model)  # in place: parameters, optimizer and checkpoints stay as they are
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=2e-5), []
    for texts, scores in batches:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            hidden, mask = model(**texts).last_hidden_state, texts["attention_mask"][..., None]
        first, second = ((hidden * mask).sum(1) / mask.sum(1)).float().chunk(2)  # mean pooling
        loss = mse_loss(cosine_similarity(first, second), scores)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main(folder: str, pairs_file: str, steps: str = "6") -> None:
    tokenizer, batches = AutoTokenizer.from_pretrained(folder), []
    with open(pairs_file, encoding="utf-8", newline="") as file:
        rows = list(islice(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), PAIRS * int(steps)))
    for start in range(0, len(rows), PAIRS):
        some = rows[start : start + PAIRS]
        texts = [row[5] for row in some] + [row[6] for row in some]
        ids = tokenizer(texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt").to(DEVICE)
        batches.append((ids, torch.tensor([float(row[4]) / 5 for row in some], device=DEVICE)))
    curves = []
    for patched in (False, True):
        began = time.perf_counter()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        curves.append(losses(folder, batches, patched))
        peak = f", at most {torch.cuda.max_memory_allocated() >> 20} MiB" if DEVICE == "cuda" else ""
        print(f"{'with' if patched else 'without'} ftbert.norm ({time.perf_counter() - began:.1f} s{peak}):")
        print("  " + " ".join(f"{loss:.4f}" for loss in curves[-1]))
    rtol, atol = (1e-3, 1e-5) if DEVICE == "cpu" else (5e-2, 2e-3)  # bf16 rounds
    torch.testing.assert_close(torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=rtol, atol=atol)
    print("the same losses")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
