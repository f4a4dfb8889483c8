"""Tokenizers of GGUF files against those that their vocabularies were taken from."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers_offline
from isolated import run
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import ftbert
from ftbert.converters import convert
from ftbert.text import load_tokenizer

gguf = pytest.importorskip("gguf")
from gguf_models import make, vocabulary, write  # noqa: E402

# Without what a text holds as a special token: whether these are found in it, no GGUF file says.
TEXTS = [text for text in tokenizers_offline.TEXTS if "[" not in text] + ["In 2024, 3.14159 wasn't \r\n\n 12345  a\u0301 don't", "x\u00a0y"]
PAIR = ("hello world", "the end")


def read(arch: str, extra: dict[str, Any], path: Path) -> Any:
    """transformers' tokenizer of the file, and what keeps its folder."""
    model = ftbert.load(write(make(arch, vocab_size=700), path, arch, extra=extra))
    return load_tokenizer(Path(model.folder)), model  # type: ignore[arg-type]


def same(found: Any, wanted: Tokenizer, types: bool = False) -> None:
    for text in [*TEXTS, ""]:
        assert found(text)["input_ids"] == wanted.encode(text).ids, text
    pair, theirs = found(*PAIR), wanted.encode(*PAIR)
    assert pair["input_ids"] == theirs.ids
    assert not types or pair["token_type_ids"] == theirs.type_ids
    assert types == ("token_type_ids" in pair)


