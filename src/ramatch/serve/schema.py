"""What goes over the wire. The same models check requests and describe the interface in /openapi.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ramatch.config import MATCHERS
from ramatch.errors import RamatchError
from ramatch.labels import SEPARATORS, merge_labels, parse_page, split_labels
from ramatch.serve.errors import ApiError
from ramatch.serve.settings import ServeSettings

M = TypeVar("M", bound=BaseModel)
_DAY_MS = 86_400_000


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TagOptions(_Request):
    """Which labels to look for and how to answer."""

    labels: list[str] | None = Field(None, description="Labels to look for; in a form: 'cat, dog' or one per line")
    vocabulary: str | None = Field(None, description="Name of a bundled or registered vocabulary, instead of labels")
    top: int | None = Field(
        None, ge=1, description="At most this many labels (10 when neither top nor threshold is given)"
    )
    threshold: float | None = Field(
        None, ge=0, le=1, description="Only labels with at least this probability (or relative score)"
    )
    maps: bool = Field(False, description="Add each label's region map, rows of values in [0, 1]")
    matcher: Literal[tuple(MATCHERS)] | None = Field(  # type: ignore[valid-type]
        None, description="How regions are matched with labels; the model's own when absent"
    )
    deadline_ms: int | None = Field(None, ge=1, le=_DAY_MS, description="Give up after this many milliseconds")


class ImageRequest(_Request):
    """One image."""

    image: str = Field(description="The image file, base64 (a data: URI is fine). URLs are not fetched")
    name: str | None = Field(None, max_length=255, description="File name, only echoed back")


class TagRequest(TagOptions, ImageRequest):
    """One image with its options, as JSON."""


class BatchRequest(TagOptions):
    """Several images with the same options, as JSON."""

    images: list[ImageRequest] = Field(min_length=1)


class SearchRequest(_Request):
    """Which photos of the library to look for."""

    q: str = Field(
        max_length=1000, description='Words that are all there: dog beach; "hot dog" -person; hot dog, beach'
    )
    limit: int = Field(20, ge=1, le=200, description="At most this many photos")
    threshold: float | None = Field(None, ge=0, le=1, description="Only photos with at least this probability")
    sort: Literal["probability", "name", "date", "size"] = Field("probability", description="Order of those found")


class VocabularyRequest(_Request):
    """The labels of a vocabulary."""

    labels: list[str] = Field(min_length=1)


class Tag(BaseModel):
    """One label of an image."""

    label: str
    probability: float | None = Field(None, description="In [0, 1], the label's own; absent without calibration")
    relative: float | None = Field(
        None, description="Only without calibration: a share of 1, which compares the labels of the vocabulary"
    )
    calibrated: bool = Field(
        description="Whether to trust the probability: not that of a word the model does not know well"
    )
    familiarity: float | None = Field(
        description="In [0, 1]: how much like the words that the model learned; null where these are not known"
    )
    score: float = Field(description="Raw score, for ranking")
    parents: list[str] | None = Field(
        None, description="Of the general vocabulary: what it is a kind of, nearest first"
    )
    map: list[list[float]] | None = Field(None, description="Region map: grid[0] rows of grid[1] values in [0, 1]")


class ImageInfo(BaseModel):
    """The image that was tagged, after EXIF rotation."""

    name: str | None
    width: int
    height: int


class VocabularyInfo(BaseModel):
    """A vocabulary; `labels` only where one is asked for by name."""

    name: str | None
    size: int
    bundled: bool | None = None
    labels: list[str] | None = None


class TagResponse(BaseModel):
    """Labels of one image, best first."""

    image: ImageInfo
    labels: list[Tag]
    grid: tuple[int, int] = Field(description="Rows and columns of the region grid")
    vocabulary: VocabularyInfo
    model: str
    matcher: str
    calibrated: bool = Field(description="Whether the model gives probabilities; 0.5 then means even odds")
    took_ms: float


class Rle(BaseModel):
    """A mask as COCO has it."""

    size: tuple[int, int] = Field(description="Height and width")
    counts: list[int] = Field(description="Lengths of runs down the columns, the first of zeros")


class Mask(BaseModel):
    """The pixels of one label; masks do not overlap."""

    label: str
    id: int
    value: float = Field(description="Probability, or relative score")
    area: int
    box: tuple[int, int, int, int] = Field(description="x, y, width, height")
    rle: Rle
    polygons: list[list[int]] = Field(description="Outlines of its parts, [x0, y0, x1, y1, …]; holes are in the RLE")


class SegmentResponse(TagResponse):
    """Labels of one image, best first, and the masks of those that have pixels."""

    masks: list[Mask]
    mask_size: tuple[int, int] = Field(description="Height and width that masks are measured in")


class Hit(BaseModel):
    """A photo that a search found."""

    image: str = Field(description="Its path below the folder of the library")
    probability: float | None = Field(None, description="Of the whole search; absent without calibration")
    relative: float | None = Field(None, description="Only without calibration: how far it stands out from the others")
    labels: list[dict[str, Any]] = Field(description="Each label of the search by itself")
    date: float = Field(description="When it was taken, else of the file, in seconds since 1970")
    size: int
    width: int
    height: int
    thumbnail: str = Field(description="Address of a small WebP picture, relative to the server's root")


class SearchResponse(BaseModel):
    """Photos of the library that fit a search."""

    wanted: list[str]
    unwanted: list[str]
    hits: list[Hit]
    calibrated: bool
    took_ms: float


class ErrorBody(BaseModel):
    """What is wrong and what to do."""

    code: str
    message: str
    hint: str


class ErrorResponse(BaseModel):
    """Every answer other than 2xx."""

    error: ErrorBody


class BatchResponse(BaseModel):
    """One result or one error per image, in the order sent."""

    results: list[TagResponse | ErrorResponse]


def parse_json(model: type[M], body: bytes, settings: ServeSettings) -> M:
    """The body as `model`, or an ApiError that names the first wrong field. Runs in a thread: bodies may be large."""
    _check_parts(body.count(b","), settings)
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError("bad_json", f"the body is not JSON: {str(error)[:120]}") from None
    if not isinstance(data, dict):
        raise ApiError("bad_json", "the body is JSON but not an object", hint='send {"image": "...", ...}')
    # Long lists are refused by their length: pydantic would write an error for each wrong element.
    lengths = {name: len(value) if isinstance(value := data.get(name), list) else 0 for name in ("labels", "images")}
    if lengths["labels"] > 4 * settings.max_labels:
        raise _too_many(lengths["labels"], settings)
    if lengths["images"] > settings.max_images:
        raise image_count(lengths["images"], settings)
    return parse(model, data)


def parse_form(fields: Mapping[str, list[str]], settings: ServeSettings) -> TagOptions:
    """Form fields as the JSON they stand for: empty ones dropped, labels split. Runs in a thread."""
    data: dict[str, Any] = {}
    for key, values in fields.items():
        values = [value for value in values if value.strip()]
        if key == "labels" and values:
            _check_parts(sum(value.count(mark) for value in values for mark in SEPARATORS), settings)
            data[key] = [label for value in values for label in form_labels(value)]
        elif values:
            data[key] = values[-1].strip()
    return parse(TagOptions, data)


def parse_vocabulary(kind: str, body: bytes, settings: ServeSettings) -> list[str]:
    """The labels of a vocabulary, as text (one per line) or JSON. Runs in a thread."""
    if kind != "text/plain":
        return parse_json(VocabularyRequest, body, settings).labels
    _check_parts(body.count(b"\n") + body.count(b"\r"), settings)
    text = body.decode("utf-8", "replace")
    _check_lengths(text.splitlines(), settings, 10)
    return _typed(lambda page: list(parse_page(page).names), text)


def parse(model: type[M], data: Any) -> M:
    """Check `data`, or raise an ApiError that names the first wrong field."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        if where.split(".")[-1].lower() in {"url", "image_url", "uri"}:
            raise ApiError("no_url_fetching", "this server does not fetch URLs") from None
        fields = f"the fields are: {', '.join(model.model_fields)}"
        raise ApiError("bad_field", f"'{where[:80]}': {first['msg']}", hint=fields) from None


