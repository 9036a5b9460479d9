"""`tad tasks`, `tad grade`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tad.cli.options import AsJson, DataDir, NoSandbox
from tad.cli.progress import Progress

if TYPE_CHECKING:
    from tad.tasks import Example, Task, Verdict


def tasks(
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List the tasks: splits, sizes, and where their data was found."""
    rows = list(_describe(data_dir))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max(len(row["task"]) for row in rows)
    typer.echo(f"{'task':{width}}  {'split':10}  {'size':>7}  data")
    for row in rows:
        size = "-" if row["size"] is None else f"{row['size']:,}"
        typer.echo(f"{row['task']:{width}}  {row['split']:10}  {size:>7}  {row['data']}")


def _describe(data_dir: Path | None) -> Iterator[dict[str, Any]]:
    from tad.tasks import get_task, task_names

    for name in task_names():
        if name == "jsonl":
            yield {"task": "jsonl:FILE", "split": "all", "size": None, "data": "your own file"}
            continue
        task = get_task(name, data_dir)
        for split in task.splits:
            where = task.where(split)
            found = where != "not found" and not where.startswith("hub:")
            yield {
                "task": name,
                "split": split,
                "size": task.count(split) if found else None,
                "data": where,
            }


def grade(
    task: Annotated[str, typer.Argument(help="A task (see `tad tasks`), or jsonl:FILE.")],
    file: Annotated[
        Path,
        typer.Argument(
            help='Texts to grade: JSON lines with {"id", "text"}, or with strings in the order of the data; '
            "any other file holds one text per line."
        ),
    ],
    split: Annotated[str | None, typer.Option(help="Which split (default: the task's own).")] = None,
    data_dir: DataDir = None,
    extraction: Annotated[
        str | None, typer.Option(help="How answers are read: gsm8k exact, flexible; math box, math-verify.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Of programs: apart, or together where tests ask for more than values.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Graders at work at once (default: one per core).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a verdict per text to this file (jsonl).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    unsafe_no_sandbox: NoSandbox = False,
) -> None:
    """Grade a file of texts: accuracy, its standard error, and why texts fail."""
    from tad.tasks import Score, get_task, is_unjudged
    from tad.tasks.texts import match_texts, short_reason, write_verdicts

    options: dict[str, Any] = {}
    if extraction is not None:
        options["extraction"] = extraction
    if judge is not None:
        options["judge"] = judge
    if unsafe_no_sandbox:
        options["contained"] = False
    chosen = get_task(task, data_dir, **options)
    pairs = match_texts(chosen, split, file)
    verdicts = _grade(chosen, pairs, workers)
    if out is not None:
        write_verdicts(out, pairs, verdicts)
    score = Score.of(verdicts)
    unjudged = sum(verdict.unjudged for verdict in verdicts)
    reasons = Counter((verdict.correct, short_reason(verdict.reason)) for verdict in verdicts)
    if as_json:
        summary = {
            "task": task,
            "split": split or chosen.default_split,
            "texts": score.count,
            "correct": score.correct,
            "cannot_judge": unjudged,
            "accuracy": score.accuracy,
            "standard_error": score.standard_error if score.count > 1 else None,
            "reasons": [
                {"correct": correct, "reason": reason, "count": count}
                for (correct, reason), count in reasons.most_common()
            ],
        }
        typer.echo(json.dumps(summary, indent=2))
        return
    error = f" ± {100 * score.standard_error:.2f}" if score.count > 1 else ""
    typer.echo(
        f"{task} {split or chosen.default_split}: {100 * score.accuracy:.2f}%{error}  ({score.correct} of {score.count}"
        + (f"; {unjudged} cannot be judged)" if unjudged else ")")
    )
    for (correct, reason), count in reasons.most_common():
        verdict = "right" if correct else "-----" if is_unjudged(correct, reason) else "wrong"
        typer.echo(f"  {count:6,}  {verdict}  {reason}")


def _grade(task: Task, pairs: list[tuple[Example, str]], workers: int | None) -> list[Verdict]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress.update(done, len(pairs))

    with Progress() as progress:
        progress.begin("grading")
        return task.grade_many(pairs, workers, advance)
