"""SIGKILL at random moments of `convert` and `embed`: python tests/kills.py --count 200 --seed 0

After each kill the target must be whole or what it was before, and after the next run nothing else may be left. Children
are forked from a process that has imported everything, so that kills fall into the work. Exit code 1 where one was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from conftest import make_bert
from stub_model import StubModel, use_stub_pooling, write_tokenizer

from ftbert.converters import open_checkpoint
from ftbert.converters.from_huggingface import convert
from ftbert.files import embed_file, staging_path


def _forked(call: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            call()
            code = 0
        finally:
            os._exit(code)
    return child


def _kill_within(call: Callable[[], object], seconds: float) -> bool:
    """Whether the kill came before the end."""
    child = _forked(call)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


EXPECTED = ("killed within", "gone on where they were")


def _takes(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    status = os.waitpid(_forked(call), 0)[1]
    assert status == 0, "the command fails without a kill"
    return time.perf_counter() - began


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _whole(folder: Path) -> bool:
    checkpoint = open_checkpoint(folder)
    return all(bool(tensor.isfinite().all()) for _, tensor in checkpoint.items())


def kill_converts(root: Path, count: int, rng: random.Random) -> Counter[str]:
    """Half of them replace a target (--force), which must be there at every moment."""
    sources = [root / "a", root / "b"]
    for seed, source in enumerate(sources):
        make_bert(seed, hidden_size=256, intermediate_size=1024, vocab_size=8000).save_pretrained(source)
    home, found = root / "converted", Counter[str]()
    home.mkdir()
    takes = _takes(lambda: convert(sources[0], home / "out"))
    for number in range(count):
        force = number % 2 == 0
        if not force and (home / "out").exists():
            (home / "out").rename(root / f"away-{number}")
        killed = _kill_within(lambda: convert(sources[number // 2 % 2], home / "out", force=force), rng.uniform(0, takes))  # noqa: B023
        found["converts killed within"] += killed
        takes *= 1.05 if killed else 0.85  # so that most kills come before the end
        there = (home / "out").exists()
        found["no target though one was replaced"] += force and not there
        found["half-written checkpoints"] += there and not _whole(home / "out")
        if number % 5 == 4:
            _takes(lambda: convert(sources[0], home / "out", force=True))
            found["leftovers of convert"] += _names(home) != ["out"]
        if not (home / "out").exists():
            _takes(lambda: convert(sources[0], home / "out"))
            found["leftovers of convert"] += _names(home) != ["out"]
    return found


def kill_embeds(root: Path, count: int, rng: random.Random) -> Counter[str]:
    use_stub_pooling()
    model = StubModel(write_tokenizer(root / "model"), delay=0.002)
    source, home, found = root / "in.jsonl", root / "embedded", Counter[str]()
    home.mkdir()
    source.write_text("".join(f'{{"text": "cat {"dog " * (i % 7)}"}}\n' for i in range(600)))
    whole: dict[str, bytes] = {}
    takes, resumed = 0.0, root / "resumed"
    for ending in ("npy", "jsonl", "parquet"):
        target = root / f"whole.{ending}"
        takes = max(takes, _takes(lambda: embed_file(model, source, target, batch_records=11)))  # noqa: B023
        whole[ending] = target.read_bytes()
    assert np.load(root / "whole.npy").shape[0] == 600
    for _ in range(count):
        ending = rng.choice(list(whole))
        target = home / f"out.{ending}"
        call = lambda: resumed.write_text(str(embed_file(model, source, target, batch_records=11).resumed))  # noqa: B023, E731
        killed = _kill_within(call, rng.uniform(0, takes))
        found["embeds killed within"] += killed
        takes *= 1.05 if killed else 0.85
        found["half-written embeddings"] += target.exists() and target.read_bytes() != whole[ending]
        while rng.random() < 0.5:  # killed again on the way on
            _kill_within(call, rng.uniform(0, takes / 2))
        _takes(call)
        found["embeds gone on where they were"] += int(resumed.read_text()) > 0
        found["wrong embeddings"] += target.read_bytes() != whole[ending]
        found["leftovers of embed"] += staging_path(target).exists() or _names(home) != [target.name]
        target.unlink()
    return found


def kills(count: int, seed: int) -> Counter[str]:
    """`count` kills, half of convert and half of embed."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kill_converts(Path(root), count // 2, rng) + kill_embeds(Path(root), count - count // 2, rng)


def wrong(found: Counter[str]) -> bool:
    """Whether anything else was counted than what should happen."""
    return any(number and not kind.endswith(EXPECTED) for kind, number in found.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="kills (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="(default 0)")
    options = parser.parse_args()
    found = kills(options.count, options.seed)
    idle = [kind for kind, number in found.items() if kind.endswith(EXPECTED) and not number]
    print(f"kills: {options.count}: " + ", ".join(f"{n} {kind}" for kind, n in found.items()) + f"; wrong: {wrong(found)}")
    return int(wrong(found) or bool(idle))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