def form_labels(text: str) -> list[str]:
    """Labels as people type them, or a JSON array of strings."""
    if not text.lstrip().startswith("["):
        return _typed(split_labels, text)
    try:
        labels = json.loads(text)
    except (ValueError, RecursionError):
        labels = None
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        wrong = "'labels' begins like a JSON array but is not an array of strings"
        raise ApiError("bad_field", wrong, hint='send ["cat", "dog"], or: cat, dog')
    return labels


def _typed(read: Callable[[str], list[str]], text: str) -> list[str]:
    try:
        return read(text)
    except RamatchError as error:
        raise ApiError("bad_field", f"'labels': {error}") from None


def check_labels(labels: list[str], settings: ServeSettings) -> tuple[str, ...]:
    """Labels without surplus spaces, empties and repeats, within the limits."""
    if len(labels) > 4 * settings.max_labels:  # don't tidy a list that can only be refused
        raise _too_many(len(labels), settings)
    _check_lengths(labels, settings, 10)  # likewise: a long one would fall into millions of words
    tidy = merge_labels(labels).names
    for label in tidy:
        if not label.isprintable():
            raise ApiError("bad_label", f"the label {label[:40]!a} has characters that cannot be printed")
    _check_lengths(tidy, settings)
    if not tidy:
        raise ApiError("no_labels", "'labels' holds no label")
    if len(tidy) > settings.max_labels:
        raise _too_many(len(tidy), settings)
    return tidy


def _check_lengths(labels: Iterable[str], settings: ServeSettings, times: int = 1) -> None:
    """Refuse labels of more than `times` the characters that a tidy one may have."""
    for label in labels:
        if len(label) > times * settings.max_label_chars:
            hint = f"use at most {settings.max_label_chars} characters a label"
            raise ApiError("label_too_long", f"the label '{label[:40]}…' has {len(label)} characters", hint=hint)


def image_count(count: int, settings: ServeSettings) -> ApiError:
    hint = f"send 1 to {settings.max_images} as 'image'"
    return ApiError("image_count", f"{count} images in the request", hint=hint)


def _too_many(count: int, settings: ServeSettings) -> ApiError:
    return ApiError("too_many_labels", f"{count} labels, more than this server's {settings.max_labels}")


def _check_parts(separators: int, settings: ServeSettings) -> None:
    """Refuse before parsing what has more values than any request may have, even if every label were commas: parsed,
    each byte of it could take a hundred."""
    if separators > settings.max_labels * settings.max_label_chars + 1000:
        raise ApiError("body_too_large", f"the body has about {separators:,} values in it")
