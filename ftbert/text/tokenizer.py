"""The model's tokenizer as transformers' AutoTokenizer builds it, with only truncation and never any padding.

Which class reads the files, what of tokenizer_config.json it applies and what of tokenizer.json it rebuilds differs
between families and releases of transformers. So AutoTokenizer does that; its `tokenizers` object does the work.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ftbert.checkpoint import expect_file, is_unicode, read_json_object
from ftbert.text.cutting import CHARACTERS, Cutter
from ftbert.text.settings import TextSettings
from ftbert.text.tokens import Text, Tokens, joined, tokens_of
from ftbert.text.wordpiece import WordPiece

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Any of these lets transformers build a tokenizer when tokenizer.json itself is missing.
_VOCABULARIES = ("vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model")
_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # of all that AutoTokenizer may open

# The tokenizer's own result keeps strings, offsets and the truncated rest: about 100 bytes a token.
# Handing it this much at a time bounds that; one call is still long enough to use every core.
_TEXTS_PER_CALL, _CHARACTERS_PER_CALL = 512, 1 << 20

# Maximum lengths in use at once; each has a tokenizer of its own, since the length is part of it.
_LENGTHS_KEPT = 4


class Tokenizer:
    """text -> token ids with the special tokens, truncated, unpadded. Thread-safe.

    max_length: tokens with the special ones where the caller asks for no other length. longest: the most the model
    takes.
    """

    def __init__(self, folder: Path, settings: TextSettings, max_seq: int) -> None:
        """`folder` holds tokenizer.json or a vocabulary that transformers can turn into a tokenizer.

        `max_seq` bounds the length, special tokens included; settings.max_length, or else the tokenizer's own
        model_max_length, may lower it. FileNotFoundError without a tokenizer, ValueError when it cannot be used.
        """
        self.settings = settings
        self.longest = max_seq
        self._folder = folder
        tokenizer = load_tokenizer(folder, settings.tokenizer_arguments)
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self._special = tokenizer.num_special_tokens_to_add(pair=False)
        self._special_of_pairs = tokenizer.num_special_tokens_to_add(pair=True)
        self._has_types = "token_type_ids" in tokenizer.model_input_names
        self._side = tokenizer.truncation_side
        self._fast: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._python = tokenizer if self._fast is None else None
        self._cutter: Cutter | None = None
        self._wordpiece: WordPiece | None = None
        self._lock = threading.Lock()
        self._by_length: dict[tuple[int, str], Any] = {}
        own = settings.max_length or _own_length(folder, tokenizer)
        self.max_length = self.check_length(min(max_seq, own), str(folder))
        _expect_one_type(folder, tokenizer)
        if self._fast is None:
            if settings.lower_case:
                raise ValueError(f"{folder}: do_lower_case is not supported for {type(tokenizer).__name__}")
            return
        # tokenizer.json may carry both, and they belong to whoever saved it, not to this model.
        self._fast.no_padding()
        self._fast.no_truncation()
        if settings.lower_case:
            lower_first(self._fast)
        self._cutter = Cutter.of(self._fast)
        self._wordpiece = WordPiece.of(self._fast)

    def check_length(self, length: int, where: str, pairs: bool = False) -> int:
        """`length` itself; ValueError where it is more than the model takes, or no room for a text (or a pair)."""
        if length > self.longest:
            raise ValueError(f"{where}: a maximum length of {length} is more than the model's {self.longest}")
        special = self._special_of_pairs if pairs else self._special
        if length <= special:
            raise ValueError(f"{where}: a maximum length of {length} leaves no room beside {special} special tokens")
        return length

    def encode_batch(
        self, texts: Sequence[Text], prompt: str = "", max_length: int | None = None
    ) -> list[NDArray[np.int64]]:
        """The ids of `tokens`, an array a text."""
        return self.tokens(texts, prompt, max_length).rows()

    def tokens(
        self, texts: Sequence[Text], prompt: str = "", max_length: int | None = None, side: str | None = None
    ) -> Tokens:
        """`prompt` + each text as token ids; of a pair the longer text is truncated first, and the prompt is the first
        one's. side: "right" or "left", where tokens beyond `max_length` are dropped; None: the tokenizer's own.

        Whether a text was truncated shows at a max_length of one more. ValueError for text that is not valid Unicode, a
        length without room for it, a side that the tokenizer cannot do.
        """
        length = self.max_length if max_length is None else max_length
        side = self._side if side is None else side
        if side not in ("right", "left") or (self._python is not None and side != self._side):
            raise ValueError(f"{self._folder}: this tokenizer truncates on the {self._side}; got side {side!r}")
        found = []
        for start in range(0, len(texts), _TEXTS_PER_CALL):
            part = with_prompt(texts[start : start + _TEXTS_PER_CALL], prompt)
            try:
                found.append(self._encode(part, length, side))
            except (TypeError, UnicodeError) as error:
                raise _explained(error, part, start) from error
            except Exception as error:  # a vocabulary without the unknown token, for one; no type of its own
                raise ValueError(f"{self._folder}: the tokenizer cannot encode texts ({_words(error)})") from error
        return joined(found)

    def prompt_tokens(self, prompt: str) -> int:
        """Tokens at the beginning of a text that are the prompt's or special ones before it."""
        if not prompt:
            return 0
        ids = self.encode_batch([prompt])[0]
        return len(ids) - (len(ids) > 0 and int(ids[-1]) in self.special_ids)

    def _encode(self, texts: list[Any], length: int, side: str) -> Tokens:
        pairs = not set(map(type, texts)) <= {str} and not all(isinstance(text, str) for text in texts)
        if self._python is not None:
            made = [
                self._python(*([text] if isinstance(text, str) else text), truncation=True, max_length=length)
                for text in texts
            ]
            types = [one["token_type_ids"] for one in made] if pairs and self._has_types else None
            return tokens_of([one["input_ids"] for one in made], types)
        given, cut = self._cut(texts, length, side)
        if self._wordpiece is not None and not pairs and not cut:
            return self._wordpiece.tokens(given, length, side)
        fast = self._truncating(length, side)
        rows, types = self._rows(fast, given, pairs)
        while cut:
            # Exact once the length is reached: what was cut off comes behind the tokens that are kept.
            cut = [place for place in cut if len(rows[place]) < length]
            for place in cut:
                given[place] = self._part(texts[place], 2 * len(given[place]), side)
            for place, row in zip(cut, self._rows(fast, [given[place] for place in cut], False)[0], strict=True):
                rows[place] = row
            cut = [place for place in cut if len(given[place]) < len(texts[place])]
        return tokens_of(rows, types)

    def _rows(self, fast: Any, texts: list[Any], pairs: bool) -> tuple[list[list[int]], list[list[int]] | None]:
        rows: list[list[int]] = []
        types: list[list[int]] = []
        for part in _calls(texts):
            # _fast: the same ids, without the character offsets.
            encodings = fast.encode_batch_fast(part)
            rows += [encoding.ids for encoding in encodings]
            if pairs and self._has_types:
                types += [encoding.type_ids for encoding in encodings]
        return rows, types if pairs and self._has_types else None

    def _cut(self, texts: list[Any], length: int, side: str) -> tuple[list[Any], list[int]]:
        """What to tokenise of each text, and the places of the single ones that are not whole."""
        most = CHARACTERS * length
        if self._cutter is None or max(_sizes(texts), default=0) <= most:
            return texts, []
        given, cut = list(texts), []
        for place, text in enumerate(texts):
            if not isinstance(text, str):
                given[place] = self._cut_pair(text, length, most, side)
            elif len(text) > most:
                given[place] = self._part(text, most, side)
                if len(given[place]) < len(text):
                    cut.append(place)
        return given, cut

    def _cut_pair(self, pair: Sequence[str], length: int, most: int, side: str) -> tuple[str, str]:
        """Parts of a pair that are truncated as the whole pair is. The longer text is truncated first, then both to
        halves; of an odd length the longer one gets the token more. (Long texts are not only slow: `tokenizers` makes
        every pair of their truncated rests as well.)
        """
        parts = [text if len(text) <= most else self._part(text, most, side) for text in pair]
        if [*pair] == parts:
            return pair[0], pair[1]

        def grow(place: int) -> None:
            parts[place] = self._part(pair[place], 2 * len(parts[place]), side)
            counts[place] = self._count(parts[place])

        counts = [self._count(part) for part in parts]
        for place in (0, 1):
            while counts[place] <= length and len(parts[place]) < len(pair[place]):
                grow(place)
        if min(counts) > length and (length - self._special_of_pairs) % 2:
            whole = [self._count(text) for text in pair]
            while (counts[0] > counts[1]) != (whole[0] > whole[1]):
                grow(0 if whole[0] > whole[1] else 1)
        return parts[0], parts[1]

    def _count(self, text: str) -> int:
        """Tokens without the special ones."""
        return len(self._fast.encode_batch_fast([text], add_special_tokens=False)[0])

    def _part(self, text: str, size: int, side: str) -> str:
        return text if self._cutter is None else self._cutter.part(text, size, side)

    def _truncating(self, length: int, side: str) -> Any:
        """A `tokenizers.Tokenizer` for this length: setting it in one that another thread uses would change both."""
        with self._lock:
            found = self._by_length.get((length, side))
            if found is None:
                found = copy.deepcopy(self._fast)
                found.encode_special_tokens = self._fast.encode_special_tokens  # the copy is of what a file holds
                found.enable_truncation(length, direction=side)
                while len(self._by_length) >= _LENGTHS_KEPT:
                    del self._by_length[next(iter(self._by_length))]
                self._by_length[length, side] = found
            return found


