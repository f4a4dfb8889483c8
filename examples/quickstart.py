"""Embed a few sentences and find the closest pair.

    .venv/bin/python examples/quickstart.py .models/minilm-l6

`make run` makes that environment and that folder; where ftbert is installed, any Python and any HuggingFace folder or
hub id will do.
"""

from __future__ import annotations

import sys

import numpy as np

import ftbert

TEXTS = [
    "How do I reset my password?",
    "I cannot log in any more, I forgot my passphrase.",
    "Which trains go to Lisbon on Sunday?",
    "The soup needs another ten minutes and a pinch of salt.",
]


def main(folder: str) -> None:
    model = ftbert.load(folder)
    vectors = model.encode(TEXTS)  # float32 [4, hidden], unit length
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -1)
    first, second = np.unravel_index(similarity.argmax(), similarity.shape)
    print(f"closest ({similarity.max():.3f}):\n  {TEXTS[first]}\n  {TEXTS[second]}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
