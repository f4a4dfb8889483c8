"""`ftbert serve`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftbert.cli import command
from ftbert.server import FLAGS, Flag, Settings, from_environment, models_in


def add_to(commands: command.Commands) -> None:
    parser = command.add(
        commands,
        "serve",
        "An HTTP server: routes of TEI, OpenAI, Cohere, Ollama, vLLM and llama.cpp. docs/serving.md has them.",
        _serve,
        "examples: ftbert serve minilm --port 8080\n"
        "          ftbert serve search=minilm rank=my-reranker --device cuda --dtype fp16",
        model=False,
    )
    parser.add_argument("model", metavar="[NAME=]MODEL", nargs="*", help="requests that name none: the first that fits")
    parser.add_argument(
        "--device", default="cpu",
        help="cpu, cuda or cuda:* (every GPU), or a list: cuda:0,cuda:1; one engine each (default cpu)",
    )
    command.add_parallel(parser)
    parser.add_argument(
        "--dtype",
        choices=("fp32", "fp16", "bf16", "fp8", "int8", "q8_0", "auto"),
        help="(default fp16 on a GPU, fp32 on the CPU; a quantized or converted folder's own)",
    )
    for flag in FLAGS:
        shown = "" if flag.default is None or "default" in flag.text else f" (default {str(flag.default).lower()})"
        names = [f"--{name}" for name in (flag.name, *flag.also)]
        if flag.kind is bool:
            parser.add_argument(*names, type=_kind(flag), nargs="?", const=True, help=flag.text + shown)
        else:
            parser.add_argument(*names, type=_kind(flag), metavar="N" if flag.kind is not str else "TEXT",
                                help=flag.text + shown)  # fmt: skip
    parser.add_argument("--served-model-name", metavar="NAME", help="of a single model (default: the folder's name)")


def _kind(flag: Flag) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return flag.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _serve(options: argparse.Namespace) -> int:
    from ftbert.server import check_extra, serve

    check_extra()
    return serve(settings_of(options, dict(os.environ)))


def settings_of(options: argparse.Namespace, environment: dict[str, str]) -> Settings:
    """The command line goes before the environment. ValueError for two models of one name, for
    none, or an unknown device."""
    given = from_environment(environment)
    given |= {flag.field: value for flag in FLAGS if (value := getattr(options, flag.field)) is not None}
    devices = _devices(options.device)
    name = options.served_model_name or environment.get("SERVED_MODEL_NAME")
    if options.parallel is not None and len(devices) < 2:
        raise ValueError(f"--parallel {options.parallel} is over several devices; got --device {options.device}")
    models, others = _models(options.model, name), models_in(given["models_dir"]) if given.get("models_dir") else ()
    if not models and not others:
        raise ValueError("expected a MODEL, or --models-dir with a folder of models")
    if same := {name for name, _ in models} & {name for name, _ in others}:
        raise ValueError(f"a model and one of --models-dir have one name: {', '.join(sorted(same))}. Write NAME=MODEL")
    return Settings(
        models=models + others, on_demand=len(others), devices=devices, dtype=options.dtype, parallel=options.parallel,
        **given,
    )  # fmt: skip


def _models(given: list[str], served: str | None) -> tuple[tuple[str, str], ...]:
    found = []
    for text in given:
        name, _, source = text.partition("=") if not Path(text).exists() else ("", "", text)
        if not source:
            name, source = "", text
        found.append((name or Path(source).name or source, source))
    if served is not None:
        if len(found) != 1:
            raise ValueError("--served-model-name is for a single model: write NAME=MODEL for each of several")
        found = [(served, found[0][1])]
    names = [name for name, _ in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two models have one name: {', '.join(names)}. Write NAME=MODEL")
    return tuple(found)


def _devices(text: str) -> tuple[str, ...]:
    devices = ["cuda"] if text.strip() == "cuda:*" else [one.strip() for one in text.split(",")]
    for one in devices:
        kind, _, index = one.partition(":")
        if kind not in ("cpu", "cuda") or (":" in one and (kind == "cpu" or not index.isdigit())):
            raise ValueError(f"--device: expected cpu, cuda, cuda:N or a list of them; got {text!r}")
    if devices == ["cuda"]:
        import torch

        return tuple(f"cuda:{i}" for i in range(torch.cuda.device_count())) or ("cuda",)
    return tuple(devices)
