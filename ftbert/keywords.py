"""Keyword arguments of public calls: other libraries' names, an answer to what is not there, the nearest known word."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
# What is there in place of an argument that other libraries have, or a check of its value: check(self, value) raises.
Answer = str | Callable[[Any, Any], object]


def keywords(
    same: Mapping[str, str] | None = None,
    answers: Mapping[str, Answer] | None = None,
    passed_to: Callable[..., Any] | None = None,
) -> Callable[[Function], Function]:
    """A function whose unknown keyword arguments are a TypeError that names the nearest known ones.

    same: other names of its arguments. answers: to arguments that it does not have; None and False, which ask for
    nothing, are dropped. passed_to: the function that gets its **options.
    """
    same, answers = same or {}, answers or {}

    def wrap(function: Function) -> Function:
        known = [*_named(function), *(_named(passed_to) if passed_to else ())]
        kept = frozenset(known)

        @wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            if not given.keys() <= kept:
                given = _understood(function.__name__, args, given, known, same, answers)
            return function(*args, **given)

        return cast(Function, call)

    return wrap


def unknown(name: str, given: str, known: Iterable[str]) -> str:
    """The words of the error: function `name` has no argument `given`."""
    near = get_close_matches(given, list(known), n=3, cutoff=0.6)
    told = f"nearest: {', '.join(near)}" if near else f"it has {', '.join(known)}"
    return f"{name} has no argument {given!r}; {told}"


def _named(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(function).parameters.values()
    return [one.name for one in found if one.kind in kinds and one.name != "self"]


def _understood(
    name: str,
    args: tuple[Any, ...],
    given: Mapping[str, Any],
    known: list[str],
    same: Mapping[str, str],
    answers: Mapping[str, Answer],
) -> dict[str, Any]:
    made = {key: value for key, value in given.items() if key in known}
    for key in given.keys() - made.keys():
        value = given[key]
        if key in same:
            if same[key] in made:
                raise TypeError(f"{name}: {key} and {same[key]} are one argument; give one of them")
            made[same[key]] = value
        elif key not in answers:
            raise TypeError(unknown(name, key, [*known, *same]))
        elif callable(answer := answers[key]):
            answer(args[0] if args else None, value)
        elif value is not None and value is not False:
            raise TypeError(f"{name} has no argument {key!r}: {answer}")
    return made
