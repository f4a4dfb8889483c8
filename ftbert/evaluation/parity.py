"""Parity with transformers on this machine, on ragged text under every kind of mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftbert.dtypes import Q8_0, told_dtype
from ftbert.evaluation.errors import (
    Difference,
    HeadAgreement,
    LayerError,
    costliest,
    head_agreements,
    layer_errors,
)
from ftbert.evaluation.gates import GATES, Gate, cosines_allowed, least_cosine, within
from ftbert.evaluation.reference_model import base_of, in_dtype, pad_id, peer_dtype, reference_of
from ftbert.evaluation.sample_texts import SAMPLE_TEXTS
from ftbert.evaluation.sequences import sequences_of
from ftbert.evaluation.text_parity import (
    LowText,
    TextResult,
    compare_texts,
    lowest_of,
    pooling_of,
    reads_texts,
    table_head,
    table_row,
)
from ftbert.model import Model
from ftbert.padded_batches import MASK_KINDS, padded
from ftbert.pooled_rows import pooled
from ftbert.quantization import stored_type

_BATCH = 32  # texts

Batches = Sequence[tuple[Tensor, Tensor]]  # ids and masks, int64 [batch, longest] each


@dataclass(frozen=True)
class MaskResult:
    """One kind of mask. All numbers are over valid tokens only. Cosines are of tokens, in 8 bits of the texts' vectors;
    lowest: the vectors with the least. An allowed number that is None is not asked for."""

    mask: str
    tokens: int
    max_abs_diff: float
    max_abs_diff_allowed: float | None
    mean_cosine: float
    mean_cosine_allowed: float | None
    min_cosine: float
    min_cosine_allowed: float
    padding_is_zero: bool
    passed: bool
    lowest: tuple[LowText, ...] = ()


@dataclass(frozen=True)
class CheckResult:
    """What `check` found. texts: None without a tokenizer. layers, heads: of 8 bits alone."""

    device: str
    dtype: str
    passed: bool
    masks: tuple[MaskResult, ...]
    texts: TextResult | None
    layers: tuple[LayerError, ...] = ()
    heads: tuple[HeadAgreement, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"way_around": self.way_around}

    @property
    def way_around(self) -> str:
        """What to do where 8 bits cost this model too much, or ""."""
        if self.passed or not self.layers:
            return ""
        if self.dtype == told_dtype(Q8_0):
            return "way around: --dtype fp32, or bf16"
        kind, keep = stored_type(self.dtype), costliest(self.layers)
        return (
            f"way around: leave layers as they are, `ftbert quantize MODEL DST --dtype {kind.name} --keep {keep}` (the "
            f"one that adds most error), or --dtype {kind.instead}"
        )

    def __str__(self) -> str:
        lines = [table_head(self.masks[0])]
        lines += [
            table_row(m.mask, m.tokens, m) + ("" if m.padding_is_zero else "  (rows at padding are not zero)")
            for m in self.masks
        ]
        if self.texts is not None:
            lines.append(str(self.texts))
        if self.layers:
            lines += ["", f"{'behind':<12}{'relative error':>15}{'mean cosine':>13}{'min cosine':>13}  (of tokens)"]
            lines += [str(layer) for layer in self.layers]
        if self.heads:
            lines += ["", f"{'head':<24}{'same argmax':>16}{'allowed':>9}{'max abs diff':>15}"]
            lines += [str(head) for head in self.heads]
        lowest = self.masks[0].lowest if self.texts is None or not self.texts.lowest else self.texts.lowest
        if lowest:
            lines += ["", "lowest cosines", *(f"{low.cosine:>9.5f}  {low.text!r}" for low in lowest), ""]
        verdict = "passed" if self.passed else "FAILED"
        lines.append(f"{verdict}: last_hidden_state against transformers, {self.device} {self.dtype}")
        return "\n".join([*lines, self.way_around] if self.way_around else lines)


@torch.inference_mode()
def check(
    model: Model, *, texts: Sequence[str] | None = None, against: str | Path | torch.nn.Module | None = None
) -> CheckResult:
    """Compares last_hidden_state [batch, seq, hidden] with transformers in float32 on the same ids.

    texts: what to run, by default texts of 1 to over 200 words; random ids if there is no tokenizer. against: of a
    model from a folder that is quantized, the plain model that it was made from.
    fp32 must agree to 2e-5 (cpu) or 5e-5 (cuda). fp16 and bf16 may err 1.25 times as much as transformers
    does in that dtype, with a cosine of at least 0.9999 or 0.999 for every token, or less where transformers' own
    has less (1 - cosine at most 1.25 squared times its own). In fp8 the vectors of texts, pooled
    as the model pools, have a mean cosine of 0.997 and none below 0.99, and heads choose the same class in 99 %; on
    random ids, and where a mask moves positions, 0.95 and 0.9. In int8 and q8_0 it is 0.999 and 0.995, and 0.99, 0.97
    (gates.py).
    Where there is a tokenizer, texts are compared too: their ids with AutoTokenizer's, what encode makes of them with
    sentence-transformers where it is installed and reads the folder, else with transformers.
    """
    if texts is not None and not texts:
        raise ValueError("texts is empty; give at least one, or None for the built-in ones")
    given = SAMPLE_TEXTS if texts is None else texts
    sequences = sequences_of(model, given)
    whole = reference_of(model, against).to(model.device)
    reference, gate = base_of(whole), GATES[model.dtype]
    runs = {kind: _batches(sequences, kind, pad_id(reference), model.device) for kind in MASK_KINDS}
    peer = None if gate.error_ratio is None else in_dtype(reference, peer_dtype(model))
    masks = tuple(_compare(model, reference, peer, kind, batches, gate) for kind, batches in runs.items())
    spoken = None
    if model.folder is not None:
        try:
            spoken = compare_texts(model, reference, given, gate, peer)
        except ValueError as error:
            spoken = TextResult.failed(len(given), str(error))
    layers = layer_errors(model, reference, runs["right"]) if gate.by_text else ()
    heads = head_agreements(model, whole, sequences, gate.agreement) if gate.by_text else ()
    parts: list[Any] = [*masks, *heads, *([] if spoken is None else [spoken])]
    passed = all(part.passed for part in parts)
    return CheckResult(str(model.device), told_dtype(model.dtype), passed, masks, spoken, layers, heads)


def _batches(sequences: Sequence[Tensor], kind: str, pad: int, device: torch.device) -> Batches:
    starts = range(0, len(sequences), _BATCH)
    return [padded(sequences[start : start + _BATCH], kind, pad, device) for start in starts]


def _compare(model: Model, reference: Any, peer: Any, kind: str, batches: Batches, gate: Gate) -> MaskResult:
    """peer: transformers' encoder in the dtype of `model`, whose error is the measure, or None."""
    tokens, vectors, theirs = Difference(), Difference(), Difference()
    zero, names = True, list[str]()
    pooling = pooling_of(model) if gate.by_text else ""
    mean_allowed, least_allowed = cosines_allowed(gate, usual=kind == "right" and reads_texts(model))
    kept_alone = kind == "holes" and any(layer.attention.window for layer in model.config.layers)
    for ids, mask in batches:
        valid = mask.bool()
        want = _hidden(reference, ids, mask, kept_alone)
        made: Any = model(ids, attention_mask=mask)
        got = made.last_hidden_state.float()
        tokens.add(got[valid], want[valid])
        zero = zero and not bool(got[~valid].any())
        if peer is not None:
            theirs.add(_hidden(peer, ids, mask, kept_alone)[valid], want[valid])
        if gate.by_text:
            ours, exact = (
                torch.stack([pooled(rows[kept], pooling) for rows, kept in zip(hidden, valid, strict=True)])
                for hidden in (got, want)
            )
            names += [f"sequence {len(names) + i}, {int(n)} tokens" for i, n in enumerate(valid.sum(1))]
            vectors.add(ours, exact)
    limit = None if gate.max_abs_diff is None else gate.max_abs_diff[model.device.type]
    if peer is not None and gate.error_ratio is not None:
        limit = gate.error_ratio * theirs.largest
        least_allowed = least_cosine(gate, least_allowed, theirs.min_cosine)
    of = vectors if gate.by_text else tokens
    near = of.min_cosine >= least_allowed and (mean_allowed is None or of.mean_cosine >= mean_allowed)
    return MaskResult(
        mask=kind,
        tokens=len(tokens.cosines),
        max_abs_diff=tokens.largest,
        max_abs_diff_allowed=limit,
        mean_cosine=of.mean_cosine,
        mean_cosine_allowed=mean_allowed,
        min_cosine=of.min_cosine,
        min_cosine_allowed=least_allowed,
        padding_is_zero=zero,
        passed=within(tokens.largest, limit) and near and zero,
        lowest=lowest_of(names, vectors.cosines),
    )


def _hidden(reference: Any, ids: Tensor, mask: Tensor, kept_alone: bool) -> Tensor:
    """float32 [batch, seq, hidden]. kept_alone: each text's kept tokens go through without the others, at the positions
    of their columns: ftbert's windows count kept tokens, as those of transformers' flash attention do, and its other
    attention counts columns."""
    if not kept_alone:
        return reference(input_ids=ids, attention_mask=mask).last_hidden_state.float()  # type: ignore[no-any-return]
    rows = []
    for row, kept in zip(ids, mask.bool(), strict=True):
        columns = kept.nonzero().T
        # With a mask: transformers takes positions without one for several texts in a row.
        made = reference(input_ids=row[kept][None], attention_mask=torch.ones_like(columns), position_ids=columns)
        found = made.last_hidden_state[0].float()
        rows.append(found.new_zeros(len(row), found.shape[1]).index_copy(0, columns[0], found))
    return torch.stack(rows)
