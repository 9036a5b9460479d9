"""`tad decoders`: the table of named decoders, and the parameters of one."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tad.cli.options import FAMILIES, AsJson, check_among, check_decoder

if TYPE_CHECKING:
    from rich.table import Table

    from tad.decoding import Decoder

VARIED = ("llada", "dream")  # families of full attention, whose published defaults differ


def decoders(
    name: Annotated[
        str | None, typer.Argument(help="One decoder, with all its parameters.", callback=check_decoder)
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            help="Only what models of this family decode with, such as llada or sdar.",
            callback=check_among("--family", FAMILIES),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The named decoders: block schedule, unmasking rule, cache and defaults."""
    from rich.console import Console

    from tad.decoding import DECODERS, decoders_for, get_decoder
    from tad.models import BlockLayout

    families = VARIED if family is None else (family,)
    names = [name] if name is not None else list(DECODERS)
    if name is None and family is not None:
        causal = family in ("llama", "qwen2", "qwen3")  # once converted; before, they are autoregressive
        names = decoders_for(None if family in VARIED else BlockLayout(2, "absolute", causal))
    found = {(one, kind): get_decoder(one, kind) for one in names for kind in families}
    if as_json:
        typer.echo(json.dumps([as_record(decoder, kind) for (_, kind), decoder in found.items()], indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(list_decoders(found) if name is None else list_parameters(found))
    if name is None:
        console.print("`tad decoders NAME` explains the parameters of one.", highlight=False)


def as_record(decoder: Decoder, family: str) -> dict[str, Any]:
    """A decoder for machines."""
    from tad.decoding.decoders import describe, parameters

    return {"name": decoder.name, "family": family, **describe(decoder), "parameters": parameters(decoder)}


def defaults(decoder: Decoder) -> dict[str, str]:
    """The three parts with their parameters; how tokens are drawn stands with the rule where it is not plain."""
    from tad.decoding.decoders import describe, parameters
    from tad.decoding.sampler import Sampling

    settable = parameters(decoder)
    described = {}
    for part, label in describe(decoder).items():
        own = {
            item.name: getattr(getattr(decoder, part), item.name) for item in fields(getattr(decoder, part))
        }
        if part == "rule":
            own |= {
                item.name: getattr(decoder.sampling, item.name)
                for item in fields(Sampling)
                if getattr(decoder.sampling, item.name) != item.default
            }
        words = [
            key if value is True else f"{key} {spell(value)}"
            for key, value in own.items()
            if key in settable and value is not False
        ]
        described[part] = f"{label}: {', '.join(words)}" if words else label
    return described


def spell(value: Any) -> str:
    """A value as `--set` takes it."""
    words = {None: "none", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else f"{value}"


def list_decoders(found: dict[tuple[str, str], Decoder]) -> Table:
    """A row per decoder; one per family where their defaults differ."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("decoder", no_wrap=True, style="bold")
    for title in ("schedule", "rule", "cache"):
        table.add_column(title)
    for name in dict.fromkeys(name for name, _ in found):
        mine = {kind: defaults(decoder) for (one, kind), decoder in found.items() if one == name}
        if len({str(cells) for cells in mine.values()}) == 1:
            table.add_row(name, *next(iter(mine.values())).values())
            continue
        for kind, cells in mine.items():
            table.add_row(f"{name} ({kind})", *cells.values())
    return table


def list_parameters(found: dict[tuple[str, str], Decoder]) -> Table:
    """A row per parameter; a column of values per family where they differ."""
    from rich import box
    from rich.table import Table

    from tad.decoding.decoders import describe, explain, parameters

    values = {kind: parameters(decoder) for (_, kind), decoder in found.items()}
    first = next(iter(found.values()))
    if len({str(value) for value in values.values()}) == 1:
        values = {"value": next(iter(values.values()))}
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="bold",
        title=f"{first.name}: " + ", ".join(f"{part} {label}" for part, label in describe(first).items()),
    )  # fmt: skip
    for title in ("parameter", *values):
        table.add_column(title, no_wrap=True)
    table.add_column("meaning", overflow="fold")
    for key in next(iter(values.values())):
        table.add_row(key, *(spell(column[key]) for column in values.values()), explain(key, first))
    return table
