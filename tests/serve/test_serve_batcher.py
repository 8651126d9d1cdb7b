"""The batcher alone: what shares a batch, what is refused, what is dropped."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

from ramatch.serve.batcher import MicroBatcher
from ramatch.serve.errors import ApiError
from ramatch.serve.metrics import Metrics
from ramatch.serve.settings import ServeSettings


class Model:
    """Squares numbers; `gate` holds it back so that a queue can build up."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, list[int]]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, key: Any, items: list[int]) -> list[int]:
        self.batches.append((key, list(items)))
        self.threads.add(threading.get_ident())
        assert self.gate.wait(10)
        if -1 in items:
            raise ValueError("minus one")
        return [item * item for item in items]


def soon() -> float:
    return time.monotonic() + 10


async def submit(batcher: MicroBatcher, key: str, item: int, deadline: float) -> Any:
    return (await batcher.submit_many(key, [item], deadline))[0]


def run(scenario: Any, **options: Any) -> Model:
    async def main() -> Model:
        model = Model()
        batcher = MicroBatcher(model, ServeSettings(**options), Metrics())
        batcher.start()
        await asyncio.wait_for(scenario(model, batcher), 20)
        model.gate.set()
        await batcher.drain()
        assert batcher.waiting == 0
        return model

    return asyncio.run(main())


async def blocked(model: Model, batcher: MicroBatcher) -> asyncio.Task:
    """Keep the model busy with one item, so that what follows queues up."""
    model.gate.clear()
    task = asyncio.create_task(submit(batcher, "busy", 0, soon()))
    while not model.batches:
        await asyncio.sleep(0.002)
    return task


def test_concurrent_items_share_a_batch_and_each_gets_its_own_result() -> None:
    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        results = await asyncio.gather(*(submit(batcher, "a", i, soon()) for i in range(10)))
        assert results == [i * i for i in range(10)]

    model = run(scenario, max_batch=4, window_s=0.5)
    assert [len(items) for _, items in model.batches] == [4, 4, 2]
    assert len(model.threads) == 1


def test_a_full_batch_does_not_wait_for_the_window() -> None:
    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        start = time.monotonic()
        await asyncio.gather(*(submit(batcher, "a", i, soon()) for i in range(4)))
        assert time.monotonic() - start < 2

    run(scenario, max_batch=4, window_s=5)


def test_the_window_lets_later_items_join() -> None:
    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        first = asyncio.create_task(submit(batcher, "a", 1, soon()))
        await asyncio.sleep(0.05)
        await asyncio.gather(first, submit(batcher, "a", 2, soon()))

    assert run(scenario, window_s=0.4).batches == [("a", [1, 2])]


def test_without_a_window_a_lone_item_runs_at_once() -> None:
    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        assert await submit(batcher, "a", 3, soon()) == 9

    assert run(scenario, window_s=0).batches == [("a", [3])]


def test_keys_never_mix_and_the_oldest_goes_first() -> None:
    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        busy = await blocked(model, batcher)
        tasks = []
        for key, item in [("b", 1), ("a", 2), ("b", 3), ("a", 4)]:
            tasks.append(asyncio.create_task(submit(batcher, key, item, soon())))
            await asyncio.sleep(0.002)
        model.gate.set()
        assert await asyncio.gather(*tasks) == [1, 4, 9, 16]
        await busy

    assert run(scenario, window_s=0).batches == [("busy", [0]), ("b", [1, 3]), ("a", [2, 4])]


def test_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        busy = await blocked(model, batcher)
        tasks = [asyncio.create_task(submit(batcher, "a", i, soon())) for i in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="queue is full") as refused:
            await submit(batcher, "a", 9, soon())
        assert int(refused.value.headers["Retry-After"]) >= 1
        with pytest.raises(ApiError, match="queue is full"):
            await batcher.submit_many("a", [1, 2], soon())
        model.gate.set()
        assert await asyncio.gather(*tasks) == [0, 1, 4]
        await busy

    run(scenario, queue_size=3, window_s=0)


def test_many_enter_together_or_not_at_all() -> None:
    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        busy = await blocked(model, batcher)
        with pytest.raises(ApiError, match="queue is full"):
            await batcher.submit_many("a", [1, 2, 3, 4], soon())
        assert batcher.waiting == 0
        model.gate.set()
        assert await batcher.submit_many("a", [1, 2, 3], soon()) == [1, 4, 9]
        await busy

    run(scenario, queue_size=3, window_s=0)


def test_deadline_in_the_queue_is_an_error_and_the_item_never_runs() -> None:
    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        busy = await blocked(model, batcher)
        with pytest.raises(asyncio.TimeoutError):
            await submit(batcher, "a", 5, time.monotonic() + 0.05)
        model.gate.set()
        await busy
        assert await submit(batcher, "a", 6, soon()) == 36

    assert run(scenario, window_s=0).batches == [("busy", [0]), ("a", [6])]


def test_deadline_while_running_answers_in_time_and_the_batcher_goes_on() -> None:
    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        model.gate.clear()
        start = time.monotonic()
        with pytest.raises(asyncio.TimeoutError):
            await submit(batcher, "a", 5, time.monotonic() + 0.1)
        assert time.monotonic() - start < 2
        model.gate.set()
        assert await submit(batcher, "a", 6, soon()) == 36

    run(scenario, window_s=0)


def test_cancelled_items_free_their_place_and_never_run() -> None:
    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        busy = await blocked(model, batcher)
        gone = [asyncio.create_task(submit(batcher, "a", i, soon())) for i in (1, 2)]
        stays = asyncio.create_task(submit(batcher, "a", 3, soon()))
        await asyncio.sleep(0.01)
        for task in gone:
            task.cancel()
        model.gate.set()
        assert await stays == 9
        await asyncio.gather(*gone, busy, return_exceptions=True)

    assert run(scenario, window_s=0).batches == [("busy", [0]), ("a", [3])]


def test_an_error_fails_its_batch_only() -> None:
    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        results = await asyncio.gather(
            submit(batcher, "a", -1, soon()),
            submit(batcher, "a", 2, soon()),
            submit(batcher, "b", 3, soon()),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [ValueError, ValueError, int]
        assert await submit(batcher, "a", 4, soon()) == 16

    run(scenario, window_s=0.05)


def test_drain_finishes_the_queue_and_takes_nothing_new() -> None:
    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        busy = await blocked(model, batcher)
        tasks = [asyncio.create_task(submit(batcher, "a", i, soon())) for i in range(5)]
        await asyncio.sleep(0.01)
        draining = asyncio.create_task(batcher.drain())
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="takes no new ones"):
            await submit(batcher, "a", 9, soon())
        model.gate.set()
        assert await asyncio.gather(*tasks) == [0, 1, 4, 9, 16]
        await asyncio.gather(draining, busy)

    run(scenario, max_batch=2, window_s=0.3)


def test_wrong_number_of_results_is_an_error_not_a_mix_up() -> None:
    async def main() -> None:
        batcher = MicroBatcher(lambda key, items: items[:-1], ServeSettings(window_s=0), Metrics())
        batcher.start()
        with pytest.raises(RuntimeError, match="1 results for 2 images"):
            await batcher.submit_many("a", [1, 2], soon())
        await batcher.drain()

    asyncio.run(main())


def test_work_of_who_has_left_is_not_in_the_log() -> None:
    said: list[str] = []

    async def scenario(model: Model, batcher: MicroBatcher) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
        first = await blocked(model, batcher)
        gone = asyncio.create_task(batcher.submit_many("a", [2, 3], soon()))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        model.gate.set()
        await first
        del gone
        gc.collect()

    run(scenario)
    assert said == []
