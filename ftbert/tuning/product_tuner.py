"""Which algorithms a product has, how long each takes, and the row of the table that follows. docs/tuning.md.

Times are of a CUDA graph in which the product runs on weight matrices by turns, more than the L2 cache holds, as in a
model. A LayerNorm of a few rows follows each product; the LayerNorms' own time is subtracted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

import torch

from ftbert.checkpoint import LayerConfig, ModelConfig, NormConfig, activations, fits_8_bits
from ftbert.dtypes import DTYPES
from ftbert.tuning.c_calls import Algorithm
from ftbert.tuning.gemm_rows import WGMMA_TILE, WITH_NORM, Own, Product, Row
from ftbert.tuning.gemm_table import tuner_module
from ftbert.tuning.product_bench import Bench, choice_of, is_faster

_DEFERRED_ROWS = 1024  # up to which norms are deferred: csrc/layers/prepared.h, most_deferred_tokens
_FINALISTS = 5
_ROUNDS = 15  # of the turns that these take
_E4M3_SUMS = 2**-6  # of the largest result: more than sums of E4M3, which keep 14 bits, differ by from kernel to kernel
_OPERANDS = {"e4m3": "e4m3", "int8": "byte_rows"}  # what matrices stored so are multiplied by
_WITH_E4M3 = ("none", "gelu")  # activations that a product of E4M3 applies itself; with a gate all of them


def with_layers_in(word: str, config: ModelConfig) -> ModelConfig:
    """The same with every matrix of the layers in e4m3 or int8 whose sizes allow it."""
    layers = (spec for spec in config.weight_specs() if spec.matrix and spec.name.startswith("layers."))
    return config.stored_as([spec.name for spec in layers if not fits_8_bits(word, spec.shape)], word)


def products(config: ModelConfig, dtype: str) -> list[Product]:
    """The linear layers that this encoder runs per token, each once. dtype: of all but the matrices in 8 bits."""
    fused = all(tuner_module().fuses_heads_of(layer.attention.head_size) for layer in config.layers)
    next_norms = [layer.attention_norm if layer.norm_place == "pre" else None for layer in config.layers[1:]]
    found = [
        product
        for layer, next_norm in zip(config.layers, [*next_norms, None], strict=True)
        for product in _of_layer(config.hidden, layer, next_norm, dtype, fused)
    ]
    if config.embedding_projection:
        found.append(Product(dtype, config.hidden, config.embedding, bias=True))
    return list(dict.fromkeys(found))


def _of_layer(hidden: int, layer: LayerConfig, next_norm: NormConfig | None, dtype: str, fused: bool) -> list[Product]:
    """QKV, attention's output, and the two of the feed-forward block. next_norm: before the next layer."""
    attention, ffn = layer.attention, layer.ffn
    post = layer.norm_place == "post"

    def types(stored: str, result: str = dtype) -> str:
        return dtype if stored == "model" else f"{_OPERANDS[stored]} {stored} {result}"

    def to_stream(stored: str, k: int, bias: bool, norm: NormConfig | None, result_norm: NormConfig | None) -> Product:
        """norm: of the residual's sum, or before the block that follows."""
        product = Product(types(stored), hidden, k, bias=bias, layernorm=post, prenorm=not post)
        # What has another norm behind it, or none, is alone: the kernel that follows adds bias and residual.
        contained = norm is not None and result_norm is None and not (post and norm.kind == "rms")
        return product if contained else without_norm(product)

    activation, narrow = activations()[ffn.activation], "e4m3" if ffn.down_type == "e4m3" else dtype
    rows = ffn.inter * (1 + ffn.gated)
    up = Product(types(ffn.up_type, narrow), rows, hidden, ffn.up_bias, activation, gated=ffn.gated)
    if ffn.up_type == "e4m3" and not up.gated and activation not in _WITH_E4M3:
        up = Product(types(ffn.up_type), up.n, up.k)
    return [
        # The general attention path adds the bias itself.
        Product(
            types(attention.qkv_type), attention.width + 2 * attention.kv_width, hidden, attention.qkv_bias and fused
        ),
        to_stream(
            attention.out_type, attention.width, attention.out_bias, layer.attention_norm if post else layer.ffn_norm,
            layer.attention_result_norm,
        ),
        up,
        to_stream(
            ffn.down_type, ffn.inter, ffn.down_bias, layer.ffn_norm if post else next_norm, layer.ffn_result_norm
        ),
    ]  # fmt: skip


def products_of_shape(hidden: int, inter: int, activation: str, dtype: str, word: str = "") -> list[Product]:
    """Of one layer, where LayerNorm follows both blocks. word: as of `with_layers_in`, or "". ValueError for an
    activation that the core does not know."""
    if activation not in activations():
        raise ValueError(f"activation must be one of {', '.join(activations())}; got {activation!r}")
    attention, ffn, norm = {"heads": 1, "head_size": hidden}, {"inter": inter, "activation": activation}, {"eps": 1e-12}
    described = {"attention": attention, "attention_norm": norm, "ffn": ffn, "ffn_norm": norm}
    around = {"vocab": 1, "hidden": hidden, "embedding": hidden, "positions": {"kind": "none", "rows": 1}}
    config = ModelConfig.from_json({**around, "layers": [described]})
    return _of_layer(hidden, (with_layers_in(word, config) if word else config).layers[0], None, dtype, fused=True)


