"""Frames on the Unix socket between a worker and an engine: a length, a kind, a payload. Both ends are one machine.

worker -> engine: SUBMIT, CANCEL. engine -> worker: HELLO once, STATUS now and then, PARTS and FAILURES of a batch,
TOKENS of a step of the texts that are written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ftbert.server.description import Description
from ftbert.server.job import Failure, Job, Kind, Part, Result, Writing, Written


class Frame(IntEnum):
    SUBMIT = 1
    CANCEL = 2
    HELLO = 3
    STATUS = 4
    PARTS = 5
    FAILURES = 6
    TOKENS = 7


_HEAD = struct.Struct("<IB3x")  # bytes of the payload, Frame
# id, Kind, flags, targets, texts, tokens, marked, the query's vectors and their width, bytes of `writing`, adapter,
# deadline, sent
_SUBMIT = struct.Struct("<QBBHIIIIIIH2xdd")
_STATUS = struct.Struct("<B7xQd")  # ready, queued tokens, tokens/s
_PARTS = struct.Struct("<III")  # parts, width, rows
_PART = struct.Struct("<QIIIff")  # id, start, stop, rows, queue, compute
_KINDS, _FRAMES = tuple(Kind), {frame.value: frame for frame in Frame}  # a call of the class costs five times as much
_pack, _writing = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Writing)
_written = msgspec.msgpack.Decoder(list[Written])
_SKIP, _TYPES, _MARKED, _TARGETS, _KEYS, _QUERY = 1, 2, 4, 8, 16, 32


def submit(job: Job) -> bytes:
    flags = _SKIP * (job.skip is not None) + _TYPES * (job.types is not None)
    flags += _MARKED * (job.marked is not None) + _TARGETS * (job.targets is not None)
    marked, targets = (0 if array is None else len(array) for array in (job.marked, job.targets))
    flags += _KEYS * (job.keys is not None) + _QUERY * (job.query is not None)
    shape = (0, 0) if job.query is None else job.query.shape
    writing = b"" if job.writing is None else _pack.encode(job.writing)
    head = _SUBMIT.pack(
        job.id, job.kind, flags, targets, job.texts, job.tokens, marked, *shape, len(writing), job.adapter,
        job.deadline, job.sent,
    )  # fmt: skip
    arrays = [job.offsets, job.skip, job.ids, job.marked, job.targets, job.keys, job.query, job.types]
    return _frame(Frame.SUBMIT, head, *[np.ascontiguousarray(array) for array in arrays if array is not None], writing)


def read_submit(payload: bytes) -> Job:
    one, kind, flags, targets, texts, tokens, marked, vectors, width, *rest = _SUBMIT.unpack_from(payload)
    size, adapter, deadline, sent = rest
    take = _Taker(payload, _SUBMIT.size)
    offsets = take(np.int64, texts + 1)
    skip = take(np.int32, texts) if flags & _SKIP else None
    ids = take(np.int32, tokens)
    places = take(np.int32, marked) if flags & _MARKED else None
    wanted = take(np.int32, targets) if flags & _TARGETS else None
    keys = take(np.int32, texts) if flags & _KEYS else None
    query = take(np.float32, vectors * width).reshape(vectors, width) if flags & _QUERY else None
    types = take(np.uint8, tokens) if flags & _TYPES else None
    writing = _writing.decode(payload[len(payload) - size :]) if size else None
    more = (skip, types, places, wanted, keys, query, writing, adapter)
    return Job(one, _KINDS[kind], ids, offsets, deadline, *more, sent=sent)


def cancel(ids: list[int]) -> bytes:
    return _frame(Frame.CANCEL, np.array(ids, dtype=np.uint64).tobytes())


def read_cancel(payload: bytes) -> list[int]:
    return np.frombuffer(payload, dtype=np.uint64).tolist()


def hello(description: Description) -> bytes:
    return _frame(Frame.HELLO, msgspec.json.encode(description))


def read_hello(payload: bytes) -> Description:
    return msgspec.json.decode(payload, type=Description)


def status(ready: bool, queued_tokens: int, rate: float) -> bytes:
    return _frame(Frame.STATUS, _STATUS.pack(ready, queued_tokens, rate))


def read_status(payload: bytes) -> tuple[bool, int, float]:
    ready, queued, rate = _STATUS.unpack(payload)
    return bool(ready), queued, rate


def results(found: list[Result]) -> bytes:
    """A frame of each kind of result."""
    parts = [one for one in found if isinstance(one, Part)]
    written = [one for one in found if isinstance(one, Written)]
    failures = [one for one in found if isinstance(one, Failure)]
    frames = b""
    if failures:
        listed = [(one.id, one.status, one.words, one.retry_after, one.full) for one in failures]
        frames += _frame(Frame.FAILURES, msgspec.json.encode(listed))
    if parts:
        table = [_PART.pack(one.id, one.start, one.stop, len(one.rows), one.queue, one.compute) for one in parts]
        width, rows = parts[0].rows.shape[1], sum(len(one.rows) for one in parts)
        matrices = [np.ascontiguousarray(one.rows) for one in parts]
        frames += _frame(Frame.PARTS, _PARTS.pack(len(parts), width, rows), *table, *matrices)
    if written:
        frames += _frame(Frame.TOKENS, _pack.encode(written))
    return frames


def read_parts(payload: bytes) -> list[Result]:
    count, width, rows = _PARTS.unpack_from(payload)
    table = memoryview(payload)[_PARTS.size :][: count * _PART.size]
    matrix = _Taker(payload, _PARTS.size + len(table))(np.float32, rows * width).reshape(rows, width)
    found: list[Result] = []
    at = 0
    for one, start, stop, size, queue, compute in _PART.iter_unpack(table):
        found.append(Part(one, start, stop, matrix[at : at + size], queue, compute))
        at += size
    return found


def read_failures(payload: bytes) -> list[Result]:
    listed = msgspec.json.decode(payload, type=list[tuple[int, int, str, float, float]])
    return [Failure(*one) for one in listed]


def read_tokens(payload: bytes) -> list[Result]:
    return list(_written.decode(payload))


class Reader:
    """Puts frames together from what a socket gives."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Frame, bytes]]:
        self._data += data
        at = 0
        while len(self._data) - at >= _HEAD.size:
            size, kind = _HEAD.unpack_from(self._data, at)
            end = at + _HEAD.size + size
            if len(self._data) < end:
                break
            yield _FRAMES[kind], bytes(memoryview(self._data)[at + _HEAD.size : end])
            at = end
        if at:
            del self._data[:at]


class _Taker:
    """Arrays one behind the other."""

    def __init__(self, payload: bytes, at: int) -> None:
        self._payload, self._at = payload, at

    def __call__(self, dtype: Any, count: int) -> NDArray[Any]:
        found = np.frombuffer(self._payload, dtype=dtype, count=count, offset=self._at)
        self._at += found.nbytes
        return found


def _frame(kind: Frame, *parts: Any) -> bytes:
    size = sum(part.nbytes if isinstance(part, np.ndarray) else len(part) for part in parts)
    return b"".join([_HEAD.pack(size, kind), *parts])
