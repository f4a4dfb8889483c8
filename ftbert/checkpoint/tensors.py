"""Where tensors come from: safetensors (one file or sharded), PyTorch .bin, or a live model; read one at a time."""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from ftbert.checkpoint.tensor_bytes import find_checksums, read_bytes, sample_of, verifies_files
from ftbert.input_file import expect_file, list_folder, read_json_value, shown

Shape = tuple[int, ...]

# Best first. Of a variant, "fp16" for one, the word stands in the name.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_VARIANTS = (
    r"model\.(\w+)\.safetensors", r"model\.safetensors\.index\.(\w+)\.json", r"pytorch_model\.(\w+)\.bin",
    r"pytorch_model\.bin\.index\.(\w+)\.json",
)  # fmt: skip

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # best first

_MOST_COMPLAINTS = 60  # lines of one message

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class TensorSource(ABC):
    """Named tensors. `where` names the file or model for error messages. files: all that tensors are read from; none of
    a model in memory."""

    where: str
    files: tuple[Path, ...] = ()

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every name with its shape, without reading the data."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, in the dtype it is stored in; the caller owns it."""

    def is_quantised(self, name: str) -> bool:
        """Whether it is stored in fewer bits than floats have, from which `read` dequantises it."""
        return False

    def sample(self, name: str) -> str:
        """A digest of some of a tensor's bytes, which differ between models."""
        data = self.read(name).contiguous().reshape(-1).view(torch.uint8)
        return sample_of(lambda begin, end: data[begin:end].numpy().data, data.numel())

    def in_blocks(self, name: str) -> bool:
        """Whether it is stored in Q8_0, from which `read` dequantises it."""
        return False

    def read_blocks(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a matrix [n, k] in Q8_0 numbers int8 [n, k] and scales fp16 [n, k / 32] as they are stored."""
        raise NotImplementedError(name)

    def told(self) -> dict[str, str]:
        """What `info` says of how they are read; nothing where they are read as they are stored."""
        return {}


class SafetensorsSource(TensorSource):
    """Read from the file, not mapped: a mapping would count every page ever read as memory in use, and opening one anew
    for each tensor costs milliseconds (BERT base, 199 tensors: 1.4 s, against 0.2 s this way)."""

    def __init__(self, files: list[Path], verify: bool) -> None:
        """verify: whether a tensor is compared with its checksum, where the file has any, when it is read."""
        self.where = str(files[0] if len(files) == 1 else files[0].parent)
        self.files = tuple(files)
        self._found: dict[str, tuple[Path, int, torch.dtype, Shape]] = {}  # file, first byte, dtype, shape
        self._checksums: dict[str, str] = {}
        for path in files:
            expect_file(path)
            try:
                # The library checks that the entries are whole and cover the file; after that the offsets can be used.
                with safe_open(path, framework="pt"), path.open("rb") as file:
                    length = int.from_bytes(file.read(8), "little")
                    header = json.loads(file.read(length))
                metadata = header.pop("__metadata__", None)
                for name, entry in header.items():
                    start, dtype = 8 + length + entry["data_offsets"][0], _DTYPES[entry["dtype"]]
                    self._found[name] = (path, start, dtype, tuple(entry["shape"]))
            except (SafetensorError, OSError, ValueError) as error:
                raise ValueError(f"{path}: not a complete safetensors file ({error})") from error
            except KeyError as error:
                raise ValueError(f"{path}: a tensor is stored as {error}, which ftbert does not read") from error
            if verify:
                self._checksums |= find_checksums(metadata, set(header), str(path))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (*_, shape) in self._found.items()}

    def read(self, name: str) -> torch.Tensor:
        path, start, dtype, shape = self._found[name]
        data = read_bytes(path, name, start, math.prod(shape) * dtype.itemsize, self._checksums.get(name))
        return torch.from_numpy(data).view(dtype).reshape(shape)

    def sample(self, name: str) -> str:
        path, start, dtype, shape = self._found[name]
        with path.open("rb") as file:
            size, number = math.prod(shape) * dtype.itemsize, file.fileno()
            return sample_of(lambda begin, end: os.pread(number, end - begin, start + begin), size)


class StateDictSource(TensorSource):
    """A state dict in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor], where: str) -> None:
        if other := [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]:
            raise ValueError(f"{where}: not all of its weights are tensors ({other[0]}, ...): is the model quantized?")
        self.where = where
        self._tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach().to("cpu", copy=True)

    def sample(self, name: str) -> str:
        data = self._tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        return sample_of(lambda begin, end: data[begin:end].cpu().numpy().data, data.numel())


class BinSource(StateDictSource):
    """Of .bin files, in part mapped: a page behind the end of a file that was cut short would end the process."""

    def __init__(self, files: list[Path], where: str) -> None:
        self.files = tuple(files)
        self._files: list[tuple[BinaryIO, int]] = []  # and their sizes
        tensors: dict[str, torch.Tensor] = {}
        for path in files:
            expect_file(path)
            file = path.open("rb")
            self._files.append((file, os.fstat(file.fileno()).st_size))
            tensors |= _read_bin(path)
        super().__init__(tensors, where)

    def __getstate__(self) -> dict[str, Any]:
        """A copy holds the tensors themselves, and no file."""
        return {**vars(self), "_files": []}

    def read(self, name: str) -> torch.Tensor:
        for file, size in self._files:
            if os.fstat(file.fileno()).st_size < size:
                raise ValueError(f"{file.name}: shorter than it was; has it been changed since it was opened?")
        return super().read(name)


