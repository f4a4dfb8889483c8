"""A model of the Hugging Face hub, each weight once: one format of those that a repository holds."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from ftbert.converters.huggingface import MERGE

# Everything small, at any depth: configs, the tokenizer's files, the modules of sentence-transformers.
_SMALL = ("*.json", "*.txt", "*.model")
# Best first. A sharded format is its index and its shards.
_WEIGHTS = (
    ("model.safetensors",),
    ("model.safetensors.index.json", "model-*-of-*.safetensors"),
    ("pytorch_model.bin",),
    ("pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"),
)
# Where sentence-transformers puts what belongs to one module.
_MODULE = re.compile(r"\d+_\w+/")
_OTHERS = ("onnx/*", "openvino/*", "coreml/*")


def wanted(repository: str, files: list[str]) -> list[str]:
    """Of its files those that ftbert reads: what is small, and the weights in the best format there is. ValueError:
    only adapters, or no weights that ftbert reads."""
    if "adapter_config.json" in files:
        raise ValueError(f"{repository}: a PEFT adapter (adapter_config.json), no whole model; {MERGE}")
    modules = {found[0] for name in files if (found := _MODULE.match(name))} if "modules.json" in files else set()
    weights = [name for folder in ("", *sorted(modules)) for name in _best(folder, files)]
    if not weights:
        raise ValueError(
            f"{repository}: no weights that ftbert reads (model.safetensors or pytorch_model.bin, possibly sharded); "
            f"the repository holds {', '.join(files[:20])}"
        )
    small = [name for name in files if any(fnmatchcase(name, one) for one in _SMALL)]
    small = [name for name in small if not any(fnmatchcase(name, one) for one in _OTHERS)]
    return list(dict.fromkeys(small + weights))


def _best(folder: str, files: list[str]) -> list[str]:
    """The weights in one folder, "" or as "2_Dense/", in the best format that it has."""
    # A star of fnmatch goes through slashes, and weights in other folders are other models'.
    here = [name for name in files if name.startswith(folder) and "/" not in name[len(folder) :]]
    chosen = next((formats for formats in _WEIGHTS if folder + formats[0] in here), ())
    return [name for name in here if any(fnmatchcase(name[len(folder) :], one) for one in chosen)]


def fetch(repository: str) -> Path:
    """The folder of the hub's snapshot; without a connection the one that was fetched before.

    ValueError as of `wanted`, before anything is fetched. FileNotFoundError: no such repository, or it cannot be
    reached.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        files = HfApi().list_repo_files(repository)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise _unavailable(repository, error) from error
    except Exception as error:  # noqa: BLE001 (the transport's own errors differ by release)
        try:
            return Path(snapshot_download(repository, local_files_only=True))
        except LocalEntryNotFoundError:
            raise _unavailable(repository, error) from error
    try:
        return Path(snapshot_download(repository, allow_patterns=wanted(repository, files)))
    except OSError as error:  # those of the hub's client are
        raise _unavailable(repository, error) from error


def _unavailable(repository: str, error: Exception) -> FileNotFoundError:
    reason = str(error).split("\n", 1)[0]
    return FileNotFoundError(f"{repository}: no such folder, and not to be had from the hub ({reason})")
