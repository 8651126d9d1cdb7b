"""Prometheus metrics of one server, in a registry of its own; of several workers, their sums."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Counters that the app and the batcher fill; gauges are read from the live objects after each request."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        reg = self.registry
        timing = partial(Histogram, buckets=_SECONDS, registry=reg)
        self.requests = Counter("ramatch_requests", "Requests answered", ["method", "route", "status"], registry=reg)
        self.seconds = timing("ramatch_request_seconds", "Time to answer", ["route"])
        self.images = Counter("ramatch_images", "Images tagged", registry=reg)
        sizes = partial(Histogram, buckets=(1, 2, 4, 8, 16, 32, 64), registry=reg)
        self.batches = sizes("ramatch_batch_images", "Images in one call of the model")
        self.predict = timing("ramatch_batch_seconds", "Time of one call of the model")
        self.wait = timing("ramatch_queue_wait_seconds", "Time an image waited for its batch")
        drops = Counter("ramatch_dropped", "Requests not answered with a result", ["reason"], registry=reg)
        # made here, so that the series exist before the first event
        self.dropped = {reason: drops.labels(reason) for reason in ("overload", "deadline", "cancelled")}
        self._watched: list[tuple[Gauge, Callable[[], float]]] = []

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge with the value of `read`."""
        self._watched.append((Gauge(name, text, registry=self.registry, multiprocess_mode="livesum"), read))

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)
        self._read()

    def _read(self) -> None:
        for gauge, read in self._watched:
            gauge.set(read())

    def render(self) -> bytes:
        self._read()
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        everyone = CollectorRegistry()
        MultiProcessCollector(everyone)  # type: ignore[no-untyped-call]
        return generate_latest(everyone)
