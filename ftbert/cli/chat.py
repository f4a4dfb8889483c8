"""`ftbert chat`."""

from __future__ import annotations

import argparse
import sys

from ftbert.cli import command, generate

_PROMPT = "> "


def add_to(commands: command.Commands) -> None:
    parser = command.add(
        commands,
        "chat",
        "Talk to a causal language model: a line of standard input is a message, the answer comes as it is made.\n"
        "/clear begins anew, /exit or Ctrl-D ends, Ctrl-C ends an answer.",
        _chat,
        'example: ftbert chat smollm2 --system "You are brief." --temperature 0.7 --top-p 0.9',
        reports=False,
    )
    generate.add_how(parser)


def _chat(options: argparse.Namespace) -> int:
    """Each answer is computed from the whole conversation. 1 where a message had none."""
    given = generate.how(options)
    model = command.load_model(options, heads=False)
    messages, code = generate.begun(options), 0
    while (line := _line()) is not None:
        if line == "/exit":
            break
        if line == "/clear":
            messages = generate.begun(options)
        if not line or line == "/clear":
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            pieces = model.stream(asked, **given)
        except ValueError as error:  # longer than the context; the template takes no such messages
            print(f"ftbert: error: {error}", file=sys.stderr)
            code = 1
            continue
        answer = ""
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
                answer += piece
        except KeyboardInterrupt:
            pass
        print(flush=True)
        messages = [*asked, {"role": "assistant", "content": answer}]
    return code


def _line() -> str | None:
    """The next message; None: there is none."""
    if not sys.stdin.isatty():
        return line.strip() if (line := sys.stdin.readline()) else None
    import readline  # noqa: F401 - lines can be edited, and come back

    try:
        return input(_PROMPT).strip()
    except EOFError:
        print()
        return None
