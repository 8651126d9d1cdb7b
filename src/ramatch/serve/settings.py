"""What a server allows and how it batches; every limit has a default that is safe on a small machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ramatch.errors import RamatchError

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServeSettings:
    """Limits and batching of one server. Sizes are bytes, times are seconds."""

    # batching
    max_batch: int = 16  # images in one call of the model
    window_s: float = 0.005  # how long the first image of a batch waits for company
    queue_size: int = 128  # images waiting for the model; beyond it: 429
    deadline_s: float = 30.0  # the longest a request may take, uploading included
    decode_threads: int = 2
    # what a request may bring
    max_body_bytes: int = 20 * 2**20
    max_buffered_bytes: int = 512 * 2**20  # bodies held at a time, all requests together
    max_pixels: int = 50_000_000
    max_labels: int = 2_000
    max_label_chars: int = 120
    max_images: int = 32  # in one batch request
    max_maps: int = 100  # labels whose region map is sent
    # vocabularies
    vocabulary: str = "general"  # used when a request names none
    cached_vocabularies: int = 32  # encoded ones kept, least recently used dropped
    registered_vocabularies: int = 64
    # who may come in
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()  # empty: CORS off
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS  # Host headers answered; ("*",) for any
    page: bool = True  # the web page at /

    def __post_init__(self) -> None:
        positive = ("max_batch", "queue_size", "deadline_s", "decode_threads", "max_body_bytes",
                    "max_buffered_bytes", "max_pixels", "max_labels", "max_label_chars", "max_images", "cached_vocabularies")  # fmt: skip
        for name in positive:
            if getattr(self, name) <= 0:
                raise RamatchError(f"serve setting {name}={getattr(self, name)} must be greater than 0")
        for name in ("window_s", "max_maps", "registered_vocabularies"):
            if getattr(self, name) < 0:
                raise RamatchError(f"serve setting {name}={getattr(self, name)} must not be negative")
        if self.max_images > self.queue_size:
            # A full batch request must be able to fit into an empty queue.
            object.__setattr__(self, "max_images", self.queue_size)
        if self.api_key is not None and len(self.api_key) < 8:
            raise RamatchError("the API key is shorter than 8 characters; choose a longer one")

    def limits(self) -> dict[str, int | float]:
        """The limits that a client should know."""
        names = ("max_body_bytes", "max_pixels", "max_labels", "max_label_chars", "max_images", "max_maps",
                 "deadline_s")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def replace(self, **changes: object) -> ServeSettings:
        """A copy with some settings changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
