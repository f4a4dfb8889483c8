"""A model against transformers on this machine: its numbers (`check`) and its speed (`bench`)."""

from ftbert.evaluation.parity import CheckResult, check
from ftbert.evaluation.sample_texts import SAMPLE_TEXTS
from ftbert.evaluation.sequences import ragged_lengths, random_sequences, sequences_of
from ftbert.evaluation.speed import BenchResult, bench

__all__ = [
    "SAMPLE_TEXTS", "BenchResult", "CheckResult", "bench", "check", "ragged_lengths", "random_sequences",
    "sequences_of",
]  # fmt: skip
