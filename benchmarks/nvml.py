"""Clock and energy of a GPU, from the driver's own library. None where there is none, or it does not say."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_SM_CLOCK = 1


class Meter:
    """Of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """OSError: no library, or it does not know the device."""
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._device = ctypes.c_void_p()
        self._expect("nvmlInit_v2")
        self._expect("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(self._device))

    def sm_mhz(self) -> float | None:
        """The clock of the multiprocessors now."""
        value = ctypes.c_uint()
        code = self._nvml.nvmlDeviceGetClockInfo(self._device, _SM_CLOCK, ctypes.byref(value))
        return None if code else float(value.value)

    def millijoules(self) -> float | None:
        """Since the driver was loaded. The counter moves some ten times a second."""
        value = ctypes.c_ulonglong()
        code = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(value))
        return None if code else float(value.value)

    def _expect(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._nvml, name)(*arguments):
            raise OSError(f"{name} failed with {code}")


def meter(device: torch.device) -> Meter | None:
    """None on a CPU, and where the driver's library is missing."""
    if device.type != "cuda":
        return None
    try:
        return Meter(device)
    except (OSError, AttributeError):
        return None
