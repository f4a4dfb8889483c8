"""Task heads: small torch functions over the encoder's packed output, and the modules that run both.

No postponed annotations here: TorchScript cannot look a class's own up.
"""

from dataclasses import replace
from typing import Any, List, Optional, Tuple  # noqa: UP035 (TorchScript reads these annotations)

import torch
from torch import Tensor
from torch.nn import functional

from ftbert._fake import word_table_of
from ftbert.checkpoint import Checkpoint, HeadConfig
from ftbert.end_rows import end_of_packed, end_of_padded
from ftbert.module import EncoderModule


class Head(torch.nn.Module):
    """out(norm(activation(dense(x)))), as ftbert.checkpoint.HeadConfig describes it. weights: by the names there, zeros
    for a bias that there is not."""

    dense_weight: Tensor
    dense_bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    padding_id: int
    end_id: int

    def __init__(self, config: HeadConfig, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.task = config.task
        self.source = config.source
        self.padding_id = config.padding_id
        self.end_id = config.end_id
        self.has_out = config.outputs > 0
        self.tied = config.tied
        self.norm_eps = config.norm_eps
        self.activation = config.activation
        self.has_dense = config.width > 0
        for name in ("dense.weight", "dense.bias", "norm.weight", "norm.bias", "out.weight", "out.bias"):
            self.register_buffer(name.replace(".", "_"), weights.get(name, torch.empty(0)))

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        """x [rows, hidden] -> logits [rows, outputs]; word: the encoder's word table, for a tied head."""
        if not self.has_out:
            return self._before_out(x)
        return functional.linear(self._before_out(x), word if self.tied else self.out_weight, self.out_bias)

    def some(self, x: Tensor, word: Tensor, ids: List[int]) -> Tensor:  # noqa: UP006
        """As forward, the logits `ids` alone: [rows, len(ids)]. Nothing is computed for the others; no copy from the
        host, which would wait for a GPU."""
        weight = word if self.tied else self.out_weight
        rows = torch.stack([weight[i] for i in ids])
        return functional.linear(self._before_out(x), rows, torch.stack([self.out_bias[i] for i in ids]))

    def _before_out(self, x: Tensor) -> Tensor:
        if self.has_dense:
            x = functional.linear(x, self.dense_weight)
            x = torch.ops.ftbert.add_bias_act(x, self.dense_bias, self.activation)
        if self.norm_eps > 0:
            x = functional.layer_norm(x, [x.shape[-1]], self.norm_weight, self.norm_bias, self.norm_eps)
        return x


def load_head(checkpoint: Checkpoint, config: HeadConfig, place: torch.device, element: torch.dtype) -> Head:
    """A checkpoint's head on a device, in `element`, zeros for a bias that it lacks."""
    hidden = checkpoint.config.encoder.hidden
    whole, stored = replace(config, dense_bias=True, norm_bias=True, out_bias=True), config.shapes(hidden)
    weights = {}
    for name, shape in whole.shapes(hidden).items():
        there = name in stored
        tensor = checkpoint.read(f"heads.{config.task}.{name}", element) if there else torch.zeros(shape, dtype=element)
        weights[name] = tensor.to(place)
    return Head(config, weights)


def _choices_as_rows(
    input_ids: Tensor,
    attention_mask: Optional[Tensor],  # noqa: UP045
    token_type_ids: Optional[Tensor],  # noqa: UP045
) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor], int]:  # noqa: UP006, UP045
    """[batch, choices, seq] -> [batch * choices, seq], choices; two dimensions stay as they are: 0 choices."""
    if not torch.jit.is_scripting() and not isinstance(input_ids, Tensor):  # type: ignore[attr-defined]
        raise TypeError(f"input_ids: expected a torch tensor, got {type(input_ids).__name__}")
    choices = input_ids.shape[1] if input_ids.dim() == 3 else 0
    if input_ids.dim() == 3:
        input_ids = input_ids.flatten(0, 1)
        attention_mask = None if attention_mask is None else attention_mask.flatten(0, 1)
        token_type_ids = None if token_type_ids is None else token_type_ids.flatten(0, 1)
    return input_ids, attention_mask, token_type_ids, choices


def _last_of_padded(ids: Tensor, index: Tensor, padding_id: int) -> Tensor:
    """ids [batch, seq], index int32 [batch*seq], rows of the packed tokens -> the row of each text's last token whose
    id is not padding_id, int32 [batch]; without one that of column 0. -1: no token."""
    index = index.view(ids.shape)
    columns = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    column = (columns * ((ids != padding_id) & (index >= 0))).argmax(1, keepdim=True)
    return index.gather(1, column).squeeze(1)


