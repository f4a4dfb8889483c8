"""The model as a torch module: scriptable, compilable, exportable."""

from __future__ import annotations

from typing import Any, Optional, Tuple  # noqa: UP035 (TorchScript reads these annotations)

import torch
from torch import Tensor

from ftbert._library import load_library
from ftbert.dtypes import DTYPES
from ftbert.tuning import gemm_table

load_library()  # so that pickle, which imports this first, can read the encoder


class EncoderModule(torch.nn.Module):
    """Holds a torch.classes.ftbert.Encoder. `torch.jit.script(module).save("m.pt")` loads in C++ through LibTorch."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    @torch.jit.unused
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What `to`, `cuda`, `half` and the like come to, also of a module around this one: the encoder moves along."""
        place, dtype = self.encoder.device(), DTYPES[self.encoder.dtype()]
        probe = fn(torch.empty(0, dtype=dtype, device=place))
        if (probe.device, probe.dtype) != (place, dtype):
            names = {value: name for name, value in DTYPES.items()}
            if probe.device.type not in ("cpu", "cuda") or probe.dtype not in names:
                raise RuntimeError(f"ftbert's encoder computes on cpu and cuda, not in {probe.dtype} on {probe.device}")
            if probe.device.type == "cpu" and probe.dtype != torch.float32:
                raise RuntimeError("on the CPU only products take 16 bits: use ftbert.load(..., dtype='bf16')")
            gemm_table.install(probe.device)
            self.encoder = self.encoder.to(probe.device, names[probe.dtype])
        return super()._apply(fn, recurse)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
        token_type_ids: Optional[Tensor] = None,  # noqa: UP045
    ) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        """int [batch, seq] -> last hidden state [batch, seq, hidden] (0 at padding), pooled [batch, hidden or 0]."""
        return torch.ops.ftbert.forward(self.encoder, input_ids, attention_mask, token_type_ids)

    @torch.jit.export
    def forward_first(
        self,
        input_ids: Tensor,
        attention_mask: Optional[Tensor] = None,  # noqa: UP045
        token_type_ids: Optional[Tensor] = None,  # noqa: UP045
    ) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        """As forward, but of the last hidden state the first kept token of each row only: [batch, hidden], 0 for an
        empty row. The last layer is computed for it alone."""
        return torch.ops.ftbert.forward_first(self.encoder, input_ids, attention_mask, token_type_ids)

    @torch.jit.export
    def forward_packed(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        token_type_ids: Optional[Tensor] = None,  # noqa: UP045
    ) -> Tensor:
        """int [tokens], int32 [batch+1] -> [tokens, hidden]; no host synchronisation."""
        return torch.ops.ftbert.forward_packed(self.encoder, input_ids, cu_seqlens, max_seqlen, token_type_ids)

    @torch.jit.export
    def forward_first_packed(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        token_type_ids: Optional[Tensor] = None,  # noqa: UP045
    ) -> Tensor:
        """As forward_packed, but the first token of each sequence only: [batch, hidden]."""
        return torch.ops.ftbert.forward_first_packed(self.encoder, input_ids, cu_seqlens, max_seqlen, token_type_ids)
