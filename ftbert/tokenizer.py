"""The fast tokenizer, with only the truncation that the model needs and never any padding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ftbert.text_settings import TextSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Any of these lets transformers build the fast tokenizer when tokenizer.json itself is missing.
_VOCABULARIES = ("vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model")

# The tokenizer's own result keeps strings, offsets and the truncated rest: about 100 bytes a token.
# Handing it this many texts at a time bounds that; one call is still long enough to use every core.
_TEXTS_PER_CALL = 512


class Tokenizer:
    """text -> token ids with the special tokens, truncated to `max_length`, unpadded. Thread-safe."""

    def __init__(self, folder: Path, settings: TextSettings, max_seq: int) -> None:
        """`folder` holds tokenizer.json or a vocabulary that transformers can turn into one.

        `max_seq` bounds the length, special tokens included; settings.max_length may lower it.
        FileNotFoundError without a tokenizer, ValueError when it cannot be used.
        """
        self.settings = settings
        self.max_length = min(max_seq, settings.max_length or max_seq)
        self._fast = _load(folder)
        special = self._fast.num_special_tokens_to_add(False)
        if self.max_length <= special:
            raise ValueError(
                f"{folder}: a maximum length of {self.max_length} leaves no room beside {special} special tokens"
            )
        # tokenizer.json may carry both, and they belong to whoever saved it, not to this model.
        self._fast.no_padding()
        self._fast.enable_truncation(self.max_length)
        if settings.lower_case:
            from tokenizers import normalizers

            before = self._fast.normalizer
            rest = [] if before is None else [before]
            self._fast.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Token ids of each text, int64 [tokens]. ValueError for text that is not valid Unicode."""
        prompt = self.settings.prompt
        found: list[NDArray[np.int64]] = []
        for start in range(0, len(texts), _TEXTS_PER_CALL):
            part = list(texts[start : start + _TEXTS_PER_CALL])
            if prompt:
                part = [prompt + text for text in part]
            try:
                # _fast: the same ids, without the character offsets.
                encodings = self._fast.encode_batch_fast(part)
            except (TypeError, UnicodeError) as error:
                raise _explained(error, part, start) from error
            found.extend(np.array(encoding.ids, dtype=np.int64) for encoding in encodings)
        return found


def _load(folder: Path) -> Any:
    """A `tokenizers.Tokenizer` that nobody else holds."""
    from tokenizers import Tokenizer as Fast

    path = folder / "tokenizer.json"
    if path.exists():
        try:
            return Fast.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{path}: not a tokenizer file ({error})") from error
    if not any((folder / name).exists() for name in _VOCABULARIES):
        raise FileNotFoundError(
            f"{folder}: no tokenizer here; expected tokenizer.json or one of {', '.join(_VOCABULARIES)}. "
            "Copy the tokenizer's files beside the weights, or pass token ids to the model"
        )
    from transformers import AutoConfig, AutoTokenizer

    # Which class reads the vocabulary follows from the model type; our own config.json keeps it one level down.
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("huggingface")
    known = {"config": AutoConfig.for_model(**config)} if config else {}
    slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **known)
    fast = getattr(slow, "backend_tokenizer", None)
    if fast is None:
        raise ValueError(
            f"{folder}: {type(slow).__name__} has no fast version; save a tokenizer.json into the folder"
        )
    return Fast.from_str(fast.to_str())


def is_unicode(text: str) -> bool:
    """False for a str with a lone surrogate, the only kind that no tokenizer takes."""
    if text.isascii():  # a flag of the object, so most texts cost nothing
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _explained(error: Exception, texts: list[str], start: int) -> Exception:
    """The same failure, naming the text."""
    for index, text in enumerate(texts):
        if not is_unicode(text):
            return ValueError(f"text {start + index} is not valid Unicode: it holds a lone surrogate")
    return error
