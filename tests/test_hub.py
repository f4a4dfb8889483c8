"""Hub ids: which files are fetched, and what is said where nothing can be. No network: the hub's client is replaced."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from conftest import make_bert
from torch import nn

import ftbert
from ftbert.converters.hub import wanted

TEXT = ["config.json", "tokenizer.json", "vocab.txt", "1_Pooling/config.json"]
OTHER = ["README.md", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "onnx/config.json", "rust_model.ot",
         "model.fp16.safetensors", "checkpoint-5/model.safetensors", "checkpoint-5/pytorch_model.bin"]  # fmt: skip
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
FORMATS = [
    ["model.safetensors"], ["model.safetensors.index.json", *SHARDS], ["pytorch_model.bin"],
    ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"],
]  # fmt: skip


@pytest.mark.parametrize("best", range(len(FORMATS)))
def test_the_weights_are_fetched_once(best: int) -> None:
    held = [name for formats in FORMATS[best:] for name in formats]
    got = wanted("someone/model", [*TEXT, *OTHER, *held])
    weights = {name for name in got if not name.endswith((".json", ".txt"))}
    assert weights == {name for name in FORMATS[best] if not name.endswith(".json")}
    assert {*TEXT, FORMATS[best][0]} <= set(got) and "onnx/config.json" not in got


@pytest.mark.parametrize("home", ["", "0_Transformer/"])
def test_the_modules_of_sentence_transformers_are_fetched(home: str) -> None:
    files = ["modules.json", home + "config.json", home + "pytorch_model.bin", "1_Pooling/config.json", "2_Dense/config.json"]
    files += ["2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "checkpoint-5/model.safetensors", "old_2/2_Dense/pytorch_model.bin"]
    got = wanted("someone/model", files)
    assert set(got) == {*files} - {"2_Dense/pytorch_model.bin", "checkpoint-5/model.safetensors", "old_2/2_Dense/pytorch_model.bin"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A hub of one repository; "fetched" is what was asked for. `list` may be an error."""
    import huggingface_hub

    state: dict[str, Any] = {"fetched": [], "list": [], "folder": tmp_path / "snapshot"}

    def list_repo_files(self: Any, repository: str) -> list[str]:
        if isinstance(state["list"], Exception):
            raise state["list"]
        return list(state["list"])

    def snapshot_download(repository: str, **how: Any) -> str:
        state["fetched"].append(how)
        if not state["folder"].exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
        return str(state["folder"])

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", list_repo_files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def test_a_repository(hub: dict[str, Any]) -> None:
    make_bert().save_pretrained(hub["folder"])
    hub["list"] = [*TEXT, *OTHER, "model.safetensors", "pytorch_model.bin"]
    assert ftbert.load("someone/model").config.layers == 2
    [how] = hub["fetched"]
    assert [name for name in hub["list"] if any(fnmatch(name, one) for one in how["allow_patterns"])] == [
        *TEXT, "model.safetensors"
    ]  # fmt: skip


def test_without_a_connection_the_snapshot_counts(hub: dict[str, Any]) -> None:
    import httpx

    hub["list"] = httpx.ConnectError("no route")
    with pytest.raises(FileNotFoundError, match=r"someone/model: .*not to be had from the hub \(no route\)"):
        ftbert.load("someone/model")
    make_bert().save_pretrained(hub["folder"])
    assert ftbert.load("someone/model").config.layers == 2
    assert hub["fetched"] == [{"local_files_only": True}] * 2


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "tf_model.h5"], r"no weights that ftbert reads .*holds config.json, tf_model.h5"),
        (["adapter_config.json", "adapter_model.safetensors"], r"PEFT adapter.*merge_and_unload\(\)"),
    ],
)
def test_what_cannot_be_used_is_not_fetched(hub: dict[str, Any], files: list[str], message: str) -> None:
    hub["list"] = files
    with pytest.raises(ValueError, match=message):
        ftbert.load("someone/model")
    assert hub["fetched"] == []


# ---- adapters that were not merged -----------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """By the names that peft gives its parts."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})


def test_adapters_are_named(tmp_path: Path) -> None:
    model = make_bert().eval()
    model.encoder.layer[1].attention.self.query = LoraLinear(model.encoder.layer[1].attention.self.query)
    wrapper = type("PeftModel", (nn.Module,), {"__module__": "peft.peft_model", "config": model.config})()
    (tmp_path / "adapter_config.json").write_text("{}")
    inside = r"query\.(base_layer|lora_A).* belongs to a PEFT adapter"
    for entry, given, words in (
        (ftbert.load, model, inside), (ftbert.optimize, model, inside),
        (ftbert.load, wrapper, "PeftModel: a model with PEFT adapters"),
        (ftbert.load, tmp_path, r"PEFT adapter \(adapter_config.json\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words + r".*merge_and_unload\(\)"):
            entry(given)


# ---- the public face -------------------------------------------------------------------------------------------------


def test_dir_is_the_public_face_and_imports_nothing() -> None:
    code = (
        "import ftbert, sys; names = dir(ftbert); assert 'torch' not in sys.modules; "
        "assert names == sorted(ftbert.__all__) and {'Model', 'load', 'optimize', 'undo'} <= set(names), names; "
        "assert all(hasattr(ftbert, name) for name in names); from ftbert import *; assert load is ftbert.load"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
