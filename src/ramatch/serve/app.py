"""The HTTP interface. Handlers read top to bottom: admit, read, check, ask the service, answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import ramatch
from ramatch import assets
from ramatch.config import MATCHERS
from ramatch.errors import RamatchError
from ramatch.serve import limits, schema
from ramatch.serve.errors import ERRORS, ApiError, draining
from ramatch.serve.guard import Guard
from ramatch.serve.limits import ClientGone, Upload
from ramatch.serve.service import Service
from ramatch.serve.settings import ServeSettings

log = logging.getLogger("ramatch.serve")
T = TypeVar("T")
PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".jpg": "image/jpeg",
}


def _answers(*errors: int, **models: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """What a route answers, for OpenAPI: errors by their status, others as `ok` or `created`."""
    status = {"ok": 200, "created": 201}
    found: dict[int | str, dict[str, Any]] = {status[name]: {"model": model} for name, model in models.items()}
    for error in errors:
        codes = [code for code, (status_of_code, _) in ERRORS.items() if status_of_code == error]
        found[error] = {"model": schema.ErrorResponse, "description": ", ".join(codes)}
    return found


_TAGGING = (400, 401, 413, 415, 422, 429, 503, 504)


def create_app(recognizer: Any, settings: ServeSettings | None = None) -> FastAPI:
    """The server as an ASGI app around a loaded Recognizer."""
    settings = settings or ServeSettings()
    service = Service(recognizer, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        warm_up = asyncio.create_task(service.warm_up())
        yield
        await warm_up
        await service.close()

    about = "Open-vocabulary image tagging: which of these labels are in the picture, and where?"
    version = getattr(ramatch, "__version__", "0")
    app = FastAPI(title="ramatch", version=version, description=about, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    for kind in (ApiError, RamatchError, HTTPException, ClientGone, Exception):
        app.add_exception_handler(kind, _answer_error)
    _add_tagging(app, service)
    _add_vocabularies(app, service)
    _add_search(app, service)
    _add_operations(app, service)
    if settings.page:
        _add_page(app)
    if settings.cors_origins:
        origins, methods = settings.cors_origins, ["GET", "POST", "PUT", "DELETE"]
        headers = ["Content-Type", "Authorization", "X-API-Key"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=headers)
    app.add_middleware(Guard, settings=settings, metrics=service.metrics)
    return app


def _add_tagging(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/tag",
        tags=["tagging"],
        summary="Tag one image",
        responses=_answers(*_TAGGING, ok=schema.TagResponse),
        openapi_extra={"requestBody": _body(schema.TagRequest, files=1)},
    )
    async def tag(request: Request) -> Response:
        """Send the image as a multipart file `image` with the other fields beside it, or as JSON with base64."""
        return await _tag_one(request, service)

    @app.post(
        "/v1/segment",
        tags=["tagging"],
        summary="Tag one image, with masks",
        responses=_answers(*_TAGGING, ok=schema.SegmentResponse),
        openapi_extra={"requestBody": _body(schema.TagRequest, files=1)},
    )
    async def segment(request: Request) -> Response:
        """As /v1/tag, and which pixels show which label: COCO's RLE, polygons and boxes."""
        return await _tag_one(request, service, masks=True)

    @app.post(
        "/v1/tag/batch",
        tags=["tagging"],
        summary="Tag several images",
        responses=_answers(*_TAGGING, ok=schema.BatchResponse),
        openapi_extra={"requestBody": _body(schema.BatchRequest, files=service.settings.max_images)},
    )
    async def tag_batch(request: Request) -> Response:
        """Several images with the same options. An image that cannot be read gives an error in its place, and the
        others are tagged."""
        start = time.monotonic()
        with service.admitted() as charge:
            uploads, options = await _read(request, service.settings, schema.BatchRequest, charge)
            if not 1 <= len(uploads) <= service.settings.max_images:
                raise schema.image_count(len(uploads), service.settings)
            answers = await _unless_gone(request, service.tag(uploads, options, start))
        return JSONResponse({"results": [a.to_dict() if isinstance(a, ApiError) else a for a in answers]})


