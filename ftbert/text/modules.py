"""modules.json of sentence-transformers: which modules a text goes through, and where their files are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

_NOTHING = ("Dropout",)  # at inference


@dataclass(frozen=True)
class Modules:
    """The folders of the modules. normalize: of each Normalize behind the pooling."""

    transformer: Path
    pooling: Path
    normalize: list[Path]

    @classmethod
    def read(cls, folder: Path, modules: Any) -> Modules:
        """`modules`: the content of `folder`'s modules.json. ValueError for other chains than Transformer, Pooling and
        any Normalize, and for a path that leads out of the folder."""
        where = folder / "modules.json"
        if not isinstance(modules, list) or not all(isinstance(m, dict) and "type" in m for m in modules):
            raise ValueError(f"{where}: expected a list of modules, each with a 'type'")
        names = [module["name"] for module in modules if "name" in module]
        if len({str(name) for name in names}) != len(names):
            raise ValueError(f"{where}: two modules have one name")
        found: list[tuple[str, Path]] = []
        for module in modules:
            kind, path = _kind(str(module["type"]), where), _inside(folder, module.get("path", ""), where)
            if kind not in _NOTHING:
                found.append((kind, path))
        if [kind for kind, _ in found[:2]] != ["Transformer", "Pooling"] or any(k != "Normalize" for k, _ in found[2:]):
            chain = ", ".join(kind for kind, _ in found) or "nothing"
            raise ValueError(f"{where}: expected Transformer, Pooling and at most Normalize behind them; got {chain}")
        if found[0][1] != folder:
            raise ValueError(f"{where}: the Transformer is in {found[0][1]}; only one in the folder itself is loaded")
        return cls(found[0][1], found[1][1], [path for _, path in found[2:]])


def _kind(full: str, where: Path) -> str:
    # The class has moved between packages over the releases; only its own name is stable. A class from elsewhere
    # (custom_st.Transformer) may compute anything, whatever its name.
    name = full.rsplit(".", 1)[-1] if full.startswith("sentence_transformers.") else full
    if name not in ("Transformer", "Pooling", "Normalize", *_NOTHING):
        raise ValueError(
            f"{where}: module {full!r} is not supported; encode() knows Transformer, Pooling, Normalize. "
            "Call the model itself for last_hidden_state and apply the module to that"
        )
    return name


def _inside(folder: Path, path: Any, where: Path) -> Path:
    parts = PureWindowsPath(path) if isinstance(path, str) else None
    if parts is None or parts.anchor or ".." in parts.parts or "\0" in path:
        raise ValueError(f"{where}: path {path!r} must stay inside the folder")
    return folder / path
