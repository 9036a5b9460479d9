"""The same application on several replicas under Ray Serve, behind one address. Each replica loads its own model.

A replica has its own queue and batch; Ray's proxy spreads requests over them. The proxy adds two routes of its own,
`/-/healthz` and `/-/routes`, which ask for no key and say nothing of the model.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tad.errors import MissingExtraError
from tad.serving.settings import Settings


@dataclass(frozen=True)
class Source:
    """What a replica loads."""

    model: str
    adapter: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantize: Any = None  # a `tad.models.quantize.Kind`


def deploy(source: Source, settings: Settings, replicas: int, host: str, port: int) -> None:
    """Start the replicas and return when all of them answer."""
    ray, serve = _import_ray()
    import torch

    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")

    def build() -> Any:
        from tad.models import load
        from tad.serving.app import create_app

        lm = load(
            source.model,
            adapter=source.adapter,
            device=source.device,
            dtype=source.dtype,
            quantize=source.quantize,
        )
        return create_app(lm, settings)

    gpus = 1 if source.device != "cpu" and torch.cuda.is_available() else 0

    class Replica:
        """Ray wants a class around an application."""

    deployment = serve.deployment(
        name="tad",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        # The engine's own queue is the bound, and answers with 429; Ray's would let requests wait unseen.
        max_ongoing_requests=settings.batch + settings.queue + 64,
        graceful_shutdown_timeout_s=settings.grace,
    )(serve.ingress(build)(Replica))
    serve.start(http_options={"host": host, "port": port})
    serve.run(deployment.bind(), name="tad", route_prefix="/")


def serve_until_stopped(
    source: Source,
    settings: Settings,
    replicas: int,
    host: str,
    port: int,
    announce: Callable[[str], None] = lambda address: None,
) -> None:
    """Deploy, wait for SIGTERM or SIGINT, and shut the replicas down."""
    stop = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        stop.set()

    ray, serve = _import_ray()
    before = {which: signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGINT)}
    try:
        deploy(source, settings, replicas, host, port)
        for which in before:  # only now: Ray puts a handler of its own in place when it starts
            signal.signal(which, note)
        announce(f"http://{host}:{port}")
        while not stop.wait(1.0):
            continue
    finally:
        serve.shutdown()
        ray.shutdown()
        for which, handler in before.items():
            signal.signal(which, handler)


def _import_ray() -> tuple[Any, Any]:
    try:
        import ray
        from ray import serve
    except ImportError:
        raise MissingExtraError("Ray Serve, which --backend ray needs,", "serve", "ray") from None
    return ray, serve
