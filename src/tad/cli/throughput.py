"""`tad throughput`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tad.cli import options
from tad.cli.evaluate import Settings, Template, read_numbers, split_settings
from tad.errors import TadError


def throughput(
    model: options.Model,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL,DECODER[,KEY=VALUE...]",
            help="'base' or an adapter, a decoder and its parameters: base,one-by-one; repeat it to compare.",
        ),
    ] = None,
    task: Annotated[str, typer.Option(help="Where the prompts are from.")] = "gsm8k",
    batch: Annotated[
        str, typer.Option(help="Batch sizes, with commas; 1 is the published tables' measure.")
    ] = "1",
    limit: Annotated[int, typer.Option(min=1, help="Prompts to decode at each batch size.")] = 32,
    warmup: Annotated[int, typer.Option(min=0, help="Batches run before the clock starts.")] = 2,
    gen_length: options.GenLength = None,
    settings: Settings = None,
    template: Template = "tad",
    no_grade: Annotated[bool, typer.Option("--no-grade", help="Leave the accuracy out.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    data_dir: options.DataDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Tokens per second of methods that take turns: accuracy, tokens per forward, and the ratio to the base and to the first."""
    sizes = [int(number) for number in read_numbers("--batch", batch, whole=True)]
    shared, task_options = split_settings(settings)
    for text in method or ():
        _read_method(text)

    from tad.decoding import get_decoder
    from tad.evaluation import TimedMethod, list_tasks, measure_speeds
    from tad.evaluation.labels import path_name
    from tad.evaluation.questions import Questions
    from tad.evaluation.sweep import FIRST
    from tad.evaluation.throughput import show_speeds
    from tad.models import find_defaults
    from tad.runs.record import describe_machine

    defaults = find_defaults(model)
    texts, length = method or [f"base,{defaults.decoder}"], gen_length or defaults.gen_length
    chosen = [_read_method(text) for text in texts]
    for _, decoder, own in chosen:
        get_decoder(decoder, **shared | own).check(length)
    sections = list_tasks([task], limit=limit, templates=[template], options=task_options)
    items = Questions(sections, None if data_dir is None else str(data_dir)).items
    adapters = dict.fromkeys(adapter for adapter, _, _ in chosen)
    with options.busy(f"loading {model}"):
        lms = {one: options.load_model(model, one, device, dtype, to_decode=True) for one in adapters}
    methods, first = [], next(iter(lms.values()))
    for text, (adapter, decoder, own) in zip(texts, chosen, strict=True):
        name = ", ".join(["base" if adapter is None else path_name(adapter), *text.split(",")[1:]])
        methods.append(
            TimedMethod(name, lms[adapter], get_decoder(decoder, first.family.name, **shared | own))
        )
    speeds = list(measure_speeds(methods, items, length, sizes, warmup, grade=not no_grade))
    machine = describe_machine()
    if as_json:
        found = [
            {
                **asdict(one),
                "accuracy": one.accuracy,
                "tpf": one.tpf,
                "tokens_per_second": one.tokens_per_second,
            }
            for one in speeds
        ]
        typer.echo(json.dumps({"speeds": found, "machine": machine}))
        return
    base = next(
        (
            one.name
            for one, (adapter, decoder, _) in zip(methods, chosen, strict=True)
            if (adapter, decoder) == (None, FIRST)
        ),
        None,
    )
    typer.echo(show_speeds(speeds, base))
    typer.echo(
        f"{model}, {task}, gen_length {length}, {first.dtype}, {machine['device']}; methods take turns, {warmup} batches "
        "of warm-up left out; x base: over the base one token at a time"
    )


def _read_method(text: str) -> tuple[str | None, str, dict[str, Any]]:
    """'speed/adapter,tad,threshold=0.4' as an adapter (None: the base), a decoder and its parameters."""
    source, _, rest = text.partition(",")
    decoder, _, given = rest.partition(",")
    if not source or not decoder:
        raise TadError(f"--method {text}: should be MODEL,DECODER, such as base,one-by-one")
    options.check_decoder(decoder)
    own = options.read_settings(given.split(",") if given else None)
    return None if source == "base" else options.check_source(source), decoder, own
