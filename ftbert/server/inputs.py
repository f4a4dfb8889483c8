"""What requests carry, checked: texts, how they are cut, how many there may be."""

from __future__ import annotations

from collections.abc import Sized
from typing import NamedTuple

from ftbert.server.errors import ApiError, too_many, validation
from ftbert.server.schemas import Cut, TokenLimits
from ftbert.server.served_model import ServedModel
from ftbert.server.settings import Settings

Listed = list[str | list[int]]


class Reading(NamedTuple):
    """How texts become tokens. prompt: before each text, of a pair before the first one. truncate: False refuses what
    is longer than `most`, tokens with the special ones, None: the model's. side: where tokens are dropped. adapter: as
    of Job."""

    prompt: str
    truncate: bool
    side: str
    most: int | None = None
    adapter: int = 0


def reading(asked: Cut, model: ServedModel) -> Reading:
    """As TEI's fields say. ApiError 422."""
    where = side("truncation_direction", asked.truncation_direction)
    return Reading(model.prompt(asked.prompt_name), model.truncates(asked.truncate), where)


def limited_reading(asked: TokenLimits, model: ServedModel, pairs: bool = False) -> Reading:
    """As vLLM's fields say; pairs: the texts are pairs. ApiError 422."""
    about, most = model.about, asked.truncate_prompt_tokens
    if asked.truncation_side is not None:
        side("truncation_side", asked.truncation_side)
    if most is not None:
        special = model.encoder().special_of_pairs if pairs else about.text.special
        most = about.text.max_length if most == -1 else most
        if not special < most <= about.text.max_length:
            raise validation(
                f"`truncate_prompt_tokens` must be -1 or from {special + 1} to {about.text.max_length}; "
                f"got {str(most)[:20]}", param="truncate_prompt_tokens",
            )  # fmt: skip
    truncate = most is not None or model.truncates(None)
    cut = (asked.truncation_side or about.text.truncation_side).lower()
    return Reading(about.text.default_prompt, truncate, cut, most)


def own_limit(name: str, value: int | None) -> int | None:
    """Tokens of max_tokens_per_query and its kin; None: all, which vLLM and its clients also write as 0."""
    if value is not None and value < 0:
        raise validation(f"`{name}` must not be negative; got {str(value)[:20]}", param=name)
    return value or None


def listed(inputs: str | list[str | int | list[int]], settings: Settings, name: str = "inputs") -> Listed:
    """TEI's and OpenAI's union as a list of texts and ids: a str, ids, or a list of either. ApiError 400 for an empty
    one, 422 for too many or a mixture."""
    if isinstance(inputs, str):
        return [inputs]
    if not inputs:
        raise ApiError("Empty", f"`{name}` cannot be empty", param=name)
    if isinstance(inputs[0], int):
        ids = [one for one in inputs if isinstance(one, int)]
        if len(ids) != len(inputs):
            raise validation(f"`{name}` must be texts, or ids, or lists of ids", param=name)
        return [ids]
    found: Listed = [one for one in inputs if not isinstance(one, int)]
    if len(found) != len(inputs):
        raise validation(f"`{name}` must be texts, or ids, or lists of ids", param=name)
    check_count(found, settings, name)
    return found


def check_count(texts: Sized, settings: Settings, name: str = "inputs") -> None:
    """ApiError 400 where there is none, 422 where there are too many, as TEI's."""
    if not texts:
        raise ApiError("Empty", f"`{name}` cannot be empty", param=name)
    if len(texts) > settings.max_client_batch_size:
        raise too_many(f"batch size {len(texts)} > maximum allowed batch size {settings.max_client_batch_size}")


def characters(inputs: Listed) -> int:
    return sum(map(len, inputs))


def side(name: str, given: str) -> str:
    """ "left" or "right"; some clients capitalise it."""
    if given.lower() not in ("left", "right"):
        raise validation(f"`{name}` must be left or right; got {given[:20]!r}", param=name)
    return given.lower()


def check_dimensions(
    dimensions: int | None, model: ServedModel, of_tokens: bool = False, name: str = "dimensions"
) -> int | None:
    """Entries that are kept of a vector, of a text's or a token's; None: all. ApiError 422."""
    about = model.about
    if dimensions is None:
        return None if of_tokens else about.vectors.truncate_dim  # the folder's own is for whole texts
    width = about.model.token_width if of_tokens else about.model.hidden
    if not 1 <= dimensions <= width:
        raise validation(f"`{name}` must be from 1 to {width}; got {str(dimensions)[:20]}", param=name)
    return None if dimensions == width else dimensions
