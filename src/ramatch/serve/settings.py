"""What a server allows and how it batches; every limit has a default that is safe on a small machine."""

from __future__ import annotations

from dataclasses import dataclass

from ramatch.errors import RamatchError
from ramatch.settings import Count, Natural, NotNegative, Positive, Settings

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServeSettings(Settings):
    """Limits and batching of one server. Sizes are bytes, times are seconds."""

    # batching
    max_batch: Count = 16  # images in one call of the model
    window_s: NotNegative = 0.005  # how long the first image of a batch waits for company
    queue_size: Count = 128  # images waiting for the model; beyond it: 429
    queue_s: Positive = 5.0  # and the longest they may have to wait, as far as one can tell
    deadline_s: Positive = 30.0  # the longest a request may take, uploading included
    decode_threads: Count = 2
    # what a request may bring
    max_body_bytes: Count = 20 * 2**20
    max_buffered_bytes: Count = 512 * 2**20  # bodies held at a time, all requests together
    max_pixels: Count = 50_000_000
    max_labels: Count = 2_000
    max_label_chars: Count = 120
    max_images: Count = 32  # in one batch request
    max_maps: Natural = 100  # labels whose region map is sent
    # vocabularies
    vocabulary: str = "general"  # used when a request names none
    cached_vocabularies: Count = 32  # encoded ones kept, least recently used dropped
    registered_vocabularies: Natural = 64
    # photos to search
    index: str | None = None  # the folder of a photo library's index; `ramatch index` fills it
    # who may come in
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()  # empty: CORS off
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS  # Host headers answered; ("*",) for any
    max_connections: Count = 512  # open at a time; then the one that has been silent longest is closed
    header_s: Positive = 10.0  # how long a client may take for the headers of a request
    body_s: Positive = 5.0  # how long a body may stand still, or stay below MIN_RATE in `limits`
    page: bool = True  # the web page at /
    # the process
    workers: Count = 1  # processes, each with the model
    access_log: str | None = None  # a file, or "-" for stderr
    drain_s: Positive = 30.0  # after SIGTERM, for the requests at hand

    def check(self) -> None:
        if self.max_images > self.queue_size:  # a full batch request must be able to fit into an empty queue
            object.__setattr__(self, "max_images", self.queue_size)
        if self.api_key is not None and len(self.api_key) < 8:
            raise RamatchError("the API key is shorter than 8 characters; choose a longer one")

    def limits(self) -> dict[str, int | float]:
        """The limits that a client should know."""
        sizes = (
            "max_body_bytes",
            "max_pixels",
            "max_labels",
            "max_label_chars",
            "max_images",
            "max_maps",
            "deadline_s",
        )
        return {name: getattr(self, name) for name in sizes}
