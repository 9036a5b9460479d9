"""The HTTP application: routes, and errors that are always JSON. `create_app` is all there is to call.

Requests become jobs in `offer`, jobs become rows in `engine`, events become responses in `stream`; `guard` stands before
all of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from tad import __version__
from tad.models import LM
from tad.serving.engine import Begun, Engine, Failed, Finished, RefusedError
from tad.serving.errors import ApiError, error_body
from tad.serving.guard import Guard
from tad.serving.metrics import CONTENT_TYPE, Metrics, Watch
from tad.serving.offer import Offer
from tad.serving.schema import (
    ChatAnswer,
    ChatRequest,
    CompletionAnswer,
    CompletionRequest,
    ErrorBody,
    Health,
    ModelCard,
    ModelList,
)
from tad.serving.settings import Settings
from tad.serving.stream import Answer, EventStream, Listener

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
}
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def create_app(lm: LM, settings: Settings | None = None) -> FastAPI:
    """The application for one model. Its engine starts and ends with the application; `app.state` has it."""
    settings = settings or Settings()
    offer = Offer(lm, settings)
    engine = Engine(lm, settings.batch, settings.queue, settings.queue_seconds, settings.seconds)
    metrics = Metrics(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await run_sync(engine.close)

    app = FastAPI(
        title="tad",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.engine, app.state.offer, app.state.metrics = engine, offer, metrics
    _add_errors(app)
    _add_api(app, offer, engine, metrics)
    _add_page(app)

    @app.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> Response:
        status = "ok" if engine.alive else "failed"
        status = "draining" if engine.draining else status
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}, 401: _REFUSALS[401]})
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    app.add_middleware(Guard, settings=settings)
    routes = frozenset(getattr(route, "path", "") for route in app.routes)
    app.add_middleware(Watch, metrics=metrics, routes=routes)
    return app


def _add_api(app: FastAPI, offer: Offer, engine: Engine, metrics: Metrics) -> None:
    card = offer.card()
    posted: dict[str, Any] = {"responses": {**_REFUSALS, **_STREAM}}

    @app.post("/v1/chat/completions", response_model=ChatAnswer, **posted)
    async def chat(request: Request, body: ChatRequest) -> Response:
        return await _answer(request, body, offer, engine, metrics)

    @app.post("/v1/completions", response_model=CompletionAnswer, **posted)
    async def complete(request: Request, body: CompletionRequest) -> Response:
        return await _answer(request, body, offer, engine, metrics)

    @app.get("/v1/models", response_model=ModelList, responses={401: _REFUSALS[401]})
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get(
        "/v1/models/{name:path}",
        response_model=ModelCard,
        responses={status: _REFUSALS[status] for status in (401, 404)},
    )
    async def show_model(name: str) -> Response:
        offer.check_model(name)
        return JSONResponse(card)


async def _answer(
    request: Request,
    body: ChatRequest | CompletionRequest,
    offer: Offer,
    engine: Engine,
    metrics: Metrics,
) -> Response:
    """Decode, and answer with one object or a stream. The status is decided when decoding begins."""
    job = await run_sync(offer.job, body)
    answer = Answer(offer, body, job)
    listener = Listener(engine, request.receive)
    streaming = False
    try:
        listener.submit(job, steps=bool(body.stream))
        event = await listener.next()
        if isinstance(event, Begun):
            answer.queued = event.queued
            if body.stream:
                streaming = True
                pieces = answer.chunks(listener, metrics.first_text.observe)
                return EventStream(pieces, offer.settings.body_seconds, listener.close)
            event = await listener.next()
        if isinstance(event, Finished):
            return JSONResponse(answer.whole(event))
        if isinstance(event, Failed):
            status = 500 if event.cause == "internal" else 503
            raise ApiError(status, event.message, code=event.cause)
        return Response(status_code=499)  # the client has gone: nobody reads this but the metrics
    except RefusedError as error:
        status = 429 if error.cause == "full" else 503
        raise ApiError(status, str(error), code=error.cause, headers={"retry-after": "1"}) from None
    finally:
        if not streaming:
            listener.close()


def _add_page(app: FastAPI) -> None:
    """The playground's three files, read once."""
    folder = files("tad.serving").joinpath("page")
    for path, (name, kind) in PAGE.items():
        found = folder.joinpath(name)
        if found.is_file():
            app.get(path, include_in_schema=False)(_serve(found.read_bytes(), kind))


def _serve(content: bytes, kind: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def show_file() -> Response:
        return Response(content, media_type=kind)

    return show_file


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def refuse_fields(request: Request, error: RequestValidationError) -> Response:
        message, param = explain(error.errors())
        return JSONResponse(error_body(400, message, param), 400)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        return JSONResponse(
            error_body(error.status_code, str(error.detail)), error.status_code, error.headers
        )

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        return JSONResponse(error_body(500, "the server failed; its log says why"), 500)


def explain(problems: Sequence[Any]) -> tuple[str, str | None]:
    """One line on what is wrong with the first bad field of a body, and its name."""
    # A field of several possible types has a problem with each of them; the deepest is with the one that was meant.
    same = [one for one in problems if one["loc"][:2] == problems[0]["loc"][:2]]
    problem = max(same, key=lambda one: len(one["loc"]))
    *place, last = problem["loc"]
    kind, said = problem["type"], str(problem["msg"])
    if kind == "json_invalid":
        return f"the body is not JSON: {problem.get('ctx', {}).get('error', said)}", None
    if not place:
        return f"the body should be a JSON object with the fields of a request: {said}", None
    known = [part for part in place[1:] if _is_field(part)]
    if kind == "extra_forbidden" or _is_field(last):
        known.append(str(last)[:100])
    param = ".".join(map(str, known))
    if kind == "extra_forbidden":
        return f"field '{param}' is not supported", param
    if kind == "missing":
        return f"field '{param}' is missing", param
    return f"field '{param}': {said}", param


def _is_field(part: Any) -> bool:
    """Whether a part of an error's place is a field or an index, rather than pydantic's name of an alternative."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int", "float", "bool"))