def _read_bin(path: Path) -> dict[str, torch.Tensor]:
    try:
        document = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # noqa: BLE001 - a broken pickle raises whatever its instructions happen to meet
        reason = str(error).split("\n", 1)[0][:200] or type(error).__name__
        raise ValueError(f"{path}: not a complete PyTorch weights file ({reason})") from error
    if not isinstance(document, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in document.items()
    ):
        raise ValueError(f"{path}: expected a state dict of tensors")
    for name, tensor in document.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(f"{path}: {shown(name)} is not a plain tensor with data")
        # A stride of 0 lets four bytes stand for any number of elements, which copying them would make real.
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path}: {shown(name)} has {list(tensor.shape)} elements that the file does not hold")
    return document


def open_bin(path: Path) -> TensorSource:
    """The tensors of one file as torch saves them; ValueError where it holds anything else, or is broken."""
    return BinSource([path], str(path))


def shard_names(index: Path) -> list[str]:
    """The files beside `index` that it names; ValueError where it is none, or names one in another folder."""
    document = read_json_value(index)
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index}: not a shard index (no 'weight_map' from tensors to files)")
    if elsewhere := next((name for name in places.values() if Path(name).name != name or "\0" in name), None):
        raise ValueError(f"{index}: {shown(elsewhere)} is not the name of a file in the same folder")
    return sorted(set(places.values()))


def _shards(index: Path) -> list[Path]:
    names, held = shard_names(index), set(list_folder(index.parent))
    if missing := [name for name in names if name not in held]:
        raise ValueError(f"{index}: shards are missing: {', '.join(missing)}")
    return [index.parent / name for name in names]


def find_weights(names: Collection[str], where: str) -> str:
    """Of the files of a folder the one that holds the weights, or the index of their shards.

    A variant (model.fp16.safetensors) counts where there is nothing else. ValueError where there are none, or several
    variants; `where` says of which folder.
    """
    if plain := next((name for name in _WEIGHTS if name in names), None):
        return plain
    found: dict[str, str] = {}
    for pattern in _VARIANTS:
        for name in sorted(names):
            if match := re.fullmatch(pattern, name):
                found.setdefault(match[1], name)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise ValueError(
            f"{where}: the weights are there in several variants alone ({', '.join(found.values())}); load a folder "
            "that holds one of them"
        )
    held = ", ".join(sorted(names)[:20]) or "nothing"
    raise ValueError(
        f"{where}: no weights found that ftbert reads (model.safetensors or pytorch_model.bin, possibly sharded); "
        f"it holds {held}"
    )


def open_weights(folder: Path, verify: bool = True) -> TensorSource:
    """The weights of a HuggingFace or ftbert folder; ValueError when there are none or they are broken. verify: False,
    or FTBERT_VERIFY=off, leaves out the checksums that a file of ftbert has."""
    path = folder / find_weights(list_folder(folder), str(folder))
    sharded = path.suffix == ".json"
    files = _shards(path) if sharded else [path]
    if ".safetensors" in path.name:
        return SafetensorsSource(files, verify and verifies_files())
    return BinSource(files, str(folder if sharded else path))


def open_adapter(folder: Path, verify: bool = True) -> TensorSource:
    """The weights of a PEFT adapter, as of `open_weights`. FileNotFoundError where there are none."""
    name = next((name for name in ADAPTER_WEIGHTS if name in list_folder(folder)), None)
    if name is None:
        raise FileNotFoundError(f"{folder}: an adapter without its weights; expected {' or '.join(ADAPTER_WEIGHTS)}")
    path = folder / name
    if path.suffix == ".bin":
        return BinSource([path], str(path))
    return SafetensorsSource([path], verify and verifies_files())


def check_shapes(
    where: str,
    expected: dict[str, list[int]],
    found: dict[str, Shape],
    ignored: Collection[str],
    spare: Collection[str] = (),
) -> None:
    """ValueError that lists what is missing, misshapen or left over. spare: what may be left over, and is listed where
    something else is wrong."""
    wrong: list[str] = []
    for name, shape in expected.items():
        if name not in found:
            wrong.append(f"missing {name} {shape}")
        elif list(found[name]) != shape:
            wrong.append(f"{name}: the config asks for {shape}, the file has {list(found[name])}")
    extra = [name for name in found if name not in expected and name not in ignored]
    if wrong or any(name not in spare for name in extra):
        wrong += [f"extra {name} {list(found[name])}" for name in extra]
        raise ValueError(complaint(f"{where}: the weights do not fit the config", wrong))


def complaint(what: str, wrong: list[str]) -> str:
    """One message of several lines."""
    more = [f"and {len(wrong) - _MOST_COMPLAINTS} more"] if len(wrong) > _MOST_COMPLAINTS else []
    return "\n  ".join([f"{what}:", *wrong[:_MOST_COMPLAINTS], *more])
