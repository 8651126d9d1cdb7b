"""Dynamic micro-batching: single requests go in, batches with the same vocabulary and options come out.

One asyncio task forms the batches and one worker thread runs them, so that the model is never called twice at a
time and the event loop never waits for it. While a batch runs, the next ones gather: under load batches fill by
themselves, and the window only matters when the server is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ramatch.serve.errors import ApiError, draining
from ramatch.serve.metrics import Metrics
from ramatch.serve.settings import ServeSettings

T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    key: Hashable
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
        self.max_batch, self.window_s, self.queue_s = settings.max_batch, settings.window_s, settings.queue_s
        self.running = 0  # images in the batch that the model works on now
        self.arriving = 0  # images of requests that were let in and are still being decoded
        self._jobs: list[_Job] = []  # waiting, oldest first
        self._news = asyncio.Event()
        self._closing = False
        self._seconds_per_image = 0.05  # smoothed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ramatch-predict")
        self._task: asyncio.Task | None = None

    @property
    def waiting(self) -> int:
        """Images queued and not yet handed to the model."""
        return len(self._jobs)

    def full(self) -> ApiError:
        """The refusal of a request there is no room for, with a guess of when the present queue will be done."""
        self.metrics.dropped["overload"].inc()
        after = str(max(1, min(60, math.ceil(self.seconds()))))
        hint = f"try again in {after} s, or send fewer requests at a time"
        return ApiError("overloaded", "the queue is full", hint=hint, headers={"Retry-After": after})

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
            raise draining()
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def seconds(self) -> float:
        """What the images that come, wait or run will take, judged by the last ones."""
        return (self.arriving + self.waiting + self.running) * self._seconds_per_image

    def check_room(self, images: int = 1) -> None:
        if self._closing:
            raise draining()
        ahead = self.arriving + self.waiting
        if ahead + images > self.queue_size or (ahead and self.seconds() > self.queue_s):
            raise self.full()

    @contextlib.contextmanager
    def arrival(self, images: int) -> Iterator[None]:
        """While images are decoded that `submit_many` will bring: they count as if they waited already."""
        self.arriving += images
        try:
            yield
        finally:
            self.arriving -= images

    async def submit_many(self, key: Hashable, items: Sequence[Any], deadline: float) -> list[Any]:
        """Results for items that enter the queue together or not at all; after `deadline` (on time.monotonic's
        clock) a TimeoutError. Cancelling the caller drops them. How long they will wait was asked when they were let
        in: those who came later do not make them turn back."""
        if self._closing:
            raise draining()
        if self.waiting + len(items) > self.queue_size:
            raise self.full()
        loop = asyncio.get_running_loop()
        jobs = [_Job(key, item, deadline, loop.create_future()) for item in items]
        self._jobs += jobs
        self._news.set()
        gathered = asyncio.gather(*(job.future for job in jobs))
        gathered.add_done_callback(heard)
        try:
            return await asyncio.wait_for(gathered, max(0.0, deadline - time.monotonic()))
        except asyncio.TimeoutError:
            self.metrics.dropped["deadline"].inc()
            raise
        except asyncio.CancelledError:
            self.metrics.dropped["cancelled"].inc()
            raise
        finally:
            for job in jobs:  # whatever is still queued will be skipped
                job.future.cancel()
            self._news.set()

    # the task that forms batches

    async def _serve(self) -> None:
        while self._jobs or not self._closing:
            if not self._jobs:
                self._news.clear()
                await self._news.wait()
            elif batch := await self._batch():
                await self._run(batch)

    async def _batch(self) -> list[_Job]:
        """The oldest job (nobody starves) and those that share its key, once they are `max_batch` or it has waited
        `window_s` for them."""
        first = self._jobs[0]
        while True:
            # the caller of a job that is done or late sees to its own answer
            self._jobs = [j for j in self._jobs if not j.future.done() and j.deadline > time.monotonic()]
            batch = [job for job in self._jobs if job.key == first.key][: self.max_batch]
            left = first.queued + self.window_s - time.monotonic()
            if not batch or len(batch) == self.max_batch or left <= 0 or self._closing:
                self._jobs = [job for job in self._jobs if job not in batch]
                return batch
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)

    async def _run(self, jobs: list[_Job]) -> None:
        start = time.monotonic()
        for job in jobs:
            self.metrics.wait.observe(start - job.queued)
        self.running = len(jobs)
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._thread, self.run, jobs[0].key, [job.item for job in jobs])
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
            before = self._seconds_per_image  # one slow batch, a first one say, must not make it refuse what comes
            self._seconds_per_image += 0.2 * (min(seconds / len(jobs), 2 * before) - before)
            self.metrics.images.inc(len(jobs))
            self.metrics.batches.observe(len(jobs))
            self.metrics.predict.observe(seconds)
        for job, result in zip(jobs, results, strict=True):
            if not job.future.done():
                job.future.set_result(result)


def heard(done: asyncio.Future[Any]) -> None:
    """For work whose client may leave before its end: asyncio would log an exception that nobody looks at."""
    if not done.cancelled():
        done.exception()
