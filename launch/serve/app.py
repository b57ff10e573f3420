"""The routes of the server: one for each operation, health, readiness, metrics, and the page."""

import asyncio
import contextlib
import dataclasses
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloze.launch.parsing.error_messages import quoted
from cloze.launch.predict.operation import Operation, Row
from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.table import OPERATIONS
from cloze.launch.serve.asgi import App, Message, Receive, Scope, Send
from cloze.launch.serve.batching import Batcher, QueueFull
from cloze.launch.serve.config import ServeConfig
from cloze.launch.serve.description import describe
from cloze.launch.serve.keys import is_loopback, read_keys
from cloze.launch.serve.request_checks import RequestLimits, Traffic
from cloze.launch.serve.schemas import Refusal, answer_model, request_model
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.untrusted import load_json, unique_fields
from cloze.version import __version__

if TYPE_CHECKING:  # an extra, imported where it is used
    from fastapi import FastAPI

# Lists, objects and fields in a body: of each text an object of a question, a passage and their likes, or a list of
# choices, and of the body its options.
_MOST_OF_A_TEXT, _MOST_OF_A_BODY = 16, 1000

PAGE = Path(__file__).with_name("page.html")
REFUSALS: dict[int | str, Fields] = {
    status: {"model": Refusal, "description": reason}
    for status, reason in (
        (401, "The request brings no key of this server"),
        (403, "A page of another site asks, and the server has no keys"),
        (408, "The body did not come in time"),
        (413, "The body is too large"),
        (421, "The request is for another host, and the server has no keys"),
        (422, "The request cannot be answered"),
        (503, "The queue is full"),
    )
}


class Meters:
    """Counters and histograms for Prometheus."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        kept: Fields = {"registry": self.registry}
        by = ["operation", "status"]
        self.requests = Counter("cloze_requests", "Requests by operation and HTTP status", by, **kept)
        self.texts = Counter("cloze_texts", "Texts answered, by operation", ["operation"], **kept)
        self.seconds = Histogram("cloze_request_seconds", "Time of a request", ["operation"], **kept)
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
        self.batch = Histogram("cloze_batch_texts", "Texts of a batch", buckets=sizes, **kept)
        self.held = Gauge("cloze_bytes_in_flight", "Bytes of bodies and answers that are received and sent", **kept)
        self.waiting = Gauge("cloze_waiting_tokens", "Tokens that wait or run", **kept)


class CountRequests:
    """ASGI middleware: counts responses by operation and HTTP status. Operation `other`: any other path; status 499, as
    in nginx: the client disconnected before the response.
    """

    def __init__(self, app: App, counter: Any, operations: list[str]) -> None:
        self._app, self._counter, self._operations = app, counter, operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, answered = scope["path"].removeprefix("/"), False
        operation = path if path in self._operations else "other"

        async def noting(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                self._counter.labels(operation, message["status"]).inc()
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            if not answered:  # Starlette responds to it outside of all middleware
                self._counter.labels(operation, 500).inc()
            raise
        if not answered:
            self._counter.labels(operation, 499).inc()


def build_app(predictor: Predictor, config: ServeConfig) -> Any:
    """The FastAPI application of a model. Needs the extra `serve`.

    `app.state.stopping` set to true makes /ready answer 503; `app.state.traffic.dropped` counts requests that were
    accepted and not answered.

    Raises:
        UserError: the keys cannot be read, or are missing where they are demanded.
    """
    from fastapi_offline import FastAPIOffline

    meters = Meters()
    batcher = Batcher(predictor, config, meters.batch.observe)
    traffic = Traffic(config.max_bytes_in_flight)
    meters.held.set_function(lambda: traffic.held)
    meters.waiting.set_function(lambda: batcher.waiting_tokens)

    @contextlib.asynccontextmanager
    async def lifespan(app: "FastAPI") -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.run())
        yield
        worker.cancel()

    app = FastAPIOffline(
        title="Cloze",
        version=__version__,
        lifespan=lifespan,
        redoc_url=None,
        description=f"{type(predictor.model).__name__} from {predictor.loaded.source}",
    )
    app.add_middleware(RequestLimits, config=config, traffic=traffic, keys=read_keys(config))
    # added last, so that it is the outer one
    app.add_middleware(CountRequests, counter=meters.requests, operations=predictor.abilities())
    app.state.stopping, app.state.traffic = False, traffic
    app.router.route_class = _strict_route(config)
    for entry in OPERATIONS.values():
        operation = entry.load()
        if predictor.has_head(operation):
            _add_operation(app, operation, config, batcher, meters)
        else:
            _add_lacking(app, operation, predictor)
    _add_refusals(app)
    _add_pages(app, describe(predictor, config.model, shows_rows=is_loopback(config.host)), batcher, meters)
    return app


def _strict_route(config: ServeConfig) -> Any:
    """The class of routes whose requests are read as they are meant: options in the body alone, each once."""
    from fastapi import Request
    from fastapi.routing import APIRoute

    class StrictRequest(Request):
        async def json(self) -> Any:
            try:
                return load_json(await self.body(), unique_fields)
            except json.JSONDecodeError:
                raise
            except ValueError as error:
                raise json.JSONDecodeError(str(error), "", 0) from error

    class StrictRoute(APIRoute):
        def get_route_handler(self) -> Any:
            answer = super().get_route_handler()

            async def strict(request: Request) -> Any:
                if request.method == "POST" and request.url.query:
                    raise UserError(
                        f"query: found {quoted(request.url.query)} in the address, expected options beside `inputs` in "
                        "the body"
                    )
                read = StrictRequest(request.scope, request.receive)
                _check_structure(await read.body(), config.max_texts)
                return await answer(read)

            return strict

    return StrictRoute


def _check_structure(body: bytes, max_texts: int) -> None:
    """Raise UserError for a body that is no UTF-8, or of more texts, or of more lists, objects and fields, than any
    request needs: while a million of them were parsed, and collected, other requests waited for two seconds.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"body: found bytes that are no UTF-8 text ({error}), expected JSON in UTF-8") from error
    # By such bytes JSON's reader takes a body for UTF-16 or UTF-32, whose quotation marks are not counted here.
    if b"\0" in body:
        raise UserError("body: found a byte 0x00, as of UTF-16, expected JSON in UTF-8")
    most = _MOST_OF_A_TEXT * max_texts + _MOST_OF_A_BODY
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    texts, most_texts = bare.count(b'"') // 2, most + max_texts**2  # each of max_texts may have as many choices
    if texts > most_texts:
        raise UserError(f"body: found {texts:,} texts and names, expected at most {most_texts:,}; send fewer")
    outside = re.sub(rb'"[^"]*"?', b"", bare)
    found = sum(map(outside.count, (b"[", b"{", b":")))
    if found > most:
        raise UserError(f"body: found {found:,} lists, objects and fields, expected at most {most:,}; send fewer texts")