def _last_of_packed(ids: Tensor, cu_seqlens: Tensor, padding_id: int) -> Tensor:
    """The same of packed ids [tokens]; without such a token each text's first."""
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    rows = torch.arange(ids.shape[0], device=ids.device)
    seen = torch.where(ids != padding_id, rows, -1).cummax(0)[0]
    last = seen[(ends - 1).clamp(min=0).long()].int()
    last = torch.where(last >= starts, last, starts)
    return torch.where(ends > starts, last, -1)


class HeadedModule(EncoderModule):
    """An encoder with heads. What is computed for each token is computed for the valid ones only."""

    def __init__(self, encoder: Any, heads: List[Head]) -> None:  # noqa: UP006
        super().__init__(encoder)
        self.heads = torch.nn.ModuleList(heads)
        self.reads_tokens = any(head.source not in ("first", "pooler") for head in heads)
        self.reads_words = any(head.tied for head in heads)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
        token_type_ids: Optional[Tensor] = None,  # noqa: UP045
    ) -> Tuple[Tensor, Tensor, Tensor]:  # noqa: UP006
        """As EncoderModule.forward, and the first head's logits. See `run`."""
        hidden, pooled, logits = self.run(input_ids, attention_mask, token_type_ids)
        return hidden, pooled, logits[0]

    @torch.jit.export
    def run(
        self,
        input_ids: Tensor,
        attention_mask: Optional[Tensor] = None,  # noqa: UP045
        token_type_ids: Optional[Tensor] = None,  # noqa: UP045
    ) -> Tuple[Tensor, Tensor, List[Tensor]]:  # noqa: UP006
        """int [batch, seq] -> last hidden state, pooled, and the logits of every head.

        Logits are [batch, seq, outputs] for heads over tokens (0 at padding), else [batch, outputs]. Ids of multiple
        choice are [batch, choices, seq], its logits [batch, choices]; the hidden state has all choices as rows.
        """
        hidden, pooled, logits, _ = self.run_with(input_ids, attention_mask, token_type_ids, [])
        return hidden, pooled, logits

    @torch.jit.export
    def run_with(
        self,
        input_ids: Tensor,
        attention_mask: Optional[Tensor],  # noqa: UP045
        token_type_ids: Optional[Tensor],  # noqa: UP045
        want: List[str],  # noqa: UP006
    ) -> Tuple[Tensor, Tensor, List[Tensor], List[Tensor]]:  # noqa: UP006
        """As `run`, and what else of forward_batch `want` names."""
        inputs = _choices_as_rows(input_ids, attention_mask, token_type_ids)
        input_ids, attention_mask, token_type_ids, choices = inputs
        want = ["packed_tokens", "packed_index", "cu_seqlens", "first", "pooled"] + want
        made = self.forward_batch(input_ids, attention_mask, token_type_ids, None, 0, want, None, 0, None)
        packed, index, cu_seqlens, first, pooled = made[0], made[1], made[2], made[3], made[4]
        batch, seq = input_ids.shape[0], input_ids.shape[1]
        hidden = torch.ops.ftbert.restore_padding(packed, index).view(batch, seq, packed.shape[1])
        rows: List[Tensor] = []  # noqa: UP006
        for head in self.heads:
            found = index[:0]
            if head.source == "last" and seq > 0:
                found = _last_of_padded(input_ids, index, head.padding_id)  # type: ignore[arg-type]
            elif head.source == "end" and seq > 0:
                found = end_of_padded(input_ids, index, head.end_id)  # type: ignore[arg-type]
            rows.append(found)
        logits = self._logits(packed, cu_seqlens, first, pooled, rows, choices)
        for i, head in enumerate(self.heads):
            if head.source == "tokens":
                logits[i] = torch.ops.ftbert.restore_padding(logits[i], index).view(batch, seq, logits[i].shape[1])
        return hidden, pooled, logits, made[5:]

    @torch.jit.export
    def run_first(
        self,
        input_ids: Tensor,
        attention_mask: Optional[Tensor] = None,  # noqa: UP045
        token_type_ids: Optional[Tensor] = None,  # noqa: UP045
    ) -> Tuple[Tensor, List[Tensor]]:  # noqa: UP006
        """As `run` without the last hidden state, for heads that read the first token of each row or its pooled output
        only: the last layer is computed for it alone."""
        if self.reads_tokens:
            raise ValueError("run_first: a head of this model reads every token; call run")
        rows = _choices_as_rows(input_ids, attention_mask, token_type_ids)
        input_ids, attention_mask, token_type_ids, choices = rows
        want = ["first", "pooled"]
        made = self.forward_batch(input_ids, attention_mask, token_type_ids, None, 0, want, None, 0, None)
        none = made[0][:0].int()
        return made[1], self._logits(made[0], none, made[0], made[1], [none] * len(self.heads), choices)

    @torch.jit.export
    def logits_packed(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        token_type_ids: Optional[Tensor] = None,  # noqa: UP045
    ) -> List[Tensor]:  # noqa: UP006
        """int [tokens], int32 [batch+1] -> the logits of every head: [tokens, outputs] for heads over tokens, else
        [batch, outputs] (of choices one output each). No padding anywhere, and no host synchronisation."""
        want = ["first", "pooled", "tokens"] if self.reads_tokens else ["first", "pooled"]
        made = self.forward_batch(input_ids, None, token_type_ids, cu_seqlens, max_seqlen, want, None, 0, None)
        rows: List[Tensor] = []  # noqa: UP006
        for head in self.heads:
            found = cu_seqlens[:0]
            if head.source == "last" and input_ids.shape[0] > 0:
                found = _last_of_packed(input_ids, cu_seqlens, head.padding_id)  # type: ignore[arg-type]
            elif head.source == "end":
                found = end_of_packed(input_ids, cu_seqlens, head.end_id)  # type: ignore[arg-type]
            rows.append(found)
        return self._logits(made[-1], cu_seqlens, made[0], made[1], rows, 0)

    @torch.jit.export
    def logits_at(
        self,
        positions: Tensor,
        input_ids: Tensor,
        attention_mask: Optional[Tensor] = None,  # noqa: UP045
        token_type_ids: Optional[Tensor] = None,  # noqa: UP045
    ) -> Tensor:
        """The first head's logits at the tokens where the bool [batch, seq] is set, row by row: [count, outputs]."""
        want = ["packed_tokens", "packed_index"]
        made = self.forward_batch(input_ids, attention_mask, token_type_ids, None, 0, want, None, 0, None)
        packed, index = made[0], made[1]
        if positions.dtype != torch.bool or positions.shape != input_ids.shape:
            raise ValueError("positions: expected bool, of the shape of input_ids")
        rows = index[positions.reshape(-1)].long()
        if bool((rows < 0).any()):
            raise ValueError("positions: expected valid tokens, got one at padding")
        return self.heads[0](packed[rows], self._word_table())  # type: ignore[no-any-return]

    def _word_table(self) -> Tensor:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return self.encoder.weight("embeddings.word")  # type: ignore[no-any-return]
        else:  # noqa: RET505 - what is scripted compiles no other branch
            exports = torch.compiler.is_exporting()
            return word_table_of(self.encoder) if exports else self.encoder.weight("embeddings.word")

    def _logits(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        first: Tensor,
        pooled: Tensor,
        rows: List[Tensor],  # noqa: UP006
        choices: int,
    ) -> List[Tensor]:  # noqa: UP006
        """Every head over what it reads; tokens are packed. rows: of each head, the tokens that it reads, -1 for none.
        choices: of a question, one row each; 0: none."""
        word = self._word_table() if self.reads_words else first
        all_logits: List[Tensor] = []  # noqa: UP006
        for i, head in enumerate(self.heads):
            if head.source == "tokens":
                logits = head(tokens, word)
            elif head.source == "pooler":
                logits = head(pooled, word)
            elif head.source == "mean":
                logits = head(_means(tokens, cu_seqlens), word)
            elif head.source == "late":
                logits = _means(head(tokens, word), cu_seqlens)
            elif head.source == "last" or head.source == "end":
                logits = head(torch.ops.ftbert.restore_padding(tokens, rows[i]), word)
                if head.task == "pooled":  # 0 of a text without tokens, whatever the bias
                    logits = logits * (rows[i] >= 0)[:, None]
            else:
                logits = head(first, word)
            if head.task == "multiple_choice" and choices > 0:
                logits = logits.view(-1, choices)
            all_logits.append(logits)
        return all_logits


def _means(tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[tokens, cols] -> [batch, cols], 0 for a text without tokens."""
    return torch.ops.ftbert.pooling(tokens, cu_seqlens, "mean", False).to(tokens.dtype)  # type: ignore[no-any-return]
