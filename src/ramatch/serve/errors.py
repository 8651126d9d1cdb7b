"""Errors of the HTTP interface: every one says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

# code: (status, what to do about it)
ERRORS = {
    "bad_json": (400, "send one JSON object, encoded as UTF-8"),
    "bad_form": (400, "send the image as the file field 'image'; let your HTTP library build the form"),
    "bad_base64": (400, "encode the bytes of the image file with standard base64"),
    "bad_length": (400, "leave it to your HTTP library"),
    "empty_image": (400, "send the bytes of an image file"),
    "unreadable_image": (400, "check that the file opens elsewhere, or save it again as JPEG or PNG"),
    "bad_api_key": (401, "send it as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"),
    "foreign_origin": (403, "start it with this origin among its CORS origins if they should"),
    "unknown_vocabulary": (404, "register it with PUT /v1/vocabularies/NAME, or see GET /v1/vocabularies"),
    "no_index": (404, "start it with --index DIR, a folder that `ramatch index DIR` has looked at"),
    "not_found": (404, "see /docs for what there is"),
    "method_not_allowed": (405, "see /docs for what there is"),
    "upload_too_slow": (408, "send a smaller image or use a faster connection"),
    "read_only": (409, "choose another name"),
    "too_many_vocabularies": (
        409,
        "delete one with DELETE /v1/vocabularies/NAME, or send the labels with each request",
    ),
    "body_too_large": (413, "send a smaller or more compressed image, or fewer labels and images at a time"),
    "too_many_pixels": (413, "send a smaller version of the image"),
    "unsupported_body": (415, "send multipart/form-data with a file 'image', or application/json"),
    "unsupported_format": (415, "convert it to JPEG or PNG"),
    "unknown_host": (421, "use the address it printed when it started, or start it with this name as an allowed host"),
    "bad_field": (422, "see /openapi.json"),
    "bad_label": (422, "send plain text"),
    "bad_name": (422, "use 1 to 64 of a-z, 0-9, '.', '_', '-', beginning with a letter or digit"),
    "image_count": (422, "send fewer as 'image'"),
    "label_too_long": (422, "use shorter labels"),
    "labels_and_vocabulary": (422, "send one of them"),
    "no_labels": (422, "send at least one, or name a vocabulary"),
    "no_url_fetching": (422, "send the image itself: a multipart file or base64 in 'image'"),
    "one_image": (422, "send exactly one as 'image'; /v1/tag/batch takes several"),
    "refused_by_model": (422, "change the request as the message says"),
    "too_many_labels": (422, "send fewer labels, or start the server with a higher limit"),
    "overloaded": (429, "try again after the time in Retry-After, or send fewer requests at a time"),
    "internal": (500, "try again; its cause is in the server's log"),
    "not_ready": (503, "wait, or read the server's log if it does not change"),
    "shutting_down": (503, "send the request to another server, or again when this one is back"),
    "deadline_exceeded": (504, "try again when the server is less busy, or allow more time with deadline_ms"),
}


class ApiError(Exception):
    """An answer other than 2xx. Sent as {"error": {"code", "message", "hint"}}."""

    def __init__(
        self, code: str, message: str, *, hint: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        message = message.encode("utf-8", "replace").decode()  # it may quote what cannot be sent back
        super().__init__(message)
        self.status, usual = ERRORS[code]
        self.code, self.message, self.hint, self.headers = code, message, hint or usual, dict(headers or {})

    def to_dict(self) -> dict[str, dict[str, str]]:
        return {"error": {"code": self.code, "message": self.message, "hint": self.hint}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.to_dict(), self.status, self.headers)


def draining() -> ApiError:
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError("shutting_down", "the server is finishing its last requests and takes no new ones", headers=headers)
