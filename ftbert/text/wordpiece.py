"""WordPiece by the package nanotoken, where it is installed and gives the ids of `tokenizers`.

A text of 200 tokens takes `tokenizers` 320 us of a core and nanotoken 2.5 us. nanotoken refuses tokenizers that it does
not know; those that it takes are compared here, each once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ftbert.text.tokens import Tokens

# Where implementations of WordPiece differ: accents, ideographs, white space, controls, case, long words, added tokens.
_PROBES = (
    "", " ", "Hello, world!", "un-believable U.S.A. e-mail@host.com 3.14%", "Crème brûlée naïve Ångström İstanbul ẞß",
    "漢字かな交じり文 한국어 ไทย हिन्दी العربية עברית", "e\u0301 a\u0300\u0323 \u0301x",
    "tab\tline\nreturn\rvt\x0bff\x0cnul\0end", "zero\u200bwidth\u200djoin\ufeff nbsp\xa0\u3000wide\u2028",
    "👩\u200d👩\u200d👧 🇩🇪 ✓ \ufffd", "ΣΊΣΥΦΟΣ ﬁne ½ Ⅷ ㎏", "x" * 101, "[CLS] [SEP][MASK] [UNK]x[PAD]", "##s a##b",
    "¿qué? «oui» “quote” …", "\U00020000\U0001d400\U000e0001",
)  # fmt: skip
_LENGTHS = ((8, "right"), (8, "left"), (64, "right"))
# Words that each thread remembers: 16 MiB in place of 130.
_CACHE_ENTRIES = 1 << 17


class WordPiece:
    """texts -> token ids with the special tokens, truncated. Thread-safe; has no threads of its own."""

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder

    @classmethod
    def of(cls, fast: Any) -> WordPiece | None:
        """For a `tokenizers.Tokenizer` without truncation. None where it is no WordPiece that nanotoken knows, where
        ids differ, without nanotoken, and if $FTBERT_TOKENIZER is "tokenizers"."""
        if os.environ.get("FTBERT_TOKENIZER") == "tokenizers" or fast.encode_special_tokens:
            return None
        try:
            import nanotoken
        except ImportError:
            return None
        try:
            made = cls(nanotoken.WordPieceTokenizer.from_json(fast.to_str()))
            if not made._equals(type(fast).from_str(fast.to_str())):
                return None
        except Exception:  # noqa: BLE001 - of either package, of no type of its own: `tokenizers` says it in its place
            return None
        nanotoken.set_cache_entries(min(nanotoken.get_cache_entries(), _CACHE_ENTRIES))
        return made

    def tokens(self, texts: Sequence[str], length: int, side: str) -> Tokens:
        """UnicodeError for a lone surrogate. side: "right" or "left", where tokens beyond `length` are dropped."""
        # A pool of threads would be lost in a forked child.
        ids, starts = self._encoder.encode_batch(texts, max_length=length, truncation_side=side, parallel=False)
        return Tokens(ids.astype(np.int64), starts)

    def _equals(self, fast: Any) -> bool:
        for length, side in _LENGTHS:
            fast.enable_truncation(length, direction=side)
            want = [encoding.ids for encoding in fast.encode_batch_fast(list(_PROBES))]
            if [row.tolist() for row in self.tokens(_PROBES, length, side).rows()] != want:
                return False
        return True
