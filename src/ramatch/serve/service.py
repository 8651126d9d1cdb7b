"""From uploads to answers: decode, batch, predict, render. Knows nothing of routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from PIL import Image

from ramatch.serve import limits
from ramatch.serve.batcher import DeadlineExceeded, Draining, MicroBatcher, QueueFull
from ramatch.serve.errors import ApiError, draining, late, overloaded
from ramatch.serve.limits import Picture, Upload
from ramatch.serve.metrics import Metrics
from ramatch.serve.schema import TagOptions, check_labels
from ramatch.serve.settings import ServeSettings
from ramatch.serve.vocabularies import EncodedVocabularies, Labels, NamedVocabularies

log = logging.getLogger("ramatch.serve")


@dataclass(frozen=True)
class BatchKey:
    """Images with equal keys can share a call of the model."""

    labels: Labels
    matcher: str | None
    maps: bool


class Service:
    """One recognizer with its batcher, vocabularies and metrics."""

    def __init__(self, recognizer: Any, settings: ServeSettings) -> None:
        self.recognizer, self.settings = recognizer, settings
        self.metrics = Metrics()
        self.named = NamedVocabularies(settings.registered_vocabularies)
        # A recognizer that comes with labels of its own (given features, say) answers for these by default.
        self.own_labels: Labels = tuple(getattr(recognizer, "labels", None) or ())
        self.matcher: str = _own_matcher(recognizer)
        self.encoded = EncodedVocabularies(self._encode, settings.cached_vocabularies)
        self.batcher = MicroBatcher(
            self._predict, max_batch=settings.max_batch, window_s=settings.window_s,
            queue_size=settings.queue_size, observer=self.metrics,
        )  # fmt: skip
        self.active = 0  # requests admitted and not yet answered
        self.buffered = 0  # bytes of their bodies
        self.ready = False
        self.draining = False  # set on SIGTERM: requests under way are finished, new ones are refused
        self.failure: str | None = None
        self._decoders = ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="ramatch-decode")
        watch = self.metrics.watch
        watch("ramatch_queue_images", "Images waiting", lambda: self.batcher.waiting)
        watch("ramatch_running_images", "Images in the model now", lambda: self.batcher.running)
        watch("ramatch_ready", "1 when the model has answered once", lambda: float(self.ready))
        watch("ramatch_vocabularies_cached", "Encoded vocabularies kept", lambda: len(self.encoded))
        watch("ramatch_vocabulary_hits", "Vocabularies found encoded", lambda: self.encoded.hits)
        watch("ramatch_vocabulary_misses", "Vocabularies encoded", lambda: self.encoded.misses)

    # life

    async def warm_up(self) -> None:
        """One blank image with the default vocabulary: after it the first real answer is as quick as the rest."""
        try:
            key = BatchKey(self.default_labels()[1], None, False)
            await self.batcher.call(self._predict, key, [Picture(Image.new("RGB", (64, 64)), None, (64, 64))])
        except Draining:
            pass
        except Exception as error:  # the server stays up to say so
            log.error("the model failed on its first image", exc_info=error)
            self.failure = f"{type(error).__name__}: {error}"

    async def close(self) -> None:
        await self.batcher.drain()
        self._decoders.shutdown(wait=True, cancel_futures=True)

    # vocabularies

    def default_labels(self) -> tuple[str | None, Labels]:
        if self.own_labels:
            return None, self.own_labels
        return self.settings.vocabulary, self.named.get(self.settings.vocabulary)

    def resolve(self, options: TagOptions) -> tuple[str | None, Labels]:
        """Name and labels that a request asks for."""
        if options.labels is not None and options.vocabulary is not None:
            raise ApiError(422, "labels_and_vocabulary", "both 'labels' and 'vocabulary' are given", "send one of them")
        if options.labels is not None:
            return None, check_labels(options.labels, self.settings)
        if options.vocabulary is not None:
            return options.vocabulary, self.named.get(options.vocabulary)
        return self.default_labels()

    async def register(self, name: str, labels: list[str]) -> bool:
        """Check, encode and keep a vocabulary (within `admitted`); True when the name is new."""
        self.named.check_name(name)
        checked = check_labels(labels, self.settings)
        try:
            await asyncio.wait_for(self.batcher.call(self._vocabulary, checked), self.settings.deadline_s)
        except asyncio.TimeoutError:
            raise late(self.settings.deadline_s) from None
        return self.named.put(name, checked)

    # tagging

    @contextlib.contextmanager
    def admitted(self) -> Iterator[Callable[[int], None]]:
        """A place for one request from before its body is read until it is answered. Gives the function that accounts
        for the bytes of its body. Refuses when there is no room: before the body is read, or while it streams."""
        if self.draining:
            raise draining()
        held = 0

        def charge(count: int) -> None:
            nonlocal held
            if self.buffered + count > self.settings.max_buffered_bytes:
                raise QueueFull(self.batcher.retry_after())
            self.buffered += count
            held += count

        try:
            self.batcher.check_room()
            if self.active >= self.settings.queue_size + self.settings.max_batch:
                raise QueueFull(self.batcher.retry_after())
            self.active += 1
            try:
                yield charge
            finally:
                self.active -= 1
                self.buffered -= held
        except QueueFull as error:
            self.metrics.dropped("overload")
            raise overloaded(error.retry_after) from None
        except Draining:
            raise draining() from None

    async def tag(
        self, uploads: Sequence[Upload], options: TagOptions, start: float
    ) -> list[dict[str, Any] | ApiError]:
        """One answer or error for each image (within `admitted`); `start` is when the request came (time.monotonic)."""
        name, labels = self.resolve(options)
        seconds = min(self.settings.deadline_s, (options.deadline_ms or 1e9) / 1000)
        loop = asyncio.get_running_loop()
        try:
            self.batcher.check_room(len(uploads))  # before work is spent on decoding
            pictures = await asyncio.wait_for(
                asyncio.gather(
                    *(loop.run_in_executor(self._decoders, limits.decode, u, self.settings) for u in uploads),
                    return_exceptions=True,
                ),
                max(0.0, start + seconds - time.monotonic()),
            )
            for picture in pictures:
                if isinstance(picture, BaseException) and not isinstance(picture, ApiError):
                    raise picture
            good = [picture for picture in pictures if isinstance(picture, Picture)]
            key = BatchKey(labels, options.matcher, options.maps)
            predictions = await self.batcher.submit_many(key, good, start + seconds) if good else []
        except (DeadlineExceeded, asyncio.TimeoutError):
            raise late(seconds) from None
        rendered = iter(await loop.run_in_executor(self._decoders, self._render_all, predictions, good, options, name))
        took = round((time.monotonic() - start) * 1000, 1)
        answers: list[dict[str, Any] | ApiError] = []
        for picture in pictures:
            answers.append(picture if isinstance(picture, ApiError) else {**next(rendered), "took_ms": took})
        return answers

    # in the model's thread

    def _encode(self, labels: Labels) -> Any:
        return self.recognizer.encode_vocabulary(list(labels))

    def _vocabulary(self, labels: Labels) -> Any:
        return None if labels == self.own_labels else self.encoded.get(labels)  # None: the recognizer's own

    def _predict(self, key: BatchKey, pictures: list[Picture]) -> list[Any]:
        predictions = self.recognizer.predict(
            [picture.image for picture in pictures], vocabulary=self._vocabulary(key.labels), matcher=key.matcher,
            maps=key.maps, batch_size=len(pictures),
        )  # fmt: skip
        self.ready = True
        return predictions

    # answers

    def _render_all(
        self, predictions: Sequence[Any], pictures: Sequence[Picture], options: TagOptions, name: str | None
    ) -> list[dict[str, Any]]:
        return [self._render(p, q, options, name) for p, q in zip(predictions, pictures, strict=True)]

    def _render(self, prediction: Any, picture: Picture, options: TagOptions, name: str | None) -> dict[str, Any]:
        count = options.top or (10 if options.threshold is None else len(prediction.labels))
        entries: list[dict[str, Any]] = []
        for tag in prediction.top(min(count, len(prediction.labels))):
            # Compared as it is shown, so that a probability sent back as the threshold keeps its label.
            probability = round(float(tag.probability), 6)
            if options.threshold is not None and probability < options.threshold:
                continue
            entry = {"label": tag.label, "probability": probability, "score": round(float(tag.score), 6)}
            if options.maps and len(entries) < self.settings.max_maps:
                entry["map"] = prediction.heatmap(tag.label).astype(float).round(3).tolist()
            entries.append(entry)
        width, height = picture.size
        return {
            "image": {"name": picture.name, "width": width, "height": height},
            "labels": entries,
            "grid": list(prediction.grid),
            "vocabulary": {"name": name, "size": len(prediction.labels)},
            "model": str(self.recognizer.name),
            "matcher": options.matcher or self.matcher,
            "calibrated": bool(prediction.calibrated),
        }


def _own_matcher(recognizer: Any) -> str:
    """The matcher that `predict` uses when none is named."""
    config = getattr(getattr(recognizer, "ram", None), "config", None)
    return getattr(config, "matcher", "kcot")
