"""The GGUF container and its types against the package gguf, and files that are broken."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from isolated import run

from ftbert.converters.gguf_file import read_gguf
from ftbert.converters.gguf_types import TYPES, dequantise_q8_0

gguf = pytest.importorskip("gguf")
Kind = gguf.GGMLQuantizationType
DEQUANTISED = [kind for kind in gguf.quants._type_traits if kind != Kind.BF16]


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Any]], **metadata: Any) -> Path:
    """tensors: bytes or floats, and their type."""
    writer = gguf.GGUFWriter(path, "bert")
    for key, (value, kind) in metadata.items():
        writer.add_key_value(key, value, kind, *([gguf.GGUFValueType.INT16] if kind == gguf.GGUFValueType.ARRAY else []))
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def some_blocks(kind: Any, rows: int, blocks: int) -> np.ndarray:
    """Random bytes: any are blocks of any type; scales may be infinite or NaN."""
    return np.random.default_rng(kind).integers(0, 256, (rows, blocks * TYPES[kind].bytes), dtype=np.uint8)


def test_the_types_are_ggmls() -> None:
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in Kind}
    assert {number: (one.name, one.block, one.bytes) for number, one in TYPES.items()} == theirs


@pytest.mark.parametrize("kind", DEQUANTISED, ids=lambda kind: kind.name)
def test_dequantisation_is_the_packages_byte_for_byte(kind: Any, tmp_path: Path) -> None:
    data = some_blocks(kind, 5, 3)
    found = read_gguf(write(tmp_path / "t.gguf", {"a": (data, kind)})).read("a")
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(data, kind)
    assert found.dtype == torch.float32 and found.shape == (5, 3 * TYPES[kind].block)
    np.testing.assert_array_equal(found.numpy().view(np.uint32), wanted.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F32, torch.float32), (Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16), (Kind.F64, torch.float64)]
)
@pytest.mark.parametrize("shape", [(7,), (5, 8), (2, 3, 4), (2, 1, 3, 4)])
def test_floats_are_as_they_are_stored(kind: Any, dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    wanted = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    data = wanted.view(torch.uint8).numpy() if kind == Kind.BF16 else wanted.numpy()
    path = write(tmp_path / "t.gguf", {"before": (np.ones(3, np.float32), Kind.F32), "a": (data, kind)})
    found = read_gguf(path).read("a")
    assert found.dtype == dtype and torch.equal(found, wanted)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.name.startswith("I") and kind.name[1].isdigit()], ids=str)
def test_integers_are_no_weights(kind: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "t.gguf", {"a": (np.ones((2, 4), f"i{TYPES[kind].bytes}"), kind)})
    with pytest.raises(ValueError, match=f"t.gguf: a: type {kind.name} holds no weights"):
        read_gguf(path).read("a")


def test_metadata_of_every_type(tmp_path: Path) -> None:
    t = gguf.GGUFValueType
    values: dict[str, tuple[Any, Any]] = {
        "u8": (255, t.UINT8), "i8": (-128, t.INT8), "u16": (65535, t.UINT16), "i16": (-5, t.INT16), "u32": (2**32 - 1, t.UINT32),
        "i32": (-(2**31), t.INT32), "u64": (2**64 - 1, t.UINT64), "i64": (-(2**63), t.INT64), "f32": (0.5, t.FLOAT32),
        "f64": (1e300, t.FLOAT64), "yes": (True, t.BOOL), "no": (False, t.BOOL), "text": ("naïve ▁", t.STRING),
    }  # fmt: skip
    found = read_gguf(write(tmp_path / "m.gguf", {}, **values)).metadata
    assert {key: found[key] for key in values} == {key: value for key, (value, _) in values.items()}
    lists: dict[str, list[Any]] = {"ints": [1, -2, 3], "floats": [0.5, 2.0], "bools": [True, False], "texts": ["a", "", "▁b"], "nested": [[1, 2], [3]]}
    writer = gguf.GGUFWriter(tmp_path / "l.gguf", "bert")
    for key, value in lists.items():
        writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_gguf(tmp_path / "l.gguf").metadata
    for key, value in lists.items():
        assert [one.tolist() if hasattr(one, "tolist") else one for one in found[key]] == value, key


# ---- Q8_0 -----------------------------------------------------------------------------------------------------------


def test_q8_0_rows_are_whole_blocks() -> None:
    blocks = some_blocks(Kind.Q8_0, 6, 4).reshape(2, 3, -1)
    np.testing.assert_array_equal(dequantise_q8_0(blocks), gguf.quants.dequantize(blocks, Kind.Q8_0))
    for wrong in (blocks[..., :33], blocks.view(np.int8)):
        with pytest.raises(ValueError, match="Q8_0: expected uint8 rows of blocks of 34"):
            dequantise_q8_0(wrong)


# ---- broken files ---------------------------------------------------------------------------------------------------

HUGE = 1 << 60


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def header(tensors: int = 1, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def info(name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, start: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


BROKEN = {
    "nothing": (b"", "shorter than a header"),
    "magic": (b"GGML" + header()[4:] + info() + bytes(64), "begins with b'GGML'"),
    "version": (header(version=1) + bytes(64), "version 1: versions 2 and 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "it is big endian"),
    "tensors": (header(tensors=HUGE) + bytes(64), "passes the file's end"),
    "entries": (header(0, entries=HUGE) + bytes(64), "passes the file's end"),
    "cut": (header(2) + info() + struct.pack("<Q", 30) + bytes(24), "a text of 30 bytes"),
    "key": (header(0, 1) + struct.pack("<Q", HUGE) + bytes(64), "a text of 1152921504606846976 bytes"),
    "text": (header(0, 1) + text("k") + struct.pack("<IQ", 8, HUGE) + bytes(64), "a text of"),
    "list": (header(0, 1) + text("k") + struct.pack("<IIQ", 9, 4, HUGE) + bytes(64), "a list of"),
    "list of texts": (header(0, 1) + text("k") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(64), "a list of"),
    "list of lists": (header(0, 1) + text("k") + struct.pack("<IIQ", 9, 9, HUGE) + bytes(64), "a list of"),
    "deep": (header(0, 1) + text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 40, "lists in lists"),
    "value": (header(0, 1) + text("k") + struct.pack("<I", 99) + bytes(64), "a value of type 99"),
    "two keys": (header(0, 2) + (text("k") + struct.pack("<II", 4, 7)) * 2 + bytes(64), "two entries 'k'"),
    "two tensors": (header(2) + info() * 2 + bytes(64), "two tensors 'a'"),
    "dims": (header() + text("a") + struct.pack("<I", 1 << 30) + bytes(64), "has 1073741824 dimensions"),
    "no dims": (header() + info(shape=()) + bytes(64), "has 0 dimensions"),
    "empty": (header() + info(shape=(4, 0)) + bytes(64), r"tensor 'a' is \[4, 0\]"),
    "blocks": (header() + info(shape=(33,), kind=8) + bytes(99), "Q8_0 is stored in blocks of 32"),
    "type": (header() + info(kind=4) + bytes(64), "type 4, which ftbert does not know"),
    "end": (header() + info(shape=(999,)) + bytes(64), "behind the file's end"),
    "huge": (header() + info(shape=(HUGE, HUGE, HUGE)) + bytes(64), "behind the file's end"),
    "start": (header() + info(start=HUGE) + bytes(64), "behind the file's end"),
    "off": (header() + info(start=8) + bytes(64), "off its alignment"),
    "inside": (header(2) + info(shape=(16,)) + info("b", start=32) + bytes(150), "in another one"),
    "alignment": (header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 24) + bytes(64), "alignment 24: expected a power of two"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files(what: str, tmp_path: Path) -> None:
    data, words = BROKEN[what]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=words) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    kind, _ = run(lambda: read_gguf(path), seconds=5, memory=64 << 20)
    assert kind == "raised"


def test_every_cut_of_a_file_is_seen(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", {"a": (np.ones((2, 32), np.float32), Kind.F32)}, k=(7, gguf.GGUFValueType.UINT32)).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut.gguf"):
            read_gguf(path)


def test_a_file_that_was_cut_after_it_was_opened(tmp_path: Path) -> None:
    """An error that names it, where a mapping would end the process; one that was replaced is read on as it was."""
    whole = some_blocks(Kind.Q8_0, 64, 64)
    path = write(tmp_path / "t.gguf", {"a": (whole, Kind.Q8_0), "b": (np.ones((64, 64), np.float32), Kind.F32)})
    file = read_gguf(path)
    again = write(tmp_path / "again.gguf", {"c": (np.ones(3, np.float32), Kind.F32)})
    for name, read in (("b", file.read), ("a", file.read_blocks)):
        with path.open("r+b") as writable:
            writable.truncate(file.tensors[name].start + 100)
        kind, (_, expected, words) = run(lambda read=read, name=name: read(name))
        assert kind == "raised" and expected and words.startswith(f"{path}: {name}: the file ends within it")
    path = write(tmp_path / "t.gguf", {"a": (whole, Kind.Q8_0)})
    file = read_gguf(path)
    again.replace(path)
    np.testing.assert_array_equal(file.read("a").numpy(), dequantise_q8_0(whole))
