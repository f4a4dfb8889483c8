"""Mutated checkpoints, settings and tables against their readers: python tests/fuzz_files.py --count 3000 --seed 0

Files of texts have hypothesis in test_records.py.

Each file is read in a child of its own with 5 s and 4 GB. It must be read rightly (a checkpoint that transformers loads
too must give the same numbers) or refused with a ValueError or OSError that names it. Exit code 1 where one was not.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import isolated
import torch
from conftest import make_bert
from families import make_model
from tokenizers_offline import sentence_folder

import ftbert
from ftbert.converters import open_checkpoint
from ftbert.converters.from_huggingface import convert
from ftbert.text import TextSettings
from ftbert.tuning import Machine, in_force

_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 64.5, 65536, 2**31, 2**63, 2**70, -(2**40), 1e-12, -1e-5, float("nan"), 1e400, "",
    "64", "gelu", "relu", "bert", "roberta", "albert", "x" * 5000, "../..", "/etc/passwd", "a\0b", "\ud800", [], {}, [1],
    {"a": 1}, [None], "F16", "I8", [0], [2**40, 2**40], 10**400,
]  # fmt: skip


def _mutate_value(value: Any, rng: random.Random) -> Any:
    """One entry somewhere in a JSON value changed, removed, added or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        how = rng.random()
        changed = dict(value)
        if how < 0.15:
            del changed[key]
        elif how < 0.2:
            changed[rng.choice(["num_hidden_groups", "is_decoder", "use_task_id", "extra"])] = rng.choice(_VALUES)
        else:
            changed[key] = _mutate_value(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], _mutate_value(value[place], rng), *value[place + 1 :]]
    if type(value) is int and rng.random() < 0.4:
        return value + rng.choice([-1, 1, value, 16])
    return rng.choice(_VALUES)


def _mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if not changed:
            break
        place = rng.randrange(len(changed) if rng.random() < 0.5 else min(len(changed), 600))
        how = rng.randrange(6)
        if how == 0:
            changed[place] ^= 1 << rng.randrange(8)
        elif how == 1:
            changed[place] = rng.choice(b'\x00\xff"{}[],0-\n\t')
        elif how == 2:
            del changed[place : place + rng.choice([1, 4, 64])]
        elif how == 3:
            changed[place:place] = changed[place : place + rng.choice([1, 8, 100])]
        elif how == 4:
            del changed[place:]
        else:
            changed[place:place] = rng.choice([b'"' * 99, b"\xff" * 8, b"[" * 3000, bytes(8), b"1" * 5000])
    return bytes(changed)


def _mutate(path: Path, rng: random.Random, header: bool = False) -> None:
    """header: of a .safetensors file, whose JSON lies behind 8 bytes."""
    data = path.read_bytes()
    if (path.suffix == ".json" or header) and rng.random() < 0.8:
        length = int.from_bytes(data[:8], "little") if header else len(data)
        head = json.loads(data[8 : 8 + length] if header else data)
        for _ in range(rng.choice([1, 1, 2])):
            head = _mutate_value(head, rng)
        text = json.dumps(head).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + length :] if header else text
    else:
        data = _mutate_bytes(data, rng)
    path.write_bytes(data)


def make_seeds(root: Path) -> list[Path]:
    """Folders of whole files, one for each kind."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 24, "intermediate_size": 24}
    model = make_bert(**sizes, vocab_size=50)
    for name in ("config", "weights"):
        model.save_pretrained(root / name)
    make_model("roberta", "masked_lm", 0).save_pretrained(root / "config-roberta")
    make_model("albert", "encoder", 1).save_pretrained(root / "config-albert")
    model.save_pretrained(root / "index", max_shard_size="8KB")
    for name, legacy in (("bin", False), ("bin-legacy", True)):
        model.config.save_pretrained(root / name)
        torch.save(model.state_dict(), root / name / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    sentence_folder(root / "modules", normalize=True, bert=sizes)
    convert(root / "config-roberta", root / "ours")
    (root / "table").mkdir()
    shipped = sorted((Path(ftbert.__file__).parent / "tuning" / "gemm_tables").glob("*.json"))[0]
    document = json.loads(shipped.read_text())
    (root / "table" / "a.json").write_text(json.dumps(document | {"rows": document["rows"][:8]}))
    return sorted(root.iterdir())


# What is mutated of each kind; of others config.json.
_MUTATED = {
    "weights": ["model.safetensors"], "bin": ["pytorch_model.bin"], "bin-legacy": ["pytorch_model.bin"],
    "index": ["model.safetensors.index.json"], "modules": ["modules.json", "1_Pooling/config.json"],
    "ours": ["config.json", "model.safetensors"], "table": ["a.json"],
}  # fmt: skip


def _read(folder: Path, kind: str, path: Path) -> str:
    """"right" or what was wrong; raises what the reader raises."""
    if kind == "table":
        os.environ["FTBERT_GEMM_TABLE"] = str(path)
        in_force(Machine("NVIDIA H200", "cuBLASLt 13.1.0"))  # whatever is in it, only a warning
    elif kind == "modules":
        TextSettings.from_folder(folder)
    else:
        return _read_checkpoint(folder, kind)
    return "right"


def _read_checkpoint(folder: Path, kind: str) -> str:
    model = ftbert.load(folder)
    ids = torch.randint(5, min(50, model.config.vocab), (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    got = model(ids, mask).last_hidden_state
    if kind == "ours":
        return "right"
    try:
        import transformers

        ids[1, 6:] = int(getattr(model.checkpoint.config.encoder, "padding_id", 0))
        theirs = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            expected = theirs(ids, mask).last_hidden_state * mask[..., None]
    except Exception:  # noqa: BLE001 - it refuses what it likes
        return "right"
    # Weights with flipped exponents are beyond comparing.
    if not bool(expected.isfinite().all()) or float(expected.abs().max()) > 1e6:
        return "right"
    worst = float((got - expected).abs().max())
    return "right" if worst <= 1e-3 * max(1.0, float(expected.abs().max())) else f"wrong: off by {worst:.3g}"


def cases(root: Path, count: int, seed: int) -> Iterator[isolated.Case]:
    """A folder that is not mutated is read here first, with all that reading imports: children then need not."""
    seeds = make_seeds(root / "seeds")
    if (found := _read_checkpoint(root / "seeds" / "config", "config")) != "right":
        raise AssertionError(f"not mutated, {found}")
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        seed_folder, folder = seeds[number % len(seeds)], root / f"case-{number}-"
        kind = seed_folder.name
        shutil.copytree(seed_folder, folder)
        path = folder / rng.choice(_MUTATED.get(kind, ["config.json"]))
        _mutate(path, rng, header=path.suffix == ".safetensors" and rng.random() < 0.6)
        yield f"seed {seed} number {number} {kind}", folder, partial(_read, folder, kind, path)
        shutil.rmtree(folder)


def fuzz(count: int, seed: int, tell: isolated.Tell) -> Counter[str]:
    import transformers

    transformers.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    open_checkpoint(make_bert(hidden_size=16, num_hidden_layers=1))  # the library, once for all children
    torch.set_num_threads(1)  # a child that was forked beside OpenMP's threads would wait for them
    environment = {"FTBERT_CACHE": "off", "FTBERT_GEMM_TABLE": ""}  # the user's tables are not what is read here
    with mock.patch.dict(os.environ, environment), tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        return isolated.count_cases(cases(Path(root), count, seed), tell)


if __name__ == "__main__":
    sys.exit(isolated.main(__doc__, fuzz, 3000))
