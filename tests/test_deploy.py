"""The image, the compose file and the manifest name what exists: files, flags, ports, probes.

tests/image.py runs the lines of the image.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import served  # noqa: F401  skips where the server's packages are not installed
import yaml
from dockerfile import Stage, environment, ignored, needed, stages
from pages import ROOT

from ftbert.cli.program import _parser
from ftbert.cli.serve import settings_of
from ftbert.server.routes import all_routes

DEPLOY = ROOT / "deploy"
STAGES = stages(DEPLOY / "Dockerfile")
IGNORE = (DEPLOY / "Dockerfile.dockerignore").read_text()
TARGETS = ("cpu", "cuda")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
MANIFEST = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))}


def settings(words: list[str], environment: dict[str, str] | None = None) -> Any:
    """What the server makes of a command line: SystemExit or ValueError for one that it does not know."""
    options = _parser().parse_args(words[1:] if words[0] == "ftbert" else words)
    options.device = options.device.replace("cuda", "cuda:0")  # every GPU: none may be here
    return settings_of(options, environment or {})


def entry(target: str) -> list[str]:
    return STAGES[target].last("ENTRYPOINT").command()


@pytest.mark.parametrize("target", TARGETS)
def test_the_image_starts_a_server(target: str) -> None:
    stage, given = STAGES[target], environment(STAGES, target)
    made = settings([*entry(target), *stage.last("CMD").command()], given)
    assert made.hostname == "0.0.0.0" and made.devices == (("cpu",) if target == "cpu" else ("cuda:0",))
    assert str(made.port) == stage.last("EXPOSE").text == given["PORT"]
    volume = stage.last("VOLUME").text
    assert given["HF_HOME"].startswith(volume + "/") and given["FTBERT_CACHE"].startswith(volume + "/")
    assert stage.last("USER").text not in ("root", "0")
    assert [one.word for one in stage.instructions].index("USER") > max(
        place for place, one in enumerate(stage.instructions) if one.word in ("RUN", "COPY")
    )


@pytest.mark.parametrize("target", TARGETS)
def test_the_health_check_is_a_program_that_asks_a_route(target: str) -> None:
    text = STAGES[target].last("HEALTHCHECK").text
    python, option, program = yaml.safe_load(text.partition("CMD ")[2])
    assert (python, option) == ("python3", "-c") and ("GET", re.search(r"'(/\w+)'", program)[1]) in all_routes()  # type: ignore[index]
    # Nothing answers there: it has to fail, as a program and not as a mistake.
    done = subprocess.run(["python3", "-c", program], env={**os.environ, "PORT": "9"}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "URLError" in done.stderr.splitlines()[-1]


def test_the_wheel_finds_all_that_it_is_made_of() -> None:
    for path in ("setup.py", "build_backend.py", "pyproject.toml", "CMakeLists.txt", "README.md", "requirements.txt", "csrc/encoder.cpp",
                 "ftbert/server/page.html", "converters/family.py", "LICENSE"):  # fmt: skip
        assert (ROOT / path).exists() and not ignored(path, IGNORE), path
    for path in (".models/x", "build/x", "docs/x.md", "tests/x.py", ".git/HEAD", "ftbert/lib/libftbert.so"):
        assert ignored(path, IGNORE), path


def test_stages_copy_what_there_is() -> None:
    for stage in STAGES.values():
        for one in stage.instructions:
            if one.word == "COPY":
                source = re.match(r"--from=(\S+) (\S+) ", one.text)
                assert one.text == ". /src" or (source and source[1] in STAGES and source[2] == "/wheels"), one
                assert not source or "-w /wheels" in STAGES[source[1]].last("RUN").text
    assert needed(STAGES, "cpu") == ["python", "torch-cpu", "wheel-cpu", "cpu"]
    assert needed(STAGES, "cuda") == ["python", "torch-cuda", "wheel-cuda", "cuda"]


def test_packages_are_those_of_the_project() -> None:
    pinned = re.search(r"^torch==\S+", (ROOT / "requirements.txt").read_text(), flags=re.M)
    project = (ROOT / "pyproject.toml").read_text()
    text = (DEPLOY / "Dockerfile").read_text()
    assert pinned and {*re.findall(r"ARG TORCH=(\S+)", text)} == {pinned[0]}
    for extras in re.findall(r"\.whl\)\[([\w,-]+)\]", text):
        assert all(re.search(rf"^{extra} = ", project, flags=re.M) for extra in extras.split(","))


def test_what_reads_the_dockerfile_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("ARG A=b\nFROM $A AS c\nRUN x \\\n  # a comment stays\n && y\nFROM c AS d\nCOPY --from=c /e /f\n")
    found = stages(path)
    assert found["c"] == Stage("c", "b", found["c"].instructions) and found["c"].instructions[0].line == 3
    assert found["c"].instructions[0].text.startswith("x ") and needed(found, "d") == ["c", "d"]
    for text in ("RUN x\n", "FROM a\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="Dockerfile:1"):
            stages(path)


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_compose_runs_the_image(name: str) -> None:
    service = COMPOSE["services"][name]
    target = service["build"]["target"]
    assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]) == DEPLOY / "Dockerfile"
    made = settings([*entry(target), *service["command"]], environment(STAGES, target))
    for port in service["ports"]:
        address, _, inside = port.rsplit(":", 2)
        assert address == "127.0.0.1" and inside == str(made.port)
    volume, at = service["volumes"][0].split(":")
    assert volume in COMPOSE["volumes"] and at == STAGES[target].last("VOLUME").text
    assert service["read_only"] and int(service["stop_grace_period"].rstrip("s")) > made.drain_delay + made.shutdown_timeout


def test_the_manifest_asks_routes_of_the_image() -> None:
    pod = MANIFEST["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    made = settings([*entry("cpu"), *container["args"]], environment(STAGES, "cpu"))
    (port,) = container["ports"]
    assert port["containerPort"] == made.port
    paths = {probe: container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")}
    assert {probe: get["path"] for probe, get in paths.items()} == {"startup": "/health", "readiness": "/health", "liveness": "/live"}
    notes = MANIFEST["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    for path in (*(get["path"] for get in paths.values()), notes["prometheus.io/path"]):
        assert all_routes()["GET", path].probe, path  # no key is asked for
    assert {get["port"] for get in paths.values()} == {port["name"]} and notes["prometheus.io/port"] == str(made.port)
    assert pod["terminationGracePeriodSeconds"] > made.drain_delay + made.shutdown_timeout
    assert str(pod["securityContext"]["runAsUser"]) == STAGES["cpu"].last("USER").text
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts["models"] == STAGES["cpu"].last("VOLUME").text and container["securityContext"]["readOnlyRootFilesystem"]
    assert {*mounts} == {one["name"] for one in pod["volumes"]}
    claim = next(one for one in pod["volumes"] if "persistentVolumeClaim" in one)["persistentVolumeClaim"]["claimName"]
    assert claim == MANIFEST["PersistentVolumeClaim"]["metadata"]["name"]
    assert {one["name"] for one in container["env"]} == {"API_KEY"}


def test_the_service_finds_the_pods() -> None:
    labels = MANIFEST["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (MANIFEST["Deployment"]["spec"]["selector"]["matchLabels"], MANIFEST["Service"]["spec"]["selector"]):
        assert selector.items() <= labels.items()
    (port,) = MANIFEST["Service"]["spec"]["ports"]
    assert port["targetPort"] == MANIFEST["Deployment"]["spec"]["template"]["spec"]["containers"][0]["ports"][0]["name"]


def test_a_flag_or_probe_that_is_not_there_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings([*entry("cpu"), "model", "--drain-dealy=10"])
    assert "unrecognized arguments: --drain-dealy=10" in capsys.readouterr().err
    with pytest.raises(KeyError):
        all_routes()["GET", "/healthz"]
