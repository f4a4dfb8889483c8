"""HuggingFace folder, hub id or live model -> ftbert checkpoint folder.

python -m ftbert.converters.from_huggingface SRC DST
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from ftbert.checkpoint import open_checkpoint
from ftbert.config import FORMAT, read_json

# Everything small that says how text becomes ids and vectors; weights and training state stay behind.
_TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "*.model", "modules.json", "sentence_*_config.json",
    "config_sentence_transformers.json", "[0-9]_*/config.json",
)  # fmt: skip


def convert(
    source: str | Path | torch.nn.Module, target: str | Path, *, dtype: torch.dtype | None = None, force: bool = False
) -> Path:
    """Writes `target` (model.safetensors, config.json, the tokenizer's files) and returns its path.

    dtype: of the stored weights, None keeps the source's. force: replace a checkpoint folder that ftbert wrote; nothing
    else is ever replaced. Nothing half-written is left: a folder beside the target is filled and renamed.
    FileExistsError, ValueError (the target holds the source; see also `open_checkpoint`), OSError when the target
    cannot be written.
    """
    target = Path(target)
    _check_target(target, source, force)
    target.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(source)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        stored = dtype or checkpoint.stored_dtype
        tensors = {ours: tensor.contiguous() for ours, tensor in checkpoint.items(stored)}
        save_file(tensors, folder / "model.safetensors")
        checkpoint.config.write(folder / "config.json")
        if checkpoint.folder is not None:
            _copy_text_files(checkpoint.folder, folder)
        folder.chmod(0o755)
        (folder / "model.safetensors").chmod(0o644)
        _replace_folder(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return target


def _check_target(target: Path, source: str | Path | torch.nn.Module, force: bool) -> None:
    if not isinstance(source, torch.nn.Module) and Path(source).exists():
        here, there = Path(source).resolve(), target.resolve()
        if here == there or there in here.parents:
            raise ValueError(f"{target}: holds the source, {source}; convert to another folder")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise FileExistsError(f"{target}: exists already; remove it or pass force=True (--force)")
    if not _is_ours(target):
        raise FileExistsError(f"{target}: is no checkpoint folder of ftbert, and nothing else is replaced; remove it")


def _is_ours(folder: Path) -> bool:
    try:
        return bool(read_json(folder / "config.json").get("format") == FORMAT)
    except (OSError, ValueError):
        return False


def _copy_text_files(source: Path, target: Path) -> None:
    for pattern in _TEXT_FILES:
        for path in sorted(source.glob(pattern)):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def _replace_folder(folder: Path, target: Path) -> None:
    """A rename cannot replace a folder that has files: the old one steps aside first, and goes last."""
    if not target.exists():
        os.rename(folder, target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    os.rename(target, aside / "old")
    os.rename(folder, target)
    shutil.rmtree(aside, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Convert a HuggingFace model to an ftbert checkpoint folder.")
    parser.add_argument("source", help="folder or hub id")
    parser.add_argument("target", help="folder to write")
    parser.add_argument("--dtype", choices=["fp32", "fp16", "bf16"], help="of the stored weights (default: kept)")
    parser.add_argument("--force", action="store_true", help="replace a target that ftbert wrote")
    options = parser.parse_args(arguments)
    from ftbert.model import parse_dtype

    try:
        dtype = parse_dtype(options.dtype) if options.dtype else None
        path = convert(options.source, options.target, dtype=dtype, force=options.force)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
