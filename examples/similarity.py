"""Draws the cosine similarity of texts, related ones side by side, and prints the closest pairs.

python examples/similarity.py TEXTS.txt VECTORS.npy OUT.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.patches import Rectangle
from scipy.cluster.hierarchy import fcluster, leaves_list, linkage, optimal_leaf_ordering
from scipy.spatial.distance import pdist

GROUPS = 8  # topics to look for; the picture shows what was found, not what was meant
INK, FAINT, PAPER = "#22262b", "#8a9099", "#fbfaf7"
SEA = (PAPER, "#cfe3dc", "#5fb0a6", "#1d6f86", "#163a63", "#0d1730")
LABEL = 64  # characters


def main(texts_file: str, vectors_file: str, picture: str) -> None:
    texts = Path(texts_file).read_text(encoding="utf-8").splitlines()
    vectors = np.load(vectors_file)
    if len(texts) != len(vectors) or len(texts) < 3:
        sys.exit(f"{len(texts)} texts but {len(vectors)} vectors; expected equally many, and at least 3")
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    similarity = vectors @ vectors.T

    distances = pdist(vectors)
    tree = optimal_leaf_ordering(linkage(vectors, method="ward"), distances)
    order = leaves_list(tree)
    groups = fcluster(tree, min(GROUPS, len(texts)), criterion="maxclust")[order]
    print_closest(texts, similarity)
    draw([texts[i] for i in order], similarity[np.ix_(order, order)], groups, Path(picture))


def print_closest(texts: list[str], similarity: np.ndarray, pairs: int = 5) -> None:
    rows, columns = np.triu_indices(len(texts), k=1)
    best = np.argsort(-similarity[rows, columns])[:pairs]
    for row, column in zip(rows[best], columns[best], strict=True):
        print(f"  {similarity[row, column]:.3f}  {shorten(texts[row])}\n         {shorten(texts[column])}")


def shorten(text: str) -> str:
    return text if len(text) <= LABEL else text[: LABEL - 1].rsplit(" ", 1)[0] + " …"


def draw(texts: list[str], similarity: np.ndarray, groups: np.ndarray, picture: Path) -> None:
    count = len(texts)
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": INK, "axes.edgecolor": PAPER})
    side = max(6.0, 0.16 * count)
    figure = plt.figure(figsize=(side + 5.2, side + 1.6), facecolor=PAPER)
    left, bottom = 4.4 / (side + 5.2), 0.35 / (side + 1.6)
    axes = figure.add_axes((left, bottom, side / (side + 5.2), side / (side + 1.6)))
    shown = np.where(np.eye(count, dtype=bool), np.nan, similarity)  # 1 for everybody: it says nothing
    colours = LinearSegmentedColormap.from_list("sea", SEA)
    colours.set_bad("#e9e6df")
    most = float(np.nanpercentile(shown, 99.5))
    # The power lets the weak resemblance that any two English sentences have fade into the paper.
    image = axes.imshow(shown, cmap=colours, norm=PowerNorm(1.4, 0, max(most, 0.1), clip=True), interpolation="nearest")

    starts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), count]
    hues = matplotlib.colormaps["Dark2"]
    for number, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        frame = Rectangle((begin - 0.5, begin - 0.5), end - begin, end - begin, fill=False)
        frame.set(edgecolor=hues(number % 8), linewidth=2.0)
        axes.add_patch(frame)
        axes.plot([-1.0, -1.0], [begin - 0.35, end - 0.65], color=hues(number % 8), linewidth=3, clip_on=False,
                  solid_capstyle="butt")  # fmt: skip
        for row in range(begin, end):
            axes.text(-1.7, row, shorten(texts[row]), ha="right", va="center", fontsize=6.6, color=INK)
    for edge in starts[1:-1]:
        axes.axhline(edge - 0.5, color=PAPER, linewidth=0.8)
        axes.axvline(edge - 0.5, color=PAPER, linewidth=0.8)
    axes.set(xticks=[], yticks=[], xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5))

    title = "What the model takes to be about the same thing"
    figure.text(0.02, 1 - 0.42 / (side + 1.6), title, fontsize=15, va="center")
    subtitle = f"Cosine similarity of {count} texts, put in order by the vectors alone; frames are the groups found"
    figure.text(0.02, 1 - 0.78 / (side + 1.6), subtitle, fontsize=9, va="center", color=FAINT)
    bar = figure.add_axes((left + side / (side + 5.2) + 0.018, bottom, 0.012, 0.35 * side / (side + 1.6)))
    scale = figure.colorbar(image, cax=bar)
    scale.outline.set_visible(False)
    bar.tick_params(labelsize=8, length=0, colors=FAINT)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130, facecolor=PAPER)
    print(f"  drawn: {picture}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
