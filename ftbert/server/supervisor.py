"""The first process: starts workers and engines, starts them again when they die, passes signals on."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbert.cores import cores, wish
from ftbert.server.catalogue import Catalogue
from ftbert.server.logs import LOG, say_where, set_up
from ftbert.server.metrics import Metrics, Row
from ftbert.server.process import ServerFolder, check_extra, socket_path, wait_for_signal
from ftbert.server.settings import Settings
from ftbert.server.tracing import check_traces

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_LAST = 5.0  # seconds for engines to end, once nothing is to be computed
_LONGEST_PAUSE = 5.0  # before a child that keeps dying is started again
_AT_ONCE = 130
# Seconds after which a child is ended and started again: that is stopped by a signal, or gives no sign of life. A busy
# machine may keep one from a core for long. At most _LOOK of them are counted between two looks.
_STOPPED, _SILENT, _LOOK = 10.0, 60.0, 1.0


def serve(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code: 0 after a drain, 130 after a second signal. Raises
    RuntimeError without an extra's packages, OSError where the address is taken, ValueError for flags that do not go
    together, and what loading a model raises."""
    check_extra()
    from ftbert.server.worker import bind, run_one_process

    set_up(settings.json_output)
    check_paths(settings.models)
    if settings.otlp_endpoint is not None:
        check_traces(settings.otlp_endpoint)
    settings = dataclasses.replace(settings, workers=_workers(settings))
    alone = settings.workers == 0
    if alone and settings.on_demand:
        raise ValueError("--models-dir loads models in processes of their own: --workers must be at least 1")
    bound = bind(settings.hostname, settings.port, shared=False)  # fails where another server listens
    port = bound.getsockname()[1]
    settings = dataclasses.replace(settings, port=port)
    if alone:
        code = run_one_process(settings, bound)
    else:
        bound.close()
        with bind(settings.hostname, port, shared=True) as kept:  # the port; does not listen
            code = _Supervisor(settings, kept.getsockname()[:2]).run()
    LOG.info("ended with exit code %d", code)
    return code


def check_paths(models: Iterable[tuple[str, str]]) -> None:
    """FileNotFoundError for what can be a path alone and is not there: loading would say it seconds later, while the
    server listens."""
    for _, source in models:
        if source.startswith(("/", "./", "../", "~")) and not Path(source).expanduser().exists():
            raise FileNotFoundError(f"{source}: expected a model folder (with config.json and weights) or a hub id")


def _workers(settings: Settings) -> int:
    if settings.workers is not None:
        return settings.workers
    if all(device == "cpu" for device in settings.devices):
        return 1 if settings.on_demand else 0
    return default_workers(cores().number)


