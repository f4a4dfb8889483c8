"""The format of a checkpoint: its config, its tensors, reading and writing its files."""

from ftbert.checkpoint.atomic_folder import put_in_place, work_folder
from ftbert.checkpoint.checkpoint import Checkpoint, Make, read_checkpoint
from ftbert.checkpoint.config import FORMAT, VERSION, CheckpointConfig, EncoderConfig, HeadConfig, activations, typed
from ftbert.checkpoint.tensors import Shape, StateDictSource, TensorSource, check_shapes, open_weights
from ftbert.dtypes import DTYPES
from ftbert.input_file import expect_file, expect_inside, named, read_json_object, read_json_value, shown
from ftbert.sentence_modules import MODULES, Module, read_modules, transformer_folder

__all__ = [
    "DTYPES", "FORMAT", "MODULES", "VERSION", "Checkpoint", "CheckpointConfig", "EncoderConfig", "HeadConfig", "Make",
    "Module", "Shape", "StateDictSource", "TensorSource", "activations", "check_shapes", "expect_file", "expect_inside",
    "named", "open_weights", "put_in_place", "read_checkpoint", "read_json_object", "read_json_value", "read_modules",
    "shown", "transformer_folder", "typed", "work_folder",
]  # fmt: skip
