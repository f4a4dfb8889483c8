"""Hub ids: which files are fetched, and what is said where nothing can be. No network: the hub's client is replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_bert
from fake_hub import Hub
from families import make_model
from safetensors.torch import save_file
from tokenizers_offline import sentence_folder
from torch import nn

import ftbert
from ftbert.converters import convert
from ftbert.converters.hub import small_files, weight_files
from ftbert.converters.hub_name import parts_of

TEXT = ["config.json", "tokenizer.json", "vocab.txt", "bpe.codes", "1_Pooling/config.json", "0_Transformer/bpe.codes",
        "additional_chat_templates/tool.jinja"]  # fmt: skip
OTHER = ["README.md", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "onnx/config.json", "rust_model.ot",
         "checkpoint-5/model.safetensors", "checkpoint-5/pytorch_model.bin"]  # fmt: skip
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
VARIANT_SHARDS = [f"model.fp16-0000{i}-of-00002.safetensors" for i in (1, 2)]
# Best first.
FORMATS = [
    ["model.safetensors"], ["model.safetensors.index.json", *SHARDS], ["pytorch_model.bin"],
    ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"], ["model.fp16.safetensors"],
    ["model.safetensors.index.fp16.json", *VARIANT_SHARDS], ["pytorch_model.fp16.bin"],
]  # fmt: skip


@pytest.mark.parametrize("best", range(len(FORMATS)))
def test_the_weights_are_fetched_once(tmp_path: Path, best: int) -> None:
    held = [name for formats in FORMATS[best:] for name in formats]
    index, *shards = FORMATS[best]
    if shards:
        (tmp_path / index).write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(shards)}}))
    assert weight_files("someone/model", [*TEXT, *OTHER, *held], tmp_path) == FORMATS[best]
    small = small_files([*TEXT, *OTHER, *held])
    assert set(TEXT) <= set(small) and not [name for name in small if name.endswith((".bin", ".safetensors"))]
    assert "onnx/config.json" not in small


def test_adapters_of_tasks_are_fetched(tmp_path: Path) -> None:
    listed = [f"{place}/{name}" for place in ("adapters/retrieval", "separation", "checkpoint-5", "a/b/c")
              for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")]  # fmt: skip
    found = weight_files("someone/model", [*TEXT, *OTHER, "model.safetensors", *listed], tmp_path)
    assert found == ["model.safetensors", *(f"{one}/adapter_model.safetensors" for one in ("adapters/retrieval", "separation"))]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    return Hub(monkeypatch, tmp_path)


def test_a_repository(hub: Hub, tmp_path: Path) -> None:
    make_bert().save_pretrained(hub.home)
    hub.put(*TEXT[1:], *OTHER, "pytorch_model.bin", "model.fp16.safetensors")
    assert ftbert.load("someone/model").config.depth == 2
    assert hub.fetched() == sorted([*TEXT, "model.safetensors"])
    (first, before), (second, after) = hub.downloads
    assert "config.json" in before and after == ["model.safetensors"]
    assert first == second == {"revision": None, "token": None}


@pytest.mark.parametrize("transformer", ["", "0_Transformer"])
def test_the_modules_of_sentence_transformers_are_fetched(hub: Hub, transformer: str) -> None:
    dense = {"in_features": 64, "out_features": 8, "bias": True, "activation_function": "torch.nn.modules.linear.Identity"}
    sentence_folder(hub.home, transformer=transformer, behind=[dense])
    other = ["2_Dense/pytorch_model.bin", "checkpoint-5/model.safetensors", "old_2/2_Dense/pytorch_model.bin"]
    hub.put(*other)
    assert ftbert.load("someone/model").encode(["hello world"]).shape == (1, 8)
    assert hub.fetched() == sorted(set(hub.files()) - set(other))
    assert [name for name in hub.downloads[0][1] if name.endswith((".safetensors", ".bin"))] == []


GGUF = ["README.md", "config.json", "mmproj-model-Q8_0.gguf", "model-BF16.gguf", "model-Q4_K_M.gguf", "sub/model.q8_0.gguf",
        "model-F16-00001-of-00002.gguf", "model-F16-00002-of-00002.gguf"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "filename", "wanted"),
    [
        ("someone/model:Q8_0", None, "sub/model.q8_0.gguf"),
        ("hf.co/someone/model:q4_k_m", None, "model-Q4_K_M.gguf"),
        ("someone/model:F16", None, "model-F16-00001-of-00002.gguf"),
        ("https://huggingface.co/someone/model/blob/main/sub/model.q8_0.gguf", None, "sub/model.q8_0.gguf"),
        ("someone/model/sub/model.q8_0.gguf", None, "sub/model.q8_0.gguf"),
        ("someone/model/MODEL-bf16.GGUF", None, "model-BF16.gguf"),
        ("someone/model", "*q8_0.gguf", "sub/model.q8_0.gguf"),
        ("someone/model", "model-Q4_K_M.gguf", "model-Q4_K_M.gguf"),
    ],
)
def test_a_gguf_file_of_a_repository(hub: Hub, name: str, filename: str | None, wanted: str) -> None:
    hub.put(*GGUF)
    for _ in range(2):  # without a connection, too
        with pytest.raises(ValueError, match=rf"snapshot/{wanted}: no GGUF file: it is shorter than a header"):
            ftbert.load(name, filename=filename)
        assert hub.fetched() == parts_of(wanted)
        hub.error = ConnectionError("no route")


def test_a_part_that_a_repository_lacks(hub: Hub) -> None:
    hub.put(*GGUF[:-1])
    with pytest.raises(FileNotFoundError, match="model-F16-00001-of-00002.gguf is one of 2 parts; missing: model-F16-00002-of-00002.gguf"):
        ftbert.load("someone/model:F16")
    assert hub.fetched() == []


@pytest.mark.parametrize(
    ("name", "filename", "words"),
    [
        ("someone/model:Q6_K", None, "no file of type 'Q6_K' there; its .gguf files are model-BF16.gguf, model-F16-0"),
        ("someone/model:Q4_K", None, "no file of type 'Q4_K' there"),
        ("someone/model/other.gguf", None, "no file 'other.gguf' there; its .gguf files are model-BF16.gguf"),
        ("someone/model", "*.safetensors", "no file '.*.safetensors' there; its .gguf files are"),
        ("someone/model", None, r"several GGUF files \(model-BF16.gguf, .*\); name one of them: someone/model/model-BF16.gguf"),
        ("someone/model", "*.gguf", "several GGUF files"),
        ("someone/model:Q8_0", "model.gguf", "filename 'model.gguf': someone/model:Q8_0 names a file by itself"),
    ],
)
def test_no_one_gguf_file_of_a_repository(hub: Hub, name: str, filename: str | None, words: str) -> None:
    hub.put(*GGUF)
    with pytest.raises((FileNotFoundError, ValueError), match=words):
        ftbert.load(name, filename=filename)
    assert hub.fetched() == []


def test_gguf_files_beside_others_are_not_taken(hub: Hub) -> None:
    make_bert().save_pretrained(hub.home)
    hub.put("model-Q8_0.gguf")
    assert ftbert.load("someone/model").config.depth == 2
    assert "model-Q8_0.gguf" not in hub.fetched()


@pytest.mark.parametrize("name", ["nothere.gguf", "folder/nothere.GGUF", "/a/b/c/nothere.gguf", "./a/b/nothere.onnx"])
def test_a_file_that_is_not_there_is_no_question_to_the_hub(hub: Hub, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"{name}: no such file"):
        ftbert.load(name)
    assert hub.asked == {}


def test_revision_and_token(hub: Hub, tmp_path: Path) -> None:
    make_bert().save_pretrained(hub.home)
    said = {"revision": "v1.0", "token": "secret"}
    ftbert.load("someone/model", **said)
    convert("someone/model", tmp_path / "ours", **said)
    assert hub.asked == said and [how for how, _ in hub.downloads] == [said] * 4
    for source in (hub.home, make_bert()):
        for name, value in said.items():
            with pytest.raises(ValueError, match=f"{name}: is for a model of the hub"):
                ftbert.load(source, **{name: value})


def test_the_command_line_names_a_revision(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ftbert.cli import main

    make_bert().save_pretrained(hub.home)
    for command in (["convert", "someone/model", str(tmp_path / "ours")], ["info", "someone/model"]):
        hub.asked.clear()
        assert main([*command, "--revision", "v1.0"]) == 0
        assert hub.asked == {"revision": "v1.0", "token": None}
    assert main(["info", str(hub.home), "--revision", "v1.0"]) == 1
    assert "revision: is for a model of the hub" in capsys.readouterr().err


def test_sharded_variants(hub: Hub) -> None:
    from transformers import AutoModel

    make_bert().save_pretrained(hub.home, variant="fp16", max_shard_size="40KB")
    assert "model.safetensors.index.fp16.json" in hub.files()
    got, want = ftbert.load("someone/model"), ftbert.load(AutoModel.from_pretrained(hub.home, variant="fp16"))
    for name in want.checkpoint.tensors:
        assert (got.checkpoint.read(name) == want.checkpoint.read(name)).all()
    assert ftbert.load(hub.home).config.depth == 2


def test_without_a_connection_the_snapshot_counts(hub: Hub) -> None:
    import httpx

    hub.error = httpx.ConnectError("no route")
    with pytest.raises(FileNotFoundError, match=r"someone/model: .*not to be had from the hub \(no route\)"):
        ftbert.load("someone/model")
    make_bert().save_pretrained(hub.snapshot)
    assert ftbert.load("someone/model").config.depth == 2
    assert [how for how, _ in hub.downloads] == [{"local_files_only": True, "revision": None}] * 2


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "tf_model.h5"], r"no weights found that ftbert reads .*holds config.json, tf_model.h5"),
        (["config.json", "model.fp16.safetensors", "model.bf16.safetensors"], r"several variants alone \(model.bf16"),
        (["model.safetensors", "a.txt"], "no config.json in this repository; it holds a.txt, model.safetensors"),
    ],
)
def test_what_cannot_be_used_is_not_fetched(hub: Hub, files: list[str], message: str) -> None:
    hub.put(*files)
    if "config.json" in files:
        make_bert().config.save_pretrained(hub.home)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ftbert.load("someone/model")
    assert set(hub.fetched()) <= {"config.json"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "xlnet"}, "someone/model: model type 'xlnet' is not supported: its attention scores"),
        ({"is_decoder": True}, "someone/model: this checkpoint is a decoder"),
        ({"hidden_act": "mish"}, "(?s)someone/model: .*unknown activation 'mish'"),
        ({"auto_map": {"AutoModel": "other/code--modeling_other.BertModel"}}, "someone/model: auto_map names modeling_other.BertModel"),
    ],
)
def test_config_json_decides_before_the_weights_are_fetched(hub: Hub, entries: dict[str, Any], message: str) -> None:
    make_bert().save_pretrained(hub.home)
    path = hub.home / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    with pytest.raises(ValueError, match=message):
        ftbert.load("someone/model")
    assert hub.fetched() == ["config.json"]


def test_a_config_in_older_words(hub: Hub) -> None:
    """As nomic-ai/nomic-embed-text-v1.5 is published."""
    make_model("nomic_bert", "encoder", 0, hidden_act="silu").save_pretrained(hub.home)
    path = hub.home / "config.json"
    said = json.loads(path.read_text())
    older = {
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "layer_norm_eps": "layer_norm_epsilon",
        "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
    }  # fmt: skip
    path.write_text(json.dumps({older.get(key, key): value for key, value in said.items()}))
    assert ftbert.load("someone/model").config.max_seq == said["max_position_embeddings"]


def test_a_disk_that_is_full_is_no_missing_repository(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    import huggingface_hub

    def full(repository: str, **how: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "blobs")

    hub.put("config.json", "model.safetensors")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(OSError, match="No space left"):
        ftbert.load("someone/model")


def test_an_adapter_and_its_base(hub: Hub, tmp_path: Path) -> None:
    """The adapter's repository has no other weights than its own, and names a folder of this machine."""
    base = make_bert()
    base.save_pretrained(tmp_path / "base")
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"], "base_model_name_or_path": str(tmp_path / "base")}
    parts = {}
    for i in range(2):
        stem = f"base_model.model.encoder.layer.{i}.attention.self.query"
        parts |= {f"{stem}.lora_A.weight": torch.ones(2, 64), f"{stem}.lora_B.weight": torch.ones(64, 2)}
    save_file(parts, hub.home / "adapter_model.safetensors")
    (hub.home / "adapter_config.json").write_text(json.dumps(said))
    model = ftbert.load("someone/model")
    with torch.no_grad():
        for layer in base.encoder.layer:
            layer.attention.self.query.weight += 4  # 2 products of ones, twice
    ids = torch.tensor([[5, 6, 7]])
    assert torch.allclose(model(ids).last_hidden_state, base(ids).last_hidden_state, atol=2e-5)
    assert set(hub.fetched()) == {"adapter_config.json", "adapter_model.safetensors"}


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
    inside = r"query\.(base_layer|lora_A).* belongs to a PEFT adapter"
    for entry, given, words in (
        (ftbert.load, model, inside), (ftbert.optimize, model, inside),
        (ftbert.load, wrapper, "PeftModel: a model with PEFT adapters"),
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
