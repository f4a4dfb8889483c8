"""LayerNorm and RMSNorm for fine-tuning: modules and functions with gradients, and patch for models that exist."""

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
    "FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm", "fused_add_layer_norm",
    "fused_add_rms_norm", "fused_layer_norm", "fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine",
    "mixed_dtype_fused_layer_norm_affine", "mixed_dtype_fused_rms_norm_affine", "patch", "unpatch",
]  # fmt: skip
