"""The HTTP application: routes, and errors that are always JSON. `create_app` is all there is to call.

`middleware` stands before every route, `validation` turns requests into jobs, `engine` decodes them, `stream` turns its
events into responses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
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
from tad.serving.card import model_card
from tad.serving.engine import Begun, Engine, Failed, RefusedError
from tad.serving.errors import ApiError, error_body, explain
from tad.serving.metrics import CONTENT_TYPE, FACTS, Metrics, MetricsMiddleware
from tad.serving.middleware import RequestMiddleware, retry_later
from tad.serving.schema import ChatRequest, CompletionRequest
from tad.serving.settings import Settings
from tad.serving.stream import Answer, EventStream, Listener
from tad.serving.validation import RequestValidator

IGNORED_HEADER = "x-tad-ignored"
PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
}


def create_app(lm: LM, settings: Settings | None = None) -> FastAPI:
    """The application for one model. Its engine starts and ends with the application; `app.state` has it."""
    settings = settings or Settings()
    validator = RequestValidator(lm, settings)
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
    app.state.engine, app.state.settings, app.state.validator = engine, settings, validator
    _add_errors(app)
    _add_api(app, validator, engine, metrics, settings)
    _add_page(app)

    @app.get("/health")
    async def health() -> Response:
        if engine.draining:
            return JSONResponse({"status": "draining"}, 503, retry_later(settings))
        return JSONResponse(
            {"status": "ok"} if engine.alive else {"status": "failed"}, 200 if engine.alive else 503
        )

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    app.add_middleware(RequestMiddleware, settings=settings, engine=engine)
    routes = frozenset(getattr(route, "path", "") for route in app.routes)
    app.add_middleware(MetricsMiddleware, metrics=metrics, routes=routes, logged=settings.request_log)
    return app


def _name_ignored(body: ChatRequest | CompletionRequest, settings: Settings) -> dict[str, str]:
    """A header with the fields that change nothing here; a strict server refuses them."""
    if not body.ignored:
        return {}
    if settings.strict:
        name = body.ignored[0]
        raise ApiError(400, f"field '{name}' is not supported; leave it out, or start without --strict", name)
    return {IGNORED_HEADER: ", ".join(body.ignored)}


def _add_api(
    app: FastAPI, validator: RequestValidator, engine: Engine, metrics: Metrics, settings: Settings
) -> None:
    card = model_card(validator)

    async def answer(request: Request, body: ChatRequest | CompletionRequest) -> Response:
        """Decode, and answer with one object or a stream. The status is decided when decoding begins."""
        headers = _name_ignored(body, settings)
        jobs = await run_sync(validator.jobs, body)
        answer = Answer(validator, body, jobs)
        listener = Listener(engine, request.receive)

        def done() -> None:
            listener.close()
            request.scope[FACTS].update(answer.facts())

        streaming = False
        try:
            listener.submit(jobs, steps=bool(body.stream))
            while (found := await listener.next()) is not None:
                number, event = found
                if isinstance(event, Failed):
                    raise ApiError(500 if event.cause == "internal" else 503, event.message, code=event.cause)
                if isinstance(event, Begun) and body.stream:
                    streaming = True
                    return EventStream(
                        answer.chunks(listener, found, metrics.first_text.observe), done, headers
                    )
                answer.take(number, event)
                if listener.over:
                    return JSONResponse(answer.whole(), headers=headers)
            return Response(status_code=499)  # the client has gone: nobody reads this but the metrics
        except RefusedError as error:
            status = 429 if error.cause == "full" else 503
            raise ApiError(status, str(error), code=error.cause, headers={"retry-after": "1"}) from None
        finally:
            if not streaming:
                done()

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        return await answer(request, body)

    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, body)

    @app.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        validator.check_model(name)
        return JSONResponse(card)


def _add_page(app: FastAPI) -> None:
    """The playground's three files, read once."""
    folder = files("tad.serving").joinpath("page")
    for path, (name, kind) in PAGE.items():
        app.get(path, include_in_schema=False)(_serve(folder.joinpath(name).read_bytes(), kind))


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
        said = str(error.detail)
        if error.status_code == 404:
            said = f"no route {request.method} {request.url.path}; this server has /v1/chat/completions, /v1/completions and /v1/models"
        return JSONResponse(error_body(error.status_code, said), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        return JSONResponse(error_body(500, "the server failed; its log says why"), 500)
