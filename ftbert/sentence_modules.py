"""modules.json: the modules that a sentence-transformers folder is made of, and where each has its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from ftbert.input_file import exists, read_json_value

MODULES = "modules.json"
_OWN = "sentence_transformers."
_TRANSFORMERS = ("Transformer", "MLMTransformer", "CLIPModel")
ROUTERS, ROUTER_CONFIG = ("Router", "Asym"), "router_config.json"
STATIC = "StaticEmbedding"  # a table of token vectors in a transformer's place


@dataclass(frozen=True)
class Module:
    """kind: its class where that is one of sentence-transformers', such as "Pooling"; else the whole of `full`, which
    may be any code. full: the class as the file names it. folder: of its files."""

    kind: str
    full: str
    folder: Path


@dataclass(frozen=True)
class Routes:
    """modules: of each route, by its name. default: the name of that for texts whose task nobody says."""

    modules: dict[str, list[Module]]
    default: str | None


def read_routes(router: Module) -> Routes:
    """ValueError where router_config.json does not say which modules each route has."""
    where = router.folder / ROUTER_CONFIG
    read = read_json_value(where) if exists(where) else None
    found = read if isinstance(read, dict) else {}
    types, structure = found.get("types"), found.get("structure")
    if not isinstance(types, dict) or not isinstance(structure, dict) or not structure:
        raise ValueError(f"{where}: expected the modules of a {router.kind}: objects `types` and `structure`")
    if unknown := [one for names in structure.values() for one in names if one not in types]:
        raise ValueError(f"{where}: structure names {unknown[0]!r}, which types lacks")
    given = found.get("parameters")
    parameters = given if isinstance(given, dict) else {}
    if parameters.get("route_mappings"):
        raise ValueError(f"{where}: route_mappings is not supported; expected routes by their names")
    made = {
        str(name): [_module(str(types[one]), router.folder / _inside(one, where)) for one in names]
        for name, names in structure.items()
    }
    default = parameters.get("default_route") or (next(iter(made)) if parameters.get("allow_empty_key", True) else None)
    if default is not None and default not in made:
        raise ValueError(f"{where}: default_route {default!r} is none of {', '.join(made)}")
    return Routes(made, default)


def told_routes(router: Module) -> str:
    """The kinds of modules of each route; "" of what is no Router, or has no file with its routes."""
    if router.kind not in ROUTERS or not exists(router.folder / ROUTER_CONFIG):
        return ""
    listed = read_routes(router).modules.items()
    return "; ".join(f"{name}: {', '.join(module.kind.rpartition('.')[2] for module in one)}" for name, one in listed)


def inner_modules(module: Module) -> list[Module]:
    """Those of a Router's routes; of another module itself."""
    if module.kind not in ROUTERS:
        return [module]
    return [one for route in read_routes(module).modules.values() for one in route]


def read_modules(folder: Path) -> list[Module]:
    """In their order; none without the file. ValueError: no list of modules, an empty one, or a path that leads out
    of `folder`."""
    where = folder / MODULES
    if not exists(where):
        return []
    modules = read_json_value(where)
    listed = modules if isinstance(modules, list) else []
    if not listed or not all(isinstance(one, dict) and "type" in one for one in listed):
        raise ValueError(f"{where}: expected a list of modules, each with a 'type'")
    names = [one["name"] for one in modules if "name" in one]
    if len({str(name) for name in names}) != len(names):
        raise ValueError(f"{where}: two modules have one name")
    return [_module(str(one["type"]), folder / _inside(one.get("path", ""), where)) for one in modules]


def transformer_folder(folder: Path) -> Path:
    """Where config.json, the weights and the tokenizer are: `folder`, or the one in it that modules.json gives to its
    Transformer or StaticEmbedding, also behind a Router. ValueError as of `read_modules` and `read_routes`, and where
    the Router's routes have several networks."""
    first = next(iter(read_modules(folder)), None)
    if first is not None and first.kind in ROUTERS:
        router, inner = first, [module for module in inner_modules(first) if module.kind in _TRANSFORMERS]
        if len(names := sorted({str(module.folder.relative_to(folder)) for module in inner})) > 1:
            raise ValueError(
                f"{folder / MODULES}: module {router.full!r} ({told_routes(router)}) has several networks, "
                f"{', '.join(names)}: ftbert loads one; give the folder of that"
            )
        first = next(iter(inner), None)
    return first.folder if first is not None and first.kind in (*_TRANSFORMERS, STATIC) else folder


def _module(full: str, folder: Path) -> Module:
    # The class has moved between packages over the releases; only its own name is stable.
    return Module(full.rsplit(".", 1)[-1] if full.startswith(_OWN) else full, full, folder)


def _inside(path: Any, where: Path) -> str:
    parts = PureWindowsPath(path) if isinstance(path, str) else None
    if parts is None or parts.anchor or ".." in parts.parts or "\0" in path:
        raise ValueError(f"{where}: path {path!r} must stay inside the folder")
    return str(path)
