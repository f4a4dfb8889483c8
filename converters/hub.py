"""A model of the Hugging Face hub: config.json decides first, then each weight is fetched once, in one format."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

from ftbert.checkpoint import (
    ADAPTER_WEIGHTS,
    FORMAT,
    MODULES,
    find_weights,
    inner_modules,
    read_json_object,
    read_modules,
    shard_names,
    transformer_folder,
)
from ftbert.converters.adapters import ADAPTER, adapter_of, has_weights_among
from ftbert.converters.families import find_family
from ftbert.converters.gliner import GLINER, check_gliner
from ftbert.converters.hub_name import HubName, parts_of
from ftbert.converters.own_code import read_config
from ftbert.converters.static_embedding import static_config
from ftbert.converters.task_adapters import adapter_places
from ftbert.converters.text_files import LINEARS, MODULE_WEIGHTS, named_files
from ftbert.text import TOKENIZER_FILES

# At any depth: configs, the tokenizer's files, the modules of sentence-transformers.
_SMALL = ("*.json", "*.txt", *TOKENIZER_FILES)
_OTHERS = ("onnx/*", "openvino/*", "coreml/*")


def small_files(files: Iterable[str]) -> list[str]:
    """Of a repository's files all but weights: what says how it computes and how it reads text."""
    found = [name for name in files if any(fnmatchcase(f"/{name}", f"*/{one}") for one in _SMALL)]
    return [name for name in found if not any(fnmatchcase(name, one) for one in _OTHERS)]


def weight_files(repository: str, files: list[str], folder: Path) -> list[str]:
    """Of its files the weights in the best format there is, those of the other modules of sentence-transformers, and
    what else tokenizer_config.json names.

    folder: with the small files. ValueError: no weights that ftbert reads.
    """
    home = transformer_folder(folder)
    names = _names_in(files, folder, home)
    if ADAPTER in names and not has_weights_among(names):
        main = next((name for name in ADAPTER_WEIGHTS if name in names), "")  # of the base, whoever opens it asks
    else:
        main = find_weights(names, repository)  # weights in other folders are other models'
    shards = shard_names(home / main) if main.endswith(".json") else []
    found = [home / name for name in (main, *shards, *LINEARS, *named_files(home), *ADAPTER_WEIGHTS)]
    for module in (inner for one in read_modules(folder) for inner in inner_modules(one)):
        if module.folder not in (folder, home):
            names = _names_in(files, folder, module.folder)
            found += [module.folder / name for name in MODULE_WEIGHTS if name in names][:1]
    for adapter in adapter_places(files, str(home.relative_to(folder))):
        names = _names_in(files, folder, folder / adapter)
        found += [folder / adapter / name for name in ADAPTER_WEIGHTS if name in names][:1]
    return [name for path in found if (name := str(path.relative_to(folder))) in files]


def _names_in(files: list[str], folder: Path, place: Path) -> list[str]:
    return [Path(name).name for name in files if (folder / name).parent == place]


def fetch(name: HubName, revision: str | None = None, token: str | None = None) -> Path:
    """The folder of the hub's snapshot, or a .gguf file in it; without a connection what was fetched before. Of a model
    in parts all are fetched.

    revision: a branch, tag or commit, None: the main branch. token: None: that of HF_TOKEN or of `hf auth login`.
    ValueError, before any weights are fetched: a model that ftbert does not run, no weights that it
    reads; several GGUF files. FileNotFoundError: no such repository or file, or it cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository = name.repository

    def download(names: list[str]) -> Path:
        try:
            return Path(snapshot_download(repository, revision=revision, token=token, allow_patterns=names))
        except OSError as error:  # those of the hub's client are, without a number
            if error.errno is not None:
                raise
            raise _unavailable(repository, error) from error

    try:
        files = HfApi(token=token).list_repo_files(repository, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise _unavailable(repository, error) from error
    except Exception as error:  # noqa: BLE001 (the transport's own errors differ by release)
        try:
            folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            raise _unavailable(repository, error) from error
        chosen = name.choose(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return folder if chosen is None else folder / chosen
    if (chosen := name.choose(files)) is not None:
        parts = parts_of(chosen)
        if missing := [one for one in parts if one not in files]:
            raise FileNotFoundError(f"{repository}: {chosen} is one of {len(parts)} parts; missing: {missing[0]}")
        return download([escape(one) for one in parts]) / chosen
    if not {"config.json", MODULES, GLINER, ADAPTER}.intersection(files):
        raise FileNotFoundError(f"{repository}: no config.json in this repository; it holds {', '.join(files[:20])}")
    small = small_files(files)
    folder = download(small)
    if adapter_of(transformer_folder(folder)) is None and static_config(folder) is None:
        _check_config(repository, folder)
    # The small ones again: the repository may have changed meanwhile, and what is there is not fetched twice.
    return download(list(dict.fromkeys(small + weight_files(repository, files, folder))))


def fetch_small(repository: str, token: str | None = None) -> Path:
    """The folder of the hub's snapshot with configs and the tokenizer's files; without a connection what was fetched
    before. FileNotFoundError: it cannot be had."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        names = small_files(HfApi(token=token).list_repo_files(repository))
        return Path(snapshot_download(repository, token=token, allow_patterns=names))
    except Exception as error:  # noqa: BLE001 (the transport's own errors differ by release)
        try:
            return Path(snapshot_download(repository, local_files_only=True))
        except Exception:  # noqa: BLE001
            raise _unavailable(repository, error) from error


def _check_config(repository: str, folder: Path) -> None:
    """ValueError for what is not run, by its config alone."""
    named = folder / GLINER
    document = read_json_object(named if named.exists() else transformer_folder(folder) / "config.json")
    if document.get("format") == FORMAT:
        return
    try:
        if named.exists():
            check_gliner(document)
        else:
            document = read_config(document)
            find_family(document).config(document)
    except ValueError as error:
        raise ValueError(f"{repository}: {error}") from error


def _unavailable(repository: str, error: Exception) -> FileNotFoundError:
    from huggingface_hub.errors import RepositoryNotFoundError

    reason = str(error).split("\n", 1)[0]
    private = isinstance(error, RepositoryNotFoundError)
    hint = "; a private or gated model takes token=..., HF_TOKEN or `hf auth login`" if private else ""
    return FileNotFoundError(f"{repository}: no such folder, and not to be had from the hub ({reason}){hint}")
