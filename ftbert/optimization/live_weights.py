"""An encoder over the weights of a live transformers model: shared where the layout allows it, watched for changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ftbert.checkpoint import Checkpoint, ModelConfig
from ftbert.devices import stream_dtype
from ftbert.dtypes import EIGHT_BITS, Dtype
from ftbert.formats import formats
from ftbert.live_check import has_hooks, hooks_of
from ftbert.quantization import live_in_8_bits
from ftbert.tuning import gemm_table


def _version(tensor: Tensor) -> int:
    # Tensors made under inference_mode count no versions; replacing them is still noticed.
    return -1 if tensor.is_inference() else tensor._version


class Watch:
    """Notices when `module` no longer has the weights or the layers it had.

    In-place changes (load_state_dict, an optimizer's step), other storage (to, half, assign=True) and replaced
    submodules (resize_token_embeddings) are seen. A write through `parameter.data` is not: torch does not count it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._hooks = hooks_of(module)
        self._children = [(part._modules, tuple(part._modules.values())) for part in module.modules()]
        # The alias keeps the storage alive, so that its address cannot come back with other contents.
        self._parameters = [
            (part._parameters, name, tensor.detach(), tensor.data_ptr(), _version(tensor))
            for part in module.modules()
            for name, tensor in part._parameters.items()
            if tensor is not None
        ]

    def hooked(self) -> bool:
        """Whether a module inside has forward hooks, which only the original would call."""
        return has_hooks(self._hooks)

    def unchanged(self) -> bool:
        """Called before every forward: about 0.3 us for each parameter."""
        for children, were in self._children:
            if tuple(children.values()) != were:
                return False
        for parameters, name, _, pointer, version in self._parameters:
            tensor = parameters.get(name)
            if tensor is None or tensor.data_ptr() != pointer or _version(tensor) != version:
                return False
        return True


def build_encoder(
    module: nn.Module,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: Dtype,
    attention: str,
    tokenizer: Any = None,
) -> tuple[Any, ModelConfig]:
    """A torch.classes.ftbert.Encoder without pooler, from `checkpoint`, which was opened from `module`.

    A tensor that ftbert would hold bit for bit as `module` holds it is shared. What takes memory of its own: the
    stacked query, key and value matrices, on a CPU every matrix of the layers (packed for its GEMM), and everything
    when device or dtype differ. tokenizer: for fp8 and int8, see live_in_8_bits.
    """
    theirs, weights = module.state_dict(), {}
    if isinstance(dtype, str) or dtype in EIGHT_BITS.values():
        with live_in_8_bits(checkpoint, dtype, device, module, tokenizer) as stored:
            config = replace(stored.config.encoder, pooler=False)
            for spec in config.weight_specs():
                if spec.stored:
                    weights[spec.name] = stored.read(spec.name, formats()[spec.stored].numbers).to(device)
        dtype = stream_dtype(device, dtype, checkpoint.stored_dtype, checkpoint.config.encoder.outgrows_fp16)
    else:
        config = replace(checkpoint.config.encoder, pooler=False)
    for spec in config.weight_specs():
        if spec.name in weights:
            continue
        tensor = checkpoint.read(spec.name, dtype if spec.matrix else stream_dtype(device, dtype))
        names = checkpoint.tensors[spec.name]
        own = theirs.get(names[0]) if len(names) == 1 else None
        weights[spec.name] = own if own is not None and _same(own, tensor, device) else tensor.to(device)
    gemm_table.install(device)
    return torch.classes.ftbert.Encoder(weights, config.text(), attention), config


def _same(own: Tensor, tensor: Tensor, device: torch.device) -> bool:
    return (
        own.device == device
        and own.dtype == tensor.dtype
        and own.is_contiguous()
        and torch.equal(own, tensor.to(device))
    )