@pytest.mark.parametrize("lower", [True, False])
def test_wordpiece(lower: bool, tmp_path: Path) -> None:
    """Upper case counts where the vocabulary has some."""
    wanted = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    wanted.normalizer = normalizers.BertNormalizer(lowercase=lower)
    wanted.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    wanted.train_from_iterator(tokenizers_offline._SAMPLE, trainers.WordPieceTrainer(vocab_size=300, min_frequency=1, special_tokens=special, show_progress=False))
    marks = [(token, wanted.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    wanted.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", marks)
    wanted.save(str(tmp_path / "tokenizer.json"))
    ids = {"cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]"}
    for given in (ids, {}):  # old files do not say which tokens are special
        found, _ = read("bert", vocabulary(tmp_path, "bert", **given), tmp_path / "m.gguf")
        same(found, wanted, types=True)
        assert (found.cls_token, found.sep_token, found.unk_token) == ("[CLS]", "[SEP]", "[UNK]")
        assert (found.pad_token, found.mask_token) == ("[PAD]", "[MASK]" if given else None)
        assert found.model_max_length == 64


# The expression of each model's own tokenizer.json, by the architecture that has it.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(expression: str) -> Any:
    parts = [pre_tokenizers.Split(Regex(expression), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


BYTE_LEVEL = {
    "gpt-2": ("bert", pre_tokenizers.ByteLevel(False), None, ("$A", "$A $B")),
    "roberta-bpe": ("bert", pre_tokenizers.ByteLevel(False), None, ("<s> $A </s>", "<s> $A </s> </s> $B </s>")),
    "modern-bert": ("modern-bert", pre_tokenizers.ByteLevel(False), normalizers.NFC(), ("<s> $A </s>", "<s> $A </s> $B </s>")),
    "smollm": ("llama", pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]), None, None),
    "llama-bpe": ("llama", split(WORDS % "{1,3}"), None, ("<s> $A", "<s> $A <s> $B")),
    "qwen2": ("qwen3", split(WORDS % ""), normalizers.NFC(), ("$A </s>", "$A </s> $B </s>")),
}
FLAGS: dict[str, dict[str, bool]] = {
    "roberta-bpe": {"add_bos_token": True, "add_eos_token": True},
    "modern-bert": {"add_bos_token": True, "add_eos_token": True, "add_sep_token": True}, "qwen2": {"add_eos_token": True},
}


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level(pre: str, tmp_path: Path) -> None:
    arch, before, normalizer, around = BYTE_LEVEL[pre]
    wanted = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    wanted.pre_tokenizer = before
    if normalizer is not None:
        wanted.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    wanted.train_from_iterator([*tokenizers_offline._SAMPLE, "12345 2024 1415 wasn't don't"] * 3, trainer)
    wanted.save(str(tmp_path / "tokenizer.json"))
    if around is not None:
        wanted.post_processor = processors.TemplateProcessing(*around, [("<s>", 0), ("</s>", 1)])
    extra = vocabulary(tmp_path, "gpt2", bos="<s>", eos="</s>") | {"tokenizer.ggml.pre": pre}
    extra |= {f"tokenizer.ggml.{key}": flag for key, flag in FLAGS.get(pre, {}).items()}
    found, _ = read(arch, extra, tmp_path / "m.gguf")
    same(found, wanted, types=arch == "bert")
    assert found.decode(found(TEXTS[0])["input_ids"], skip_special_tokens=True) == TEXTS[0]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges(prefix: bool, tmp_path: Path) -> None:
    """Llama 2's kind with a space before a text, Gemma's without; bytes stand for characters that no token has."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    wanted = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "\u2581")
    wanted.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces] if prefix else [spaces])
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False, max_token_length=9)
    wanted.train_from_iterator(tokenizers_offline._SAMPLE[0].split(" ") * 3 + ["the end", "hello world", "two  spaces"], trainer)
    wanted.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    wanted.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    size = wanted.get_vocab_size()
    tokens = [wanted.id_to_token(i) for i in range(size)]
    types = [2, 3, 3] + [6] * 256 + [1] * (size - 259)
    extra = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(size - 259)],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_space_prefix": prefix,
    }  # fmt: skip
    # The bytes are no special tokens of the model's own tokenizer.json.
    whole = json.loads(wanted.to_str())
    whole["added_tokens"] = whole["added_tokens"][:3]
    found, _ = read("llama" if prefix else "gemma3", extra, tmp_path / "m.gguf")
    same(found, Tokenizer.from_str(json.dumps(whole)))


def test_unigrams(tmp_path: Path) -> None:
    """XLM-RoBERTa's kind: spaces are collapsed, two texts have two marks between them."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    wanted = Tokenizer(models.Unigram())
    wanted.normalizer = normalizers.Sequence([normalizers.Replace(Regex(" {2,}"), " ")])
    wanted.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    wanted.train_from_iterator(tokenizers_offline._SAMPLE, trainer)
    marks = [("<s>", 0), ("</s>", 2)]
    wanted.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", marks)
    wanted.save(str(tmp_path / "tokenizer.json"))
    extra = vocabulary(tmp_path, "t5", bos="<s>", eos="</s>", unknown="<unk>", padding="<pad>")
    found, _ = read("bert", extra, tmp_path / "m.gguf")
    same(found, wanted, types=True)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model 'rwkv' is not known; known: bert, gpt2, llama, t5"),
        ({"model": "gpt2", "pre": "kimi-k2"}, "tokenizer.ggml.pre 'kimi-k2' is not known; known: a.x-4.0, bloom"),
        ({"model": "gpt2", "tokens": [1, 2]}, "tokenizer.ggml.tokens: expected str alone"),
        ({"model": "gpt2", "tokens": None}, "tokenizer.ggml.tokens is no list of texts"),
        ({"model": "llama", "scores": [0.5]}, "3 tokens, and scores of 1"),
        ({"model": "bert", "token_type": [1]}, "3 tokens, and types of 1"),
        ({"model": "bert"}, r"its vocabulary has no \[CLS\]"),
    ],
    ids=str,
)
def test_what_is_no_known_tokenizer_leaves_a_model_of_ids(extra: dict[str, Any], words: str, tmp_path: Path) -> None:
    said = {"tokens": ["a", "b", "c"], "pre": "gpt-2", **extra}
    path = write(make("bert"), tmp_path / "m.gguf", "bert", extra={f"tokenizer.ggml.{key}": value for key, value in said.items()})
    with pytest.warns(UserWarning, match=f"m.gguf: takes ids, but no texts: {words}"):
        model = ftbert.load(path)
    with pytest.raises(FileNotFoundError, match=f"no tokenizer here: {words}") as caught:
        model.encode("hello")
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(("kind", "name"), [(1, "mean"), (2, "cls"), (3, "last"), (0, "mean"), (None, "mean")])
def test_pooling(kind: int | None, name: str, tmp_path: Path) -> None:
    extra = vocabulary(tokenizers_offline.write(tmp_path / "t", "bert"), "bert") | {"bert.pooling_type": kind}
    model = ftbert.load(write(make("bert", vocab_size=300), tmp_path / "m.gguf", "bert", extra=extra))
    np.testing.assert_array_equal(model.encode(["hello world"]), model.encode(["hello world"], pooling=name))
    assert len({model.encode("hello world", pooling=one).tobytes() for one in ("mean", "cls", "last")}) == 3


