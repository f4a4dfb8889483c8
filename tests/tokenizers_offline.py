"""Small tokenizers of every kind, made without a network: a folder with tokenizer.json, a vocabulary, or both; and
folders of sentence-transformers around them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from conftest import make_bert
from families import make_model
from safetensors.torch import save_file
from transformers import AutoTokenizer

TEXTS = [
    "Hello World", "hello world", "naïve CAFÉ", "nai\u0308ve cafe\u0301", "中文字符 and 中文", "", " ", "  two  spaces ",
    "tab\there\x00\x07\u200bnull", "\ufeffbom\r\nline", "[MASK] <mask> [CLS] </s> mid</s>dle", "Straße ǅ İstanbul ﬁ", "hello " * 80,
    "Hello " * 7 + "World the end", "🙂 emoji 👩‍👩‍👧", "a" * 200, "query: x", "\u0301", "ａｂｃ　ｗｉｄｅ",
]  # fmt: skip

_SAMPLE = [
    "hello world the end naive cafe naïve café Hello World CAFÉ query document two spaces tab here null bom line mid "
    "middle strasse istanbul wide emoji 中文字符",
] * 3
FAMILIES = ("bert", "roberta", "mpnet", "xlm-roberta", "camembert", "distilbert", "albert")
_WORDPIECE = ("bert", "distilbert", "mpnet")


def write(folder: Path, family: str, *, tokenizer_json: bool = True, **config: Any) -> Path:
    """A folder that AutoTokenizer reads. config: entries of tokenizer_config.json. tokenizer.json is as the family's
    class in transformers saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
    write_files(folder, family, tokenizer_json=tokenizer_json)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_files(folder: Path, family: str, *, tokenizer_json: bool = True) -> None:
    """The tokenizer's own files alone, into a folder with a config.json."""
    if family in _WORDPIECE:
        _wordpiece(folder, family, tokenizer_json)
    elif family == "roberta":
        _byte_level(folder, tokenizer_json)
    else:
        _unigram(folder, family)
    if tokenizer_json:
        AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer.save(
            str(folder / "tokenizer.json")
        )


def _wordpiece(folder: Path, family: str, tokenizer_json: bool) -> None:
    from tokenizers import BertWordPieceTokenizer

    special = ["<pad>", "[UNK]", "<s>", "</s>", "<mask>"] if family == "mpnet" else None
    special = special or ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = BertWordPieceTokenizer(
        lowercase=False, strip_accents=False, unk_token="[UNK]", cls_token=special[2], sep_token=special[3],
        pad_token=special[0], mask_token=special[4],
    )  # fmt: skip
    tokenizer.train_from_iterator(_SAMPLE, vocab_size=300, min_frequency=1, special_tokens=special, show_progress=False)
    if tokenizer_json:
        tokenizer.save(str(folder / "tokenizer.json"))
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    (folder / "vocab.txt").write_text("".join(word + "\n" for word, _ in words), encoding="utf-8")


def _byte_level(folder: Path, tokenizer_json: bool) -> None:
    from tokenizers import ByteLevelBPETokenizer, processors

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(_SAMPLE, vocab_size=350, min_frequency=1, special_tokens=special, show_progress=False)
    tokenizer._tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    if tokenizer_json:
        tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.save_model(str(folder))


def _unigram(folder: Path, family: str) -> None:
    from tokenizers import SentencePieceUnigramTokenizer, processors

    first = ["[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]"] if family == "albert" else None
    special = first or ["<s>", "</s>", "<unk>", "<pad>", "<mask>"]
    tokenizer = SentencePieceUnigramTokenizer()
    tokenizer.train_from_iterator(
        _SAMPLE, vocab_size=120, unk_token="<unk>", special_tokens=special, show_progress=False
    )
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        f"{special[0]} $A {special[1]}", None, [(special[0], 0), (special[1], 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def unfit(folder: Path, name: str, **config: Any) -> Path:
    """A Unigram as multilingual MiniLM has it beside the config of a BERT ("minilm"), or WordPiece beside a wrong class as
    camembertv2 has it."""
    made = write(folder, "xlm-roberta" if name == "minilm" else "bert")
    tokens = ("<s>", "</s>", "<unk>", "<pad>", "<mask>") if name == "minilm" else ("[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]")
    named = dict(zip(("cls_token", "sep_token", "unk_token", "pad_token", "mask_token"), tokens, strict=True))
    (made / "config.json").write_text(json.dumps({"model_type": "bert" if name == "minilm" else "roberta"}))
    wrong = {} if name == "minilm" else {"tokenizer_class": "RobertaTokenizer"}
    (made / "tokenizer_config.json").write_text(json.dumps(named | wrong | config))
    return made


def modules_of(*kinds: str) -> list[dict[str, Any]]:
    """modules.json as sentence-transformers writes it."""
    return [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]


def sentence_folder(
    folder: Path, *, pooling: str | list[str] = "mean", include_prompt: bool = True, normalize: bool = False,
    behind: Sequence[str | dict[str, Any]] = (), transformer: str = "", sentence: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None, bert: dict[str, Any] | None = None, model: Any = None, **settings: Any,
) -> Path:  # fmt: skip
    """A random BERT, or `model`, as sentence-transformers saves one. behind: the modules after the pooling, names or the config of a
    Dense with random weights; transformer: the folder of its files; settings: of config_sentence_transformers.json."""
    home = folder / transformer
    write(home, "bert", **(tokenizer or {}))
    made = model or make_bert(**{"vocab_size": 300, "max_position_embeddings": 48, **(bert or {})})
    made.save_pretrained(home)
    kinds = [*(one if isinstance(one, str) else "Dense" for one in behind), *["Normalize"] * normalize]
    modules = modules_of("Transformer", "Pooling", *kinds)
    modules[0]["path"] = transformer
    for path, content in {
        "modules.json": modules,
        "1_Pooling/config.json": {
            "word_embedding_dimension": 64, "pooling_mode": pooling, "include_prompt": include_prompt,
        },
        f"{transformer}/sentence_bert_config.json".lstrip("/"): sentence or {},
        "config_sentence_transformers.json": settings,
    }.items():  # fmt: skip
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(content), encoding="utf-8")
    for place, one in enumerate(behind, start=2):
        if not isinstance(one, str):
            _dense(folder / f"{place}_Dense", place, **one)
    return folder


def _dense(folder: Path, seed: int, binary: bool = False, dtype: torch.dtype = torch.float32, **config: Any) -> None:
    """binary: weights as older releases save them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = config["out_features"], config["in_features"]
    made = torch.Generator().manual_seed(seed)
    weights = {"linear.weight": torch.randn(shape, generator=made) / shape[1] ** 0.5}
    if config.get("bias", True):
        weights["linear.bias"] = torch.randn(shape[0], generator=made) / 4
    if config.get("use_residual") and shape[0] != shape[1]:
        weights["residual.weight"] = torch.randn(shape, generator=made) / shape[1] ** 0.5
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    if binary:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")


def folder_of(folder: Path, family: str = "bert", task: str = "sequence_classification", labels: int = 1, config: dict[str, Any] | None = None, **tokenizer: Any) -> Path:
    """A random model with a head and a tokenizer of its family."""
    write(folder, family, model_max_length=tokenizer.pop("model_max_length", 64), **tokenizer)
    sizes = {"vocab_size": 400, "max_position_embeddings": 68, "pad_token_id": 1, "num_labels": labels}
    make_model(family, task, 2, **sizes, **(config or {})).save_pretrained(folder)
    return folder
