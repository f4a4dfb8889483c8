"""The model as a torch module: scriptable, compilable, exportable."""

from __future__ import annotations

from typing import Any, Optional, Tuple  # noqa: UP035 (TorchScript reads these annotations)

import torch
from torch import Tensor

from ftbert._library import load_library

load_library()  # so that pickle, which imports this first, can read the encoder


class EncoderModule(torch.nn.Module):
    """Holds a torch.classes.ftbert.Encoder. `torch.jit.script(module).save("m.pt")` loads in C++ through LibTorch."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

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
