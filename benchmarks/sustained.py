"""A call that is repeated for as long as a busy GPU takes to reach its power limit: its time, the clock, the energy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import seconds
from nvml import Meter

_BURST = 0.02  # seconds between two looks at the clock
_WARM = 0.1


def sustained(
    call: Callable[[], Any], tokens: int, device: torch.device, meter: Meter | None, least: float = 0.5
) -> dict[str, float]:
    """For `least` seconds without a pause: ms of a call; sm_mhz, the mean clock; mj_per_token, millijoules for each of
    `tokens`. The last two are left out where nobody measures them."""
    call()
    repeats = max(1, round(_BURST / max(seconds(call, device), 1e-6)))
    began = time.perf_counter()
    while time.perf_counter() - began < _WARM:
        seconds(call, device, repeats)
    times: list[float] = []
    clocks: list[float] = []
    before, began = meter.millijoules() if meter else None, time.perf_counter()
    while time.perf_counter() - began < least:
        times.append(seconds(call, device, repeats))
        if meter and (clock := meter.sm_mhz()) is not None:
            clocks.append(clock)
    after = meter.millijoules() if meter else None
    found = {"ms": 1e3 * statistics.fmean(times)}
    if clocks:
        found["sm_mhz"] = statistics.fmean(clocks)
    if before is not None and after is not None:
        found["mj_per_token"] = (after - before) / (len(times) * repeats * tokens)
    return found
