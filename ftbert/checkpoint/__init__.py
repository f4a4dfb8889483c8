"""The format of a checkpoint: its config, its tensors, reading and writing its files.

Names are imported when first asked for: readers of text files need the checks of input files, and no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftbert.checkpoint.atomic_folder import put_in_place, work_folder
    from ftbert.checkpoint.checkpoint import Checkpoint, Make, read_checkpoint
    from ftbert.checkpoint.config import (
        ACTIVATIONS,
        FORMAT,
        VERSION,
        CheckpointConfig,
        EncoderConfig,
        HeadConfig,
        typed,
    )
    from ftbert.checkpoint.input_file import (
        expect_file,
        expect_inside,
        is_unicode,
        named,
        read_json_object,
        read_json_value,
        shown,
    )
    from ftbert.checkpoint.tensors import Shape, StateDictSource, TensorSource, check_shapes, open_weights

__all__ = [
    "ACTIVATIONS", "FORMAT", "VERSION", "Checkpoint", "CheckpointConfig", "EncoderConfig", "HeadConfig",
    "Make", "Shape", "StateDictSource", "TensorSource", "check_shapes", "expect_file", "expect_inside", "is_unicode",
    "named", "open_weights", "put_in_place", "read_checkpoint", "read_json_object", "read_json_value", "shown", "typed",
    "work_folder",
]  # fmt: skip

_HOMES = {
    "ftbert.checkpoint.atomic_folder": "put_in_place work_folder",
    "ftbert.checkpoint.checkpoint": "Checkpoint Make read_checkpoint",
    "ftbert.checkpoint.config": "ACTIVATIONS FORMAT VERSION CheckpointConfig EncoderConfig HeadConfig typed",
    "ftbert.checkpoint.input_file": (
        "expect_file expect_inside is_unicode named read_json_object read_json_value shown"
    ),
    "ftbert.checkpoint.tensors": "Shape StateDictSource TensorSource check_shapes open_weights",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
