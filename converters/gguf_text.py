"""The files beside a model's weights, made of a GGUF file's metadata: the tokenizer, the pooling, the config.

They lie in a temporary folder, which goes when nobody needs it. It is the folder that `convert` would write, without
weights: what reads texts, serves, checks and converts then finds what it finds beside any model.

transformers reads such a tokenizer, too (`gguf_file=`); not used, since of SmolLM2's it takes 12 s, gives the
end-of-text token for the first one, and knows no "tokenizer.ggml.pre", without which digits are split otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ftbert.checkpoint import MODULES, ORIGIN, named, warn_caller
from ftbert.converters.gguf_file import GgufFile
from ftbert.converters.gguf_metadata import Metadata
from ftbert.converters.gguf_tokenizer import tokenizer_files
from ftbert.converters.gguf_vocabulary import end_ids

POOLINGS = {1: "pooling_mode_mean_tokens", 2: "pooling_mode_cls_token", 3: "pooling_mode_lasttoken"}
_NOTE = "made by ftbert of a GGUF file's metadata"


class TextFolder:
    """A temporary folder, whose name says of which file; removed with this object, by the process that made it."""

    def __init__(self, file: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"ftbert-{file[-80:]}-"))
        self._end = weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:  # a forked child ends with the same objects
        shutil.rmtree(folder, ignore_errors=True)


def write_text_folder(file: GgufFile, said: Metadata, config: dict[str, Any], dense: Sequence[str] = ()) -> TextFolder:
    """dense: tensors of linear layers behind the pooling, in their order; they have no bias. Warns where the file's
    tokenizer is not known: such a model takes ids alone."""
    folder = TextFolder(file.path.name)
    stats = [path.stat() for path in file.paths]
    documents: dict[str, Any] = {
        "config.json": {"note": _NOTE, "huggingface": config},
        # Errors name that file. Of a model's folder `embed` looks at the files, to know whether it is still the same.
        ORIGIN: {
            "made_of": str(file.path), "path": str(file.path.resolve()),
            "size": sum(one.st_size for one in stats), "time": max(one.st_mtime_ns for one in stats),
        },
    }
    if (flag := POOLINGS.get(said.count("pooling_type", 0))) is not None:
        documents["1_Pooling/config.json"] = {"word_embedding_dimension": config["hidden_size"], flag: True}
        modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
        for name in dense:
            modules.append((f"{len(modules)}_Dense", "Dense"))
            documents[f"{modules[-1][0]}/config.json"] = _write_dense(folder.path / modules[-1][0], file, name)
        documents[MODULES] = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ]
    if ends := end_ids(file, said):
        documents["generation_config.json"] = {"eos_token_id": ends}
    try:
        documents |= tokenizer_files(file, said, config["max_position_embeddings"])
    except ValueError as error:
        documents[ORIGIN]["no_texts"] = str(error)
        warn_caller(f"{file.path}: takes ids, but no texts: {error}")
    for name, document in documents.items():
        path = folder.path / name
        path.parent.mkdir(exist_ok=True)
        with named(path):
            path.write_text(json.dumps(document), encoding="utf-8", errors="replace")
    return folder


def _write_dense(folder: Path, file: GgufFile, name: str) -> dict[str, Any]:
    """The weights of a Dense module, and what its config.json says."""
    weight = file.read(name).float()
    if weight.dim() != 2:
        raise ValueError(f"{file.path}: {name} is {list(weight.shape)}: expected a matrix")
    folder.mkdir()
    save_file({"linear.weight": weight}, folder / "model.safetensors")
    outputs, inputs = weight.shape
    return {
        "in_features": inputs, "out_features": outputs, "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }  # fmt: skip
