"""convert takes every file with it that the tokenizer reads: the copy gives the ids of the source, or there is none."""

from __future__ import annotations

import importlib
import json
import shutil
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import tokenizers_offline
import transformers
from families import make_model
from tokenizers_offline import TEXTS, sentence_folder
from transformers import AutoTokenizer

import ftbert
from ftbert.converters import convert, hub
from ftbert.converters.families import FAMILIES
from ftbert.text import TOKENIZER_FILES, load_tokenizer

VOCABULARY = 300
# Whose files each family's checkpoints have.
_LIKE = {
    "data2vec-text": "roberta", "roberta-prelayernorm": "roberta", "xlm-roberta-xl": "xlm-roberta", "rembert": "albert",
    "electra": "bert", "ernie": "bert", "megatron-bert": "bert", "nomic_bert": "bert", "new": "bert",
    "jina_embeddings_v3": "xlm-roberta", "modernbert": "roberta",
}  # fmt: skip


def write_bpe(folder: Path, tokenizer_class: str) -> None:
    """PhoBERT's and BERTweet's files: words with @@ at breaks, a table of merges in bpe.codes."""
    (folder / "bpe.codes").write_text("h e 5\nhe l 4\nhel l 3\nl o</w> 2\nhell o</w> 1\nw o 1\n", encoding="utf-8")
    (folder / "vocab.txt").write_text("hello 9\nhell@@ 8\nhe@@ 7\nwo@@ 6\nl@@ 5\no 4\nh@@ 3\ne@@ 2\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}), encoding="utf-8")


def write_class_in_config(folder: Path) -> None:
    """As PhoBERT was published: no tokenizer_config.json, config.json names the class."""
    write_bpe(folder, "PhobertTokenizer")
    (folder / "tokenizer_config.json").unlink()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PhobertTokenizer"}), encoding="utf-8")


def write_versioned(folder: Path) -> None:
    """tokenizer.json for older releases, another file for this one, as tokenizer_config.json says."""
    tokenizers_offline._wordpiece(folder, "bert", True)
    (folder / "tokenizer.json").rename(folder / "tokenizer.4.0.0.json")
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}))


