"""Errors of the HTTP interface: every one says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Mapping


class ApiError(Exception):
    """An answer other than 2xx. Sent as {"error": {"code", "message", "hint"}}."""

    def __init__(
        self, status: int, code: str, message: str, hint: str, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.hint = status, code, message, hint
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, dict[str, str]]:
        return {"error": {"code": self.code, "message": self.message, "hint": self.hint}}


def overloaded(retry_after: int) -> ApiError:
    return ApiError(
        429, "overloaded", "the queue is full", f"try again in {retry_after} s, or send fewer requests at a time",
        headers={"Retry-After": str(retry_after)},
    )  # fmt: skip


def draining() -> ApiError:
    return ApiError(
        503, "shutting_down", "the server is finishing its last requests and takes no new ones",
        "send the request to another server, or again when this one is back",
        headers={"Retry-After": "5", "Connection": "close"},
    )  # fmt: skip


def late(seconds: float) -> ApiError:
    return ApiError(
        504, "deadline_exceeded", f"no answer within the deadline of {seconds:g} s",
        "try again when the server is less busy, or allow more time with deadline_ms",
    )  # fmt: skip
