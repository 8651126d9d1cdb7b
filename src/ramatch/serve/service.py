"""From uploads to answers: decode, batch, predict, describe. Knows nothing of routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from PIL import Image

from ramatch.assets import GENERAL
from ramatch.prediction import Prediction
from ramatch.serve import limits
from ramatch.serve.batcher import MicroBatcher, heard
from ramatch.serve.errors import ApiError, draining
from ramatch.serve.limits import Picture, Upload
from ramatch.serve.metrics import Metrics
from ramatch.serve.schema import TagOptions, check_labels
from ramatch.serve.search import Finder
from ramatch.serve.settings import ServeSettings
from ramatch.serve.vocabularies import Labels, NamedVocabularies

log = logging.getLogger("ramatch.serve")
T = TypeVar("T")
PART = 64  # labels encoded in one go
MASK_SIDE = 1024  # of masks: polygons of a photograph of 12 megapixels would only make answers large


class BatchKey(NamedTuple):
    """Images with equal keys can share a call of the model."""

    which: int  # id of the vocabulary, which itself is not made to be compared
    matcher: str | None
    maps: bool
    vocabulary: Any  # encoded; None: the recognizer's own
    masks: bool = False


class Service:
    """One recognizer with its batcher, vocabularies and metrics."""

    def __init__(self, recognizer: Any, settings: ServeSettings) -> None:
        self.recognizer, self.settings = recognizer, settings
        self.metrics = Metrics()
        shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR")  # of several workers
        file = Path(shared, "vocabularies.sqlite") if shared else ":memory:"
        self.named = NamedVocabularies(settings.registered_vocabularies, file)
        # A recognizer that comes with labels of its own (given features, say) answers for these by default.
        self.own_labels: Labels = tuple(getattr(recognizer, "labels", None) or ())
        self.matcher: str = _own_matcher(recognizer)
        self.encoded: OrderedDict[Labels, Any] = OrderedDict()  # the least recently used first
        self.hits = self.misses = 0
        self._encoding: WeakValueDictionary[Labels, asyncio.Lock] = WeakValueDictionary()
        self.batcher = MicroBatcher(self._predict, settings, self.metrics)
        self.finder = Finder(recognizer, settings)
        self.active = 0  # requests that have arrived in full and are not yet answered
        self.buffered = 0  # bytes of their bodies
        self.ready = False
        self.draining = False  # set on SIGTERM: requests under way are finished, new ones are refused
        self.failure: str | None = None
        self._decoders = ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="ramatch-decode")
        # Beside the model's thread, so that a long list of new labels does not hold up others.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="ramatch-encode")
        watch = self.metrics.watch
        watch("ramatch_queue_images", "Images waiting", lambda: self.batcher.waiting)
        watch("ramatch_running_images", "Images in the model now", lambda: self.batcher.running)
        watch("ramatch_ready", "1 when the model has answered once", lambda: float(self.ready))
        watch("ramatch_vocabularies_cached", "Encoded vocabularies kept", lambda: len(self.encoded))
        watch("ramatch_vocabulary_hits", "Vocabularies found encoded", lambda: self.hits)
        watch("ramatch_vocabulary_misses", "Vocabularies encoded", lambda: self.misses)

    # life

    async def warm_up(self) -> None:
        """One blank image with the default vocabulary: after it the first real answer is as quick as the rest."""
        labels = self.default_labels()[1]

        def first() -> Any:
            """In the model's thread, before any request."""
            vocabulary = None if labels == self.own_labels else self._encode(labels)
            blank = Picture(Image.new("RGB", (64, 64)), None, (64, 64))
            self._predict(BatchKey(id(vocabulary), None, False, vocabulary), [blank])
            return vocabulary

        try:
            if (found := await self.batcher.call(first)) is not None:
                self.encoded[labels] = found
        except ApiError:  # asked to stop before it has begun
            pass
        except Exception as error:  # the server stays up to say so
            log.error("the model failed on its first image", exc_info=error)
            self.failure = f"{type(error).__name__}: {error}"

    async def close(self) -> None:
        await self.batcher.drain()
        for pool in (self._decoders, self._encoder):
            pool.shutdown(wait=True, cancel_futures=True)
        self.named.close()
        self.finder.close()

    # vocabularies

    def default_labels(self) -> tuple[str | None, Labels]:
        if self.own_labels:
            return None, self.own_labels
        return self.settings.vocabulary, self.named.get(self.settings.vocabulary)

    def resolve(self, options: TagOptions) -> tuple[str | None, Labels]:
        """Name and labels that a request asks for."""
        if options.labels is not None and options.vocabulary is not None:
            raise ApiError("labels_and_vocabulary", "both 'labels' and 'vocabulary' are given")
        if options.labels is not None:
            return None, check_labels(options.labels, self.settings)
        if options.vocabulary is not None:
            return options.vocabulary, self.named.get(options.vocabulary)
        return self.default_labels()

    async def register(self, name: str, labels: list[str]) -> bool:
        """Check, encode and keep a vocabulary (within `admitted`); True when the name is new."""
        self.named.check_name(name)
        checked = check_labels(labels, self.settings)
        with self._place(self.settings.deadline_s):
            await asyncio.wait_for(self._vocabulary(checked), self.settings.deadline_s)
        return self.named.put(name, checked)

    async def _vocabulary(self, labels: Labels) -> Any:
        """Encoded, once for all who ask at a time; None for the recognizer's own. A long list is encoded in parts,
        which the model keeps: others come in between, and it ends with the last client that waits for it."""
        if labels == self.own_labels:
            return None
        lock = self._encoding.setdefault(labels, asyncio.Lock())
        async with lock:
            if labels in self.encoded:
                self.hits += 1
            else:
                parts = range(0, 0 if labels is self.named.general else len(labels) - PART, PART)
                for start in parts:  # none of the general one, which is remembered between runs
                    await self._in_thread(self._encoder, self._encode, labels[start : start + PART])
                self.encoded[labels] = await self._in_thread(self._encoder, self._encode, labels)
                self.misses += 1
            self.encoded.move_to_end(labels)
            found = self.encoded[labels]
            while len(self.encoded) > self.settings.cached_vocabularies:
                self.encoded.popitem(last=False)
            return found

    def _encode(self, labels: Labels) -> Any:
        return self.recognizer.encode_vocabulary(GENERAL if labels is self.named.general else list(labels))

    # tagging

    @contextlib.contextmanager
    def admitted(self) -> Iterator[Callable[[int], None]]:
        """Around a request, from before its body is read. Gives the function that accounts for the bytes of its body.
        Refuses when there is no room: before the body is read, or while it streams."""
        if self.draining:
            raise draining()
        held = 0

        def charge(count: int) -> None:
            nonlocal held
            if self.buffered + count > self.settings.max_buffered_bytes:
                raise self.batcher.full()
            self.buffered += count
            held += count

        self._check_room()
        try:
            yield charge
        finally:
            self.buffered -= held

    def _check_room(self, images: int = 1) -> None:
        self.batcher.check_room(images)
        if self.active >= self.settings.queue_size + self.settings.max_batch:
            raise self.batcher.full()

    @contextlib.contextmanager
    def _place(self, seconds: float, images: int = 1) -> Iterator[None]:
        """A place among those at work, for a request that has arrived in full: slow uploads must not take them all.
        `seconds`: its deadline, as it is told when that has passed."""
        self._check_room(images)  # before work is spent on decoding or encoding
        self.active += 1
        try:
            yield
        except asyncio.TimeoutError:
            raise ApiError("deadline_exceeded", f"no answer within the deadline of {seconds:g} s") from None
        finally:
            self.active -= 1

    async def tag(
        self, uploads: Sequence[Upload], options: TagOptions, start: float, *, masks: bool = False
    ) -> list[dict[str, Any] | ApiError]:
        """One answer or error for each image (within `admitted`); `start` is when the request came (time.monotonic).
        `masks`: with which pixels show which label."""
        name, labels = self.resolve(options)
        seconds = min(self.settings.deadline_s, (options.deadline_ms or 1e9) / 1000)
        pool = self._decoders
        with self._place(seconds, len(uploads)):
            with self.batcher.arrival(len(uploads)):
                work = (self._in_thread(pool, self._decode, upload) for upload in uploads)
                ready = asyncio.gather(self._vocabulary(labels), *work)
                ready.add_done_callback(heard)
                vocabulary, *pictures = await asyncio.wait_for(ready, max(0.0, start + seconds - time.monotonic()))
            good = [picture for picture in pictures if isinstance(picture, Picture)]
            key = BatchKey(id(vocabulary), options.matcher, options.maps, vocabulary, masks)
            predictions = await self.batcher.submit_many(key, good, start + seconds) if good else []
            pairs = list(zip(predictions, good, strict=True))
            described = iter(await self._in_thread(pool, lambda: [self._describe(*p, options, name) for p in pairs]))
        took = round((time.monotonic() - start) * 1000, 1)
        return [p if isinstance(p, ApiError) else {**next(described), "took_ms": took} for p in pictures]

    def _in_thread(self, pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(pool, function, *args)

    def _decode(self, upload: Upload) -> Picture | ApiError:
        try:
            return limits.decode(upload, self.settings)
        except ApiError as error:  # this image's answer; the others of its request are tagged
            return error

    def _describe(
        self, prediction: Prediction, picture: Picture, options: TagOptions, name: str | None
    ) -> dict[str, Any]:
        """`Prediction.to_dict` and what only the request knows."""
        count = options.top or (10 if options.threshold is None else len(prediction.labels))
        prediction = replace(prediction, source=picture.name, size=picture.size)
        answer = prediction.to_dict(top=count)
        if prediction.fine is not None:
            answer |= _masks(prediction, options)
        if options.maps:
            with_maps = prediction.to_dict(top=min(count, self.settings.max_maps), maps=True)["labels"]
            answer["labels"][: len(with_maps)] = with_maps
        if options.threshold is not None:
            number = "probability" if prediction.calibrated else "relative"
            # Compared as it is shown, so that a probability sent back as the threshold keeps its label.
            answer["labels"] = [tag for tag in answer["labels"] if tag[number] >= options.threshold]
        image = {"name": answer["image"], "width": answer.pop("width"), "height": answer.pop("height")}
        return {
            **answer,
            "image": image,
            "grid": list(prediction.grid),
            "vocabulary": {"name": name, "size": len(prediction.labels)},
            "model": str(self.recognizer.name),
            "matcher": options.matcher or self.matcher,
        }

    # in the model's thread

    def _predict(self, key: BatchKey, pictures: list[Picture]) -> list[Prediction]:
        images = [picture.image for picture in pictures]
        options = {"matcher": key.matcher, "maps": key.maps, "batch_size": len(images)}
        options |= {"masks": True} if key.masks else {}
        predictions = self.recognizer.predict(images, vocabulary=key.vocabulary, **options)
        self.ready = True
        return predictions


def _masks(prediction: Prediction, options: TagOptions) -> dict[str, Any]:
    """Masks of a picture as large as it is, or as MASK_SIDE allows."""
    assert prediction.size is not None
    scale = min(1.0, MASK_SIDE / max(prediction.size))
    width, height = (max(1, round(scale * side)) for side in prediction.size)
    found = prediction.masks(options.threshold, size=(width, height)).to_dict()
    return {"masks": found["masks"], "mask_size": [found["height"], found["width"]]}


def _own_matcher(recognizer: Any) -> str:
    """The matcher that `predict` uses when none is named."""
    config = getattr(getattr(recognizer, "ram", None), "config", None)
    return getattr(config, "matcher", "kcot")
