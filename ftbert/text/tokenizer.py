"""The model's tokenizer as `load_tokenizer` builds it, with only truncation and never any padding."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftbert.input_file import is_unicode, origin
from ftbert.text.auto_tokenizer import explain, is_storable, load_tokenizer
from ftbert.text.chat_template import ChatTemplate
from ftbert.text.fast_tokenizer import FastTokenizer
from ftbert.text.panics import panics_as_errors
from ftbert.text.settings import TextSettings
from ftbert.text.static_settings import Model2vecReading
from ftbert.text.templates import INSTRUCTION, PairTemplate, Render, TemplateEncoder, takes_any_roles
from ftbert.text.tokens import Text, Tokens, joined, tokens_of

# Long enough for one call to use every core.
_TEXTS_PER_CALL = 512
# Seconds that a chat template may take for a pair: one that loops would hold up the load.
_RENDERING = 2.0
_INSTRUCTION_PROBE = "  {{ spaced }} out,\n<b>&amp;'\" # "


class Tokenizer:
    """text -> token ids with the special tokens, truncated, unpadded. Thread-safe.

    max_length: tokens with the special ones where the caller asks for no other length. longest: the most the model
    takes. backend: the `tokenizers.Tokenizer` that does the work, without truncation or padding; None for a tokenizer
    that is written in Python, or a part of it. loaded: transformers' object around it. reading: what else of a text is
    left out, which `tokens` does not know.
    """

    def __init__(self, folder: Path, settings: TextSettings, max_seq: int, loaded: Any = None) -> None:
        """`folder` holds tokenizer.json or a vocabulary that transformers can turn into a tokenizer.

        `max_seq` bounds the length, special tokens included; settings.max_length, or else the tokenizer's own
        model_max_length, may lower it. loaded: of `load_tokenizer`; None: it is called here. FileNotFoundError without
        a tokenizer, ValueError when it cannot be used.
        """
        self.settings = settings
        self.longest = max_seq
        self._where = origin(folder)  # for errors
        tokenizer = load_tokenizer(folder, settings) if loaded is None else loaded
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.loaded = tokenizer
        self.unknown_id: int | None = tokenizer.unk_token_id
        self._special = tokenizer.num_special_tokens_to_add(pair=False)
        self._leading = _leading(tokenizer)
        self._special_of_pairs = tokenizer.num_special_tokens_to_add(pair=True)
        self._has_types = "token_type_ids" in tokenizer.model_input_names
        self._side = tokenizer.truncation_side
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self.backend: Any = backend if backend is not None and is_storable(backend) else None
        self._python = tokenizer if self.backend is None else None
        own = settings.max_length or _own_length(folder, tokenizer)
        self.max_length = self.check_length(min(max_seq, own), self._where)
        _expect_one_type(folder, tokenizer)
        self._fast = None if self.backend is None else FastTokenizer(self.backend, self._has_types)
        static = settings.static
        self.reading = Model2vecReading.of(self.backend) if static is not None and static.model2vec else None
        self._templates = None if self._fast is None else TemplateEncoder(self.backend, self._fast.cutter)

    def with_choices(self, choices: Mapping[str, Any]) -> Tokenizer:
        """The same tokenizer under settings with `choices`, by the names of `TextSettings`, in the folder's place."""
        made = copy.copy(self)
        made.settings = replace(self.settings, **choices)
        made.max_length = choices.get("max_length", self.max_length)
        return made

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
        """The ids that `encode` computes of each text, truncated."""
        if self.reading is None:
            return self.tokens(texts, prompt, max_length).rows()
        length = self.max_length if max_length is None else max_length
        given = self.reading.cut(with_prompt(texts, prompt), length)
        return self.reading.kept(self.tokens(given, "", length)).rows()

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
            raise ValueError(f"{self._where}: this tokenizer truncates on the {self._side}; got side {side!r}")
        found = []
        for start in range(0, len(texts), _TEXTS_PER_CALL):
            part = with_prompt(texts[start : start + _TEXTS_PER_CALL], prompt)
            try:
                found.append(self._encode(part, length, side))
            except (TypeError, UnicodeError) as error:
                raise _explained(error, part, start) from error
            except Exception as error:  # a vocabulary without the unknown token, for one; no type of its own
                raise ValueError(f"{self._where}: the tokenizer cannot encode texts ({explain(error)})") from error
        return joined(found)

    def pair_template(self, prompt: str = "", chat_template: str | None = None) -> PairTemplate | None:
        """How pairs become texts, as sentence-transformers puts them into messages: a query, a document, and the prompt
        as the system's. chat_template: in Jinja, None: the tokenizer's, without which there is none. ValueError where
        it does not carry a pair."""
        if chat_template is None and not self.loaded.chat_template:
            return None
        if self._templates is None:
            kind = type(self._python).__name__
            raise ValueError(f"{self._where}: {kind} is written in Python; a chat template needs a fast tokenizer")
        return PairTemplate.of(self._render(prompt, chat_template), self._where)

    def instructed_template(self) -> PairTemplate | None:
        """`pair_template` with `INSTRUCTION` as the prompt, for `PairTemplate.instructed`; None where the tokenizer's
        does not carry a pair, or not the system's message as it is."""
        try:
            found = self.pair_template(INSTRUCTION)
            made = None if found is None else found.instructed(_INSTRUCTION_PROBE)
            return found if made is not None and made == self.pair_template(_INSTRUCTION_PROBE) else None
        except ValueError:
            return None

    @cached_property
    def ranks(self) -> bool:
        """Whether the tokenizer's chat template is one for a query and a document: it carries both, and does not render
        any two roles alike, as templates of chats do."""
        try:
            return self.pair_template() is not None and not takes_any_roles(self._render("", None))
        except ValueError:
            return False

    def _render(self, prompt: str, chat_template: str | None) -> Render:
        """Raises ValueError where the template does not take the messages, or loops."""
        system = [{"role": "system", "content": prompt}] if prompt else []

        def render(roles: tuple[str, str], query: str, document: str) -> str:
            pair = [{"role": role, "content": text} for role, text in zip(roles, (query, document), strict=True)]
            source, names = self.loaded.get_chat_template(chat_template), self.loaded.special_tokens_map
            try:
                return ChatTemplate(source, names).render([*system, *pair], _RENDERING, answer=False)
            except ValueError as error:
                raise ValueError(f"{self._where}: the chat template cannot be used ({error})") from error

        return render

    def template_tokens(self, pairs: Sequence[Text], template: PairTemplate, max_length: int) -> Tokens:
        """Pairs as ids, through `template`. ValueError for a single text, or one that is not valid Unicode."""
        if any(isinstance(pair, str) for pair in pairs):
            raise ValueError("this model scores pairs of texts, a query and a document; got a single text")
        assert self._templates is not None
        try:
            return self._templates.tokens(pairs, max_length, self._side, template=template)
        except (TypeError, UnicodeError) as error:
            raise _explained(error, list(pairs), 0) from error

    def encodings(self, texts: Sequence[str], max_length: int | None = None) -> list[Any]:
        """As `tokens`, what the package `tokenizers` gives for each text: with the offsets of its tokens in characters.
        ValueError for a tokenizer that is written in Python."""
        if self._fast is None:
            raise ValueError(
                f"{self._where}: {type(self._python).__name__} is written in Python and gives no offsets; expected a "
                "fast tokenizer (tokenizer.json)"
            )
        return self._fast.encodings(texts, self.max_length if max_length is None else max_length, self._side)

    @property
    def side(self) -> str:
        """"right" or "left": where tokens are dropped unless the caller says otherwise."""
        return str(self._side)

    def ends(self, prompt: str) -> tuple[int, int]:
        """Tokens before and behind a text's own: special ones, and the prompt's."""
        behind = self._special - self._leading
        return len(self.encode_batch([prompt])[0]) - behind if prompt else self._leading, behind

    def prompt_tokens(self, prompt: str) -> int:
        """Tokens at the beginning of a text that are the prompt's or special ones before it."""
        if not prompt:
            return 0
        ids = self.encode_batch([prompt])[0]
        return len(ids) - (len(ids) > 0 and int(ids[-1]) in self.special_ids)

    def _encode(self, texts: list[Any], length: int, side: str) -> Tokens:
        if self._fast is not None:
            return self._fast.tokens(texts, length, side)
        assert self._python is not None
        made = [
            self._python(*([text] if isinstance(text, str) else text), truncation=True, max_length=length)
            for text in texts
        ]
        pairs = not all(isinstance(text, str) for text in texts)
        types = [one["token_type_ids"] for one in made] if pairs and self._has_types else None
        return tokens_of([one["input_ids"] for one in made], types)


