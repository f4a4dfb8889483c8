"""The library's tuner, by ctypes (csrc/gemm/tuner/c_calls.cpp). Device memory is given as addresses; calls release the
lock of the interpreter. Every call raises Error with the library's words."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any

from ftbert._library import core_library
from ftbert.gpus import Gpu

# kernel, variant: of ftbert's own; of cuBLASLt's "", and the eight words of data count
Row = tuple["Product", int, int, str, str, Sequence[int]]


class Error(RuntimeError):
    """What the library says of a call that it cannot do."""


class Product(ctypes.Structure):
    """A linear layer's product, by words of formats and activations. types: of a, b and c."""

    _fields_ = [
        *((name, c_int64) for name in ("m", "n", "k")),
        *((name, c_char_p) for name in ("a", "b", "c", "activation")),
        *((name, c_int32) for name in ("bias", "layernorm", "gated", "prenorm")),
    ]

    def __init__(
        self, m: int, n: int, k: int, types: Sequence[str], bias: bool, activation: str, layernorm: bool, gated: bool,
        prenorm: bool,
    ) -> None:  # fmt: skip
        words = (word.encode() for word in (*types, activation))
        super().__init__(m, n, k, *words, bias, layernorm, gated, prenorm)
        _call("ftbert_check_product", byref(self))


class Algorithm(ctypes.Structure):
    """kernel and variant: of ftbert's own, "" of cuBLASLt's, whose 64 bytes are data. id: cuBLASLt's number of its
    kernel."""

    _fields_ = [
        ("_own", c_void_p), ("_variant", c_int32), ("tile_rows", c_int32), ("tile_columns", c_int32),
        ("split_k", c_int32), ("id", c_int32), ("_data", c_uint64 * 8), ("_kernel_name", c_char * 32),
        ("_variant_name", c_char * 40),
    ]  # fmt: skip

    def __init__(self, data: Sequence[int] = (0,) * 8) -> None:
        super().__init__(_variant=-1, split_k=1, _data=(c_uint64 * 8)(*data))

    @property
    def kernel(self) -> str:
        return str(self._kernel_name.decode())

    @property
    def variant(self) -> str:
        return str(self._variant_name.decode())

    @property
    def data(self) -> list[int]:
        return list(self._data)


class _Gpu(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("capability", "sm_count", "device_capability", "warpgroups")),
        *((name, c_int32) for name in ("shared_bytes", "shared_bytes_of_sm", "clock_khz")),
        ("l2_bytes", c_int64), ("bandwidth", c_double),
    ]  # fmt: skip


class _Row(ctypes.Structure):
    _fields_ = [
        ("product", Product), ("first", c_int64), ("last", c_int64), ("kernel", c_char_p), ("variant", c_char_p),
        ("data", c_uint64 * 8),
    ]  # fmt: skip


class Recording:
    """Products in a CUDA graph, ready to be timed."""

    def __init__(self, tuner: Tuner, pointer: int) -> None:
        self._tuner = tuner  # which must outlive it
        self._pointer = c_void_p(pointer)

    def microseconds(self) -> float:
        """Of one product, in a replay of all."""
        us = c_double()
        _call("ftbert_recording_microseconds", self._pointer, byref(us))
        return us.value

    def __del__(self) -> None:
        _core().ftbert_recording_free(self._pointer)