def without_norm(product: Product) -> Product:
    """The product that runs, the norm behind it, where none that contains it is faster; itself without one."""
    return replace(product, bias=False, layernorm=False, prenorm=False) if product.normed else product


def search(bench: Bench) -> list[Algorithm]:
    """ftbert's own kernels and cuBLASLt's proposals, of which a model runs any, the fastest first."""
    return _fastest(bench, [*bench.own(), *([] if bench.product.scaled else bench.heuristics())])


def _fastest(bench: Bench, candidates: list[Algorithm], rounds: int = 1, launches: int = 0) -> list[Algorithm]:
    least = [min(times) for times in bench.times(candidates, rounds, launches)]
    return [candidate for _, candidate in sorted(zip(least, candidates, strict=True), key=lambda pair: pair[0])]


def buckets(first: int, last: int) -> list[tuple[int, int]]:
    """Ranges of m that share a choice, timed at their last m. The encoder rounds m up (cuda_gemm_rows in
    csrc/gemm/gemm.h): to that m, or above 1024 to the middle of the range, above 8192 to a quarter of it, above 16384
    to a multiple of 64, where that is enough."""
    edges = [8, 16, 24, 32, 48, 64, 80, 96, 112, 128]
    while edges[-1] < last:
        at = edges[-1]
        edges.append(at + (64 if at < 4096 else 128 if at < 8192 else 256 if at < 16384 else at // 2048 * 64))
    ranges = [(low + 1, high) for low, high in zip([0, *edges], edges, strict=False)]
    return [(low, high) for low, high in ranges if high >= first and low <= last]


class ProductTuner:
    """Makes the rows of one product, one after the other: what won before is a candidate."""

    def __init__(
        self,
        product: Product,
        device: str | torch.device = "cuda",
        known: Iterable[Row] = (),
        followed: Product | None = None,
    ) -> None:
        """known: rows of other tables for this GPU and cuBLASLt. followed: the same product with the norm that
        follows it; it is then timed with that behind it: what is fastest without need not be the fastest with it."""
        self.product, self.device = product, device
        self._measured_as = followed or product
        self._known = [row for row in known if row.product == product]
        self._winners: dict[Own | tuple[int, ...], Algorithm] = {}

    def row(self, first: int, last: int) -> Row:
        """The row for m from first to last.

        The candidates are ftbert's own kernels, cuBLASLt's proposals, what won before and what known rows of this m
        run; they are timed at `last`, in a quick round first. The winner must be as accurate as cuBLASLt's first
        proposal, and faster than what this process runs for the product by more than the measurement's noise and more
        than 2 %; else the row names that. So no row of this product may be in force. Of a product with scales only
        ftbert's own kernels are candidates, and what this process runs takes the proposal's place.

        Layers whose four products run wgmma_tile defer their norms, and other variants are the fastest in such layers
        than alone: BERT-large at 256 tokens takes 0.674 ms, with the variants that are the fastest alone 0.735 (H200).
        So where the rule chooses that kernel up to 1024 rows there are no candidates. In E4M3 the rule decides up to
        there which layers defer norms, by other variants than those of the product alone: the row names none.

        With a norm the candidates are the kernels that contain it, and what the product without it runs in this
        process, followed by the norm. Raises NothingProposed.
        """
        bench = Bench(self._measured_as, last, self.device)
        runs = Bench(self.product, last, self.device).chosen()
        scaled = self.product.scaled
        rivals = list({choice_of(a): a for a in (runs if scaled else bench.first_proposal(), runs)}.values())
        candidates = [a for a in bench.own() if (a.kernel in WITH_NORM) == self.product.normed]
        if self.product.normed:
            candidates.append(Bench(without_norm(self.product), last, self.device).chosen())
        elif not scaled:
            here = [row.algorithm for row in self._known if row.first <= last and first <= row.last]
            known = [bench.algorithm(words) for words in here if isinstance(words, tuple)]
            candidates += [*known, *bench.heuristics(), *self._winners.values()]
        by_rule = last <= _DEFERRED_ROWS and self.product.types[0] == "e4m3"
        if by_rule or (runs.kernel == WGMMA_TILE and last <= _DEFERRED_ROWS and not scaled):
            candidates = []
        new = {choice_of(a): a for a in candidates if all(choice_of(a) != choice_of(rival) for rival in rivals)}
        best = _fastest(bench, list(new.values()), 2, -(-bench.launches // 3))[:_FINALISTS]
        turns = bench.times([*rivals, *best], _ROUNDS)
        us = [statistics.median(times) for times in turns]
        able = (
            i for i in sorted(range(len(rivals), len(us)), key=us.__getitem__)
            if is_faster(turns[i], turns[len(rivals) - 1]) and verified(bench, best[i - len(rivals)], rivals[0])
        )  # fmt: skip
        winner = next(able, len(rivals) - 1)
        algorithm = [*rivals, *best][winner]
        self._winners[choice_of(algorithm)] = algorithm
        contained = not self.product.normed or algorithm.kernel in WITH_NORM
        chosen = choice_of(algorithm) if contained and not by_rule else None
        return Row(self.product, first, last, chosen, (last,), (us[winner],), (us[0],))


def verified(bench: Bench, algorithm: Algorithm, default: Algorithm) -> bool:
    """As accurate as what runs by default: rounding may differ, a wrong sum may not."""
    rounding = _E4M3_SUMS if bench.product.types[0] == "e4m3" else torch.finfo(DTYPES[bench.product.types[2]]).eps
    return bench.error(algorithm) <= 1.25 * bench.error(default) + rounding
