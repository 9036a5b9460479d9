"""`tad decoders`: the table of named decoders, and the parameters of one."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tad.cli.options import AsJson, check_decoder, check_family

if TYPE_CHECKING:
    from rich.table import Table

    from tad.decoding import Decoder

VARIED = ("llada", "dream")  # families of full attention, whose published defaults differ
# Parameter -> meaning, in a line; `threshold` depends on the rule.
MEANINGS = {
    "block": "positions per block; none: the whole canvas is one block, or block by block the model's own size",
    "sub_block": "parts of a block that are decoded from left to right; none: the block at once",
    "store": "a finished block has one more forward that stores its keys and values; else the next block's first does",
    "post_steps": "tokens of the block may be edited, for so many forwards after its last mask; none: no editing",
    "block_add": "share of the last block decoded before the next one opens",
    "decoded": "share of a block decoded before the next one must make progress at every forward",
    "strict": "the threshold itself does not pass",
    "keep_best": "the best candidate is revealed at every forward, whatever the threshold",
    "score": "what surest means: confidence, entropy or margin",
    "steps": "forwards in all, block by block those of a block; none: one per position",
    "leftmost": "a forward's share of the block is the candidates to the left, not the surest",
    "bound": "sum of entropies (nats) up to which tokens are revealed",
    "edit_threshold": "confidence above which a token of the block is replaced",
    "least": "masks that a forward reveals at least",
    "timesteps": "Dream's timestep schedule instead of an even split",
    "eps": "where Dream's timestep schedule ends",
    "factor": "the r-th surest is revealed while its confidence is at least 1 - factor / (r + 1)",
    "low": "confidence that the best of a run of adjacent masks needs",
    "alpha": "weight of the credit in the logits",
    "beta": "what is left of the credit after a forward",
    "gamma": "exponent of the probability that is added to the credit",
    "delay": "forwards between the end of a block and the freezing of its keys and values",
    "refresh": "every so many forwards all (`active`: the prompt and what is not frozen) is fed again; 1 equals no cache",
    "temperature": "of sampling; 0: greedy",
    "top_p": "sample from the smallest set of tokens with this probability; none: all",
    "top_k": "sample from this many tokens; none: all",
    "filtered_scores": "score the tempered and filtered distribution instead of the model's own",
    "cfg": "classifier-free guidance; 0: off",
    "suppress_ends": "no; eos-logits: EOS is never proposed; confidence: end tokens are revealed last",
    "stop": "end: at an end token with no mask before it; block: at the end of its block; eager: at any end token; off: never",
}
_THRESHOLDS = {
    "confidence": "confidence from which a token is revealed",
    "entropy": "entropy (nats) up to which a token is revealed",
    "contiguous-prefix": "entropy (nats) below which the prefix goes on; with another score, its least value",
    "hierarchy": "confidence above which a token is revealed",
    "credit": "confidence, credit included, from which a token is revealed",
    "block-quota": "confidence above which a token is revealed, if enough are; none: always the forward's share of the block",
    "editing": "confidence above which a mask becomes a token",
}


def decoders(
    name: Annotated[
        str | None, typer.Argument(help="One decoder, with all its parameters.", callback=check_decoder)
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            help="Only what models of this family decode with, such as llada or sdar.", callback=check_family
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The named decoders: block schedule, reveal rule, cache and defaults."""
    from rich.console import Console

    from tad.decoding import DECODERS, decoders_for, get_decoder

    families = VARIED if family is None else (family,)
    fitting = [one for one in DECODERS if family not in VARIED or one in decoders_for(None)]
    names = fitting if name is None else [name]
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


def meaning(key: str, decoder: Decoder) -> str:
    """One line on a parameter."""
    from tad.decoding.decoders import describe

    return _THRESHOLDS[describe(decoder)["rule"]] if key == "threshold" else MEANINGS[key]


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

    from tad.decoding.decoders import describe, parameters

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
        table.add_row(key, *(spell(column[key]) for column in values.values()), meaning(key, first))
    return table
