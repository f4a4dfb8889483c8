"""`ftbert serve` as replicas of Ray Serve: the same routes, behind Ray's proxy, on every machine of a Ray cluster.

    python examples/ray_serve.py MODEL --address auto --num-gpus 1 --replicas 16 --port 8080

A replica is a process with the engine and its queue: requests are computed together as in `ftbert serve`, and a replica
whose engine is lost is started again. MODEL is a hub id or a path that all machines have; ftbert[serve] is installed on
each. This command's environment may set what the flags of `ftbert serve` do (API_KEY, ...). /metrics are those of the
replica that answers. Ray's proxy and the way to a replica cost more than a short text does: send 32 texts and more a
request. Runs until Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from ftbert.server import Settings, from_environment
from ftbert.server.logs import set_up, warn_without_key


class Encoder:
    """A worker of `ftbert serve`, with the engine in its process."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Ray waits for it
        from ftbert.server.app import App
        from ftbert.server.links import LocalLink
        from ftbert.server.loading import load_engine
        from ftbert.server.metrics import Metrics
        from ftbert.server.routes import all_routes

        metrics, link = Metrics(settings), LocalLink()
        engine = await asyncio.to_thread(load_engine, settings, 0, settings.engines[0], None, metrics.engine(0, 0))
        link.attach(*engine)
        self.app = App(settings, [[link]], metrics, all_routes())
        await self.app.models[0].prepare()

    async def __call__(self, request: Request) -> Response:
        from ftbert.server.messages import Request as Asked

        asked = Asked(time.monotonic())
        asked.method, asked.path, asked.query = request.method, request.scope["path"], request.scope["query_string"]
        asked.body = await request.body()
        asked.headers = {**dict(request.headers.raw), b"content-length": b"%d" % len(asked.body)}
        asked.error = self.app.gate(asked)
        try:
            if asked.error is not None:
                answer = self.app.refusal(asked)
            else:
                answer = await asyncio.shield(self.app.handle(asked))
            return Response(b"".join(answer.parts), answer.status, dict(answer.headers), answer.content_type)
        except asyncio.CancelledError:  # the client has gone: what it asked for leaves the queue
            asked.disconnect()
            raise
        finally:  # the memory of the answer is no longer counted
            asked.end()

    def check_health(self) -> None:
        """Ray starts another replica where this raises."""
        if not self.app.ready:
            raise RuntimeError("the engine has stopped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--address", help="of a Ray cluster: auto, HOST:PORT (default: this machine's, or a new one)")
    parser.add_argument("--replicas", type=int, default=1, help="(default 1)")
    parser.add_argument("--num-gpus", type=float, default=0.0, help="of a replica (default 0: the CPU)")
    parser.add_argument("--parallel", choices=("tensor", "pipeline"), help="one model over all GPUs of a replica")
    parser.add_argument("--num-cpus", type=float, default=1.0, help="of a replica; its threads on the CPU (default 1)")
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16", "fp8"), help="(default fp16 on GPUs, fp32 on CPUs)")
    parser.add_argument("--host", default="127.0.0.1", help="the proxies' address; 0.0.0.0: for other machines "
                        "(default 127.0.0.1)")  # fmt: skip
    parser.add_argument("--port", type=int, default=8080, help="(default 8080)")
    options = parser.parse_args()
    if options.parallel and options.num_gpus < 2:
        parser.error("--parallel shares a model among the GPUs of a replica: --num-gpus 2 or more")

    ray.init(address=options.address)
    serve.start(http_options={"host": options.host, "port": options.port})
    gpus = [f"cuda:{gpu}" for gpu in range(int(options.num_gpus))] if options.parallel else ["cuda"]
    settings = Settings(
        models=((options.model, options.model),), devices=tuple(gpus) if options.num_gpus else ("cpu",),
        parallel=options.parallel,
        dtype=options.dtype or ("fp16" if options.num_gpus else "fp32"), **from_environment(os.environ),
    )  # fmt: skip
    set_up(settings.json_output)
    warn_without_key(options.host, settings.api_key is not None)
    deployment = serve.deployment(
        num_replicas=options.replicas, max_ongoing_requests=settings.max_concurrent_requests, health_check_period_s=2,
        ray_actor_options={"num_gpus": options.num_gpus, "num_cpus": options.num_cpus},
    )  # fmt: skip
    serve.run(deployment(Encoder).bind(settings), blocking=True)


if __name__ == "__main__":
    main()
