"""Score texts token by token (ColBERT): each token of the query looks for the one in the text that is most like it.

    python examples/late_interaction.py colbert-ir/colbertv2.0

Takes the folder or hub id of a model of one vector for each token: of PyLate, of sentence-transformers'
MultiVectorEncoder, or of Stanford.
"""

from __future__ import annotations

import sys

import ftbert

QUERY = "How do I reset my password?"
TEXTS = ["I forgot my passphrase and cannot log in.", "Which trains go to Lisbon on Sunday?", "The soup needs salt."]


def main(folder: str) -> None:
    model = ftbert.load(folder)
    query = model.encode_multi_vector(QUERY, task="query")  # float32 [tokens, width], rows of length 1
    texts = model.encode_multi_vector(TEXTS, task="document")  # a list of them
    scores = model.similarity([query], texts)[0].tolist()  # MaxSim; model.rerank(QUERY, TEXTS) does all of it
    for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
        print(f"{score:.3f}  {text}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
