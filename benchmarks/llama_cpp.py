"""A peer in processes of its own: llama.cpp's llama-bench and llama-batched-bench, built by build_llama_cpp.sh.

Their steps take random tokens and choose none; a process loads the model, warms up and reports one run of each case.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "llama.cpp q8_0"


@dataclass(frozen=True)
class Case:
    """generate: steps behind `tokens` tokens of each of `batch` texts; else the prompt of so many tokens itself."""

    generate: bool
    batch: int
    tokens: int

    @property
    def label(self) -> str:
        texts = f", {self.batch} texts" if self.batch > 1 else ""
        return f"{'tokens behind' if self.generate else 'prompt of'} {self.tokens}{texts}"


class LlamaCpp:
    def __init__(self, folder: Path, model: Path, device: str, threads: int) -> None:
        """folder: with the two programs."""
        self.folder, self.model = folder, model
        self.options = ["-fa", "1", "-ngl", "99"] if device == "cuda" else ["-t", str(threads), "-ngl", "0"]
        self.facts: dict[str, Any] = {}  # as llama-bench reports them: build, backend, flash_attn

    def seconds(self, cases: Sequence[Case], steps: int) -> dict[Case, float]:
        """Of a prompt, or of one step of all texts. RuntimeError: a program failed."""
        return dict(self._seconds(cases, steps))

    def _seconds(self, cases: Sequence[Case], steps: int) -> Iterator[tuple[Case, float]]:
        alone = [case for case in cases if case.batch == 1]
        prompts = sorted({case.tokens for case in alone if not case.generate})
        depths = sorted({case.tokens for case in alone if case.generate})
        if prompts:
            found = self._bench("-n", "0", "-p", _list(prompts))
            yield from ((Case(False, 1, row["n_prompt"]), row["avg_ns"] / 1e9) for row in found)
        if depths:
            found = self._bench("-p", "0", "-n", str(steps), "-d", _list(depths))
            yield from ((Case(True, 1, row["n_depth"]), row["avg_ns"] / 1e9 / steps) for row in found)
        for case in cases:
            if case.batch > 1:
                yield case, self._batched(case, steps)

    def _bench(self, *options: str) -> list[dict[str, Any]]:
        rows = self._run("llama-bench", "-r", "1", "-o", "jsonl", *options)
        for key in ("build_commit", "backends", "gpu_info", "flash_attn", "n_threads", "model_type", "model_size"):
            self.facts[key] = rows[0].get(key)
        return rows

    def _batched(self, case: Case, steps: int) -> float:
        prompt = max(case.tokens, 1)
        room = str(case.batch * (prompt + steps))
        sizes = ["-npp", str(prompt), "-ntg", str(steps), "-npl", str(case.batch), "-c", room]
        (row,) = self._run("llama-batched-bench", "--output-format", "jsonl", *sizes)
        return float(row["t_tg"]) / steps if case.generate else float(row["t_pp"])

    def _run(self, program: str, *options: str) -> list[dict[str, Any]]:
        command = [str(self.folder / program), "-m", str(self.model), *self.options, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not rows:
            said = done.stderr.strip().splitlines() or ["it reported nothing"]
            raise RuntimeError(f"{program}, exit code {done.returncode}: {said[-1]}")
        return rows


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
