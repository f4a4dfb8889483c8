"""Makes a target of a Dockerfile without a container engine, starts it and asks it for a vector.

    sudo python tests/image.py deploy/Dockerfile --target cpu

Each stage is a folder under --work: Debian by debootstrap, then the lines of RUN, COPY, ENV and ARG by chroot in a mount
namespace of their own. pip has the indexes of this machine's pip. The entry point then runs as its user on a root that
cannot be written, with the real MiniLM in place of the hub's. Needs root, debootstrap, unshare and FTBERT_TEST_MINILM.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from dockerfile import Stage, environment, ignored, needed, stages, substituted

ROOT = Path(__file__).resolve().parent.parent
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
START = 600  # seconds
HOST = "/host"  # in a root: where files of this machine lie that its pip names


def pip_settings() -> tuple[dict[str, str], list[Path]]:
    """This machine's pip, as variables of the environment, and the files and folders that they name."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    values = {match[1]: match[2] for match in re.finditer(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", listed, flags=re.M)}
    named: list[Path] = []

    def inside(value: str) -> str:
        words = value.split()
        for place, word in enumerate(words):
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                named.append(path.parent if word.startswith("file:") else path)  # an index's files lie beside it
                words[place] = word.replace(str(path), f"{HOST}{path}")
        return " ".join(words)

    return {f"PIP_{name.replace('-', '_').upper()}": inside(value) for name, value in values.items()}, named


