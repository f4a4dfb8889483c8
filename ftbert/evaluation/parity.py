"""Parity with transformers on this machine, on ragged text under every kind of mask."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ftbert.evaluation.sample_texts import SAMPLE_TEXTS
from ftbert.evaluation.sequences import sequences_of
from ftbert.evaluation.text_parity import TextResult, compare_texts, table_row
from ftbert.padded_batches import MASK_KINDS, padded

# Largest absolute difference of a valid token's hidden state to transformers in float32.
_FP32_GATE = {"cpu": 2e-5, "cuda": 5e-5}
# In half precision: against the error that transformers' own model makes in that dtype, and per token.
_HALF_ERROR_RATIO = 1.25
_HALF_COSINE = {torch.float16: 0.9999, torch.bfloat16: 0.999}


@dataclass(frozen=True)
class MaskResult:
    """One kind of mask. All numbers are over valid tokens only."""

    mask: str
    tokens: int
    max_abs_diff: float
    max_abs_diff_allowed: float
    min_cosine: float
    min_cosine_allowed: float
    padding_is_zero: bool
    passed: bool


@dataclass(frozen=True)
class CheckResult:
    """What `check` found."""

    device: str
    dtype: str
    passed: bool
    masks: tuple[MaskResult, ...]
    texts: TextResult | None  # None: no tokenizer

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{'mask':<8}{'tokens':>8}{'max abs diff':>15}{'allowed':>11}{'min cosine':>13}{'allowed':>9}"
        ]
        lines += [
            table_row(m.mask, m.tokens, m) + ("" if m.padding_is_zero else "  (rows at padding are not zero)")
            for m in self.masks
        ]
        if self.texts is not None:
            lines.append(str(self.texts))
        verdict = "passed" if self.passed else "FAILED"
        return "\n".join(
            [*lines, f"{verdict}: last_hidden_state against transformers, {self.device} {self.dtype}"]
        )


@torch.inference_mode()
def check(model: Any, *, texts: Sequence[str] | None = None) -> CheckResult:
    """Compares last_hidden_state [batch, seq, hidden] with transformers in float32 on the same ids.

    texts: what to run, by default texts of 1 to over 200 words; random ids if there is no tokenizer.
    fp32 must agree to 2e-5 (cpu) or 5e-5 (cuda). fp16 and bf16 may err 1.25 times as much as transformers
    does in that dtype, with a cosine of at least 0.9999 or 0.999 for every token. Where there is a tokenizer, texts are
    compared too: their ids with AutoTokenizer's, what encode makes of them with sentence-transformers where it is
    installed and reads the folder, else with transformers.
    """
    if texts is not None and not texts:
        raise ValueError("texts is empty; give at least one, or None for the built-in ones")
    sequences = sequences_of(model, SAMPLE_TEXTS if texts is None else texts)
    reference = base_of(model.reference()).to(model.device)
    runs = [padded(sequences, kind, pad_id(reference), model.device) for kind in MASK_KINDS]
    dtype = model.dtype
    wanted = [_hidden(reference, ids, mask) for ids, mask in runs]
    allowed = [_FP32_GATE[model.device.type]] * len(runs)
    if dtype != torch.float32:
        peer = in_dtype(reference, dtype)
        allowed = [
            _HALF_ERROR_RATIO * _largest(_hidden(peer, ids, mask) - want, mask)
            for (ids, mask), want in zip(runs, wanted, strict=True)
        ]
    cosine = _HALF_COSINE.get(dtype, 0.99999)
    masks = tuple(
        _compare(model, kind, ids, mask, want, limit, cosine)
        for kind, (ids, mask), want, limit in zip(MASK_KINDS, runs, wanted, allowed, strict=True)
    )
    name = str(dtype).removeprefix("torch.")
    # Vectors of length 1 have entries far below 1: in half precision their direction is what counts.
    limit = _FP32_GATE[model.device.type] if dtype == torch.float32 else 1.0
    spoken = None
    if model.folder is not None:
        given = SAMPLE_TEXTS if texts is None else texts
        try:
            spoken = compare_texts(model, reference, given, limit, cosine)
        except ValueError as error:
            spoken = TextResult.failed(len(given), str(error))
    passed = all(m.passed for m in masks) and (spoken is None or spoken.passed)
    return CheckResult(str(model.device), name, passed, masks, spoken)


def base_of(reference: Any) -> Any:
    """The encoder of a transformers model, without its head."""
    return getattr(reference, "base_model", reference)


def in_dtype(reference: Any, dtype: torch.dtype) -> Any:
    """`reference` computing in `dtype`. A copy: .to() changes a module in place, and this one may be the user's."""
    return reference if dtype == torch.float32 else copy.deepcopy(reference).to(dtype)


def pad_id(reference: Any) -> int:
    """The id that transformers takes for padding; 0 when the config has none."""
    return int(getattr(reference.config, "pad_token_id", None) or 0)


def _compare(
    model: Any,
    kind: str,
    ids: torch.Tensor,
    mask: torch.Tensor,
    want: torch.Tensor,
    limit: float,
    cosine: float,
) -> MaskResult:
    got = model(ids, attention_mask=mask).last_hidden_state.float()
    valid = mask.bool()
    difference = _largest(got - want, mask)
    # In double: the cosine of two equal float32 vectors can come out as 0.9999999.
    cosines = torch.nn.functional.cosine_similarity(got[valid].double(), want[valid].double(), dim=-1)
    lowest = float(cosines.min())
    zero = not bool(got[~valid].any())
    return MaskResult(
        mask=kind,
        tokens=int(valid.sum()),
        max_abs_diff=difference,
        max_abs_diff_allowed=limit,
        min_cosine=lowest,
        min_cosine_allowed=cosine,
        padding_is_zero=zero,
        passed=difference <= limit and lowest >= cosine and zero,  # False for NaN as well
    )


def _hidden(reference: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """float32 [batch, seq, hidden]"""
    return reference(input_ids=ids, attention_mask=mask).last_hidden_state.float()


def _largest(difference: torch.Tensor, mask: torch.Tensor) -> float:
    return float(difference[mask.bool()].abs().max())