def with_prompt(texts: Sequence[Text], prompt: str) -> list[Any]:
    """Each text behind `prompt`, of a pair the first one; pairs as tuples."""
    if not prompt and set(map(type, texts)) <= {str}:
        return list(texts)
    return [prompt + text if isinstance(text, str) else (prompt + text[0], text[1]) for text in texts]


def _sizes(texts: list[Any]) -> list[int]:
    """Characters of each text, of a pair those of the longer one."""
    if set(map(type, texts)) <= {str}:
        return list(map(len, texts))
    return [len(text) if isinstance(text, str) else max(map(len, text)) for text in texts]


def _calls(texts: list[Any]) -> Iterator[list[Any]]:
    """`texts` in parts of at most _CHARACTERS_PER_CALL, at least one text each."""
    sizes = _sizes(texts)
    start, total = 0, 0
    if sum(sizes) > _CHARACTERS_PER_CALL:
        for place, size in enumerate(sizes):
            if place > start and total + size > _CHARACTERS_PER_CALL:
                yield texts[start:place]
                start, total = place, 0
            total += size
    yield texts[start:] if start else texts


def load_tokenizer(folder: Path, arguments: Mapping[str, Any] | None = None) -> Any:
    """transformers' tokenizer of `folder`, which may be a converted one. Never runs the folder's code or goes online.

    FileNotFoundError without its files, ValueError naming the one that cannot be used.
    """
    if not any((folder / name).exists() for name in ("tokenizer.json", *_VOCABULARIES)):
        raise FileNotFoundError(
            f"{folder}: no tokenizer here; expected tokenizer.json or one of {', '.join(_VOCABULARIES)}. "
            "Copy the tokenizer's files beside the weights, or pass token ids to the model"
        )
    for path in folder.iterdir():
        if path.suffix in _SUFFIXES:
            expect_file(path)  # a pipe in the place of a file would hold it for ever
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **_config(folder), **(arguments or {})
        )
    except Exception as error:
        raise ValueError(f"{_culprit(folder)}: cannot be used as a tokenizer ({_words(error)})") from error


