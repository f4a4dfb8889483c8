"""What a stranger expects of a project: its linters, workflows, forms, changes and metadata say what is so."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import ROOT

import ftbert

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def hooks() -> dict[str, Any]:
    return {hook["id"]: hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]}


def test_pre_commit_runs_the_linters_of_make_lint() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.M)
    assert recipe
    commands = [line.strip("\t@").split(" && ")[0].replace("$(PYTHON)", "python") for line in recipe[1].splitlines()[1:]]
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in hooks().values()]
    assert sorted(entries) == sorted(re.sub(r" (\.|\$\(CXX_FILES\))$", "", command) for command in commands)


def test_pre_commit_has_the_versions_of_the_environment() -> None:
    pinned = (ROOT / "requirements-dev.txt").read_text().splitlines()
    found = [name for hook in hooks().values() for name in hook.get("additional_dependencies", ())]
    assert len(found) == 2 and {*found} <= {*pinned}


def test_pre_commit_reads_the_c_files_of_make_lint() -> None:
    folders, names = re.search(r"CXX_FILES = \$\(shell find (.*?) (-name.*)\)", MAKEFILE).groups()  # type: ignore[union-attr]
    suffixes = tuple(re.findall(r"'\*(\.\w+)'", names))
    pattern = hooks()["clang-format"]["files"]
    ours = {str(p.relative_to(ROOT)) for folder in folders.split() for p in (ROOT / folder).rglob("*") if p.name.endswith(suffixes)}
    assert ours and all(re.search(pattern, name) for name in ours) and not re.search(pattern, "benchmarks/hide_avx512.c")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_of_make(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"} and workflow[True], path  # YAML reads `on` as True
    targets = {*re.findall(r"^([a-z0-9-]+):", MAKEFILE, flags=re.M)}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] and any("uses" in step for step in job["steps"]), name
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands, name
        for command in commands:
            assert re.fullmatch(r"make [a-z0-9-]+( [A-Z]+=\S+)*", command) and command.split()[1] in targets, command


def test_workflows_cover_lint_tests_wheels_and_pages() -> None:
    runs = {step["run"] for path in WORKFLOWS for job in read(path)["jobs"].values() for step in job["steps"] if "run" in step}
    assert {"make lint", "make test", "make docs", "make wheels", "make wheels-test"} <= runs


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_are_as_github_reads_them(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"] and form["labels"]
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in form["body"]} <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    ids = [field["id"] for field in asked]
    assert len(ids) == len({*ids}) and all(field["attributes"]["label"] for field in asked)
    assert any(field.get("validations", {}).get("required") for field in asked)


def test_forms_name_commands_and_pages_that_exist() -> None:
    from ftbert.cli.program import _parser

    commands = next(action for action in _parser()._actions if action.dest == "command").choices
    text = "".join(path.read_text(encoding="utf-8") for path in GITHUB.rglob("*") if path.is_file())
    assert {*re.findall(r"`ftbert ([a-z]+)", text)} <= {*commands}  # type: ignore[arg-type]
    assert all((ROOT / name).exists() for name in re.findall(r"\b(?:docs/)?[\w-]+\.md\b", text))
    targets = re.findall(r"^([a-z0-9-]+):", MAKEFILE, flags=re.M)
    assert {*re.findall(r"`make ([a-z-]+)", text)} <= {*targets, "help"}


def test_changes_are_in_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.*)$", text, flags=re.M)
    assert heads[0] == "Unreleased"
    days = [date.fromisoformat(re.fullmatch(r"\d+\.\d+\.\d+ - (\S+)", head)[1]) for head in heads[1:]]  # type: ignore[index]
    assert days == sorted(days, reverse=True)
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for part in text.split("\n## ")[1:]:
        found = re.findall(r"^### (.*)$", part, flags=re.M)
        assert found == [kind for kind in kinds if kind in found], found


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software" and citation["message"]
    assert citation["version"] == ftbert.__version__
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()


def test_deprecations_have_a_rule_that_the_changes_know() -> None:
    assert "DeprecationWarning" in (ROOT / "docs" / "stability.md").read_text()
    assert "docs/stability.md" in (ROOT / "CHANGELOG.md").read_text()
