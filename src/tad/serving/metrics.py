"""What /metrics shows (requests by route and status, times, the engine's own totals, in Prometheus' format), and the request log."""

from __future__ import annotations

import sys
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
FACTS = "tad.facts"  # where a request's scope keeps what its line in the log says besides
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TOTALS = {
    "forwards": "forwards of the model",
    "row_forwards": "forwards summed over the requests in each",
    "prompt_tokens": "tokens of prompts that were let in",
    "tokens": "tokens of finished answers",
    "drafted": "tokens of drafts that were verified",
    "accepted": "tokens of drafts that were kept",
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
            "tad_batches", "groups of requests that share forwards", value=self.engine.batches
        )


class Seldom:
    """The same thing at most 10 times a minute: what clients can cause must not fill the log."""

    def __init__(self) -> None:
        self._minute, self._seen = 0, dict[str, int]()

    def allows(self, what: str) -> bool:
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._seen = minute, {}
        self._seen[what] = self._seen.get(what, 0) + 1
        return self._seen[what] <= 10


class MetricsMiddleware:
    """Counts responses by route, and writes the request log. A route that does not exist counts as `other`.

    The log has a line per response, of refused requests to one route 10 a minute: when, who, what, status, seconds and, of answers, tokens and forwards. No text of
    a request or an answer is in it, nor its path where that is no route of ours.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str], logged: bool) -> None:
        self.app, self.metrics, self.routes, self.logged = app, metrics, routes, logged
        self.refused = Seldom()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in self.routes else "other"
        began = time.perf_counter()
        status = "none"
        scope[FACTS] = {}

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, sending)
        finally:
            seconds = time.perf_counter() - began
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            answered = status.startswith(("2", "3"))
            if self.logged and (answered or self.refused.allows(f"{route} {status}")):
                client = (scope.get("client") or ("-",))[0]
                facts = "".join(f" {name}={value}" for name, value in scope[FACTS].items())
                when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
                method = scope["method"] if scope["method"].isalpha() else "?"
                print(
                    f"{when} {client} {method[:10]} {route} {status} {seconds:.3f}s{facts}",
                    file=sys.stderr,
                    flush=True,
                )
