"""What counts of a GPU, as the core has it (csrc/core/gpu.h): its own facts, or a lesser GPU's where this build's code
for it is a lesser GPU's. FTBERT_MAX_GPU demands that."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftbert._library import load_library


@dataclass(frozen=True)
class Gpu:
    """The members of the core's `Gpu`. why: it is held to a lesser GPU, or "". kernels: names of ftbert's own for
    products that run there, with commas, or ""."""

    capability: int
    sm_count: int
    device_capability: int
    warpgroups: int = 0
    shared_bytes: int = 0
    shared_bytes_of_sm: int = 0
    clock_khz: int = 0
    l2_bytes: int = 0
    bandwidth: float = 0
    why: str = ""
    kernels: str = ""

    @staticmethod
    def of(device: int | str | torch.device) -> Gpu:
        """A CUDA device; RuntimeError where there is none, this build has no code for it, or FTBERT_MAX_GPU asks for
        what the build cannot do."""
        load_library()
        index = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index
        members, why, kernels = torch.ops.ftbert.gpu(torch.cuda.current_device() if index is None else index)
        return Gpu(**members, why=why, kernels=kernels)

    @property
    def told(self) -> str:
        """Its compute capability: "9.0", or "9.0 (held to 8.0)"."""
        own, counts = (f"{number // 10}.{number % 10}" for number in (self.device_capability, self.capability))
        return own if own == counts else f"{own} (held to {counts})"


def told_gpus() -> dict[str, str]:
    """For `info`, of each GPU that torch sees: "cuda:0_capability", "cuda:0_reason" where that is not the GPU's own or
    not known, and "cuda:0_products", the kernels for these."""
    told = {}
    for index in range(torch.cuda.device_count()):
        place = f"cuda:{index}"
        try:
            gpu = Gpu.of(index)
        except RuntimeError as error:
            told[f"{place}_reason"] = str(error).splitlines()[0]
            continue
        told[f"{place}_capability"] = gpu.told
        if gpu.why:
            told[f"{place}_reason"] = gpu.why
        told[f"{place}_products"] = gpu.kernels or "cuBLASLt's alone"
    return told