async def _tag_one(request: Request, service: Service, *, masks: bool = False) -> Response:
    start = time.monotonic()
    with service.admitted() as charge:
        uploads, options = await _read(request, service.settings, schema.TagRequest, charge)
        if len(uploads) != 1:
            raise ApiError("one_image", f"{len(uploads)} images in the request")
        [answer] = await _unless_gone(request, service.tag(uploads, options, start, masks=masks))
    if isinstance(answer, ApiError):
        raise answer
    return JSONResponse(answer)


def _add_vocabularies(app: FastAPI, service: Service) -> None:
    named = service.named
    one: dict[str, Any] = {"path": "/v1/vocabularies/{name}", "tags": ["vocabularies"]}

    def describe(name: str, *, labels: bool = False) -> dict[str, Any]:
        found = named.get(name)
        info: dict[str, Any] = {"name": name, "size": len(found), "bundled": named.is_bundled(name)}
        return {**info, "labels": list(found)} if labels else info

    @app.get("/v1/vocabularies", tags=["vocabularies"], summary="List vocabularies", responses=_answers(401))
    async def list_vocabularies() -> dict[str, list[schema.VocabularyInfo]]:
        return {"vocabularies": [schema.VocabularyInfo(**describe(name)) for name in named.names()]}

    @app.get(**one, summary="Labels of a vocabulary", responses=_answers(401, 404))
    async def get_vocabulary(name: str) -> schema.VocabularyInfo:
        return schema.VocabularyInfo(**describe(name, labels=True))

    @app.put(
        **one,
        summary="Register a vocabulary",
        responses=_answers(400, 401, 409, 413, 422, 503, ok=schema.VocabularyInfo, created=schema.VocabularyInfo),
        openapi_extra={"requestBody": _body(schema.VocabularyRequest, text=True)},
    )
    async def put_vocabulary(name: str, request: Request) -> Response:
        """Encoded at once, so that later requests naming it are quick. Kept until the server stops."""
        with service.admitted() as charge:
            body = await limits.read_body(request, service.settings, charge)
            kind = limits.content_type(request)
            labels = await asyncio.to_thread(schema.parse_vocabulary, kind, body, service.settings)
            new = await _unless_gone(request, service.register(name, labels))
        return JSONResponse(describe(name), 201 if new else 200)

    @app.delete(**one, summary="Forget a vocabulary", status_code=204, responses=_answers(401, 404, 409))
    async def delete_vocabulary(name: str) -> Response:
        named.delete(name)
        return Response(status_code=204)


