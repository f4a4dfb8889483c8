"""The ids that a tokenizer's files give: whoever reads them makes a table with a place for every id up to the largest.

One id of 4,000,000,000 in a file of 5 kB is a table of 64 GB, in libraries that end the process then. So the files are
looked at before any of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftbert.input_file import origin, read_json_value

# Ids without a token that a file may have. Real vocabularies have hundreds.
MOST_HOLES = 1 << 20
_PLAIN = ("added_tokens.json", "vocab.json")  # ids by token
_FILES = ("tokenizer.json", "tokenizer_config.json", *_PLAIN)
# A number of as many digits as MOST_HOLES, as a value or as a key: what has none need not be taken apart.
_LARGE = re.compile(rb'[:\[,]\s*\d{7}|"\d{7,}"\s*:')


def check_token_ids(folder: Path) -> None:
    """ValueError names the file and the token whose id is far beyond the number of its tokens. What is wrong with the
    files otherwise is for the tokenizer to say."""
    for path in (folder / name for name in _FILES):
        if not path.exists() or not _LARGE.search(path.read_bytes()):
            continue
        entries = [(token, one) for token, one in _ids(path) if isinstance(one, int)]
        token, largest = max(entries, key=lambda entry: entry[1], default=("", 0))
        if largest >= len(entries) + MOST_HOLES:
            raise ValueError(
                f"{origin(path)}: the token {str(token)[:40]!r} has the id {str(largest)[:20]}, among "
                f"{len(entries)} tokens; expected ids of one vocabulary, with at most {MOST_HOLES} of them unused. "
                "Number the tokens again"
            )


def _ids(path: Path) -> Iterator[tuple[str, Any]]:
    """(token, id) of one of the files."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        return
    if path.name in _PLAIN:
        yield from value.items()
        return
    model, added, decoder = value.get("model"), value.get("added_tokens"), value.get("added_tokens_decoder")
    if isinstance(model, dict) and isinstance(model.get("vocab"), dict):
        yield from model["vocab"].items()
    for one in added if isinstance(added, list) else ():
        if isinstance(one, dict):
            yield str(one.get("content")), one.get("id")
    for one, token in decoder.items() if isinstance(decoder, dict) else ():
        if one.isdecimal():
            yield str(token.get("content") if isinstance(token, dict) else token), int(one[:40])
