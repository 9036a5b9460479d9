"""`tad lm-eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tad.cli import options
from tad.errors import TadError


def lm_eval(
    model: options.ModelOption = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks or patterns, 'tad_gsm8k,tad_mbpp*': ours or the harness's.")
    ] = None,
    adapter: options.Adapter = None,
    decoder: options.Decoder = None,
    gen_length: Annotated[
        int | None,
        typer.Option(
            min=1, help="Positions to generate where a task has no maximum; default: the model's own."
        ),
    ] = None,
    settings: options.DecoderSettings = None,
    generation: Annotated[
        list[str] | None,
        typer.Option(
            "--gen", metavar="KEY=VALUE", help="Over the tasks' own generation arguments; repeat it."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many examples of a task.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before the question, for the harness's tasks.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Use the model's chat format.")] = True,
    multiturn: Annotated[
        bool, typer.Option("--multiturn/--one-turn", help="Examples as turns of the chat, or all in one.")
    ] = True,
    batch_size: options.BatchSize = 8,
    mc_draws: Annotated[int, typer.Option(min=1, help="Masks per likelihood.")] = 128,
    seed: Annotated[int, typer.Option(help="Of sampling and of the likelihood's masks.")] = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    data_dir: options.DataDir = None,
    include_path: Annotated[Path | None, typer.Option(help="A directory with more task files.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for results.json and samples_TASK.jsonl.")
    ] = None,
    list_ours: Annotated[bool, typer.Option("--list", help="List our tasks and stop.")] = False,
) -> None:
    """Run lm-evaluation-harness tasks, ours or its own, with a diffusion model."""
    from tad.evaluation.lm_eval import harness

    harness.check_harness()
    if list_ours:
        typer.echo("\n".join(harness.list_tasks()))
        return
    if model is None or tasks is None:
        raise TadError("tad lm-eval needs --model and --tasks (or --list)")
    overrides = options.read_settings(settings)
    arguments = options.read_settings(generation, "--gen")
    names, manager = harness.find_tasks(options.split_names(tasks), data_dir, include_path)
    from tad.evaluation.lm_eval.model import TadLM

    options.quieten()
    loaded = TadLM(
        model, adapter, decoder, gen_length, batch_size, device=device, dtype=dtype, seed=seed, mc_draws=mc_draws,
        **overrides,
    )  # fmt: skip
    results = harness.evaluate(loaded, names, manager, limit, chat, multiturn, num_fewshot, arguments)
    if out is not None:
        harness.save(results, out)
    typer.echo(harness.format_table(results))
