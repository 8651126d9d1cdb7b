"""What the server writes: strangers' control characters as codes, long lines cut, floods thinned, files rotated."""

from __future__ import annotations

import logging
import sys
import time
from logging.handlers import RotatingFileHandler

from ramatch.errors import printable

LINES, SECONDS, CHARACTERS = 100, 10.0, 8_000
FILE_BYTES, FILES = 16 * 2**20, 4


class Plain(logging.Formatter):
    """A record whose text can do nothing to a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record)[:CHARACTERS].split("\n")))


class Thinned(logging.Filter):
    """At most `LINES` records in `SECONDS`; the next one says how many were left out."""

    since, count = 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self.since > SECONDS:
            if self.count > LINES:
                record.msg, record.args = f"{record.getMessage()} ({self.count - LINES} records left out before)", ()
            self.since, self.count = now, 0
        self.count += 1
        return self.count <= LINES


def set_up(access_log: str | None) -> None:
    """Warnings and errors to stderr; one line a request to the file `access_log`, "-" for stderr."""
    errors = logging.StreamHandler(sys.stderr)
    errors.addFilter(Thinned())
    errors.setFormatter(Plain("ramatch: %(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[errors], level=logging.WARNING, force=True)
    if access_log is not None:
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
        if access_log != "-":
            handler = RotatingFileHandler(access_log, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8")
        logger = logging.getLogger("ramatch.access")
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