def _add_operation(
    app: "FastAPI", operation: type[Operation], config: ServeConfig, batcher: Batcher, meters: Meters
) -> None:
    from fastapi.responses import Response

    body, options = request_model(operation, config), [field.name for field in dataclasses.fields(operation)]

    async def answer(request: Any) -> Response:
        began = time.perf_counter()
        asked = operation(**{name: getattr(request, name) for name in options})
        rows = [_row(each, operation, number) for number, each in enumerate(request.inputs)]
        results = await batcher.submit(asked, rows)
        meters.texts.labels(operation.name).inc(len(rows))
        meters.seconds.labels(operation.name).observe(time.perf_counter() - began)
        return Response(b'{"results": %b}' % results, media_type="application/json")

    answer.__annotations__["request"] = body
    app.post(
        f"/{operation.name}",
        summary=(operation.__doc__ or "").splitlines()[0],
        response_model=answer_model(operation),
        responses=REFUSALS,
    )(answer)


def _add_lacking(app: "FastAPI", operation: type[Operation], predictor: Predictor) -> None:
    """Add the route of an operation for which the model has no head: it explains the error."""
    from fastapi.responses import JSONResponse

    @app.post(f"/{operation.name}", include_in_schema=False)
    async def refuse() -> JSONResponse:
        try:
            predictor.require(operation())
        except UserError as error:
            return JSONResponse({"detail": str(error)}, 404)
        raise AssertionError(f"unreachable: the model has no head for {operation.name}")


def _add_refusals(app: "FastAPI") -> None:
    """Add the error handlers: each responds with one line in `detail`."""
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        errors = error.errors()
        if errors[0]["type"] == "json_invalid":
            _, position = errors[0]["loc"]
            said = (
                f"body: found no valid JSON at character {position + 1} ({errors[0]['ctx']['error']}), "
                'expected an object like {"inputs": ["a text"]}'
            )
            return JSONResponse({"detail": said}, 422)
        # A missing and an unknown field in the same object are probably a misspelled field.
        shown = [each for each in errors if each["loc"][:-1] == errors[0]["loc"][:-1]][:2]
        lines = (
            f"{quoted('.'.join(map(str, each['loc'][1:])) or 'body')}: {each['msg'].removeprefix('Value error, ')}"
            for each in shown
        )
        said = "; ".join(lines)
        if errors[0]["loc"] == ("body",) and "json" not in request.headers.get("content-type", ""):
            said += "; send JSON with the header content-type: application/json"
        return JSONResponse({"detail": said}, 422)

    @app.exception_handler(UserError)
    async def unanswerable(request: Request, error: UserError) -> Response:
        return JSONResponse({"detail": str(error)}, 422)

    @app.exception_handler(QueueFull)
    async def full(request: Request, error: QueueFull) -> Response:
        return JSONResponse({"detail": "the queue is full; try again later"}, 503, {"Retry-After": "1"})


def _add_pages(app: "FastAPI", description: Fields, batcher: Batcher, meters: Meters) -> None:
    from fastapi.responses import FileResponse, JSONResponse, Response
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    @app.get("/health", summary="The process lives", response_model=None)
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/ready", summary="Requests are taken; 503 while stopping or while the queue is full")
    async def ready() -> JSONResponse:
        state = {"ready": not (batcher.full or app.state.stopping), "operations": description["operations"]}
        return JSONResponse(state, 200 if state["ready"] else 503)

    @app.get("/model", summary="The model: its name, revision and labels, and examples", response_model=None)
    async def model() -> Fields:
        return description

    @app.get("/metrics", summary="Counters for Prometheus")
    async def metrics() -> Response:
        return Response(generate_latest(meters.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE)


def _row(entry: Any, operation: type[Operation], number: int) -> Row:
    place = f"inputs.{number}"
    first, second = operation.fields
    if operation.takes_choices:
        return Row(getattr(entry, first), None, place, tuple(getattr(entry, second)))
    return Row(getattr(entry, first), getattr(entry, second, None), place)
