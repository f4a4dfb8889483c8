"""`ftbert generate`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from ftbert.cli import command

_AS_IN_STREAM = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "stop",
)  # fmt: skip


def add_to(commands: command.Commands) -> None:
    parser = command.add(
        commands,
        "generate",
        "Continue a text with a causal language model; Ctrl-C ends the text.",
        _generate,
        'examples: ftbert generate smollm2 "The capital of France is" --max-new-tokens 32\n'
        "          ftbert generate smollm2 - --chat --temperature 0.7 --top-p 0.9 < question.txt",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="- is standard input, to its end")
    add_how(parser)
    parser.add_argument("--chat", action="store_true", help="PROMPT is a message, in the model's chat template")


_COUNTS_ALL = "--repetition-penalty counts all tokens of prompt and text, llama.cpp's the last 64"
_CHAT = "ftbert chat MODEL"
# Flags of llama.cpp, transformers and vLLM that mean something else here, or nothing.
_ANSWERS = {
    ("-m", "--model"): "MODEL comes first, without a flag",
    ("-p", "--prompt"): "PROMPT comes after MODEL, without a flag; ftbert chat reads messages from standard input",
    ("-f", "--file"): "PROMPT - is standard input: ftbert generate MODEL - < FILE",
    ("-hf", "--hf-repo"): "MODEL may be a hub id, and org/repo:Q8_0 one of its GGUF files",
    ("-c", "--ctx-size", "--max-model-len"): "the context is the model's; -n bounds the text",
    ("-ngl", "--n-gpu-layers", "--gpu-layers"): "--device cuda has all layers there",
    ("-t", "--threads"): "the environment variable OMP_NUM_THREADS",
    ("-cnv", "--conversation", "-i", "--interactive"): _CHAT,
    ("-r", "--reverse-prompt"): "--stop TEXT",
    ("--ignore-eos",): "--min-new-tokens N: no end before so many",
    ("--repeat-penalty", "--repeat-last-n"): _COUNTS_ALL,
    ("--max-length",): "-n counts the generated tokens; --max-length of transformers also those of the prompt",
    ("--do-sample",): "--temperature 1.0 draws; without, the most likely token is taken",
    ("--num-beams",): "there are no beams: --temperature draws",
}


def add_how(parser: argparse.ArgumentParser) -> None:
    """How texts are made: what `how` reads, --system and --chat-template."""
    parser.add_argument(
        "--max-new-tokens", "-n", "--predict", "--n-predict", "--max-tokens", type=command.count, metavar="N",
        help="at most so many (default: generation_config.json's, else 256)",
    )  # fmt: skip
    parser.add_argument("--min-new-tokens", type=command.natural, metavar="N", help="no end before so many")
    parser.add_argument(
        "--temperature", "--temp", type=float, default=0.0, metavar="T",
        help="0: the most likely token each time (default)",
    )  # fmt: skip
    parser.add_argument("--top-k", type=command.natural, metavar="K", help="draw from the K most likely tokens; 0: all")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the fewest tokens that sum to P")
    parser.add_argument("--min-p", type=float, metavar="P", help="leave out tokens less likely than P times the best")
    parser.add_argument(
        "--repetition-penalty", type=float, metavar="R",
        help="makes tokens of prompt and text less likely, above 1 (default: generation_config.json's)",
    )  # fmt: skip
    parser.add_argument(
        "--presence-penalty", type=float, metavar="X", help="subtracted from the logit of each generated token, once"
    )
    parser.add_argument("--frequency-penalty", type=float, metavar="X", help="the same, for each time it came")
    parser.add_argument("--seed", "-s", type=int, metavar="S", help="the same draws each time")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this; may be given several times")
    parser.add_argument(
        "--system", "--system-prompt", "-sys", metavar="TEXT", help="the system's message, before those of the user"
    )
    parser.add_argument("--chat-template", metavar="JINJA", help="a file or a text (default: the model's)")
    command.add_answers(parser, _ANSWERS)


def how(options: argparse.Namespace) -> dict[str, Any]:
    """Of `ftbert.Model.stream`."""
    template = options.chat_template
    if template is not None and "{" not in template:
        template = Path(template).read_text(encoding="utf-8")
    return {name: getattr(options, name) for name in _AS_IN_STREAM} | {"chat_template": template}


def begun(options: argparse.Namespace) -> list[dict[str, str]]:
    """The messages before the user's first."""
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _generate(options: argparse.Namespace) -> int:
    prompt: Any = sys.stdin.read() if options.prompt == "-" else options.prompt
    given = how(options)
    if options.system is not None:
        prompt = [*begun(options), {"role": "user", "content": prompt}]
    model = command.load_model(options, heads=False)
    pieces = model.stream(prompt, chat=options.chat, **given)
    code, text = 0, []
    start = time.perf_counter()
    try:
        for piece in pieces:
            text.append(piece)
            if not options.json:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        code = command.INTERRUPTED
    seconds = time.perf_counter() - start
    said: dict[str, Any] = {
        "text": "".join(text), "tokens": pieces.tokens, "prompt_tokens": pieces.prompt_tokens,
        "reason": pieces.reason or "interrupted", "seconds": seconds, "tokens_per_second": pieces.tokens / seconds,
    }  # fmt: skip
    if options.json:
        command.report(options, said, "")
        return code
    print()
    told = f"{pieces.tokens} tokens after {pieces.prompt_tokens} in {seconds:.2f} s, {said['tokens_per_second']:.1f}/s"
    print(f"ftbert: {told}; {said['reason']}", file=sys.stderr)
    return code