def test_linear_layers_behind_the_pooling(tmp_path: Path) -> None:
    """As of EmbeddingGemma: two, without a bias. A file that says no pooling has nothing before them."""
    extra = vocabulary(tokenizers_offline.write(tmp_path / "t", "bert"), "bert") | {"gemma-embedding.pooling_type": 1}
    rng = np.random.default_rng(0)
    first, second = (rng.normal(size=shape).astype(np.float32) for shape in ((160, 96), (64, 160)))
    tensors = {"dense_3.weight": second, "dense_2.weight": first}
    reference = make("gemma-embedding", vocab_size=300)

    def written(extra: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
        return write(reference, tmp_path / "m.gguf", "gemma-embedding", extra=extra, tensors=tensors)

    texts = ["hello world", "the end"]
    plain = ftbert.load(written(extra, {})).encode(texts, normalize=False)
    model = ftbert.load(written(extra, tensors))
    np.testing.assert_allclose(model.encode(texts, normalize=False), plain @ first.T @ second.T, rtol=2e-4, atol=2e-4)
    convert(tmp_path / "m.gguf", tmp_path / "ours")
    np.testing.assert_array_equal(ftbert.load(tmp_path / "ours").encode(texts), model.encode(texts))
    with pytest.raises(ValueError, match="m.gguf: 3_Dense: takes vectors of 96 entries, gets 160"):
        ftbert.load(written(extra, {**tensors, "dense_3.weight": first})).encode(texts)
    with pytest.warns(UserWarning, match="left out .*dense_"):
        ftbert.load(written({**extra, "gemma-embedding.pooling_type": None}, tensors))


def test_a_chat_template_and_a_whole_tokenizer_json(tmp_path: Path) -> None:
    folder = tokenizers_offline.write(tmp_path / "t", "roberta")
    extra = vocabulary(folder, "gpt2", bos="<s>", eos="</s>") | {
        "tokenizer.ggml.pre": "unheard of", "tokenizer.chat_template": "{{ messages[0].content }}!",
        "tokenizer.huggingface.json": (folder / "tokenizer.json").read_text(),
    }  # fmt: skip
    found, _ = read("llama", extra, tmp_path / "m.gguf")
    same(found, Tokenizer.from_file(str(folder / "tokenizer.json")))
    assert found.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_chat_templates_by_name(tmp_path: Path) -> None:
    extra = vocabulary(tokenizers_offline.write(tmp_path / "t", "roberta"), "gpt2") | {
        "tokenizer.ggml.pre": "gpt-2", "tokenizer.chat_template": "{{ messages[0].content }}!",
        "tokenizer.chat_template.tool_use": "{{ messages[0].content }} by tools", "tokenizer.chat_templates": ["tool_use"],
    }  # fmt: skip
    found, model = read("llama", extra, tmp_path / "m.gguf")
    copies = found, load_tokenizer(convert(tmp_path / "m.gguf", tmp_path / "ours"))
    for one in copies:
        said = (one.apply_chat_template([{"role": "user", "content": "hi"}], chat_template=name, tokenize=False) for name in (None, "tool_use"))
        assert [*said] == ["hi!", "hi by tools"]


def test_an_answer_ends_at_the_end_of_a_turn(tmp_path: Path) -> None:
    """As of Gemma's chat models, whose turns do not end with the token that ends a text."""
    from ftbert.decoding.stated import stated

    said = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 106}
    model = ftbert.load(write(make("gemma3", vocab_size=700), tmp_path / "m.gguf", "gemma3", extra=said))
    assert stated(model).ends == {1, 106}


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize(("more", "ends"), [(["<|im_end|>", "<|end|>"], 2), (["<|call|>", "<|return|>", "<|end|>"], 2)])
def test_a_text_ends_by_the_spelling_of_a_token(kind: int, more: list[str], ends: int, tmp_path: Path) -> None:
    """Whatever its type, as in llama.cpp; <|end|> does not where <|call|> and <|return|> end answers."""
    from ftbert.decoding.prompts import spelled_ends
    from ftbert.decoding.stated import stated

    said = vocabulary(tokenizers_offline.write(tmp_path / "t", "roberta"), "gpt2", bos="<s>") | {"tokenizer.ggml.pre": "gpt-2"}
    first = len(said["tokenizer.ggml.tokens"])
    said["tokenizer.ggml.tokens"] += more
    said["tokenizer.ggml.token_type"] += [kind] * len(more)
    found, model = read("llama", said, tmp_path / "m.gguf")
    (usual,) = (i for i, token in enumerate(said["tokenizer.ggml.tokens"]) if token == "</s>")
    wanted = {usual, *range(first, first + ends)}
    assert stated(model).ends == wanted and spelled_ends(found) <= wanted
    assert found.decode([first]) == more[0] and found.decode([first], skip_special_tokens=True) == ""


