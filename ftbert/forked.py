"""Says in a forked child, at its first call, that it computes on one thread.

The library holds every call there to it (csrc/binding/forked.h): the threads of OpenMP stayed with the parent, and who
asks its pool for work waits for ever. Here it becomes a Python warning.
"""

from __future__ import annotations

import os

import torch

from ftbert.caller import warn_caller

_unsaid = False


def _in_child() -> None:
    global _unsaid
    _unsaid = True


os.register_at_fork(after_in_child=_in_child)


def note_fork() -> None:
    """Before what computes. Silent where the process has one thread anyhow (a DataLoader's worker)."""
    global _unsaid
    if not _unsaid:
        return
    _unsaid = False
    if (threads := torch.get_num_threads()) > 1:
        torch.set_num_threads(1)
        warn_caller(
            f"ftbert: this process was forked from one that had imported ftbert, whose {threads} threads stayed there: "
            'it computes on one. Start workers by "spawn" or "forkserver" to let each have threads of its own',
        )