def _config(folder: Path) -> dict[str, Any]:
    """The model's config where AutoTokenizer does not find it by itself: it says which class reads the files."""
    from transformers import AutoConfig, PretrainedConfig

    path = folder / "config.json"
    if not path.exists():
        return {"config": PretrainedConfig()}  # tokenizer_config.json alone decides
    original = read_json_object(path).get("huggingface")
    if not isinstance(original, dict) or "model_type" not in original:
        return {}
    config = AutoConfig.for_model(**original)
    config._name_or_path = str(folder)
    return {"config": config}


def _culprit(folder: Path) -> Path:
    """The file that an error of AutoTokenizer is most likely about."""
    from tokenizers import Tokenizer as Fast

    path = folder / "tokenizer.json"
    if path.exists():
        try:
            Fast.from_file(str(path))
        except Exception:  # noqa: BLE001 - tokenizers raises nothing more precise
            return path
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).exists():
            try:
                read_json_object(folder / name)
            except ValueError:
                return folder / name
    stated = folder / "tokenizer_config.json"
    return stated if stated.exists() else folder


def _own_length(folder: Path, tokenizer: Any) -> int:
    length = tokenizer.model_max_length  # transformers writes 1e30 for "no limit"
    if not isinstance(length, int | float) or isinstance(length, bool) or not length >= 1:
        raise ValueError(f"{folder / 'tokenizer_config.json'}: model_max_length must be positive; got {length!r}")
    return int(min(length, 1 << 62))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def _expect_one_type(folder: Path, tokenizer: Any) -> None:
    """encode passes no token types: refuse the rare template that gives others than 0 to a single text."""
    try:
        types = tokenizer("a").get("token_type_ids", [])  # absent where the model does not get them
    except Exception as error:  # of no type of its own
        raise ValueError(f"{folder}: its tokenizer cannot encode texts ({_words(error)})") from error
    if any(types):
        raise ValueError(f"{folder}: its tokenizer gives one text token types other than 0, which is not supported")


def lower_first(fast: Any) -> None:
    """What sentence-transformers does for do_lower_case: Lowercase before the rest, unless it is there."""
    from tokenizers import normalizers

    before: Any = fast.normalizer
    rest: list[Any] = [] if before is None else [before]
    if isinstance(before, normalizers.Sequence):
        rest = [before[place] for place in range(len(before))]  # type: ignore[arg-type]
    if not any(isinstance(one, normalizers.Lowercase) for one in rest):
        fast.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])


def _explained(error: Exception, texts: list[Any], start: int) -> Exception:
    """The same failure, naming the text."""
    for index, text in enumerate(texts):
        if not all(map(is_unicode, [text] if isinstance(text, str) else text)):
            return ValueError(f"text {start + index} is not valid Unicode: it holds a lone surrogate")
    return error
