"""The first entries of a vector alone: a model trained for it (Matryoshka) keeps most of its sense in a fraction.

    python examples/matryoshka.py nomic-ai/modernbert-embed-base 64 256

Takes a folder or hub id, and the entries to keep.
"""

from __future__ import annotations

import sys

import ftbert

QUERY = "How do I reset my password?"
TEXTS = ["I forgot my passphrase and cannot log in.", "Which trains go to Lisbon on Sunday?", "The soup needs salt."]


def main(folder: str, *entries: str) -> None:
    model = ftbert.load(folder)
    for kept in [*map(int, entries), None]:  # None: all, or what the folder itself keeps
        query = model.encode_query(QUERY, truncate_dim=kept)
        texts = model.encode_document(TEXTS, truncate_dim=kept)  # float32 [3, kept], of length 1 again
        print(f"{texts.shape[1]:>5} entries: " + "  ".join(f"{score:.3f}" for score in texts @ query))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
