"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Counters that the app and the batcher fill; gauges read the live objects when scraped."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        reg = self.registry
        self.requests = Counter("ramatch_requests", "Requests answered", ["method", "route", "status"], registry=reg)
        self.seconds = Histogram("ramatch_request_seconds", "Time to answer", ["route"], buckets=_SECONDS, registry=reg)
        self.images = Counter("ramatch_images", "Images tagged", registry=reg)
        self.batches = Histogram(
            "ramatch_batch_images", "Images in one call of the model", buckets=(1, 2, 4, 8, 16, 32, 64), registry=reg
        )
        self.predict = Histogram(
            "ramatch_batch_seconds", "Time of one call of the model", buckets=_SECONDS, registry=reg
        )
        self.wait = Histogram(
            "ramatch_queue_wait_seconds", "Time an image waited for its batch", buckets=_SECONDS, registry=reg
        )
        self.drops = Counter("ramatch_dropped", "Requests not answered with a result", ["reason"], registry=reg)
        for reason in ("overload", "deadline", "cancelled"):
            self.drops.labels(reason)  # so that the series exist before the first event

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge whose value is read when the metrics are."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    # what the batcher reports

    def batch(self, size: int, seconds: float) -> None:
        self.images.inc(size)
        self.batches.observe(size)
        self.predict.observe(seconds)

    def waited(self, seconds: float) -> None:
        self.wait.observe(seconds)

    def dropped(self, reason: str) -> None:
        self.drops.labels(reason).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)
