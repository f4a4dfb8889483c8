"""Norms for fine-tuning: modules and functions with gradients, and patch for models that exist."""

from ftbert.norm.batch_norm import (
    FusedBatchNorm1d,
    FusedBatchNorm2d,
    FusedBatchNorm3d,
    fused_batch_norm,
    masked_relu,
)
from ftbert.norm.functional import (
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)
from ftbert.norm.modules import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from ftbert.norm.patch import patch, unpatch

__all__ = [
    "FusedBatchNorm1d", "FusedBatchNorm2d", "FusedBatchNorm3d", "FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm",
    "MixedFusedRMSNorm", "fused_add_layer_norm", "fused_add_rms_norm", "fused_batch_norm", "fused_layer_norm",
    "fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine", "masked_relu",
    "mixed_dtype_fused_layer_norm_affine", "mixed_dtype_fused_rms_norm_affine", "patch", "unpatch",
]  # fmt: skip
