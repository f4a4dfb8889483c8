"""Tuned GEMM tables: JSON files of algorithms by product and range of m, and which of them is in force.

A file belongs to one GPU model and one version of cuBLASLt, since an algorithm's 64 bytes mean something to that
version only; rows that name ftbert's own kernels hold for every version, and for every GPU of the same architecture
with as many multiprocessors. Looked for in this order, and a row from further up hides those below it: the file that
$FTBERT_GEMM_TABLE names ("off": none at all), the user's cache folder (where `ftbert tune` writes), the tables that
come with the package. What fits no row runs what guess_product (csrc/gemm/gpu/own.h) chooses.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ftbert._library import build_info
from ftbert.caller import warn_caller
from ftbert.gpus import Gpu
from ftbert.input_file import named, read_json_value
from ftbert.tuning import c_calls
from ftbert.tuning.gemm_rows import Own, Product, Row, merge
from ftbert.user_cache import cache_folder, locked, make_private, untrusted

FORMAT = 4
_CHOSEN = "$FTBERT_GEMM_TABLE"
# To the library: cuBLASLt's first proposal, and where a norm is asked for, none that contains it.
_FIRST_PROPOSAL = (0,) * 8
_SHIPPED = Path(__file__).parent / "gemm_tables"


@dataclass(frozen=True)
class Machine:
    """What a table belongs to: "NVIDIA H200", "cuBLASLt 13.1.1", "sm_90 x 132". The last, architecture and
    multiprocessors, is what ftbert's own kernels depend on; tables made before do not have it. A GPU that is held to a
    lesser one (ftbert/gpus.py) is another machine: "NVIDIA H200 as 8.0", "sm_90 as 80 x 132"."""

    gpu: str
    cublaslt: str
    kind: str = field(default="", compare=False)

    @staticmethod
    def of(device: int | torch.device) -> Machine:
        """The machine of a CUDA device; RuntimeError where there is none."""
        if not torch.cuda.is_available():
            raise RuntimeError(f"no GPU to tune for: {build_info().get('cuda_reason', 'torch sees none')}")
        gpu, name = Gpu.of(device), torch.cuda.get_device_name(device)
        kind = f"sm_{gpu.device_capability}"
        if gpu.capability != gpu.device_capability:
            name += f" as {gpu.capability // 10}.{gpu.capability % 10}"
            kind += f" as {gpu.capability}"
        return Machine(name, build_info().get("cuda_gemm", ""), f"{kind} x {gpu.sm_count}")

    @property
    def capability(self) -> int:
        """That counts: 90 of sm_90, 80 of what is held to that."""
        counts = re.match(r"sm_(?:\d+ as )?(\d+) x", self.kind)
        return int(counts[1]) if counts else 0

    def is_like(self, other: Machine) -> bool:
        """Whether rows for ftbert's own kernels hold for both."""
        return self.gpu == other.gpu or (bool(self.kind) and self.kind == other.kind)

    @property
    def file_name(self) -> str:
        """Of its table."""
        words = "-".join((self.gpu, self.cublaslt)).lower()
        return re.sub(r"[^a-z0-9.]+", "_", words) + ".json"


def read_table(path: Path) -> tuple[Machine, list[Row]]:
    """ValueError says what is wrong with the file; OSError where it cannot be opened."""
    document = read_json_value(path)
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise ValueError("it is no table of ftbert")
    if document.get("format") != FORMAT:
        found = repr(document.get("format"))[:40]
        raise ValueError(f"its format is {found}, this ftbert reads {FORMAT}: `ftbert tune` makes it anew")
    owner = Machine(*(str(document.get(key, "")) for key in ("gpu", "cublaslt", "kind")))
    return owner, [Row.parse(r) for r in document["rows"]]


def add_rows(path: Path, machine: Machine, rows: Iterable[Row]) -> None:
    """Puts rows into a file, over those for the same m. Several processes may do so at once; none loses a row, and a
    killed one leaves the file as it was. A file of another machine, or no table at all, becomes FILE.old, or FILE.old2
    and so on where that is taken. A link stays one."""
    path = Path(os.path.realpath(path))
    make_private(path.parent)
    with locked(path.with_name(path.name + ".lock")):
        old: list[Row] = []
        try:
            owner, found = read_table(path)
            if owner != machine:
                raise ValueError(f"it belongs to {owner.gpu}, {owner.cublaslt}")
            old = found
        except FileNotFoundError:
            pass
        except ValueError as error:
            names = (f"{path.name}.old{number if number > 1 else ''}" for number in itertools.count(1))
            aside = path.replace(next(free for name in names if not (free := path.with_name(name)).exists()))
            warn_caller(f"{path} is replaced and kept as {aside.name}: {error}")
        head = json.dumps({"format": FORMAT} | asdict(machine))[:-1]
        lines = ",\n".join("  " + json.dumps(row.as_dict()) for row in merge(rows, old))
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with named(fresh), fresh.open("w", encoding="utf-8") as file:
                file.write(f'{head}, "rows": [\n{lines}\n]}}\n')
                file.flush()
                os.fsync(file.fileno())  # else a power cut may leave the new name and nothing in it
            fresh.chmod(fresh.stat().st_mode & ~0o022)  # others' rows are not trusted, whatever the umask says
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)


@dataclass(frozen=True)
class Source:
    """A place where a table was looked for. problem: why its rows, or some of them, are not used, or ""."""

    kind: str
    path: Path
    rows: list[Row]
    problem: str = ""


