"""What a child of the supervisor runs: `python -m ftbert.server.child`, told what to be by a line on standard input.

Standard input stays open as long as the supervisor lives; when it ends, so does the child.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

from ftbert.server.catalogue import Catalogue
from ftbert.server.logs import LOG, set_up
from ftbert.server.process import remove
from ftbert.server.settings import Settings

CANNOT_START = 3


def main() -> int:
    told = json.loads(sys.stdin.buffer.readline())
    settings, folder = Settings.from_json(told["settings"]), Path(told["folder"])
    set_up(settings.json_output)
    tempfile.tempdir = str(folder)  # what a model keeps in files goes with the server, however its processes end
    threading.Thread(target=_follow_parent, args=(folder,), name="ftbert-parent", daemon=True).start()
    if told["role"] == "engine":
        # Blocked in every thread, so that the main one can wait for them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        from ftbert.server.engine_process import run_engine

        try:
            return run_engine(settings, told["model"], told["device"], told["threads"], folder)
        except Exception as error:  # noqa: BLE001 - the one place of this process where errors become a line
            words = " ".join(str(error).split())
            if not words or not isinstance(error, (OSError, ValueError, RuntimeError, TypeError)):
                words = f"{type(error).__name__}: {words}"
            LOG.error("%s: %s", settings.models[told["model"]][0], words)
            if settings.on_demand:
                Catalogue(settings, folder).explain(told["model"], words)
            return CANNOT_START
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
    from ftbert.server.worker import run_worker

    return run_worker(settings, told["index"], folder)


def _follow_parent(folder: Path) -> None:
    while os.read(0, 4096):
        pass
    remove(folder)  # the supervisor cannot any more
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads and the library's own do not hold the exit
