"""Tokens that were chosen where logits lie: the next step takes them from there, the host reads them when it likes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Chosen:
    """ids: int64 [texts] on the device of the logits; -1 where these are no choice, as they are not finite: a decoder
    makes NaN of it."""

    def __init__(self, ids: Tensor, others: Sequence[Tensor] = ()) -> None:
        """others: what the host reads beside the ids. On a GPU nothing waits."""
        self.ids = ids
        self._copied: torch.cuda.Event | None = None
        self._told = [ids, *others]
        if ids.is_cuda:
            self._told = [_on_its_way(one) for one in self._told]
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(ids.device))

    def read(self) -> list[list[int]]:
        """The ids, and then the others, when they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return [one.tolist() for one in self._told]


def _on_its_way(values: Tensor) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host's on its way to the device: nothing waits for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
