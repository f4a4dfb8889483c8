"""What one call of encode asks for, together with what the model's folder says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftbert.caller import warn_caller
from ftbert.input_file import is_unicode
from ftbert.text.checks import one_of, positive
from ftbert.text.pooling_settings import POOLINGS
from ftbert.text.tasks import prompt_for
from ftbert.text.tokenizer import Tokenizer

# What becomes of a text of more tokens than max_length.
LONG_TEXTS = ("truncate", "mean")


@dataclass(frozen=True)
class TextOptions:
    """Every choice made.

    prompt: put before every text. unpooled_tokens: so many at the beginning of each text are left out of the pooling.
    max_length: tokens of a text with the special ones. pooling: as in `TextSettings`. width: entries of a vector;
    truncate_dim: None where that is all of them. normalize_whole: to length 1 before truncation; normalize: after it.
    max_tokens, batch_size: most tokens and texts computed at once. long_texts: one of `LONG_TEXTS`.
    """

    prompt: str
    unpooled_tokens: int
    max_length: int
    pooling: str
    truncate_dim: int | None
    width: int
    normalize_whole: bool
    normalize: bool
    max_tokens: int
    batch_size: int | None
    long_texts: str = "truncate"
    whole_width: int = 0  # entries of a vector before it is truncated

    @classmethod
    def choose(
        cls,
        tokenizer: Tokenizer,
        hidden: int,
        *,
        normalize: bool | None = True,
        pooling: str | None = None,
        max_tokens: int = 16384,
        batch_size: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        task: str | None = None,
        max_length: int | None = None,
        truncate_dim: int | None = None,
        long_texts: str = "truncate",
        vectors: str = "dense",
        adapter: str = "",
    ) -> TextOptions:
        """As `ftbert.Model.encode` documents them; adapter: of `adapter_for`; vectors: "dense", "sparse" or "multi",
        see `TextSettings.expect`. TypeError, ValueError."""
        settings = tokenizer.settings
        settings.expect(vectors)
        if not isinstance(normalize, bool | None):
            raise TypeError(f"normalize must be True, False or None; got {normalize!r}")
        if max_length is None:
            own = {"query": settings.query_length, "document": settings.document_length}.get(task or "")
            length = tokenizer.max_length
            if own is not None:
                length = tokenizer.check_length(min(own, tokenizer.longest), f"{task}_length")
        else:
            length = tokenizer.check_length(positive("max_length", max_length), "max_length")
        named = prompt_for(task, adapter, settings.prompts)
        before = choose_prompt(prompt, prompt_name, settings.prompts, settings.default_prompt, named)
        pooling = settings.pooling if pooling is None else check_pooling(pooling)
        whole = settings.width(hidden, pooling)
        kept = settings.truncate_dim if truncate_dim is None else positive("truncate_dim", truncate_dim)
        kept = None if kept is None or kept >= whole else kept
        return cls(
            prompt=before,
            unpooled_tokens=0 if settings.include_prompt else tokenizer.prompt_tokens(before),
            max_length=length,
            pooling=pooling,
            truncate_dim=kept,
            width=whole if kept is None else kept,
            normalize_whole=normalize is None and settings.normalize,
            normalize=bool(normalize),
            max_tokens=positive("max_tokens", max_tokens),
            batch_size=None if batch_size is None else positive("batch_size", batch_size),
            long_texts=_check_long_texts(long_texts, tokenizer, before, length),
            whole_width=whole,
        )


def _check_long_texts(given: str, tokenizer: Tokenizer, prompt: str, length: int) -> str:
    if one_of(LONG_TEXTS, "long_texts", given) == "mean" and (taken := sum(tokenizer.ends(prompt))) >= length:
        raise ValueError(f"a maximum length of {length} leaves no room beside {taken} special and prompt's tokens")
    return given


def check_pooling(pooling: Any) -> str:
    """`pooling` itself; ValueError for what is none of `POOLINGS`, nor several joined by "+"."""
    for one in pooling.split("+") if isinstance(pooling, str) else [pooling]:
        one_of(POOLINGS, "pooling", one)
    return str(pooling)


def choose_prompt(
    prompt: str | None, name: str | None, prompts: Mapping[str, str], default: str, task: str | None = None
) -> str:
    """As sentence-transformers chooses it: the text itself, its name, the task's, the folder's default. TypeError,
    ValueError."""
    for what, given in (("prompt", prompt), ("prompt_name", name)):
        if not isinstance(given, str | None):
            raise TypeError(f"{what} must be a str; got {type(given).__name__}")
    if prompt is not None:
        if name is not None:
            warn_caller("prompt is given, so prompt_name is ignored")
        if not is_unicode(prompt):
            raise ValueError("prompt is not valid Unicode: it holds a lone surrogate. Decode it again")
        return prompt
    name = name if name is not None else task
    if name is None:
        return default
    if name not in prompts:
        known = ", ".join(map(repr, prompts)) or "those of the folder, which has none"
        raise ValueError(f"prompt_name must be one of {known}; got {name!r}")
    return prompts[name]
