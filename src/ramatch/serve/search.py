"""Searches of a photo library: in a thread of its own, because one `Library` serves one thread, and model and event
loop must not wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from ramatch.errors import RamatchError
from ramatch.serve.errors import ApiError
from ramatch.serve.schema import SearchRequest, check_labels
from ramatch.serve.settings import ServeSettings

if TYPE_CHECKING:
    from ramatch.library import Hit, Library

T = TypeVar("T")
LARGEST = 2**63 - 1  # a number in SQLite


class Finder:
    """The library that the server was started with, if it was. It is only read: files are never opened, and what is
    told of them are their paths below the library's folder."""

    def __init__(self, recognizer: Any, settings: ServeSettings) -> None:
        self.recognizer, self.settings = recognizer, settings
        self.waiting = 0
        self._library: Library | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ramatch-search")
        if settings.index is not None:
            try:
                self._thread.submit(self._open, settings.index).result()
            except BaseException:
                self._thread.shutdown()
                raise

    def _open(self, path: str) -> None:
        from ramatch.library import Library

        self._library = Library.open(path)
        self._library.snapshot(self.recognizer)  # refuses another model's library now rather than at the first search

    async def search(self, request: SearchRequest) -> dict[str, Any]:
        """Photos that fit, best first or sorted, as plain data."""
        from ramatch.library.search import parse_query

        start = time.monotonic()
        try:
            query = parse_query(request.q)
        except RamatchError as error:
            raise ApiError("bad_field", f"'q': {error}") from None
        check_labels(list(query.labels), self.settings)
        options: dict[str, Any] = {"top": request.limit, "threshold": request.threshold, "sort": request.sort}
        try:
            hits = await self._call(lambda library: library.search(query, self.recognizer, **options))
        except RamatchError as error:  # it was replaced; where it lies is no matter of clients
            raise ApiError("refused_by_model", str(error).replace(str(self.settings.index), "the library")) from None
        return {
            "wanted": list(query.wanted),
            "unwanted": list(query.unwanted),
            "hits": [self._describe(hit) for hit in hits],
            "calibrated": bool(self.recognizer.calibrated),
            "took_ms": round((time.monotonic() - start) * 1000, 1),
        }

    def _describe(self, hit: Hit) -> dict[str, Any]:
        assert self._library is not None
        home = self._library.path.parent
        path = hit.path.relative_to(home) if hit.path.is_relative_to(home) else hit.path.name
        shown = str(path).encode("utf-8", "replace").decode()  # a name that is not UTF-8 cannot be sent
        return {**hit.to_dict(), "image": shown, "thumbnail": f"v1/thumbnails/{hit.photo}"}

    async def thumbnail(self, photo: int) -> bytes:
        """A small WebP picture of a photo that the library knows and that still has a file."""
        if photo > LARGEST:
            raise ApiError("not_found", f"there is no photo {str(photo)[:20]}…")
        try:
            return await self._call(lambda library: library.thumbnail(photo))
        except RamatchError:
            raise ApiError("not_found", f"there is no photo {photo}") from None

    async def _call(self, ask: Callable[[Library], T]) -> T:
        library = self._library
        if library is None:
            raise ApiError("no_index", "this server has no photo library")
        if self.waiting >= self.settings.queue_size:
            raise ApiError("overloaded", f"{self.waiting} searches are waiting", headers={"Retry-After": "1"})
        self.waiting += 1
        seconds = self.settings.deadline_s
        try:
            work = asyncio.get_running_loop().run_in_executor(self._thread, ask, library)
            return await asyncio.wait_for(work, seconds)
        except asyncio.TimeoutError:
            raise ApiError("deadline_exceeded", f"no answer within the deadline of {seconds:g} s") from None
        finally:
            self.waiting -= 1

    def close(self) -> None:
        library = self._library
        if library is not None:
            self._thread.submit(library.__exit__)
        self._thread.shutdown(wait=True, cancel_futures=False)
