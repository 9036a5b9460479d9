"""`tad report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tad.cli import options
from tad.cli.evaluate import Tolerance, YMax, read_y_max
from tad.errors import TadError


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="What tad's commands have left: trajectory stores, training runs, evaluations; or directories of those."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page; PNGs go beside it.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The heading.")] = "tad report",
    smoke: Annotated[bool, typer.Option("--smoke", help="Mark every number as smoke size.")] = False,
    y_max: YMax = None,
    tolerance: Tolerance = 1.5,
    example: Annotated[str | None, typer.Option(help="Id of the example to replay.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Decode the replay now with this base, not from rows.", callback=options.check_source
        ),
    ] = None,
    adapter: options.Adapter = None,
    decoder: options.Decoder = None,
    prompt: Annotated[str | None, typer.Option(help="With --model: what to ask.")] = None,
    gen_length: Annotated[
        int | None, typer.Option(min=1, help="With --model: positions to generate (default: as the runs).")
    ] = None,
    device: options.Device = None,
) -> None:
    """One web page of everything: curves, AUP, windows, losses, tables with errors, and a replay. Works offline."""
    given = {"--adapter": adapter, "--prompt": prompt, "--gen-length": gen_length, "--device": device}
    lost = next((name for name, value in given.items() if value is not None), None)
    if model is None and lost is not None:
        raise TadError(f"{lost} is for a replay that is decoded now; give --model too")

    from tad.evaluation.report import Live, write_report

    live = None
    if model is not None:
        with options.busy(f"loading {model}"):
            base = options.load_model(model, None, device, None)
            student = None if adapter is None else options.load_model(model, adapter, device, None)
        live = Live(base, student, decoder or (student or base).defaults.decoder, prompt, gen_length)
    written = write_report(
        folders,
        out,
        title,
        smoke,
        read_y_max(y_max),
        live,
        example,
        tolerance=tolerance,
        say=lambda text: typer.echo(text, err=True),
    )
    for note in written.notes:
        typer.echo(f"missing: {note}", err=True)
    for path in (written.page, *written.pictures):
        typer.echo(str(path))
