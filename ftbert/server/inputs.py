"""What requests carry, checked: texts, how they are cut, how many there may be."""

from __future__ import annotations

from ftbert.server.errors import ApiError, too_many, validation
from ftbert.server.served_model import ServedModel
from ftbert.server.settings import Settings

Listed = list[str | list[int]]


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
    check_count(len(found), settings)
    return found


def check_count(texts: int, settings: Settings) -> None:
    """ApiError 422, as TEI's."""
    if texts > settings.max_client_batch_size:
        raise too_many(f"batch size {texts} > maximum allowed batch size {settings.max_client_batch_size}")


def characters(inputs: Listed) -> int:
    return sum(map(len, inputs))


def side(direction: str) -> str:
    """ "left" or "right" of truncation_direction, which some clients capitalise."""
    if direction.lower() not in ("left", "right"):
        raise validation(f"`truncation_direction` must be left or right; got {direction[:20]!r}")
    return direction.lower()


def check_dimensions(dimensions: int | None, model: ServedModel) -> int | None:
    """Entries that are kept of a vector; None: all. ApiError 422."""
    hidden = model.about.hidden
    if dimensions is None:
        return model.about.truncate_dim
    if not 1 <= dimensions <= hidden:
        raise validation(f"`dimensions` must be from 1 to {hidden}; got {str(dimensions)[:20]}", param="dimensions")
    return None if dimensions == hidden else dimensions