def test_errors_name_the_file_and_not_the_folder_that_was_made_of_it(tmp_path: Path) -> None:
    """A unigram's vocabulary without the unknown token is found out where texts are encoded."""
    said = {"model": "t5", "tokens": ["<s>", "</s>", "a"], "scores": [0.0, 0.0, -1.0]}
    path = write(make("bert"), tmp_path / "m.gguf", "bert", extra={f"tokenizer.ggml.{key}": value for key, value in said.items()})
    model = ftbert.load(path)
    with pytest.raises(ValueError) as caught:
        model.encode(["hello"])
    assert str(caught.value).startswith(f"{path}: ") and str(model.folder) not in str(caught.value)


def test_a_long_token_is_not_taken_apart_everywhere(tmp_path: Path) -> None:
    from ftbert.converters.gguf_splits import merges_of

    tokens = ["a", "b", "ab", "x" * 3_000_000]
    kind, found = run(lambda: merges_of(dict.fromkeys(tokens, 0.0), {token: i for i, token in enumerate(tokens)}), seconds=5)
    assert (kind, found) == ("done", [("a", "b")])
    with pytest.raises(ValueError, match="tokens of up to 2499 letters are too long"):
        merges_of({"a" * length: 0.0 for length in range(1, 2500)}, {})


# A trie of one unit that leads to another block; one whose value is behind the texts.
CHARSMAPS = {
    "no trie": b"", "short": b"\xff\xff\xff\xff", "no UTF-8": b"\4\0\0\0" + bytes(4) + b"\xff\xfe",
    "outside": b"\4\0\0\0\1\2\3\4abc\0",
}  # fmt: skip


def charsmap_of(key: str, value: int) -> bytes:
    """A darts-clone trie with the one key, a byte, whose value is this. Unit: label | value's flag | offset << 10."""
    units = [0] * 512
    first, second = 1, ord(key)  # blocks of the root's children, and of the key's own
    units[0] = first << 10
    child = first ^ ord(key)
    units[child] = ord(key) | 1 << 8 | (child ^ (256 + second)) << 10
    units[256 + second] = 1 << 31 | value
    return (4 * len(units)).to_bytes(4, "little") + b"".join(one.to_bytes(4, "little") for one in units) + b"b\0\xc3\xa9\0"


