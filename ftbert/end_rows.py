"""Which token of a text a model of the CLIP kind reads: the one that ends it, found by its id.

No postponed annotations here: TorchScript compiles these functions.
"""

import torch
from torch import Tensor


def _scores(ids: Tensor, end_id: int) -> Tensor:
    """The largest of a text is the token's that is read, the first of several: its end, or with end_id -1 the largest
    id. Without an end it is the first token."""
    return (ids == end_id).long() if end_id >= 0 else ids


def end_of_padded(ids: Tensor, index: Tensor, end_id: int) -> Tensor:
    """ids [batch, seq], index int32 [batch*seq], rows of the packed tokens -> the row of the token that is read, int32
    [batch]. -1: no token."""
    index = index.view(ids.shape)
    column = torch.where(index >= 0, _scores(ids, end_id) + 1, 0).argmax(1, keepdim=True)
    return index.gather(1, column).squeeze(1)


def end_of_packed(ids: Tensor, cu_seqlens: Tensor, end_id: int) -> Tensor:
    """The same of packed ids [tokens], with offsets int32 [batch+1]. No host synchronisation."""
    tokens, batch = ids.shape[0], cu_seqlens.shape[0] - 1
    best = torch.full([batch + 1], -1, dtype=torch.int64, device=ids.device)
    if tokens == 0:
        return best[:-1].int()
    rows = torch.arange(tokens, device=ids.device)
    text = torch.bucketize(rows, cu_seqlens[1:].long(), right=True)  # batch: of no text
    keys = _scores(ids, end_id) * tokens + (tokens - 1 - rows)
    best = best.scatter_reduce(0, text, keys, "amax")[:-1]
    return torch.where(best >= 0, tokens - 1 - best % tokens, -1).int()