def _add_search(app: FastAPI, service: Service) -> None:
    fields = schema.SearchRequest.model_json_schema()
    parameters = [
        {"name": name, "in": "query", "required": name in fields["required"], "schema": field}
        for name, field in fields["properties"].items()
    ]

    @app.get(
        "/v1/search",
        tags=["library"],
        summary="Search the photo library",
        responses=_answers(401, 404, 422, 429, 503, 504, ok=schema.SearchResponse),
        openapi_extra={"parameters": parameters},
    )
    async def search(request: Request) -> Response:
        """Photos of the folder that the server was started with (`--index`), by what is on them."""
        if service.draining:
            raise draining()
        wanted = schema.parse(schema.SearchRequest, dict(request.query_params))
        return JSONResponse(await _unless_gone(request, service.finder.search(wanted)))

    @app.get(
        "/v1/thumbnails/{photo}",
        tags=["library"],
        summary="A small picture of a photo in the library",
        responses=_answers(401, 404, 429, 504),
        response_class=Response,
    )
    async def thumbnail(photo: str) -> Response:
        if not photo.isdecimal() or not photo.isascii():
            raise ApiError("not_found", f"'{photo[:40]}' is not the number of a photo")
        content = await service.finder.thumbnail(int(photo[:20]))
        return Response(content, media_type="image/webp", headers={"Cache-Control": "private, max-age=3600"})


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/v1/info", tags=["server"], summary="Model, limits and vocabularies", responses=_answers(401))
    async def info() -> dict[str, Any]:
        recognizer, named = service.recognizer, service.named
        return {
            "version": app.version,
            "model": str(recognizer.name),
            "device": str(recognizer.device),
            "calibrated": bool(recognizer.calibrated),
            "matchers": list(MATCHERS),
            "matcher_titles": MATCHERS,
            "matcher": service.matcher,
            "default_vocabulary": service.default_labels()[0],
            "own_labels": list(service.own_labels),
            "vocabularies": [{"name": name, "size": len(named.get(name))} for name in named.names()],
            "index": service.settings.index is not None,
            "limits": service.settings.limits(),
            "formats": limits.FORMATS,
            "photos": [path.name for path in assets.photo_paths()] if service.settings.page else [],
        }

    @app.get("/healthz", tags=["server"], summary="Is the process alive?")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", tags=["server"], summary="Can it answer now?", responses=_answers(503))
    async def readyz() -> dict[str, str]:
        if service.draining:
            raise draining()
        if not service.ready:
            raise ApiError("not_ready", service.failure or "the model is warming up")
        return {"status": "ready"}

    @app.get("/metrics", tags=["server"], summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    """Every file of page/ by its name, index.html at /, docs.html at /docs, photographs at /photos/NAME, read once."""
    paths = {f"/{path.name}": path for path in sorted(PAGE.iterdir()) if path.suffix in _TYPES}
    paths |= {"/": paths.pop("/index.html"), "/docs": paths.pop("/docs.html")}
    paths |= {f"/photos/{path.name}": path for path in assets.photo_paths()}
    files = {route: (path.read_bytes(), _TYPES[path.suffix]) for route, path in paths.items()}
    etags = {route: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for route, (content, _) in files.items()}

    async def send(request: Request) -> Response:
        route = request.scope["route"].path
        (content, media_type), etag = files[route], etags[route]
        headers = {"ETag": etag, "Cache-Control": "no-cache"}  # ask each time, so that an upgrade shows at once
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    for route in files:
        app.add_api_route(route, send, methods=["GET", "HEAD"], include_in_schema=False)


async def _read(
    request: Request, settings: ServeSettings, model: type[schema.TagOptions], charge: Callable[[int], None]
) -> tuple[list[Upload], schema.TagOptions]:
    """Images and options of a tagging request, multipart or JSON."""
    body = await limits.read_body(request, settings, charge)
    kind = limits.content_type(request)
    if kind == "multipart/form-data":
        uploads, fields = await limits.read_form(request.headers, body, settings)
        return uploads, await asyncio.to_thread(schema.parse_form, fields, settings)
    if kind != "application/json":
        raise ApiError("unsupported_body", f"the content type is '{kind[:80]}'")
    data = await asyncio.to_thread(schema.parse_json, model, body, settings)
    images: list[Any] = data.images if isinstance(data, schema.BatchRequest) else [data]
    return [Upload(image.image, image.name) for image in images], data


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`, which is cancelled when the client hangs up."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)  # nobody reads it; the metrics count it
    if isinstance(error, RamatchError):
        error = ApiError("refused_by_model", str(error))
    elif isinstance(error, HTTPException):
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        message = f"{request.method} {request.url.path[:120]}: {error.detail}"
        error = ApiError(code, message, headers=error.headers)
    elif not isinstance(error, ApiError):
        log.error("unexpected error in request %s", request.scope.get("request_id"), exc_info=error)
        error = ApiError("internal", "an unexpected error")
    return error.response()


def _body(model: type[Any], *, files: int = 0, text: bool = False) -> dict[str, Any]:
    """OpenAPI request body: JSON as `model`; with `files`, also multipart with the same options."""
    definition = model.model_json_schema(ref_template="#/components/schemas/{model}")
    nested = definition.pop("$defs", {})
    content: dict[str, Any] = {"application/json": {"schema": _inline(definition, nested)}}
    if files:
        options = schema.TagOptions.model_json_schema()
        file: dict[str, Any] = {"type": "string", "format": "binary"}
        image = file if files == 1 else {"type": "array", "items": file, "maxItems": files}
        properties = {"image": image, **options["properties"], "labels": {"type": "string"}}
        properties["labels"]["description"] = "Labels separated by commas or lines, or a JSON array"
        form = {"type": "object", "required": ["image"], "properties": properties}
        content = {"multipart/form-data": {"schema": form}, **content}
    if text:
        content["text/plain"] = {"schema": {"type": "string", "description": "One label per line"}}
    return {"required": True, "content": content}


def _inline(node: Any, nested: dict[str, Any]) -> Any:
    """Replace references by what they point at: the bodies are described where they are used."""
    if isinstance(node, dict):
        if "$ref" in node:
            return _inline(nested[node["$ref"].rsplit("/", 1)[-1]], nested)
        return {key: _inline(value, nested) for key, value in node.items()}
    return [_inline(item, nested) for item in node] if isinstance(node, list) else node