def test_a_table_of_characters_is_followed_before_tokenizers_does() -> None:
    from ftbert.text import check_charsmaps

    def document(data: bytes) -> Any:
        return {"normalizer": {"normalizers": [{"precompiled_charsmap": base64.b64encode(data).decode()}]}}

    for value, replaced in ((0, "b"), (2, "\u00e9")):
        check_charsmaps(document(charsmap_of("a", value)))
        assert normalizers.Precompiled(charsmap_of("a", value)).normalize_str("xax") == f"x{replaced}x"
    for wrong in (3, 6):
        with pytest.raises(ValueError, match="points out of its texts"):
            check_charsmaps(document(charsmap_of("a", wrong)))
    for data in CHARSMAPS.values():
        with pytest.raises(ValueError, match="precompiled_charsmap: "):
            check_charsmaps(document(data))


@pytest.mark.parametrize("what", CHARSMAPS)
def test_a_broken_table_of_characters(what: str, tmp_path: Path) -> None:
    """Of a GGUF file a warning, of a folder an error; tokenizers itself panics, which `except Exception` misses."""
    said = {"model": "t5", "tokens": ["<unk>", "</s>", "a"], "scores": [0.0, 0.0, -1.0], "precompiled_charsmap": [*CHARSMAPS[what]] or [0]}
    path = write(make("bert"), tmp_path / "m.gguf", "bert", extra={f"tokenizer.ggml.{key}": value for key, value in said.items()})
    with pytest.warns(UserWarning, match="m.gguf: takes ids, but no texts: precompiled_charsmap: "):
        ftbert.load(path)
    folder = tokenizers_offline.write(tmp_path / "t", "bert")
    document = json.loads((folder / "tokenizer.json").read_text())
    document["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(CHARSMAPS[what]).decode()}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"t/tokenizer.json: precompiled_charsmap: "):
        load_tokenizer(folder)


def test_a_panic_is_an_error() -> None:
    from ftbert.text.fast_tokenizer import FastTokenizer

    wanted = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False))
    wanted.normalizer = normalizers.Precompiled(CHARSMAPS["outside"])
    with pytest.raises(RuntimeError, match="index out of bounds"):
        FastTokenizer(wanted, False).tokens(["a"], 9, "right")


@pytest.mark.parametrize("key, value", [
    ("scores", [["0.5"]]), ("token_type", [["1"]]), ("merges", [1, 2]), ("precompiled_charsmap", [0.5, 1.5]),
    ("../huggingface.json", "[]"), ("../huggingface.json", "[" * 900 + "]" * 900), ("../huggingface.json", "{" * 9000),
    ("scores", [0.0, float("nan"), 0.0]),
])  # fmt: skip
def test_metadata_of_other_types_leave_a_model_of_ids(key: str, value: Any, tmp_path: Path) -> None:
    from ftbert.converters.gguf_file import read_gguf
    from ftbert.converters.gguf_metadata import Metadata
    from ftbert.converters.gguf_text import write_text_folder

    path = write(make("bert", vocab_size=700), tmp_path / "m.gguf", "bert")
    file = read_gguf(path)
    kind = "bert" if key.startswith("..") else "gpt2" if key == "merges" else "t5"
    name = "tokenizer.huggingface.json" if key.startswith("..") else f"tokenizer.ggml.{key}"
    tokens = ["[UNK]", "a", "b"]
    file.metadata.update({"tokenizer.ggml.model": kind, "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
                          "tokenizer.ggml.scores": [0.0] * 3, name: value})  # fmt: skip
    with pytest.warns(UserWarning, match="takes ids, but no texts"):
        write_text_folder(file, Metadata(file), {"max_position_embeddings": 64, "hidden_size": 96})
