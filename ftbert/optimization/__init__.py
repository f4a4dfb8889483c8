"""A HuggingFace model whose encoder ftbert computes, in place."""

from ftbert.optimization.patch import optimize, undo
from ftbert.optimization.patched_forward import PatchedForward

__all__ = ["PatchedForward", "optimize", "undo"]
