"""The part of Model that knows its replicas: the same weights on several devices, which share the batches of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from ftbert.devices import check_device, check_dtype
from ftbert.packed_model import PackedModel
from ftbert.text import CallersThread, Job, Launch, ReplicaThreads, Result, Workers
from ftbert.tuning import gemm_table

Method = TypeVar("Method", bound=Callable[..., Any])


class Replicated(PackedModel):
    """What `ftbert.Model` inherits; needs its copy_to. A model on one device is a set of one."""

    _others: tuple[Any, ...] = ()
    _calls = 0

    @property
    def replicas(self) -> tuple[Any, ...]:
        """A model for each of `devices`, this one first."""
        return (self, *self._others)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the weights lie; calls of text go to all of them. `device` is the first."""
        return tuple(one.device for one in self.replicas)

    def workers(self, launch: Launch[Job, Result]) -> Workers[Job, Result]:
        """See `TextModel.workers`. Several replicas take jobs as they are free; each call begins with another one, so
        that small calls are spread, too."""
        if not self._others:
            return CallersThread(self, launch)
        first = self._calls % len(self.replicas)
        self._calls += 1
        return ReplicaThreads([*self.replicas[first:], *self.replicas[:first]], launch)

    def replica_at(self, device: Any) -> Any:
        """The one there, else the first."""
        return next((one for one in self.replicas if one.device == device), self) if self._others else self

    def told_replicas(self) -> dict[str, str]:
        """For `info`: where they lie, and what is in force there."""
        devices = self.devices
        names = [torch.cuda.get_device_name(one) if one.type == "cuda" else "CPU" for one in devices]
        tables = [gemm_table.summary(one) for one in devices if one.type == "cuda"]
        told = {}
        if self._others:
            told["replicas"] = ", ".join(f"{one} ({name})" for one, name in zip(devices, names, strict=True))
            if len(set(names)) > 1:
                told["replicas"] += "; unequal: each batch goes to whichever is free, and results agree to rounding"
        if tables:
            each = [f"{one}: {table}" for one, table in zip(devices, tables, strict=True)]
            told["gemm_table"] = tables[0] if len(set(tables)) == 1 else "; ".join(each)
        return told

    def copy_to(self, place: torch.device) -> Any:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """The weights once, and where the others lie."""
        return self.__dict__ | {"_others": [one.device for one in self._others]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_others": ()})
        replicate(self, [check_device(place) for place in state.get("_others", ())])


Set = TypeVar("Set", bound=Replicated)


def replicate(model: Set, places: Sequence[torch.device]) -> Set:
    """`model` itself, from now on with a replica at each of `places` too, copied from device to device. ValueError
    where one of these does not compute in its dtype."""
    for place in places:
        check_dtype(place, model.dtype)
    model._others = tuple(model.copy_to(place) for place in places)
    return model


def where_the_ids_are(method: Method) -> Method:
    """A method of the replica on the device of the argument `input_ids`, else of the first."""

    @wraps(method)
    def call(self: Replicated, input_ids: Any, *args: Any, **given: Any) -> Any:
        return method(self.replica_at(getattr(input_ids, "device", None)), input_ids, *args, **given)

    return cast(Method, call)
