"""Tokenizers of two kinds, trained in a moment on a few words."""

from __future__ import annotations

import functools
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SAMPLE = ["hello world, the end. naïve café 中文字符 🙂 two  spaces\nand lines"] * 3


@functools.cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Words of bytes as GPT-2's, or words that begin with a mark and bytes for what is unknown, as Llama's."""
    special = ["<unk>", "<s>", "</s>"]
    tokens = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind == "mark"))
    if kind == "bytes":
        tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokens.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokens.pre_tokenizer = pre_tokenizers.Metaspace()
        tokens.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = []
        special += [f"<0x{i:02X}>" for i in range(256)]
    tokens.train_from_iterator(
        SAMPLE if kind == "bytes" else [SAMPLE[0][:26]],
        trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    if kind == "mark":  # bytes are no special tokens, which decoders leave out
        described = json.loads(tokens.to_str())
        described["added_tokens"] = described["added_tokens"][:3]
        tokens = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