class Tuner:
    """csrc/gemm/tuner/tuner.h: one product on one device. workspace and ones are kept alive by the caller."""

    _MOST_OWN = 256

    def __init__(self, device: int, product: Product, workspace: int, ones: int) -> None:
        self._pointer = c_void_p()
        _call("ftbert_tuner_new", device, byref(product), c_void_p(workspace), c_void_p(ones), byref(self._pointer))

    def __del__(self) -> None:
        _core().ftbert_tuner_free(self._pointer)

    def _list(self, name: str, most: int) -> list[Algorithm]:
        found, count = (Algorithm * most)(), c_int64()
        _call(name, self._pointer, c_int64(most), found, byref(count))
        return list(found[: count.value])

    def heuristics(self, most: int) -> list[Algorithm]:
        return self._list("ftbert_tuner_heuristics", most)

    def own(self) -> list[Algorithm]:
        return self._list("ftbert_tuner_own", self._MOST_OWN)

    def chosen(self) -> Algorithm:
        found = Algorithm()
        _call("ftbert_tuner_chosen", self._pointer, byref(found))
        return found

    @property
    def c_bytes(self) -> int:
        count = c_int64()
        _call("ftbert_tuner_c_bytes", self._pointer, byref(count))
        return count.value

    def run(self, algorithm: Algorithm, a: int, b: int, bias: int, c: int) -> None:
        _call("ftbert_tuner_run", self._pointer, byref(algorithm), *map(c_void_p, (a, b, bias, c)))

    def record(self, algorithm: Algorithm, a: int, b: int, weights: int, bias: int, c: int) -> Recording | None:
        """None for an algorithm that cannot run after all."""
        made, (of_a, of_b, of_bias, of_c) = c_void_p(), map(c_void_p, (a, b, bias, c))
        rest = (of_a, of_b, c_int64(weights), of_bias, of_c, byref(made))
        _call("ftbert_recording_new", self._pointer, byref(algorithm), *rest)
        return Recording(self, made.value) if made.value else None


def set_table(device: int, rows: Sequence[Row]) -> None:
    """From now on products on this device run what these rows say; they replace an earlier table."""
    table = (_Row * len(rows))()
    for made, (product, first, last, kernel, variant, data) in zip(table, rows, strict=True):
        made.product, made.first, made.last = product, first, last
        made.kernel, made.variant, made.data = kernel.encode(), variant.encode(), (c_uint64 * 8)(*data)
    _call("ftbert_set_table", device, table, c_int64(len(rows)))


def own_kernels() -> list[tuple[str, list[str]]]:
    """Names of this build's kernels for products, each with those of its variants."""
    lines = (line.split("\t") for line in _core().ftbert_own_kernels().decode().splitlines())
    return [(kernel, variants) for kernel, *variants in lines]


def supports(gpu: Gpu, kernel: str, variant: str, product: Product) -> bool:
    """gpu: one of this machine's, or an imagined one."""
    yes = c_int32()
    _call("ftbert_supports", byref(_in_c(gpu)), kernel.encode(), variant.encode(), byref(product), byref(yes))
    return bool(yes.value)


def guessed(gpu: Gpu, product: Product) -> Algorithm:
    """What runs where no table has a row, on a GPU of this machine or an imagined one. kernel "": cuBLASLt's first
    proposal, whose data is not there."""
    found = Algorithm()
    _call("ftbert_guess", byref(_in_c(gpu)), byref(product), byref(found))
    return found


def _in_c(gpu: Gpu) -> _Gpu:
    return _Gpu(**{name: getattr(gpu, name) for name, *_ in _Gpu._fields_})


def is_known(kernel: str, variant: str) -> bool:
    """Whether this build has them."""
    return bool(_core().ftbert_is_known(kernel.encode(), variant.encode()))


def rows(m: int) -> int:
    """The m that the encoder runs where it is asked for this one."""
    return int(_core().ftbert_rows(c_int64(m)))


def fuses_heads_of(size: int) -> bool:
    """Whether fused attention has heads of this size."""
    return bool(_core().ftbert_fuses_heads_of(c_int64(size)))


def workspace_bytes(device: int) -> int:
    """That a Tuner's workspace must have."""
    count = c_int64()
    _call("ftbert_workspace_bytes", device, byref(count))
    return count.value


def _call(name: str, *arguments: Any) -> None:
    if getattr(_core(), name)(*arguments):
        raise Error(_core().ftbert_error().decode(errors="replace"))


@cache
def _core() -> ctypes.CDLL:
    library = core_library()
    for text in (library.ftbert_error, library.ftbert_own_kernels):
        text.restype = c_char_p
    library.ftbert_rows.restype = c_int64
    return library