def mounts(root: Path, shared: list[Path]) -> str:
    """Commands of a shell that give a root /proc, /dev, names of hosts, certificates and the shared paths."""
    lines = ["set -e", "mount --make-rprivate /", f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
    for path, at in [(Path("/etc/resolv.conf"), ""), (Path("/etc/hosts"), ""), *((path, HOST) for path in shared)]:
        inside = Path(f"{root}{at}{path}")
        if path.is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        elif not inside.exists():
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()
        lines.append(f"mount --bind {path} {inside}")
    return "\n".join(lines)


def run(root: Path, text: str, values: dict[str, str], shared: list[Path]) -> None:
    """One line of RUN."""
    inside = {"HOME": "/root", "LANG": "C.UTF-8", **{name: os.environ[name] for name in PROXIES if name in os.environ}, **values}
    command = f"exec chroot {root} /usr/bin/env -i {shlex.join(f'{name}={value}' for name, value in inside.items())} /bin/sh -c {shlex.quote(text)}"
    subprocess.run(["unshare", "--mount", "/bin/sh", "-c", f"{mounts(root, shared)}\n{command}"], check=True)


def copy_sources(target: Path, patterns: str) -> None:
    """COPY . by the .dockerignore."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0")[:-1]:
        if os.path.lexists(ROOT / name) and not ignored(name, patterns):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def make(stage: Stage, found: dict[str, Stage], work: Path, debian: Path, patterns: str) -> None:
    """The folder of a stage, from that of its base."""
    root, ready = work / stage.name, work / f"{stage.name}.ready"
    said = repr(stage.instructions)
    if ready.exists() and ready.read_text() == said and stage.name.startswith(("python", "torch")):
        print(f"== {stage.name}: as it was made before", flush=True)
        return
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run(["cp", "-a", "--reflink=auto", str(work / stage.base if stage.base in found else debian), str(root)], check=True)
    (root / "etc" / "resolv.conf").touch()
    pip, shared = pip_settings()
    values = environment(found, stage.base)
    for one in stage.instructions:
        print(f"== {stage.name}, line {one.line}: {one.word} {one.text}", flush=True)
        began = time.monotonic()
        if one.word == "RUN":
            run(root, one.text, {**pip, **values}, shared)
            print(f"   {time.monotonic() - began:.0f} s", flush=True)
        elif one.word == "COPY":
            source = re.fullmatch(r"--from=(\S+) (\S+) (\S+)", one.text)
            if source:
                shutil.copytree(Path(f"{work / source[1]}{source[2]}"), Path(f"{root}{source[3]}"))
            else:
                copy_sources(Path(f"{root}{one.text.split()[1]}"), patterns)
        elif one.word == "ENV":
            values |= {name: substituted(value, values) for name, _, value in (pair.partition("=") for pair in one.text.split())}
        elif one.word == "ARG":
            name, _, value = one.text.partition("=")
            values[name] = os.environ.get(name, value)
    shutil.rmtree(Path(f"{root}{HOST}"), ignore_errors=True)
    ready.write_text(said)


def serve(stage: Stage, found: dict[str, Stage], work: Path, model: Path) -> None:
    """The entry point on a root that is read only but for /models and /tmp; AssertionError where it is not as promised."""
    root, user = work / stage.name, stage.last("USER").text
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    values = {**environment(found, stage.name), "PORT": str(port)}
    env = ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in values.items())]
    (root / "model").mkdir(exist_ok=True)
    lines = [
        mounts(root, []), f"mount --bind {model} {root}/model", f"mount --bind {root} {root}",
        f"mount --rbind /dev {root}/dev", f"mount -t proc proc {root}/proc", f"mount --bind {model} {root}/model",
        f"mount --bind {root}/models {root}/models", f"mount -t tmpfs tmpfs {root}/tmp",
        f"mount -o remount,bind,ro {root} {root}",
    ]  # fmt: skip

    def inside(words: list[str]) -> list[str]:
        text = f"exec chroot --userspec={user}:{user} {root} {shlex.join([*env, *words])}"
        return ["unshare", "--mount", "/bin/sh", "-c", "\n".join([*lines, text])]

    version = subprocess.run(inside(["ftbert", "--version"]), capture_output=True, text=True, check=True).stdout
    print(f"== {version.strip()}; the model is {model.name}", flush=True)
    written = subprocess.run(inside(["/usr/bin/touch", "/opt/ftbert/x"]), capture_output=True, text=True, check=False)
    assert written.returncode != 0, "the root can be written"
    server = subprocess.Popen(inside([*stage.last("ENTRYPOINT").command(), "/model"]))
    try:
        probe = json.loads(stage.last("HEALTHCHECK").text.partition("CMD ")[2])
        began = time.monotonic()
        while subprocess.run(inside(probe), capture_output=True, check=False).returncode:
            assert server.poll() is None and time.monotonic() - began < START, "the server is not healthy"
            time.sleep(1)
        print(f"== healthy after {time.monotonic() - began:.0f} s", flush=True)
        ids = re.search(r"^Uid:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text(), flags=re.M)
        assert ids and ids[1] == user, f"the server runs as user {ids and ids[1]}"
        body = json.dumps({"inputs": ["a cat", "a dog"]}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/embed", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            vectors = json.load(answer)
        assert [len(vector) for vector in vectors] == [384, 384]
        print(f"== cosine of a cat and a dog: {sum(a * b for a, b in zip(*vectors, strict=True)):.4f}", flush=True)
    finally:
        server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=60) == 0, "SIGTERM did not end it well"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--work", type=Path, default=ROOT / "build-image")
    parser.add_argument("--build-only", action="store_true", help="do not start it: of cuda where no GPU is")
    options = parser.parse_args()
    model = os.environ.get("FTBERT_TEST_MINILM", "")
    lacking = [tool for tool in ("debootstrap", "unshare", "chroot", "git") if not shutil.which(tool)]
    if os.geteuid() or lacking or not Path(model, "config.json").exists():
        print(f"needs root, FTBERT_TEST_MINILM (make models) and debootstrap; lacking: {', '.join(lacking) or 'no tool'}")
        return 2
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    os.environ.setdefault("COMMIT", head.stdout.strip())
    found, work = stages(options.dockerfile), options.work.resolve()
    patterns = options.dockerfile.with_name(f"{options.dockerfile.name}.dockerignore").read_text()
    image = found["python"].base
    release = image.removeprefix("debian:").removesuffix("-slim")
    debian = work / f"debian-{release}"
    if not (debian / "ready").exists():
        print(f"== {image}, by debootstrap", flush=True)
        shutil.rmtree(debian, ignore_errors=True)
        debian.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["debootstrap", "--variant=minbase", release, str(debian)], check=True, stdout=subprocess.DEVNULL)
        (debian / "ready").touch()
    for name in needed(found, options.target):
        make(found[name], found, work, debian, patterns)
    if options.build_only:
        run(work / options.target, "ftbert --version", environment(found, options.target), [])
    else:
        serve(found[options.target], found, work, Path(model))
    print(f"ok: target {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
