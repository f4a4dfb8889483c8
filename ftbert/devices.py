"""Where ftbert computes, and in which element type there: the checks and rules that `load` and `optimize` share."""

from __future__ import annotations

from typing import Any

import torch

from ftbert._library import build_info, load_library
from ftbert.caller import warn_caller
from ftbert.dtypes import EIGHT_BITS, FP8, INT8, Q8_0, Dtype, users_word
from ftbert.formats import format_of
from ftbert.gpus import Gpu

# What products on the CPU have beside float32, and what is faster where that is.
_COMPARED: dict[Dtype, tuple[str, str]] = {
    torch.bfloat16: ("bf16", "dtype='fp32' or 'auto'"),
    torch.int8: ("int8", "the plain model in fp32"),
}
_LISTS = "; several GPUs are a list, or 'cuda:*' for all"
_SLOWER = 1.1  # from here on: less is noise
_measured: dict[Dtype, float] = {}
_warned: set[Dtype] = set()


def check_device(given: Any) -> torch.device:
    """A torch.device from what torch takes for one, a GPU with its index. ValueError for anything else and for another
    kind, RuntimeError where this build, this torch or this machine has no such GPU."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {given!r}{_LISTS}") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    load_library()
    if torch.cuda._is_in_bad_fork():
        torch.cuda.init()  # PyTorch's own error
    info = build_info()
    if info["cuda"] != "yes":
        raise RuntimeError(f"device={str(device)!r}: {info['cuda_reason']}")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device={str(device)!r}: this torch ({torch.__version__}) sees no GPU; "
            "it needs a CUDA build of torch, an NVIDIA driver and a GPU"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise RuntimeError(f"device={str(device)!r}: there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def check_devices(given: Any, several_cpus: bool = False) -> tuple[torch.device, ...]:
    """Of one device as in `check_device`, "cuda:*" for every GPU that torch sees, or a list of different GPUs. Raises
    what `check_device` does, ValueError for an empty list, one that names a device twice, or the CPU beside others.
    several_cpus: a list may also name the CPU again and again: each time a part of its cores."""
    if isinstance(given, str) and given == "cuda:*":
        check_device("cuda")
        return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    if not isinstance(given, list | tuple):
        return (check_device(given),)
    if not given:
        raise ValueError("device: expected at least one device, got an empty list")
    named = [str(one) for one in given]
    if several_cpus and len(named) > 1 and set(named) == {"cpu"}:
        return tuple(check_device(one) for one in given)
    if len(named) > 1 and any(one.partition(":")[0] == "cpu" for one in named):
        raise ValueError(
            f"device: several devices are GPUs, since one model uses all cores of a CPU; got {', '.join(named)}"
        )
    places = tuple(check_device(one) for one in given)
    if len(set(places)) < len(places):
        raise ValueError(f"device: each GPU holds one replica; got {', '.join(map(str, places))}")
    return places


def check_dtype(device: torch.device, dtype: Dtype) -> None:
    """ValueError for an element type that ftbert does not compute in on this device."""
    if dtype in EIGHT_BITS.values():
        _check_stored(device, dtype)
    if device.type == "cuda" and dtype == torch.bfloat16 and not _has_bf16(gpu := Gpu.of(device)):
        raise ValueError(f"bf16 needs a GPU of compute capability 8.0 or above; {_told(device, gpu)}")
    if device.type != "cpu" or dtype in (torch.float32, Q8_0):
        return
    if dtype == torch.float16:
        raise ValueError("on the CPU ftbert computes in fp32, or bf16 for the products; fp16 needs a GPU")
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise ValueError("dtype: oneDNN computes no products in bf16 on this CPU; use fp32")
    if _is_slow(dtype) and dtype not in _warned:
        _warned.add(dtype)
        word, faster = _COMPARED[dtype]
        times = f"{products_speed(dtype):.1f} times as long as fp32's"
        warn_caller(f"{word} products take {times} on this CPU; {faster} is faster")


def _check_stored(device: torch.device, dtype: Dtype) -> None:
    """Of a type of 8 bits; for `check_dtype`."""
    stored, word = format_of(dtype), users_word(dtype)
    cards = " (L4, L40S, H100)" if dtype == FP8 else ""
    needed = f"{word} needs a GPU of compute capability {stored.capabilities}{cards}"
    if device.type == "cpu":
        if not stored.cpu:
            raise ValueError(f"{needed}; on the CPU ftbert computes in fp32, or bf16 for the products")
        if stored.other == "byte_rows" and build_info()["cpu_int8"] == "none":
            raise ValueError(
                f"{word}: this CPU has no instructions with which it would be faster than fp32 (VNNI, AVX-VNNI or "
                "AMX-INT8; AVX2 where there is no AVX-512); use fp32"
            )
        return
    gpu = Gpu.of(device)
    if gpu.capability < stored.first_gpu:
        raise ValueError(f"{needed}; {_told(device, gpu)}")


def _has_bf16(gpu: Gpu) -> bool:
    return gpu.capability >= format_of(torch.bfloat16).first_gpu


def _told(device: torch.device, gpu: Gpu) -> str:
    eight = "int8, " if gpu.capability >= format_of(INT8).first_gpu else ""
    types = f"{eight}fp16, bf16 or fp32" if _has_bf16(gpu) else "fp16 or fp32"
    return f"{device}, {torch.cuda.get_device_name(device)} of {gpu.told}, computes in {types}"


def q8_0_is_fast(device: torch.device) -> bool:
    """Whether products of few rows read q8_0 as it is. GPUs of 7.5 have no product by it."""
    return device.type != "cuda" or "few_rows" in Gpu.of(device).kernels


def check_range(outgrows_fp16: bool, dtype: Dtype) -> None:
    """Warns of fp16 for models whose residual streams outgrow its largest number, 65504 (ModelConfig.outgrows_fp16)."""
    if dtype == torch.float16 and outgrows_fp16:
        warn_caller(
            "this model scales its embeddings, as Gemma does, or is a large one without a scale of scores, as T5's: "
            "its numbers outgrow fp16's 65504 and then are no numbers any more; use bf16",
        )


def stored_dtype(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """What dtype="auto" is for weights that are stored in `stored`. Nothing of them is lost (float64 aside): on a GPU
    it is their own type, or float32 for bf16 where the GPU has no products in that; on the CPU for weights in bf16 the
    faster of bf16 and float32, which holds all else."""
    if device.type == "cuda":
        if stored == torch.bfloat16 and not _has_bf16(Gpu.of(device)):
            return torch.float32
        return stored if stored in (torch.float16, torch.bfloat16) else torch.float32
    if stored != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return torch.float32 if _is_slow(stored) else stored


def products_speed(dtype: Dtype) -> float:
    """How long a product in `dtype` takes on this CPU, where it takes 1 in float32; measured once in a process."""
    if dtype not in _measured:
        load_library()
        exact, narrow = torch.ops.ftbert.time_products(["fp32", _COMPARED[dtype][0]])
        _measured[dtype] = narrow / exact
    return _measured[dtype]


def _is_slow(dtype: Dtype) -> bool:
    return products_speed(dtype) > _SLOWER


def told_speed(device: torch.device) -> dict[str, str]:
    """For `info`: {"products_speed": "bf16 takes 0.52 of fp32's time"}, of the types that this process has measured."""
    told = ", ".join(f"{_COMPARED[dtype][0]} takes {speed:.2f} of fp32's time" for dtype, speed in _measured.items())
    return {"products_speed": told} if told and device.type == "cpu" else {}


def stream_dtype(
    device: torch.device, dtype: Dtype, stored: torch.dtype = torch.float32, outgrows_fp16: bool = False
) -> torch.dtype:
    """The element type of the residual stream, of vectors and tables in a model of `dtype`: all but the operands of
    matrix products. On the CPU it is float32. fp8, int8 and q8_0 have 16 bits there, by how the model's weights are
    `stored`: bf16 for bf16 and where fp16 would not do (see check_range), else fp16."""
    if device.type == "cpu":
        return torch.float32
    if isinstance(dtype, str) or dtype in EIGHT_BITS.values():
        return torch.bfloat16 if stored == torch.bfloat16 or outgrows_fp16 else torch.float16
    return dtype
