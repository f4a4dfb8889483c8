"""tokenizer.json and tokenizer_config.json of a GGUF file's vocabulary, as the model's own files have them.

A GGUF file names the kind of tokenizer (`tokenizer.ggml.model`), and of byte-level ones how a text is split before the
merges (`tokenizer.ggml.pre`); llama.cpp's src/llama-vocab.cpp says what the names stand for and what is so by default.
"""

from __future__ import annotations

import base64
from typing import Any

from ftbert.checkpoint import parse_json, shown, warn_caller
from ftbert.converters.gguf_file import GgufFile
from ftbert.converters.gguf_metadata import Metadata
from ftbert.converters.gguf_splits import USUAL, merges_of, split_of
from ftbert.converters.gguf_templates import chat_template
from ftbert.converters.gguf_vocabulary import CONTROL, NORMAL, SPACE, UNKNOWN, USER, Vocabulary
from ftbert.text import check_charsmaps

Parts = dict[str, Any]
_BYTE_FALLBACK = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}]
_NO_BPE = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}


def tokenizer_files(file: GgufFile, said: Metadata, longest: int) -> dict[str, Any]:
    """What the files hold, by name; none where the file has no vocabulary. longest: tokens of a text. ValueError says
    what is not known or does not fit."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return {}
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"tokenizer.ggml.model {shown(kind)} is not known; known: {', '.join(_KINDS)}")
    words = Vocabulary(file, said)
    whole = file.metadata.get("tokenizer.huggingface.json")
    usual = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    made = _parsed(whole) if isinstance(whole, str) else usual | _KINDS[kind](words)
    check_charsmaps(made)
    if not isinstance(made, dict):
        raise ValueError("tokenizer.huggingface.json is no object")
    types = ["token_type_ids"] if said.rows("token_types") > 1 else []
    stated: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *types, "attention_mask"],
        **{f"{name}_token": words.token(name) for name in words.special},
    }
    if (template := chat_template(file.metadata)) is not None:
        stated["chat_template"] = template
    begin = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": words.added()}
    return {"tokenizer.json": begin | made, "tokenizer_config.json": stated}


def _parsed(whole: str) -> Any:
    try:
        return parse_json(whole)
    except ValueError as error:
        raise ValueError(f"tokenizer.huggingface.json: not valid JSON ({error})") from error


def _wordpiece(words: Vocabulary) -> Parts:
    """In the file a word's first piece has a mark, in the model's own vocabulary all others have one.

    Whether the model knows upper case no file says: it does where its vocabulary has some."""
    kept = (CONTROL, UNKNOWN, USER)
    words.tokens = [
        token if kind in kept else token[1:] if token.startswith(SPACE) else f"##{token}"
        for token, kind in zip(words.tokens, words.types, strict=True)
    ]
    normal = [t for t, kind in zip(words.tokens, words.types, strict=True) if kind == NORMAL and not t.startswith("[")]
    for name, other, usual in (("cls", "bos", "[CLS]"), ("sep", "eos", "[SEP]"), ("unk", "", "[UNK]")):
        if other in words.special:
            words.special.setdefault(name, words.special[other])
        words.name(name, usual)
        if name not in words.special:
            raise ValueError(f"its vocabulary has no {usual}")
    return {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
            "lowercase": all(token == token.lower() for token in normal),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": words.around("cls", "sep", "", second=1),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": words.token("unk"), "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": words.ids(),
        },
    }  # fmt: skip


def _byte_level(words: Vocabulary) -> Parts:
    if "pre" not in words.said:
        warn_caller(f"{words.where}: tokenizer.ggml.pre is missing: texts are split as by {USUAL!r}, as in llama.cpp")
    split = split_of(words.said.get("pre", USUAL))
    before = "bos" if words.flag("add_bos_token", split.begins) else ""
    after = "eos" if words.flag("add_eos_token", False) else ""
    # <s> a </s></s> b </s>; <s> a </s> b </s>; and of models that end no text <s> a <s> b.
    separates = split.separates is not None and words.flag("add_sep_token", split.separates)
    pairs = ("sep" if "sep" in words.special else after) if separates else "" if after else before
    vocabulary = words.ids()
    merges = [merge.split(" ", 1) for merge in words.listed("merges", str) if " " in merge]
    return {
        "normalizer": split.normalizer,
        "pre_tokenizer": split.pre_tokenizer,
        "post_processor": words.around(before, after, pairs),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", **_NO_BPE, "unk_token": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": split.whole_words, "vocab": vocabulary, "merges": merges,
        },
    }  # fmt: skip


def _sentencepiece(words: Vocabulary) -> Parts:
    """SentencePiece's merges, which the file has as scores of the tokens that they make."""
    for name, usual in (("unk", "<unk>"), ("bos", "<s>"), ("eos", "</s>")):
        words.name(name, usual)
    scores = words.scores()
    # The converter has put spaces into tokens that users define.
    words.tokens = [
        token.replace(" ", SPACE) if kind == USER else token
        for token, kind in zip(words.tokens, words.types, strict=True)
    ]
    before = "bos" if words.flag("add_bos_token", True) else ""
    after = "eos" if words.flag("add_eos_token", False) else ""
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    begins = words.flag("add_space_prefix", True)
    first = [{"type": "Prepend", "prepend": SPACE}] if begins else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else []
    pieces = {
        token: score for token, score, kind in zip(words.tokens, scores, words.types, strict=True)
        if kind in (NORMAL, USER)
    }  # fmt: skip
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, spaces]},
        "post_processor": words.around(before, after, before),
        "decoder": {"type": "Sequence", "decoders": [*_BYTE_FALLBACK, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE", **_NO_BPE, "unk_token": words.token("unk"), "fuse_unk": True, "byte_fallback": True,
            "ignore_merges": False, "vocab": words.ids(), "merges": merges_of(pieces, words.ids()),
        },
    }  # fmt: skip


def _unigram(words: Vocabulary) -> Parts:
    """SentencePiece's unigrams, of XLM-RoBERTa's kin."""
    for name, usual in (("unk", "<unk>"), ("bos", "<s>"), ("eos", "</s>")):
        words.name(name, usual)
    before, after = ("bos" if words.flag("add_bos_token", True) else ""), "eos"
    normalizers: list[Any] = []
    if charsmap := bytes(byte & 255 for byte in words.listed("precompiled_charsmap", int)):
        text = base64.b64encode(charsmap).decode("ascii")
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": text})
    if words.flag("remove_extra_whitespaces", True):
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    prepend = "always" if words.flag("add_space_prefix", True) else "never"
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": prepend, "split": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": words.around(before, after, after),
        "decoder": metaspace,
        "model": {
            "type": "Unigram", "unk_id": words.special.get("unk"), "byte_fallback": False,
            "vocab": [list(pair) for pair in zip(words.tokens, words.scores(), strict=True)],
        },
    }  # fmt: skip


_KINDS = {"bert": _wordpiece, "gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}