def default_workers(count: int) -> int:
    """Beside engines on GPUs, of a machine with so many cores. On 16 of them 12 workers served 1.15 times what 8 did;
    the rest is for engines and clients."""
    return max(1, min(count - 2, 8), min(count * 3 // 4, 12))


def _is_stopped(process: int) -> bool:
    """By SIGSTOP and its like; not by a debugger."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


@dataclass
class _Child:
    told: dict[str, Any]
    row: Row = field(default_factory=Row)  # where it gives signs of life
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    pause: float = 0.1
    again_at: float | None = field(default=0.0)  # when it is started; None while it runs
    beats: float = 0.0  # its signs of life, as they were when it was looked at
    begun: bool = False  # it gives them: it has loaded, and listens
    silent: float = 0.0  # seconds without one, as the supervisor saw them
    stopped: float = 0.0  # seconds that it is stopped by a signal
    end_at: float | None = None  # when it is killed, once it was told to end

    @property
    def name(self) -> str:
        return f"{self.told['role']} {self.told['index']}"


class _Supervisor:
    """address: that the workers listen on."""

    def __init__(self, settings: Settings, address: tuple[str, int]) -> None:
        self._settings, self._address = settings, address
        self._made = ServerFolder()
        self._folder = self._made.path
        self._listens = False
        workers, models, devices = settings.workers or 1, len(settings.models), len(settings.engines)
        common = {"settings": settings.to_json(), "folder": str(self._folder)}
        there = models - max(0, settings.on_demand - (settings.models_max or settings.on_demand))  # at the same time
        on_cpu = there * settings.engines.count("cpu")
        threads = max(1, cores().number // on_cpu) if on_cpu > 1 and wish() is None else None
        self._catalogue = Catalogue(settings, self._folder) if settings.on_demand else None
        self._workers = [_Child({**common, "role": "worker", "index": i}) for i in range(workers)]
        self._engines = [
            _Child({**common, "role": "engine", "index": model * devices + device, "model": model,
                    "device": device, "threads": threads if settings.engines[device] == "cpu" else None})  # fmt: skip
            for model in range(models)
            for device in range(devices)
        ]

    def run(self) -> int:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            for child in self._workers:
                child.row = Metrics(self._settings, self._folder / "metrics", child.told["index"]).requests()
            metrics = Metrics(self._settings, self._folder / "metrics")
            for child in self._engines:
                child.row = metrics.engine(child.told["model"], child.told["device"])
            return self._watch()
        finally:
            for child in (*self._workers, *self._engines):
                if child.process is not None and child.process.poll() is None:
                    child.process.kill()
                    child.process.wait()
            self._made.remove()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _watch(self) -> int:
        looked = time.monotonic()
        while True:
            now = time.monotonic()
            # No longer than it takes: this process may have been stopped itself.
            passed, looked = min(now - looked, _LOOK), now
            if self._catalogue is not None:
                self._follow(self._catalogue, now)
            for child in (*self._workers, *self._engines):
                code = None if child.process is None else child.process.poll()
                if code is not None and not self._plan_again(child, code, now):
                    return 1
                if child.again_at is not None and now >= child.again_at:
                    self._start(child)
                elif child.process is not None and not self._lives(child, passed):
                    child.process.kill()
            if (number := self._signal(0.1)) is not None:
                LOG.info("%s: shutting down", signal.Signals(number).name)
                return self._drain()

    def _follow(self, catalogue: Catalogue, now: float) -> None:
        """Engines of models that are loaded on demand run where these are wanted."""
        wanted = catalogue.wanted()
        for child in self._engines:
            if child.told["model"] < catalogue.first:
                continue
            if child.process is None:
                again_at = now if child.again_at is None else child.again_at
                child.again_at = again_at if child.told["model"] in wanted else None
            elif child.told["model"] not in wanted and child.end_at is None:
                child.process.terminate() if self._socket(child).exists() else child.process.kill()
                child.end_at = now + self._settings.shutdown_timeout + _LAST
            elif child.end_at is not None and now > child.end_at:
                child.process.kill()

    def _socket(self, child: _Child) -> Path:
        """Of an engine: it is there once the model is loaded."""
        return socket_path(self._folder, child.told["model"], child.told["device"])

    def _lives(self, child: _Child, passed: float) -> bool:
        """False where nothing will make it answer: it was stopped, or its event loop hangs. Whoever only waits for a
        core on a busy machine is neither."""
        assert child.process is not None
        beats = child.row.beats
        if beats != child.beats:
            child.beats, child.begun, child.silent = beats, True, 0.0
            if child.told["role"] == "worker" and not self._listens:
                self._listens = True
                say_where(self._address, self._settings.api_key is not None)
        elif child.begun:
            child.silent += passed
        child.stopped = child.stopped + passed if child.silent and _is_stopped(child.process.pid) else 0.0
        if child.stopped < _STOPPED and child.silent < _SILENT:
            return True
        LOG.warning("%s is %s; ending it", child.name, "stopped" if child.stopped else f"silent for {_SILENT:.0f} s")
        return False

    def _signal(self, seconds: float) -> int | None:
        """SIGTERM or SIGINT within so many seconds. A child's end ends the waiting too."""
        return wait_for_signal({signal.SIGTERM, signal.SIGINT}, seconds, {signal.SIGCHLD})

    def _start(self, child: _Child) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        child.process = subprocess.Popen(
            [sys.executable, "-m", "ftbert.server.child"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the supervisor, which passes it on
        )
        assert child.process.stdin is not None
        child.process.stdin.write(json.dumps(child.told).encode() + b"\n")
        child.process.stdin.flush()
        child.started, child.again_at = time.monotonic(), None
        child.begun, child.silent, child.stopped, child.end_at = False, 0.0, 0.0, None
        child.beats = child.row.beats

    def _plan_again(self, child: _Child, code: int, now: float) -> bool:
        """False where an engine cannot load its model: no other try would."""
        from ftbert.server.child import CANNOT_START

        assert child.process is not None and child.process.stdin is not None
        child.process.stdin.close()
        child.process = None
        if self._catalogue is not None and child.told.get("model", -1) >= self._catalogue.first:
            if self._ended_on_demand(child, code, now, self._catalogue):
                return True
        elif code == CANNOT_START and not self._socket(child).exists():
            return False
        lived = now - child.started
        child.pause = 0.1 if lived > 10 else min(2 * child.pause, _LONGEST_PAUSE)
        child.again_at = now if lived > 10 else now + child.pause
        LOG.warning("%s ended with code %d; starting it again", child.name, code)
        return True

    def _ended_on_demand(self, child: _Child, code: int, now: float, catalogue: Catalogue) -> bool:
        """False: it fell, and is started again as any other."""
        which, loaded = child.told["model"], self._socket(child).exists()
        self._socket(child).unlink(missing_ok=True)
        if which not in catalogue.wanted():
            return True
        if child.end_at is not None:  # it was told to, and is wanted again
            child.again_at = now
            return True
        if loaded:
            return False
        LOG.error("%s cannot be loaded: its process ended with code %d", self._settings.models[which][0], code)
        catalogue.fail(which, code)
        return True

    def _drain(self) -> int:
        """Workers finish what they accepted, then engines go."""
        settings = self._settings
        for children, seconds in (
            (self._workers, settings.drain_delay + settings.shutdown_timeout + 2.0),
            (self._engines, _LAST),
        ):
            running = [child.process for child in children if child.process is not None]
            for process in running:
                process.terminate()
            until = time.monotonic() + seconds
            while any(process.poll() is None for process in running) and time.monotonic() < until:
                if (number := self._signal(0.1)) is not None:
                    LOG.info("%s again: ending at once", signal.Signals(number).name)
                    return _AT_ONCE
        return 0
