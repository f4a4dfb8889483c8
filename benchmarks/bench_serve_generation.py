"""`ftbert serve` writing texts beside llama.cpp's server: tokens/s of some streams at once, and the first token's time.

    python benchmarks/bench_serve_generation.py --gguf SmolLM2-135M-Instruct.Q8_0.gguf --threads 2
    python benchmarks/bench_serve_generation.py --gguf FILE --device cuda --llama-server FOLDER/llama-server

Both servers read the same GGUF file (decode_models.py makes one in Q8_0) and get the same requests, llama.cpp's own
/completion: prompts of random ids above 300 (words), none of them twice, greedy, the end of text ignored, streamed. In
every round they take turns; a number is the median over rounds. tokens/s: of all streams of a round, from the first
request to the last token, prompts included. first: until the first token of a prompt of --first tokens, alone, beside
that of the library in this process. Without --llama-server llama.cpp comes from the package xllamacpp, for CPUs.

llama.cpp's server keeps no prompt beside its slots here (--cache-ram 0): by default it copies a slot's keys and values
into the host's memory before another prompt takes the slot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from decode_report import FTBERT, SERVER, written_lines  # noqa: E402
from machine import log, provenance, results_file, write  # noqa: E402

import ftbert  # noqa: E402
from ftbert._library import build_info  # noqa: E402
from ftbert.decoding import generation_of  # noqa: E402
from ftbert.decoding.requests import Request  # noqa: E402

LIBRARY = "the library alone"
START_SECONDS = 300
ANSWER_SECONDS = 600
# llama.cpp of the package in a process of its own. Its threads are as many as ftbert's.
_XLLAMACPP = """
import os, sys, xllamacpp
path, slots, positions, threads = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path = path
params.n_parallel, params.n_ctx = slots, slots * positions
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.verbosity, params.cache_ram_mib = -1, 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
os._exit(0)
"""


@dataclass
class Server:
    """process: ended by `stop`. address: http://host:port."""

    process: subprocess.Popen[str]
    address: str

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Stream:
    """One answer. times: of its pieces, by time.perf_counter(). tokens: that the server says it wrote."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0


def start_ftbert(options: argparse.Namespace, log_file: Path) -> Server:
    command = [sys.executable, "-m", "ftbert", "serve", str(options.gguf), "--device", options.device, "--port", "0"]
    command += ["--generation-slots", str(max(options.streams)), "--max-model-len", str(options.positions)]
    command += ["--request-timeout", str(ANSWER_SECONDS)]
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with log_file.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env=environment, text=True)
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        said = log_file.read_text()
        if "ready" in said and (found := re.search(r"127.0.0.1:(\d+)", said)):
            return Server(process, f"http://127.0.0.1:{found[1]}")
        time.sleep(0.1)
    raise RuntimeError(f"ftbert's server did not start: {log_file.read_text()}")


def start_llama_cpp(options: argparse.Namespace) -> Server:
    slots, threads = max(options.streams), torch.get_num_threads()
    if options.llama_server is None:
        sizes = map(str, (slots, options.positions, threads))
        process = subprocess.Popen(
            [sys.executable, "-c", _XLLAMACPP, str(options.gguf), *sizes], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        if address := process.stdout.readline().strip():
            return Server(process, address)
        raise RuntimeError("llama.cpp's server did not start")
    port = 20_000 + os.getpid() % 10_000
    command = [str(options.llama_server), "-m", str(options.gguf), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-np", str(slots), "-c", str(slots * options.positions), "-t", str(threads)]
    command += ["-ngl", "999", "-fa", "on", "--cache-ram", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    server, until = Server(process, f"http://127.0.0.1:{port}"), time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(server.address + "/health", timeout=5).close()
            return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError("llama.cpp's server did not start")


def llama_cpp_facts(program: Path | None) -> str:
    """Its build."""
    if program is not None:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        return (said.stdout + said.stderr).strip()
    import xllamacpp

    return f"xllamacpp {metadata.version('xllamacpp')}: {xllamacpp.get_system_info().strip(' |')}"


async def _ask(server: Server, body: dict[str, Any]) -> Stream:
    host, _, port = server.address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    data = json.dumps(body).encode()
    head = f"POST /completion HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    writer.write(f"{head}\r\nconnection: close\r\n\r\n".encode() + data)
    stream = Stream()
    status = (await reader.readline()).split()
    if status[1:2] != [b"200"]:
        raise RuntimeError(f"{server.address}: {b' '.join(status).decode()}: {(await reader.read()).decode()[-500:]}")
    while line := await reader.readline():
        if line.startswith(b"data: ") and not line.startswith(b"data: ["):
            said = json.loads(line[6:])
            if said.get("content") or said.get("tokens"):
                stream.times.append(time.perf_counter())
            stream.tokens = said.get("tokens_predicted", stream.tokens)
    writer.close()
    return stream


def round_of(server: Server, streams: int, prompt: int, tokens: int, vocab: int, seed: int) -> dict[str, float]:
    """So many requests at once. RuntimeError where one has not all its tokens."""
    drawn = random.Random(seed)
    bodies = [
        {"prompt": [drawn.randrange(300, vocab) for _ in range(prompt)], "n_predict": tokens, "ignore_eos": True,
         "temperature": 0, "cache_prompt": False, "stream": True}
        for _ in range(streams)
    ]  # fmt: skip

    async def all_of_them() -> list[Stream]:
        return await asyncio.wait_for(asyncio.gather(*(_ask(server, body) for body in bodies)), ANSWER_SECONDS)

    began = time.perf_counter()
    found = asyncio.run(all_of_them())
    if any(one.tokens != tokens for one in found):
        raise RuntimeError(f"{server.address}: expected {tokens} tokens a text; got {[one.tokens for one in found]}")
    gaps = sorted(after - before for one in found for before, after in zip(one.times, one.times[1:], strict=False))
    return {
        "tokens_per_s": streams * tokens / (max(one.times[-1] for one in found) - began),
        "first_ms": 1e3 * statistics.median(one.times[0] - began for one in found),
        "gap_p99_ms": 1e3 * gaps[int(0.99 * len(gaps))] if gaps else 0.0,
    }


def library_first(generation: Any, prompt: int, vocab: int, seed: int) -> float:
    """Milliseconds until the first token, without a server."""
    drawn = random.Random(seed)
    ids = [drawn.randrange(300, vocab) for _ in range(prompt)]
    began = time.perf_counter()
    generation.add(Request(ids, 1))
    while not generation.step():
        pass
    return 1e3 * (time.perf_counter() - began)


def _median(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of the CPU (default: torch's)")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's program (default: the package xllamacpp)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="that follow")
    parser.add_argument("--first", type=int, default=512, help="tokens of the prompt whose first token is timed")
    parser.add_argument("--positions", type=int, default=1024, help="of a slot")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="(default: benchmarks/results/serve-generation-DEVICE.json)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    out = options.out or results_file(f"serve-generation-{torch.device(options.device).type}", whole=True)
    document: dict[str, Any] = {
        "provenance": provenance(
            torch.device(options.device), "q8_0", model=options.gguf.name, prompt=options.prompt, first=options.first,
            tokens=options.tokens, rounds=options.rounds, ftbert_isa=build_info()["cpu_isa"],
            llama_cpp=llama_cpp_facts(options.llama_server),
        ),
        "rows": [],
    }  # fmt: skip
    model = ftbert.load(options.gguf, device=options.device)
    vocab, generation = model.config.vocab, generation_of(model, slots=1, positions=options.positions)
    with tempfile.TemporaryDirectory() as folder:
        servers = {FTBERT: start_ftbert(options, Path(folder, "log"))}
        try:
            servers[SERVER] = start_llama_cpp(options)
            for streams in options.streams:
                rounds: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
                for turn in range(options.rounds + 1):  # the first is not counted
                    for name, server in servers.items():
                        one = round_of(server, streams, options.prompt, options.tokens, vocab, 1000 * streams + turn)
                        rounds[name] += [one] if turn else []
                document["rows"].append({"streams": streams, **{name: _median(of) for name, of in rounds.items()}})
                write(out, document)
                log(f"{streams} streams: {document['rows'][-1]}")
            first: dict[str, list[float]] = {LIBRARY: [], **{name: [] for name in servers}}
            for turn in range(options.rounds + 1):
                found = {LIBRARY: library_first(generation, options.first, vocab, turn)}
                found |= {
                    name: round_of(server, 1, options.first, 1, vocab, 99_000 + turn)["first_ms"]
                    for name, server in servers.items()
                }
                for name, value in found.items():
                    first[name] += [value] if turn else []
            document["first_ms"] = {name: statistics.median(values) for name, values in first.items()}
            write(out, document)
        finally:
            for server in servers.values():
                server.stop()
    print("\n".join(written_lines(document)))
    log(f"wrote {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
