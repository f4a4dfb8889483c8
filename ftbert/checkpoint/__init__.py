"""The format of a checkpoint: its config, its tensors, reading and writing its files."""

from ftbert.checkpoint.atomic_folder import put_in_place, work_folder
from ftbert.checkpoint.checkpoint import Checkpoint, Make, read_checkpoint
from ftbert.checkpoint.config import FORMAT, VERSION, CheckpointConfig, EncoderConfig, HeadConfig, activations, typed
from ftbert.checkpoint.tensors import (
    Shape,
    StateDictSource,
    TensorSource,
    check_shapes,
    find_weights,
    open_weights,
    shard_names,
)
from ftbert.dtypes import DTYPES
from ftbert.input_file import (
    exists,
    expect_file,
    expect_inside,
    list_folder,
    named,
    read_json_object,
    read_json_value,
    shown,
)
from ftbert.sentence_modules import MODULES, Module, read_modules, transformer_folder

__all__ = [
    "DTYPES", "FORMAT", "MODULES", "VERSION", "Checkpoint", "CheckpointConfig", "EncoderConfig", "HeadConfig", "Make",
    "Module", "Shape", "StateDictSource", "TensorSource", "activations", "check_shapes", "exists", "expect_file",
    "expect_inside", "find_weights", "list_folder", "named", "open_weights", "put_in_place", "read_checkpoint",
    "read_json_object", "read_json_value", "read_modules", "shard_names", "shown", "transformer_folder", "typed",
    "work_folder",
]  # fmt: skip
