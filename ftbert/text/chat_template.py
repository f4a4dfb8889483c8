"""A chat template, Jinja in a sandbox: messages to the text that a model reads. Needs no torch, no transformers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

# Stands behind the message that the answer continues, and goes with all that the template writes behind it.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# What a template's own mistakes raise, and the sandbox.
_REFUSED = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, TimeoutError, MemoryError)


class ChatTemplate:
    """source: Jinja, as transformers renders it. names: what it may use beside the messages, bos_token and its kin."""

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        """ValueError for what is no Jinja."""
        from jinja2.exceptions import TemplateError

        self._source, self._names = source, dict(names)
        try:
            self._template = _compiled(source)
        except TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], seconds: float | None = None, answer: bool = True
    ) -> str:  # fmt: skip
        """The text that ends with the beginning of an answer; where the last message is the assistant's, with that
        message, which the answer continues. answer: False: the messages alone. seconds: that it may take, None: any.
        ValueError for messages that the template does not take, and where it takes longer."""
        from jinja2.exceptions import TemplateError

        given = [dict(one) for one in messages]
        goes_on = answer and given[-1]["role"] == "assistant"
        if goes_on:
            given[-1]["content"] += _TAG
        begins = answer and not goes_on

        def text() -> str:
            return str(
                self._template.render(
                    messages=given, tools=None, documents=None, add_generation_prompt=begins, **self._names
                )
            )

        try:
            made = text() if seconds is None else _within(seconds, text)
        except (TemplateError, *_REFUSED) as error:
            words = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template does not take these messages: {words}") from error
        return self._continued(made, str(messages[-1]["content"])) if goes_on else made

    def _continued(self, made: str, last: str) -> str:
        if last.strip() not in made or _TAG.strip() not in made:
            raise ValueError(
                "the chat template does not take these messages: the last one, the assistant's, cannot be continued, "
                "as the template changes it"
            )
        end = made.rindex(_TAG.strip())
        # Where the space behind the tag is gone, so is that of the message.
        return made[:end] if made[end : end + len(_TAG)] == _TAG else made[:end].rstrip()


def _within(seconds: float, call: Callable[[], str]) -> str:
    """`call`, which may have loops without an end: each line of Python looks at the clock, in this thread alone."""
    until = time.monotonic() + seconds

    def look(frame: Any, event: str, argument: Any) -> Any:
        if time.monotonic() > until:
            raise TimeoutError(f"it was not done in {seconds:g} s")
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        return call()
    finally:
        sys.settrace(before)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}, which marks answers for training, and changes no text."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own way

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    def raise_exception(words: str) -> None:
        raise TemplateError(words)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made
