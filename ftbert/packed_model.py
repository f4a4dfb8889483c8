"""A loaded model as code for texts, files, tokens and servers sees it, and values that such code keeps beside a
model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:  # servers' workers import no torch
    import torch
    from torch import Tensor

    from ftbert.checkpoint import Checkpoint, ModelConfig
    from ftbert.dtypes import Dtype
    from ftbert.heads import Head

T = TypeVar("T")

_kept: WeakKeyDictionary[Any, dict[Hashable, Any]] = WeakKeyDictionary()


class PackedModel(Protocol):
    """`ftbert.Model` is one; see there.

    text_choices: settings of `TextSettings` that the caller has set over the folder's; replaced, never changed.
    """

    config: ModelConfig
    checkpoint: Checkpoint
    folder: Path | None
    text_choices: Mapping[str, Any]

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> Dtype: ...

    @property
    def encoder(self) -> Any: ...  # torch.classes.ftbert.Encoder

    @property
    def heads(self) -> Sequence[Head]: ...

    @property
    def tasks(self) -> list[str]: ...

    @property
    def replicas(self) -> Sequence[Any]: ...

    def head(self, task: str) -> Head: ...

    def for_task(self, task: str) -> Any: ...

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any: ...

    def forward_packed(
        self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int, token_type_ids: Tensor | None = None, *,
        want: str = "tokens", rows: Tensor | None = None, shared_prefix: int = 0,
        keys: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip

    def logits_packed(
        self, input_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int, token_type_ids: Tensor | None = None
    ) -> list[Tensor]: ...

    def workers(self, launch: Callable[[Any, Any], Callable[[], Any]]) -> Any: ...


def kept(owner: Any, what: Hashable, make: Callable[[], T]) -> T:
    """What `make` gave when `what` of this owner was first asked for. It goes when the owner goes."""
    of_owner = _kept.setdefault(owner, {})
    if what not in of_owner:
        of_owner[what] = make()
    made: T = of_owner[what]
    return made
