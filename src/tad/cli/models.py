"""`tad info`, `tad export`, `tad demo`."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tad.cli import options
from tad.cli.options import Adapter, AsJson, Dtype, Model, OptionalModel
from tad.errors import TadError


class DemoFamily(str, Enum):
    """Families with a bundled model."""

    llada = "llada"
    dream = "dream"


def info(
    model: OptionalModel = None,
    adapter: Adapter = None,
    shape: Annotated[
        str | None, typer.Option(help="A shape without weights, such as llada-8b, sdar-8b.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens per row for the cost of a forward (default 384).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a model is: family, size, special tokens, LoRA targets, what a forward costs."""
    if (model is None) == (shape is None):
        raise TadError("give either a model or --shape")
    if shape is not None and adapter is not None:
        raise TadError("--adapter needs a model, not a shape")
    from tad.models.info import describe, describe_shape, format_info

    facts = describe_shape(shape, length) if shape else describe(model or "", adapter, length)
    typer.echo(json.dumps(facts.as_dict(), indent=2) if as_json else format_info(facts))


def export(
    model: Model,
    out: Annotated[Path, typer.Option(help="The directory to write.")],
    adapter: Adapter = None,
    dtype: Dtype = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, e.g. 5GB.")] = "5GB",
    overwrite: Annotated[bool, typer.Option(help="Replace a directory that is not empty.")] = False,
) -> None:
    """Merge an adapter and write a standard checkpoint under the original names."""
    from tad.models.export import export as write

    options.quieten()
    target = write(model, out, adapter, dtype, max_shard_size, overwrite)
    typer.echo(f"wrote {target}")


def demo(
    family: Annotated[DemoFamily, typer.Option(help="Which bundled model.")] = DemoFamily.llada,
    problems: Annotated[int, typer.Option(min=2, help="Problems of each task.")] = 24,
    out: Annotated[Path | None, typer.Option(help="Directory (default: runs/demo-FAMILY).")] = None,
) -> None:
    """Every stage of the method on the bundled small model: a few minutes on a CPU, with nothing to download."""
    from tad.cli.run import ConsoleListener, stop
    from tad.pipeline.demo import run

    folder = out or Path("runs") / f"demo-{family.value}"
    options.quieten()
    with ConsoleListener() as listener:
        complete = run(family.value, problems, folder, listener)
    if not complete:
        stop(["tad", "demo", "--family", family.value, "--problems", str(problems), "--out", str(folder)])
