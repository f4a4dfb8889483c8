"""Files that are wrong, hostile or too large: each is a ValueError or OSError that names the file, at once."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_bert
from families import make_model
from isolated import run
from safetensors.torch import load_file, save_file

import ftbert
from ftbert.checkpoint import CheckpointConfig, digest_of
from ftbert.converters import open_checkpoint
from ftbert.converters.from_huggingface import convert


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    make_bert(hidden_size=16, num_hidden_layers=1).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(bert: Path, tmp_path: Path) -> Path:
    """One's own copy of the files."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in bert.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def change(folder: Path, **entries: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


def flip(path: Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_a_flipped_bit_is_noticed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tensor of a folder that ftbert wrote, wherever it lies; also where parts are summed side by side."""
    monkeypatch.setattr("ftbert.checkpoint.tensor_bytes._PART", 1000)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    path = convert(folder, tmp_path / "out") / "model.safetensors"
    assert path.read_bytes() == (convert(folder, tmp_path / "again") / "model.safetensors").read_bytes()
    whole, rng = path.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8:header])
    assert list(entries.pop("__metadata__")) == ["ftbert.crc32"] and len(entries) > 15
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        flip(path, header + rng.randrange(begin, end), rng.randrange(8))
        with pytest.raises(ValueError, match=rf"{path}: {name}: its checksum is .*: convert or quantize the model again"):
            ftbert.load(path.parent)
        path.write_bytes(whole)
    ids = torch.arange(5, 15)[None]
    expected = ftbert.load(path.parent)(ids).last_hidden_state
    save_file(load_file(path), tmp_path / "again" / path.name)  # as one of an ftbert that knew no checksums
    assert torch.equal(ftbert.load(tmp_path / "again")(ids).last_hidden_state, expected)
    flip(path, header + entries["layers.0.ffn.up.bias"]["data_offsets"][0] + 2, 6)
    assert not torch.equal(ftbert.load(path.parent, verify=False)(ids).last_hidden_state, expected)
    monkeypatch.setenv("FTBERT_VERIFY", "off")
    assert not torch.equal(ftbert.load(path.parent)(ids).last_hidden_state, expected)


def test_checksums_of_other_tensors(folder: Path, tmp_path: Path) -> None:
    path = convert(folder, tmp_path / "out") / "model.safetensors"
    for found in ("{}", "[", "[" * 9999, '{"embeddings.word": "0"}', "7"):
        save_file(load_file(path), path, metadata={"ftbert.crc32": found})
        with pytest.raises(ValueError, match=rf"{path}: ftbert\.crc32 in its header is not of its tensors"):
            open_checkpoint(path.parent)


def test_a_digest_of_a_part_of_a_tensor() -> None:
    part = torch.arange(9000, dtype=torch.int16)[1:]  # begins at byte 2
    assert digest_of(part) == digest_of(part.clone()) != digest_of(part + 1)
    assert digest_of(part[:9]) == digest_of(part[:9].clone())


def test_a_flipped_bit_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers_offline import sentence_folder

    dense = {"in_features": 64, "out_features": 32, "bias": True, "activation_function": "torch.nn.modules.linear.Identity"}
    source = sentence_folder(tmp_path / "model", behind=[dense])
    path = convert(source, tmp_path / "out") / "2_Dense" / "model.safetensors"
    assert abs(ftbert.load(tmp_path / "out").encode(["a b"]) - ftbert.load(source).encode(["a b"])).max() < 1e-6
    flip(path, -1, 0)
    for verify in (True, False):  # the latter is of the model's own file
        with pytest.raises(ValueError, match=rf"{path}: linear\.\w+: its checksum is .* FTBERT_VERIFY=off"):
            ftbert.load(tmp_path / "out", verify=verify).encode(["a b"])
    monkeypatch.setenv("FTBERT_VERIFY", "off")
    assert ftbert.load(tmp_path / "out").encode(["a b"]).shape == (1, 32)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"num_attention_heads": 2.5}, "num_attention_heads: expected a whole number, got 2.5"),
        ({"num_attention_heads": True}, "num_attention_heads: expected a whole number, got True"),
        ({"hidden_size": "16"}, "hidden_size: expected a whole number, got '16'"),
        ({"hidden_size": [16]}, "hidden_size: expected a whole number, got a list of 1"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps: expected a finite number"),
        ({"layer_norm_eps": "1e-12"}, "layer_norm_eps: expected a finite number"),
        ({"layer_norm_eps": -1e-5}, "ffn_norm.eps: expected a number in"),
        ({"layer_norm_eps": 10**400}, "layer_norm_eps: expected a finite number"),
        ({"hidden_act": {}}, "hidden_act: expected a string, got a dict of 0"),
        ({"model_type": ["bert"]}, "model type a list of 1 is not supported"),
        ({"architectures": {"a": 1}}, "architectures: expected a list of class names"),
        ({"architectures": [None]}, "architectures: expected a list of class names"),
        ({"num_hidden_layers": 65536}, "65536 layers are more than ftbert runs"),
        ({"model_type": "gemma3_text", "hidden_size": -1, "head_dim": 16}, "hidden size -1: expected at least 1"),
        ({"of_a_user": json.loads("[" * 200 + "]" * 200)}, "nested more than 100 deep"),
        ({"num_hidden_layers": 1000}, r"and \d{5} more"),
        ({"vocab_size": 2**70}, "vocab: expected an integer"),
        ({"hidden_act": "x" * 1_000_000}, "layer.ffn.activation: unknown activation 'xxx"),
    ],
)
def test_config_entries(folder: Path, entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        open_checkpoint(change(folder, **entries))
    assert str(folder) in str(caught.value) and len(str(caught.value)) < 10_000


def test_positions_that_begin_behind_the_table(tmp_path: Path) -> None:
    make_model("roberta", "masked_lm", 0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no token has a position: they count from padding id 65536") as caught:
        open_checkpoint(change(tmp_path, pad_token_id=65536))
    assert str(tmp_path) in str(caught.value)


def test_what_a_checkpoint_left_out(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "converted")
    with pytest.raises(ValueError, match="converted.*left_out: expected a string, got 7"):
        open_checkpoint(change(tmp_path / "converted", left_out=7))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}", "[]", "\xff", '"\\ud800"', ""])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_broken_json(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("latin-1"))
    if name != "config.json":
        (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=name):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_pipes_are_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if name.endswith(".bin"):
        (folder / "model.safetensors").unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=f"{name}: expected a file, it is a named pipe"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", "a\0", 7])
def test_shards_outside(folder: Path, name: Any) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="index.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "state",
    [
        {"a": torch.zeros(1).expand(2**20, 2**20)},
        {"a": torch.zeros(3).to_sparse()},
        {"a": torch.zeros(3, device="meta")},
        {7: torch.zeros(3)},
        [torch.zeros(3)],
        {"a": [1]},
    ],
    ids=["expanded", "sparse", "meta", "number as name", "list", "no tensor"],
)
def test_states_that_are_none(folder: Path, state: Any) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin: "):
        open_checkpoint(folder)


@pytest.mark.parametrize("format", ["bin", "safetensors"])
def test_weights_that_were_cut_after_they_were_opened(format: str, folder: Path) -> None:
    """An error that names the file: a page behind the end of one that is mapped would end the process."""
    path = folder / "model.safetensors"
    if format == "bin":
        torch.save(load_file(path), folder / "pytorch_model.bin")
        path.unlink()
        path = folder / "pytorch_model.bin"
    checkpoint = open_checkpoint(folder)
    with path.open("r+b") as writable:
        writable.truncate(path.stat().st_size // 2)
    kind, (_, expected, words) = run(lambda: [checkpoint.read(name) for name in checkpoint.tensors])
    assert kind == "raised" and expected and words.startswith(f"{path}: ") and "has it been changed" in words


def test_a_model_of_bin_files_is_pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    model = ftbert.load(folder)
    copy = pickle.loads(pickle.dumps(model))
    ids = torch.tensor([[2, 5, 3]])
    assert torch.equal(copy(ids).last_hidden_state, model(ids).last_hidden_state)
    name = next(iter(model.checkpoint.tensors))
    assert torch.equal(copy.checkpoint.read(name), model.checkpoint.read(name))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_weights_in_8_bits_say_what_is_missing(folder: Path, stored: torch.dtype) -> None:
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("output.dense.weight"))
    save_file(weights | {name: weights[name].to(stored)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} is stored as {stored}; quantized weights need their scales"):
        ftbert.load(folder)


def test_our_own_config(folder: Path, tmp_path: Path) -> None:
    ours = convert(folder, tmp_path / "ours")
    document = json.loads((ours / "config.json").read_text())
    head = {"task": "masked_lm", "source": "x", "outputs": 1, "width": 0, "activation": "none", "norm_eps": 0.0, "tied": False}
    for change_ in ({"heads": 5}, {"heads": [5]}, {"heads": [head]}, {"huggingface": [1]}, {"version": [1]}, {"encoder": []}):
        with pytest.raises(ValueError, match="here: "):
            CheckpointConfig.parse(document | change_, "here")
    unknown = {key: value for key, value in document["encoder"].items() if key != "vocab"} | {"colour": "red"}
    change(ours, encoder=unknown)
    with pytest.raises(ValueError, match=r"(?s)ours/config.json: .*vocab: missing.*colour: unknown key"):
        open_checkpoint(ours)
    with pytest.raises(ValueError, match=r"checkpoint version 3, this ftbert reads 1 and 2; a newer ftbert wrote it"):
        open_checkpoint(change(ours, version=3))


def test_albert_groups_that_transformers_rounds_otherwise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_hidden_groups 14 of 18 layers"):
        open_checkpoint(make_model("albert", "encoder", 0, num_hidden_layers=18, num_hidden_groups=14))


def test_every_wrong_tensor_is_named_at_once(folder: Path) -> None:
    weights = make_bert(hidden_size=16, num_hidden_layers=1).state_dict()
    (folder / "model.safetensors").unlink()
    del weights["encoder.layer.0.output.dense.weight"], weights["encoder.layer.0.attention.self.key.bias"]
    weights["embeddings.LayerNorm.bias"] = torch.zeros(3)
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ValueError) as caught:
        open_checkpoint(folder)
    for name in ("layer.0.output.dense.weight", "layer.0.attention.self.key.bias", "embeddings.LayerNorm.bias"):
        assert name in str(caught.value)


# ---- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "1_Pooling/config.json"])
def test_convert_follows_no_link_out_of_the_source(folder: Path, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    (folder / name).parent.mkdir(exist_ok=True)
    kinds = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"))]
    (folder / "modules.json").write_text(json.dumps(kinds))
    secret.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(ValueError, match=f"{name}: is a link that leads out of"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (folder / name).unlink()
    (folder / "real").write_bytes(secret.read_bytes())
    (folder / name).symlink_to(folder / "real")
    convert(folder, tmp_path / "out")


def test_convert_follows_the_links_of_the_hubs_cache(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "models--a--b"
    (model / "blobs").mkdir(parents=True)
    snapshot = model / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (folder / "tokenizer_config.json").write_text("{}")
    for path in folder.iterdir():
        path.rename(model / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    convert(snapshot, tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer_config.json").is_symlink()
