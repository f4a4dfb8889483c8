"""Tokens that were chosen where logits lie: the next step takes them from there, the host reads them when it likes."""

from __future__ import annotations

import torch
from torch import Tensor


class Chosen:
    """ids: int64 [texts] on the device of the logits; -1 where these are no choice, as they are not finite."""

    def __init__(self, ids: Tensor, dtype: torch.dtype) -> None:
        """dtype: of the logits. On a GPU nothing waits: a decoder makes NaN of -1, until the host reads it."""
        self.ids, self._dtype = ids, dtype
        self._copied: torch.cuda.Event | None = None
        self._told = ids
        if ids.is_cuda:
            self._told = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True).copy_(ids, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(ids.device))

    def read(self) -> list[int]:
        """The ids, when they are there. RuntimeError for NaN among the logits, or a largest that is infinite."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[int] = self._told.tolist()
        if -1 in found:
            raise RuntimeError(
                f"logits of the next token are not finite in {self._dtype}: weights that are not, or numbers larger "
                "than the dtype holds; another dtype may hold them"
            )
        return found


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host's on its way to the device: nothing waits for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
