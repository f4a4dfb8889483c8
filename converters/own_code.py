"""Whether a config.json names a class that computes what its model type does: transformers' own, or a listed one."""

from __future__ import annotations

from ftbert.checkpoint import find_class, in_transformers_words, named_classes
from ftbert.converters.families import find_family
from ftbert.converters.family import Config
from ftbert.converters.head_tables import rows_of
from ftbert.converters.older_keys import todays_words

_WITH_OPTIMIZE = "load it with transformers and call ftbert.optimize(model), which compares the two"


def read_config(document: Config) -> Config:
    """A config.json in the words in which transformers' own class of its type reads it today. ValueError for a model
    that ftbert does not run; no other file of the folder changes that answer."""
    document = todays_words(document)
    find_family(document)
    return read_classes(document)


def read_classes(document: Config) -> Config:
    """The config in the words of transformers' own class of its type. ValueError for a class that is neither
    transformers' nor listed in ftbert/own_classes.py: what it computes is in its code alone."""
    kind = str(document.get("model_type"))
    for name in named_classes(document):
        if find_class(document, name) is not None:
            continue
        if "." in name:
            raise ValueError(
                f"auto_map names {name}, a class with code of its own, which ftbert does not run and has no row for. "
                f"If it is the same as transformers' {kind}, take auto_map out of config.json; else {_WITH_OPTIMIZE}"
            )
        if not _is_transformers(kind, name):
            raise ValueError(
                f"architectures names {name}, a class that transformers does not have and ftbert has no row for. If it "
                f"computes what transformers' {kind} computes, name that class there; else {_WITH_OPTIMIZE}"
            )
    return in_transformers_words(document)


def _is_transformers(kind: str, name: str) -> bool:
    """Whether transformers has a class of that name, or had it for TensorFlow or Flax. It is not imported for the usual
    names of a type's own."""
    name = name.removeprefix("TF").removeprefix("Flax")
    stems = {one.replace("-", "").replace("_", "") for one in (kind, kind.removesuffix("_text"))}
    endings = ("Model", *(row.architecture for row in rows_of(kind)))
    if name.lower() in {stem + ending.lower() for stem in stems for ending in endings}:
        return True
    import transformers

    return name in dir(transformers)
