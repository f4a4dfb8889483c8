"""The model as a torch module: scriptable, compilable, exportable."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple  # noqa: UP035 (TorchScript reads these annotations)

import torch
from torch import Tensor

from ftbert._library import load_library
from ftbert.dtypes import DTYPES
from ftbert.tuning import gemm_table

load_library()  # so that pickle, which imports this first, can read the encoder


def _refuse_jagged(*tensors: Any) -> None:
    """torch takes a method for its own that gets such a tensor, and fails over its name."""
    for one in tensors:
        if isinstance(one, Tensor) and one.is_nested:
            raise RuntimeError(
                "expected dense tensors, got a nested one; packed ids go to forward_packed, with nested.values() and "
                "nested.offsets().int()"
            )


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
        want = ["tokens", "pooled"]
        made = self.forward_batch(input_ids, attention_mask, token_type_ids, None, 0, want, None, 0, None)
        return made[0], made[1]

    @torch.jit.export
    def forward_packed(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        token_type_ids: Optional[Tensor] = None,  # noqa: UP045
        want: str = "tokens",
        rows: Optional[Tensor] = None,  # noqa: UP045
        shared_prefix: int = 0,
        keys: Optional[Tensor] = None,  # noqa: UP045
    ) -> Tensor:
        """int [tokens], int32 [batch+1] -> [tokens, hidden], or what `want` names; no host synchronisation. rows,
        shared_prefix, keys: of forward_batch."""
        made = self.forward_batch(
            input_ids, None, token_type_ids, cu_seqlens, max_seqlen, [want], rows, shared_prefix, keys
        )
        return made[0]

    @torch.jit.export
    def forward_batch(
        self,
        input_ids: Tensor,
        attention_mask: Optional[Tensor],  # noqa: UP045
        token_type_ids: Optional[Tensor],  # noqa: UP045
        cu_seqlens: Optional[Tensor],  # noqa: UP045
        max_seqlen: int,
        want: List[str],  # noqa: UP006
        rows: Optional[Tensor] = None,  # noqa: UP045
        shared_prefix: int = 0,
        keys: Optional[Tensor] = None,  # noqa: UP045
    ) -> List[Tensor]:  # noqa: UP006
        """Every call: padded ids [batch, seq] with a mask, or packed ids [tokens] with the offsets of the sequences.

        want names the tensors that come back, in this order; what none of them needs is not computed. Where all of them
        read the same rows, `first` and `pooled`, `last` or `rows`, the last layer is computed for those alone.
        tokens          last hidden state as the ids lie, [batch, seq, hidden] with 0 at padding, or [tokens, hidden]
        packed_tokens   last hidden state of the valid tokens, [tokens, hidden]
        packed_index    of padded ids: row of packed_tokens, int32 [batch*seq], -1 at padding
        cu_seqlens      offsets of the sequences in packed_tokens, int32 [batch+1]
        first           last hidden state of each sequence's first token, [batch, hidden], 0 for an empty one
        last            the same of its last token
        rows            the same of the packed tokens that the argument `rows` names, int [n] -> [n, hidden]; an error
                        where there is no such token, on CUDA NaN
        pooled          tanh(pooler(first)), [batch, hidden]; [batch, 0] where the model has no pooler
        hidden_states   the embedding's output, then every layer's, [layers+1, ...] over the shape of `tokens`
        shared_prefix: of packed ids the number of tokens of the first sequence, where all others begin with those and
        are given without them; max_seqlen is of the longest with them. On CUDA it is not compared with cu_seqlens. An
        error for a model whose tokens see those that follow, or whose attention takes the general path.
        keys: of packed ids int32 [batch], how many tokens of each sequence are attended to, the first; those behind
        attend to them, as padding does in transformers. On CUDA they are not compared with cu_seqlens.
        """
        # The same op, called from C++: torch.ops would take half as long again on the host.
        if not torch.jit.is_scripting() and not torch.compiler.is_compiling():  # type: ignore[attr-defined]
            _refuse_jagged(input_ids, attention_mask, token_type_ids, cu_seqlens, rows, keys)
            return self.encoder.forward_batch(
                input_ids, attention_mask, token_type_ids, cu_seqlens, max_seqlen, want, rows, shared_prefix, keys
            )
        return torch.ops.ftbert.forward_batch(
            self.encoder, input_ids, attention_mask, token_type_ids, cu_seqlens, max_seqlen, want, rows, shared_prefix,
            keys,
        )
