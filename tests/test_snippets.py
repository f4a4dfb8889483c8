"""Snippets of README and docs as a new user copies them: Python runs, commands parse; a page says why one does not run.

Models of the hub are small random ones of the same kind, and a GPU is the CPU where none is.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import have_gpu
from pages import PAGES, ROOT, Snippet, snippets

import ftbert
from ftbert import cli
from ftbert.cli.program import _parser

ALL = [snippet for path in PAGES for snippet in snippets(path)]
LANGUAGES = {"python", "bash", "json", "text"}
# Tensors, layers and texts of the reader's program.
READERS_OWN = {
    "norm.md": "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.LayerNorm(256))\n"
    "conv = torch.nn.Conv2d(3, 256, 1)\nx, weight = torch.randn(4, 256), torch.ones(256)\nresidual = torch.randn(4, 256)\n"
    "images, shortcut = torch.randn(2, 3, 4, 4), torch.randn(2, 256, 4, 4)\n",
}  # fmt: skip
# Commands that a test runs with a small model; of others the flags are looked up.
RUN = ("embed", "info", "convert")


def of(language: str) -> list[Snippet]:
    return [snippet for snippet in ALL if snippet.language == language]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Ids that pages name -> folders of small models."""
    from language_models import random_llama
    from other_folders import colbert_folder, scored, splade_folder
    from tokenizers_offline import folder_of, sentence_folder

    home = tmp_path_factory.mktemp("hub")
    (home / "splade").mkdir()
    made = {
        "sentence-transformers/all-MiniLM-L6-v2": sentence_folder(home / "minilm", bert={"max_position_embeddings": 128}),
        "cross-encoder/ms-marco-MiniLM-L6-v2": folder_of(home / "cross"),
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english": folder_of(home / "sst2", labels=2),
        "dslim/bert-base-NER": folder_of(home / "ner", task="token_classification", labels=5),
        "naver/splade-cocondenser-ensembledistil": splade_folder(home / "splade"),
        "lightonai/GTE-ModernColBERT-v1": colbert_folder(home / "colbert"),
        "Qwen/Qwen3-Reranker-0.6B": scored(home / "reranker"),
        "SmolLM2-135M-Instruct": random_llama(home / "llama"),
    }
    return {name: str(folder) for name, folder in made.items()}


def here(text: str, hub: dict[str, str]) -> str:
    """With folders in the place of ids, on the device that is there."""
    for name, folder in hub.items():
        text = text.replace(f'"{name}"', repr(folder))
    text = text.replace("truncate_dim=128", "truncate_dim=32")  # of 64
    if not have_gpu():
        text = re.sub(r'device="cuda", dtype="\w+"', 'device="cpu"', text)
    return text


def test_every_snippet_has_a_language_and_a_reason_not_to_run() -> None:
    for snippet in ALL:
        assert snippet.language in LANGUAGES, f"{snippet}: {snippet.language!r}"
        assert not snippet.not_run or len(snippet.not_run.split()) > 1, snippet
    assert len(of("python")) > 20 and len(of("bash")) > 20