def with_prompt(texts: Sequence[Text], prompt: str) -> list[Any]:
    """Each text behind `prompt`, of a pair the first one; pairs as tuples."""
    if not prompt and set(map(type, texts)) <= {str}:
        return list(texts)
    return [prompt + text if isinstance(text, str) else (prompt + text[0], text[1]) for text in texts]


def _own_length(folder: Path, tokenizer: Any) -> int:
    length = tokenizer.model_max_length  # transformers writes 1e30 for "no limit"
    if not isinstance(length, int | float) or isinstance(length, bool) or not length >= 1:
        where = origin(folder / "tokenizer_config.json")
        raise ValueError(f"{where}: model_max_length must be positive; got {length!r}")
    return int(min(length, 1 << 62))


def _expect_one_type(folder: Path, tokenizer: Any) -> None:
    """encode passes no token types: refuse the rare template that gives others than 0 to a single text."""
    try:
        with panics_as_errors():
            types = tokenizer("a").get("token_type_ids", [])  # absent where the model does not get them
    except Exception as error:  # of no type of its own
        raise ValueError(f"{origin(folder)}: its tokenizer cannot encode texts ({explain(error)})") from error
    if any(types):
        where = origin(folder)
        raise ValueError(f"{where}: its tokenizer gives one text token types other than 0, which is not supported")


def _leading(tokenizer: Any) -> int:
    """Special tokens before a text."""
    try:
        with panics_as_errors():
            return int([*tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"], 0].index(0))
    except Exception:  # noqa: BLE001 - of no type of its own; `_expect_one_type` says it
        return 0


def _explained(error: Exception, texts: list[Any], start: int) -> Exception:
    """The same failure, naming the text."""
    for index, text in enumerate(texts):
        if not all(map(is_unicode, [text] if isinstance(text, str) else text)):
            return ValueError(f"text {start + index} is not valid Unicode: it holds a lone surrogate")
    return error
