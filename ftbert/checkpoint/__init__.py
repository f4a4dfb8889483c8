"""The format of a checkpoint: its config, its tensors, reading and writing its files."""

from ftbert.caller import warn_caller
from ftbert.checkpoint.checkpoint import Checkpoint, Make, RowOrder, read_checkpoint
from ftbert.checkpoint.config import (
    CAUSAL_LM,
    FORMAT,
    POOLED,
    TEXT_EMBEDS,
    VERSION,
    VOCABULARY,
    CheckpointConfig,
    HeadConfig,
    activations,
)
from ftbert.checkpoint.eight_bits import fits_8_bits, told_products
from ftbert.checkpoint.entity_head import EntityHead
from ftbert.checkpoint.model_config import (
    WORD_TABLE,
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    ModelConfig,
    NormConfig,
    PositionConfig,
    RelativeBiasConfig,
    RotaryConfig,
    ShardConfig,
    StageConfig,
    WeightSpec,
    shared_layers,
)
from ftbert.checkpoint.shards import cut, shard_of, stages_of
from ftbert.checkpoint.tensor_bytes import checksums, digest_of, in_parts, sample_of
from ftbert.checkpoint.tensors import (
    ADAPTER_WEIGHTS,
    Shape,
    StateDictSource,
    TensorSource,
    check_shapes,
    complaint,
    find_weights,
    open_adapter,
    open_bin,
    open_weights,
    shard_names,
)
from ftbert.dtypes import DTYPES
from ftbert.input_file import (
    ORIGIN,
    exists,
    expect_file,
    expect_inside,
    list_folder,
    named,
    origin,
    parse_json,
    read_json_object,
    read_json_value,
    shown,
    typed,
)
from ftbert.own_classes import (
    FLASH,
    OWN_CLASSES,
    PROJECTION,
    Projection,
    find_class,
    in_transformers_words,
    named_classes,
    own_class,
)
from ftbert.own_models import know_type
from ftbert.sentence_modules import (
    MODULES,
    ROUTER_CONFIG,
    ROUTERS,
    STATIC,
    Module,
    inner_modules,
    read_modules,
    transformer_folder,
)
from ftbert.staging_folder import StagingFolder

__all__ = [
    "ADAPTER_WEIGHTS", "CAUSAL_LM", "DTYPES", "FLASH", "FORMAT", "MODULES", "ORIGIN", "OWN_CLASSES", "POOLED",
    "PROJECTION", "ROUTERS", "ROUTER_CONFIG", "STATIC", "TEXT_EMBEDS", "VERSION", "VOCABULARY", "WORD_TABLE",
    "AttentionConfig", "Checkpoint", "CheckpointConfig", "EntityHead", "FeedForwardConfig", "HeadConfig",
    "LayerConfig", "Make", "ModelConfig", "Module", "NormConfig", "PositionConfig", "Projection", "RelativeBiasConfig",
    "RotaryConfig", "RowOrder", "Shape", "ShardConfig", "StageConfig", "StagingFolder", "StateDictSource",
    "TensorSource", "WeightSpec", "activations", "check_shapes", "checksums", "complaint", "cut", "digest_of",
    "exists", "expect_file", "expect_inside", "find_class", "find_weights", "fits_8_bits", "in_parts",
    "in_transformers_words", "inner_modules", "know_type", "list_folder", "named", "named_classes", "open_adapter",
    "open_bin", "open_weights", "origin", "own_class", "parse_json", "read_checkpoint", "read_json_object",
    "read_json_value", "read_modules", "sample_of", "shard_names", "shard_of", "shared_layers", "shown", "stages_of",
    "told_products", "transformer_folder", "typed", "warn_caller",
]  # fmt: skip