@pytest.mark.parametrize("page", sorted({snippet.page for snippet in of("python")}))
def test_python_runs(page: str, hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's snippets follow each other in one program."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("FTBERT_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(READERS_OWN.get(page, ""), names)
    for snippet in of("python"):
        if snippet.page == page:
            code = compile(here(snippet.text, hub), str(snippet), "exec")
            if not snippet.not_run:
                exec(code, names)


def test_names_of_snippets_that_do_not_run_exist() -> None:
    for snippet in of("python"):
        for name in re.findall(r"\bftbert\.(\w+)", snippet.text):
            assert name in {*ftbert.__all__, "norm", "converters", "tuning"}, f"{snippet}: ftbert.{name}"


def test_json_parses() -> None:
    for snippet in of("json"):
        json.loads(f"{{{snippet.text.replace(', ...', '')}}}")


def lines_of(snippet: Snippet) -> Iterator[list[str]]:
    """The words of each command, without comments; an "&" behind it and what is behind "&&" are commands too."""
    for line in snippet.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = next((i for i, word in enumerate(words) if word in ("&&", "|", "&", "<", ">")), len(words))
            if words[:end]:
                yield words[:end]
            words = words[end + 2 :] if words[end : end + 1] in (["<"], [">"]) else words[end + 1 :]


def subcommands() -> dict[str, Any]:
    return next(action for action in _parser()._actions if action.dest == "command").choices  # type: ignore[return-value]


def check_ftbert(words: list[str], where: str) -> None:
    if words[1] in ("COMMAND", "--version"):
        return
    for name in words[1].split("|"):
        parser = subcommands()[name]
        known = {flag for action in parser._actions for flag in action.option_strings}
        given = {word.partition("=")[0] for word in words[2:] if re.match(r"--?[a-z]", word)}
        assert given <= known, f"{where}: {sorted(given - known)} of {' '.join(words)}"


def check_files(words: list[str], where: str) -> None:
    for word in words:
        if re.match(r"(\./)?(deploy|examples|tests|benchmarks|docs)/", word) and not any(c in word for c in "*$"):
            assert (ROOT / word).exists(), f"{where}: {word}"


def check_make(words: list[str], where: str) -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert {word for word in words[1:] if "=" not in word} <= {*targets}, f"{where}: {words}"


def check_pip(words: list[str], where: str) -> None:
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
    extras = {*re.findall(r"^([\w-]+) = ", table, flags=re.M)}
    for word in words:
        if found := re.fullmatch(r"(?:\.|ftbert)\[([\w,-]+)\]", word):
            assert {*found[1].split(",")} <= extras, f"{where}: {word}"


def check_nothing(words: list[str], where: str) -> None:
    pass


CHECKS = {
    "ftbert": check_ftbert, "make": check_make, "pip": check_pip, "docker": check_files, "kubectl": check_files,
    "cmake": check_files, "python": check_files, "torchrun": check_files, "curl": check_nothing,
    "build-example/run_scripted": check_nothing, "build-core-example/tiny_encoder": check_nothing,
    "build-aoti/run_package": check_nothing, "printf": check_nothing, "sort": check_nothing,
}  # fmt: skip


@pytest.mark.parametrize("snippet", of("bash"), ids=str)
def test_commands_exist(snippet: Snippet) -> None:
    for words in lines_of(snippet):
        assert words[0] in CHECKS, f"{snippet}: no check of {words[0]}"
        CHECKS[words[0]](words, str(snippet))


@pytest.mark.parametrize("page", ["README.md", "embed.md", "command-line.md"])
def test_commands_run(
    page: str, hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands of RUN that need no GPU, with files as they name them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    lines = ["a cat", "a dog", "hello world"]
    for name in ("texts.txt", "texts/a.txt", "queries.txt"):
        Path(name).write_text("\n".join(lines) + "\n")
    Path("texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    ran = []
    for snippet in of("bash"):
        for words in lines_of(snippet) if snippet.page == page else ():
            if words[0] != "ftbert" or words[1] not in RUN or "--help" in words or re.search("cuda| -|gz", " ".join(words)[6:].replace(" --", " ")):
                continue
            named = {**hub, "MODEL": hub["sentence-transformers/all-MiniLM-L6-v2"]}
            assert cli.main([named.get(word, word) for word in words[1:]]) == 0, capsys.readouterr().err
            ran.append(words)
            if words[1] == "embed":
                assert Path(words[-1]).stat().st_size > 0
    capsys.readouterr()
    assert len(ran) >= {"README.md": 1, "embed.md": 5, "command-line.md": 1}[page], ran


def test_an_error_in_a_snippet_is_seen(tmp_path: Path) -> None:
    """What the checks above are for."""
    (page := tmp_path / "page.md").write_text(
        "```python\nftbert.lode()\n```\n\n<!-- not run: needs a planet -->\n```bash\nftbert embed M a b --poling cls\n```\n"
    )
    python, bash = snippets(page)
    assert python.language == "python" and bash.not_run == "needs a planet" and bash.line == 6
    with pytest.raises(AttributeError):
        exec(python.text, {"ftbert": ftbert})
    with pytest.raises(AssertionError, match="--poling"):
        check_ftbert(next(lines_of(bash)), "page.md")
