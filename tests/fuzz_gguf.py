"""Mutated GGUF files against `load`: python tests/fuzz_gguf.py --count 5000 --seed 0

Each file is read in a child of its own with 10 s and 1 GB. It must be loaded and give a result of the right shape, or be
refused with a ValueError or OSError that names it. Half of the files have another number in the place of a value of the
metadata, so that they are whole files that say something else; the others are changed anywhere, nearly always before
the tensors' bytes. Exit code 1 where one file was not read so.
"""

from __future__ import annotations

import random
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import isolated
import tokenizers_offline
import torch
from gguf_models import MODELS, all_as, make, vocabulary, write

import ftbert
from ftbert.converters.gguf_file import read_gguf

_NUMBERS = (0, 1, 2, 3, 7, 31, 33, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)
_FLOATS = [int.from_bytes(struct.pack("<f", one), "little") for one in (0.0, -1.0, 1e-5, 1.5, 1e30, float("inf"), float("nan"))]
_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")


def make_files(folder: Path) -> list[tuple[bytes, int, list[int]]]:
    """A file of each architecture, all types among them, with the places where its tensors' bytes begin and its
    metadata's values are."""
    texts = vocabulary(tokenizers_offline.write(folder / "bert", "bert"), "bert", cls="[CLS]", seperator="[SEP]")
    found = []
    for number, arch in enumerate(MODELS):
        extra = texts | {f"{arch}.pooling_type": 1} if number % 2 == 0 else None
        path = write(make(arch, vocab_size=300), folder / f"{arch}.gguf", arch, all_as(_TYPES[number % len(_TYPES)]), extra)
        data, read = path.read_bytes(), read_gguf(path)
        keys = [struct.pack("<Q", len(key)) + key.encode() for key in read.metadata if key.startswith((arch, "tokenizer"))]
        values = [data.index(key) + len(key) + 4 for key in keys]
        found.append((data, min(one.start for one in read.tensors.values()), values))
    return found


def revalue(data: bytes, values: list[int], rng: random.Random) -> bytes:
    """Another number where a value is, or in the first entries of a list."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2])):
        place = rng.choice(values) + rng.choice([0, 0, 0, 12, 12 + 4 * rng.randrange(8)])
        near = int.from_bytes(changed[place : place + 4], "little") + rng.choice([-1, 1, 2, 32])
        number = rng.choice([near % (1 << 32), *_NUMBERS, *_FLOATS])
        changed[place : place + 4] = struct.pack("<Q", number)[:4]
    return bytes(changed)


def mutate(data: bytes, first: int, rng: random.Random) -> bytes:
    """first: where the tensors' bytes begin."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        limit = first if rng.random() < 0.9 else len(changed)
        place = rng.randrange(max(1, min(limit, len(changed))))
        how = rng.randrange(8)
        if how < 2:
            changed[place : place + 1] = bytes([changed[place] ^ 1 << rng.randrange(8)])
        elif how < 5:  # a count, a length, a type, a size or an offset
            number = rng.choice(_NUMBERS)
            size = rng.choice([4, 8])
            changed[place : place + size] = struct.pack("<Q", number)[:size]
        elif how == 5:
            del changed[place : place + rng.choice([1, 4, 8, 100])]
        elif how == 6:
            changed[place:place] = changed[place : place + rng.choice([1, 8, 60])]
        else:
            del changed[rng.randrange(len(changed)) :]
        if len(changed) < 2:
            break
    return bytes(changed)


def _read(path: Path) -> str:
    """"right" or what was wrong; raises what `load` raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ftbert.load(path)
    seq = min(9, model.config.max_seq)
    ids = torch.arange(2 * seq).view(2, seq) % model.config.vocab
    got = model(ids).last_hidden_state
    return "right" if got.shape == (2, seq, model.config.hidden) else f"a result of {list(got.shape)}"


def cases(folder: Path, count: int, seed: int) -> Iterator[isolated.Case]:
    files = make_files(folder)
    for number in range(count):
        (data, first, values), rng = files[number % len(files)], random.Random(f"{seed} {number}")
        path = folder / f"case{number}.gguf"
        path.write_bytes(revalue(data, values, rng) if rng.random() < 0.5 else mutate(data, first, rng))
        yield f"seed {seed} number {number}", path, partial(_read, path)
        path.unlink()


def fuzz(count: int, seed: int, tell: isolated.Tell) -> Counter[str]:
    ftbert.load_library()  # once for all children
    torch.set_num_threads(1)  # a child that was forked beside OpenMP's threads would wait for them
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        tempfile.tempdir = folder  # a child that is killed leaves its files there
        return isolated.count_cases(cases(Path(folder), count, seed), tell, seconds=10, memory=1 << 30)


if __name__ == "__main__":
    sys.exit(isolated.main(__doc__, fuzz, 5000))
