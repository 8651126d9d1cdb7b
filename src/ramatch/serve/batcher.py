"""Dynamic micro-batching: single requests go in, batches with the same vocabulary and options come out.

One asyncio task forms the batches and one worker thread runs them, so that the model is never called twice at a
time and the event loop never waits for it. While a batch runs, the next ones gather: under load batches fill by
themselves, and the window only matters when the server is idle.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ramatch.serve.metrics import Metrics
from ramatch.serve.settings import ServeSettings

T = TypeVar("T")


class QueueFull(Exception):
    """No room for this many images; `retry_after` is a guess in whole seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("queue full")
        self.retry_after = retry_after


class Draining(Exception):
    """The batcher takes no new work."""


class DeadlineExceeded(Exception):
    """The deadline passed before the result was there."""


@dataclass
class _Job:
    item: Any
    deadline: float
    future: asyncio.Future
    queued: float = field(default_factory=time.monotonic)


class MicroBatcher:
    """Calls `run(key, items) -> results` from one thread, with up to `max_batch` items that share a key."""

    def __init__(
        self, run: Callable[[Any, list[Any]], Sequence[Any]], settings: ServeSettings, metrics: Metrics
    ) -> None:
        self.run, self.metrics, self.queue_size = run, metrics, settings.queue_size
        self.max_batch, self.window_s = settings.max_batch, settings.window_s
        self.running = 0  # images in the batch that the model works on now
        self._buckets: dict[Hashable, deque[_Job]] = {}
        self._news = asyncio.Event()
        self._closing = False
        self._seconds_per_image = 0.05  # smoothed; only used to suggest Retry-After
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ramatch-predict")
        self._task: asyncio.Task | None = None

    @property
    def waiting(self) -> int:
        """Images queued and not yet handed to the model."""
        return sum(len(bucket) for bucket in list(self._buckets.values()))

    def retry_after(self) -> int:
        """Whole seconds after which the present queue should be done."""
        seconds = (self.waiting + self.running) * self._seconds_per_image
        return max(1, min(60, math.ceil(seconds)))

    def start(self) -> None:
        self._task = asyncio.create_task(self._serve(), name="ramatch-batcher")

    async def drain(self) -> None:
        """Refuse new work, finish what is queued, stop the thread."""
        self._closing = True
        self._news.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown(wait=True)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the model's thread, between batches."""
        if self._closing:
            raise Draining
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def check_room(self, images: int = 1) -> None:
        if self._closing:
            raise Draining
        if self.waiting + images > self.queue_size:
            raise QueueFull(self.retry_after())

    async def submit_many(self, key: Hashable, items: Sequence[Any], deadline: float) -> list[Any]:
        """Results for items that enter the queue together or not at all; `deadline` is on time.monotonic's clock.
        Cancelling the caller drops them."""
        self.check_room(len(items))
        loop = asyncio.get_running_loop()
        jobs = [_Job(item, deadline, loop.create_future()) for item in items]
        self._buckets.setdefault(key, deque()).extend(jobs)
        self._news.set()
        gathered = asyncio.gather(*(job.future for job in jobs))
        try:
            return await asyncio.wait_for(gathered, max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError:
            self.metrics.dropped("deadline")
            raise DeadlineExceeded from None
        except asyncio.CancelledError:
            self.metrics.dropped("cancelled")
            raise
        finally:
            for job in jobs:  # whatever is still queued will be skipped
                job.future.cancel()
            self._news.set()

    # the task that forms batches

    async def _serve(self) -> None:
        while True:
            self._drop_dead()
            if not self._buckets:
                if self._closing:
                    return
                self._news.clear()
                await self._news.wait()
                continue
            key = min(self._buckets, key=lambda k: self._buckets[k][0].queued)  # oldest first: nobody starves
            await self._wait_for_company(key)
            jobs = self._take(key)
            if jobs:
                await self._run(key, jobs)

    async def _wait_for_company(self, key: Hashable) -> None:
        """Until the bucket is full, its oldest job has waited `window_s`, or the bucket is gone."""
        until = self._buckets[key][0].queued + self.window_s
        while (bucket := self._buckets.get(key)) and len(bucket) < self.max_batch and not self._closing:
            left = until - time.monotonic()
            if left <= 0:
                return
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except asyncio.TimeoutError:
                return
            self._drop_dead()

    def _take(self, key: Hashable) -> list[_Job]:
        self._drop_dead()
        bucket = self._buckets.get(key, deque())
        jobs = [bucket.popleft() for _ in range(min(self.max_batch, len(bucket)))]
        if not bucket:
            self._buckets.pop(key, None)
        return jobs

    def _drop_dead(self) -> None:
        """Forget jobs whose caller has gone or whose deadline has passed; the caller sees to its own answer."""
        now = time.monotonic()
        for key in list(self._buckets):
            alive = deque(job for job in self._buckets[key] if not job.future.done() and job.deadline > now)
            if alive:
                self._buckets[key] = alive
            else:
                del self._buckets[key]

    async def _run(self, key: Hashable, jobs: list[_Job]) -> None:
        start = time.monotonic()
        for job in jobs:
            self.metrics.waited(start - job.queued)
        self.running = len(jobs)
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._thread, self.run, key, [job.item for job in jobs])
            if len(results) != len(jobs):
                raise RuntimeError(f"the model gave {len(results)} results for {len(jobs)} images")
        except Exception as error:  # a bad batch fails its callers, never the server
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(error)
            return
        finally:
            self.running = 0
            seconds = time.monotonic() - start
            self._seconds_per_image += 0.2 * (seconds / len(jobs) - self._seconds_per_image)
            self.metrics.batch(len(jobs), seconds)
        for job, result in zip(jobs, results, strict=True):
            if not job.future.done():
                job.future.set_result(result)