WRITERS: dict[str, tuple[str, Any]] = {
    **{
        family: (family, lambda folder, family=family: tokenizers_offline.write_files(folder, _LIKE.get(family, family)))
        for family in FAMILIES
        if _LIKE.get(family, family) in tokenizers_offline.FAMILIES
    },
    **{
        f"{family}, vocabulary alone": (
            family, lambda folder, family=family: tokenizers_offline.write_files(folder, family, tokenizer_json=False)
        )
        for family in ("bert", "roberta", "mpnet")
    },
    "PhoBERT": ("roberta", lambda folder: write_bpe(folder, "PhobertTokenizer")),
    "PhoBERT, class in config.json": ("roberta", write_class_in_config),
    "BERTweet": ("roberta", lambda folder: write_bpe(folder, "BertweetTokenizer")),
    "versioned": ("bert", write_versioned),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_the_copy_encodes_as_the_source(tmp_path: Path, name: str) -> None:
    family, write = WRITERS[name]
    source = tmp_path / "theirs"
    make_model(family, "encoder", 0, vocab_size=VOCABULARY + 60).save_pretrained(source)
    write(source)
    want = load_tokenizer(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = convert(source, tmp_path / "ours")
    for got in (load_tokenizer(copy), AutoTokenizer.from_pretrained(copy)):
        assert type(got) is type(want)
        assert [got(text)["input_ids"] for text in TEXTS] == [want(text)["input_ids"] for text in TEXTS]
    assert (ftbert.load(copy).encode(TEXTS[:3]) == ftbert.load(source).encode(TEXTS[:3])).all()
    # The same files come from the hub.
    held = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    assert {path.name for path in copy.iterdir()} <= set(hub.small_files(held)) | {"model.safetensors"}
    convert(source, copy, force=True)  # everything in it is known for ours


def test_every_file_of_every_tokenizer_of_transformers_is_known() -> None:
    named: dict[str, str] = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/tokenization*.py")):
        try:
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        except (ImportError, NameError):  # a package that only this tokenizer needs
            continue
        for kind in vars(module).values():
            files = getattr(kind, "vocab_files_names", None)
            if isinstance(kind, type) and isinstance(files, dict):
                named |= {file: kind.__name__ for file in files.values() if isinstance(file, str)}
    assert len(named) > 15
    assert {file: kind for file, kind in named.items() if not any(fnmatch(file, one) for one in TOKENIZER_FILES)} == {}
    assert set(named) <= set(hub.small_files(list(named)))


def test_a_tokenizer_that_loses_a_file_is_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of a later release may read more."""
    make_model("roberta", "encoder", 0).save_pretrained(tmp_path / "theirs")
    write_bpe(tmp_path / "theirs", "PhobertTokenizer")
    known = tuple(name for name in TOKENIZER_FILES if name != "bpe.codes")
    monkeypatch.setattr("ftbert.converters.text_files.TOKENIZER_FILES", known)
    with pytest.raises(ValueError, match="theirs: the converted folder would have no tokenizer"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_modules_in_folders_of_any_name(tmp_path: Path) -> None:
    source = sentence_folder(tmp_path / "theirs", pooling="max")
    (source / "1_Pooling").rename(source / "pool")
    modules = json.loads((source / "modules.json").read_text())
    modules[1]["path"] = "pool"
    (source / "modules.json").write_text(json.dumps(modules))
    copy = convert(source, tmp_path / "ours")
    assert [path for path in copy.rglob("*") if path.parent != copy] == [copy / "pool" / "config.json"]
    assert (ftbert.load(copy).encode(TEXTS[:3]) == ftbert.load(source).encode(TEXTS[:3])).all()


def test_a_transformer_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """Its tokenizer's files, of any name, come into the target itself, and give the same ids there."""
    source = sentence_folder(tmp_path / "theirs", transformer="0_Transformer")
    home = source / "0_Transformer"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (home / name).unlink()
    config = json.loads((home / "config.json").read_text()) | {"tokenizer_class": "PhobertTokenizer"}
    (home / "config.json").write_text(json.dumps(config))
    write_bpe(home, "PhobertTokenizer")
    copy = convert(source, tmp_path / "ours")
    assert (copy / "bpe.codes").exists()
    assert [load_tokenizer(copy)(text)["input_ids"] for text in TEXTS] == [
        AutoTokenizer.from_pretrained(home)(text)["input_ids"] for text in TEXTS
    ]


def test_a_tokenizer_that_cannot_be_used_here_is_copied_with_a_word(tmp_path: Path) -> None:
    make_model("bert", "encoder", 0).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{")
    with pytest.warns(UserWarning, match="tokenizer.json: cannot be used as a tokenizer"):
        copy = convert(tmp_path / "theirs", tmp_path / "ours")
    assert (copy / "tokenizer.json").read_text() == "{"


@pytest.mark.parametrize("named", ["config.json", "../secret", "model.safetensors", "/etc/passwd", "a\0"])
def test_settings_name_no_file_that_is_not_theirs(tmp_path: Path, named: str) -> None:
    make_model("bert", "encoder", 0).save_pretrained(tmp_path / "theirs")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps({"vocab_file": named}))
    copy = convert(tmp_path / "theirs", tmp_path / "ours")
    assert {path.name for path in copy.rglob("*")} == {"config.json", "model.safetensors", "tokenizer_config.json"}
    assert json.loads((copy / "config.json").read_text())["format"] == "ftbert"


def test_a_converted_folder_becomes_one_for_transformers(tmp_path: Path) -> None:
    """As docs/install.md says: the reference saved, and all but config.json and the weights beside it."""
    source = sentence_folder(tmp_path / "theirs", pooling="cls", normalize=True)
    ours = convert(source, tmp_path / "ours")
    model = ftbert.load(ours)
    again = tmp_path / "again"
    model.reference().save_pretrained(again)
    shutil.copytree(ours, again, dirs_exist_ok=True, ignore=lambda at, _: ["config.json", "model.safetensors"] if Path(at) == ours else [])
    from sentence_transformers import SentenceTransformer

    want = SentenceTransformer(str(source), device="cpu").encode(TEXTS[:5])
    assert abs(SentenceTransformer(str(again), device="cpu").encode(TEXTS[:5]) - want).max() < 1e-6
    assert (ftbert.load(again).encode(TEXTS[:5]) == model.encode(TEXTS[:5])).all()
