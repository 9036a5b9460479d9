"""`tad serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tad.cli.options import Adapter, Device, Dtype, Model, Quantize, busy, check_decoder, load_model
from tad.errors import MissingExtraError, TadError


def serve(
    model: Model,
    adapter: Adapter = None,
    decoder: Annotated[
        str | None,
        typer.Option(
            help="For requests that name none, see `tad decoders`; default: the model's own.",
            callback=check_decoder,
        ),
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Of that decoder.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's id for clients; default: MODEL.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="The key; other users can see it in the process list. Better: TAD_API_KEY."),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the key.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name clients call this server by; repeat it.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests decoded at once.")] = 16,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get a 429.")] = 256,
    queue_seconds: Annotated[float, typer.Option(min=0.1, help="Longest wait.")] = 60.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="Longest decoding of a request.")] = 300.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most a request may ask for; default: half the context.")
    ] = None,
    connections: Annotated[int, typer.Option(min=1, help="Open connections at once.")] = 512,
    body_bytes: Annotated[int, typer.Option(min=1024, help="Largest body of a request.")] = 2**20,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Refuse fields that are ignored otherwise (tools, top_k, penalties)."),
    ] = False,
    request_log: Annotated[
        bool, typer.Option("--request-log/--no-request-log", help="A line per request, without its text.")
    ] = True,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running requests at the end.")] = 30.0,
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of the model; more than one needs ray.")] = 1,
    backend: Annotated[str, typer.Option(help="local, or ray: Ray Serve.")] = "local",
) -> None:
    """Serve a model: OpenAI's API, and the playground at /."""
    if backend not in ("local", "ray"):
        raise TadError(f"--backend {backend}: should be local or ray")
    if replicas > 1 and backend != "ray":
        raise TadError(f"--replicas {replicas}: needs --backend ray")
    _check_extra()
    from tad.decoding import get_decoder
    from tad.models import find_defaults
    from tad.serving.server import check_bind, read_key
    from tad.serving.server import serve as run
    from tad.serving.settings import Settings

    key = read_key(api_key, api_key_file)
    settings = Settings(
        decoder=decoder,
        threshold=threshold,
        name=name,
        batch=batch,
        queue=queue,
        queue_seconds=queue_seconds,
        seconds=seconds,
        max_tokens=max_tokens,
        connections=connections,
        body_bytes=body_bytes,
        strict=strict,
        request_log=request_log,
        grace=grace,
        key=key,
        hosts=tuple(allow_host or ()),
        public=check_bind(host, key),
    )
    # What does not depend on the model is refused before its weights are read.
    overrides = {} if threshold is None else {"threshold": threshold}
    get_decoder(decoder or find_defaults(model, adapter).decoder, **overrides)
    if backend == "ray":
        from tad.serving.replicas import Source, serve_until_stopped

        source = Source(model, adapter, device, dtype, quantize)
        serve_until_stopped(source, settings, replicas, host, port, _announce)
    else:
        from tad.serving.app import create_app

        with busy(f"loading {model}"):
            app = create_app(load_model(model, adapter, device, dtype, quantize=quantize), settings)
        run(app, host, port, _announce)
    typer.echo("stopped")


def _announce(address: str) -> None:
    typer.echo(f"serving at {address}")


def _check_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(str(error.name), "serve") from None
