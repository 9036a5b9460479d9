"""What /metrics shows: requests by route and status, times, and the engine's own totals. Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tad.serving.engine import Engine

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TOTALS = {
    "forwards": "forwards of the model",
    "row_forwards": "forwards summed over the requests in each",
    "prompt_tokens": "tokens of prompts that were let in",
    "tokens": "tokens of finished answers",
    "finished": "requests answered",
    "cancelled": "requests whose client went away",
    "failed": "requests that got an error after they were taken",
    "refused": "requests refused because the queue was full",
}


class Metrics:
    """One registry per server, so that two in a process do not meet."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "tad_requests", "responses by route and status", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "tad_request_seconds",
            "from request to the end of its response",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_text = Histogram(
            "tad_first_text_seconds",
            "from request to the first text of a streamed answer",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine when it is asked."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterable[Metric]:
        totals = asdict(self.engine.counts)
        for name, meaning in _TOTALS.items():
            yield CounterMetricFamily(f"tad_{name}", meaning, value=totals[name])
        yield GaugeMetricFamily("tad_running", "requests being decoded", value=self.engine.running)
        yield GaugeMetricFamily("tad_waiting", "requests in the queue", value=self.engine.waiting)
        yield GaugeMetricFamily(
            "tad_sessions", "groups of requests that share forwards", value=self.engine.sessions
        )


class Watch:
    """ASGI middleware that counts responses; a route that does not exist counts as `other`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self.app, self.metrics, self.routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in self.routes else "other"
        began = time.perf_counter()
        status = "none"

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, sending)
        finally:
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - began)