def user_table(machine: Machine) -> Path | None:
    """Where `ftbert tune` writes; None when the cache is off."""
    folder = cache_folder()
    return None if folder is None else folder / "gemm_tables" / machine.file_name


def sources(machine: Machine) -> list[Source]:
    """The tables that exist, first the one that counts most."""
    chosen = os.environ.get("FTBERT_GEMM_TABLE", "")
    if chosen == "off":
        return []
    user = user_table(machine)
    found = [_source(_CHOSEN, Path(os.path.expanduser(chosen)), machine)] if chosen else []
    found += [_source("user cache", _nearest(user, machine), machine)] if user is not None else []
    found += [_source("package", _nearest(_SHIPPED / machine.file_name, machine), machine)]
    return [source for source in found if source is not None]


def _nearest(path: Path, machine: Machine) -> Path:
    """`path` where it exists, else the newest beside it that fits in part, of this GPU before others of its kind."""
    if os.path.exists(path):
        return path
    fitting = []
    for other in path.parent.glob("*.json"):
        with suppress(ValueError, OSError):
            owner, _ = read_table(other)
            if owner.is_like(machine):
                fitting.append((owner.gpu == machine.gpu, other.stat().st_mtime_ns, other))
    return max(fitting, default=(False, 0, path))[2]


def _source(kind: str, path: Path, machine: Machine) -> Source | None:
    """None where there is no such file, unless it was asked for by name."""
    try:
        owner, rows = read_table(path)
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError) and kind != _CHOSEN
        return None if missing else Source(kind, path, [], str(error).removeprefix(f"{path}: "))
    if kind == "user cache" and (reason := untrusted(path.parent.parent, path.parent, path)):
        return Source(kind, path, [], reason)
    problems = []
    if owner != machine:
        problems.append(f"it was made for {owner.gpu}, {owner.cublaslt}; this is {machine.gpu}, {machine.cublaslt}")
    used: list[Row] = []
    lost: list[Row] = []
    for row in rows:
        holds = owner == machine or (owner.is_like(machine) and isinstance(row.algorithm, Own))
        (used if holds and is_known(row) else lost).append(row)
    if unknown := sum(not is_known(row) for row in lost):
        problems.append(f"{unknown} rows name kernels that this ftbert does not have")
    if lost:
        own, proposed = (sum(us for row in lost for us in getattr(row, name)) for name in ("us", "default_us"))
        cost = f", up to {proposed / own - 1:.0%} slower" if own else ""
        problems.append(f"{len(lost)} of {len(rows)} rows are not used{cost}: `ftbert tune` makes them anew")
    return Source(kind, path, used, "; ".join(problems))


def is_known(row: Row) -> bool:
    """Whether it names no kernel or variant that this build does not have."""
    own = row.algorithm
    return not isinstance(own, Own) or bool(tuner_module().is_known(own.kernel, own.variant))


def in_force(machine: Machine) -> list[Row]:
    """The rows of all sources, merged. What cannot be used of a table is left out, with one warning in a process that
    says why."""
    rows: list[Row] = []
    for source in sources(machine):
        if source.problem and (source.path, source.problem) not in _warned:
            _warned.add((source.path, source.problem))
            how = "used in part" if source.rows else "ignored"
            warn_caller(f"the tuned GEMM table {source.path} is {how}: {source.problem}")
        rows = merge(rows, source.rows)
    return rows


_warned: set[tuple[Path, str]] = set()
_installed: set[int] = set()  # devices
_lock = threading.Lock()


def install(device: torch.device, *, again: bool = False) -> None:
    """Puts the table in force for a CUDA device into the library: at the first model there, or `again`."""
    if device.type != "cuda":
        return
    index = _index(device)
    with _lock:
        if index in _installed and not again:
            return
        put_in_force(index, in_force(Machine.of(index)))
        _installed.add(index)


def _index(device: int | torch.device) -> int:
    index = device if isinstance(device, int) else device.index
    return torch.cuda.current_device() if index is None else index


def put_in_force(device: int | torch.device, rows: Iterable[Row]) -> None:
    """These rows on a CUDA device from now on, whatever the files say."""

    def choice(row: Row) -> tuple[str, str, tuple[int, ...]]:
        if isinstance(row.algorithm, Own):
            return row.algorithm.kernel, row.algorithm.variant, _FIRST_PROPOSAL
        return "", "", row.algorithm or _FIRST_PROPOSAL

    known = [(described(row.product), row.first, row.last, *choice(row)) for row in rows if is_known(row)]
    tuner_module().set_table(_index(device), known)


def described(product: Product, m: int = 0) -> Any:
    """The same for the library: ftbert/tuning/c_calls.py."""
    p = product
    return tuner_module().Product(m, p.n, p.k, p.types, p.bias, p.activation, p.layernorm, p.gated, p.prenorm)


def summary(device: torch.device) -> str:
    """For `ftbert info`: which tables count on this GPU."""
    machine = Machine.of(device)
    parts = [
        f"{source.kind} ({len(source.rows)} rows{'; ' * bool(source.problem)}{source.problem})"
        for source in sources(machine)
    ]
    without = "products are guessed" if machine.capability >= 80 else "cuBLASLt's first proposals run"
    return ", ".join(parts) or f"none: {without}; `ftbert tune` makes one"


def tuner_module() -> Any:
    """ftbert/tuning/c_calls.py, which calls the library's tuner."""
    return c_calls
