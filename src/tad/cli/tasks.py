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
from tad.errors import TadError

if TYPE_CHECKING:
    from tad.tasks import Example, Task, Verdict


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("tasks")(tasks)
    app.command("grade")(grade)


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
    workers: Annotated[
        int | None, typer.Option(min=1, help="Graders at work at once (default: one per core).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a verdict per text to this file (jsonl).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    unsafe_no_sandbox: NoSandbox = False,
) -> None:
    """Grade a file of texts: accuracy, its standard error, and why texts fail."""
    from tad.tasks import Score, get_task

    options: dict[str, Any] = {}
    if extraction is not None:
        options["extraction"] = extraction
    if unsafe_no_sandbox:
        options["contained"] = False
    chosen = get_task(task, data_dir, **options)
    pairs = _match(chosen, split, file)
    verdicts = _grade(chosen, pairs, workers)
    if out is not None:
        _write(out, pairs, verdicts)
    score = Score.of(verdicts)
    reasons = Counter((verdict.correct, short_reason(verdict.reason)) for verdict in verdicts)
    if as_json:
        summary = {
            "task": task,
            "split": split or chosen.default_split,
            "texts": score.count,
            "correct": score.correct,
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
        f"{task} {split or chosen.default_split}: {100 * score.accuracy:.2f}%{error}  ({score.correct} of {score.count})"
    )
    for (correct, reason), count in reasons.most_common():
        typer.echo(f"  {count:6,}  {'right' if correct else 'wrong'}  {reason}")


def short_reason(reason: str) -> str:
    """A reason without what is particular to one text: 'program: NameError: x is ...' becomes 'program: NameError'."""
    return ":".join(reason.split("; ")[0].split(":")[:2])


def _match(task: Task, split: str | None, file: Path) -> list[tuple[Example, str]]:
    """Pair every text with its example, by id where texts have one, else by position."""
    examples = task.examples(split)
    by_id = {example.id: example for example in examples}
    pairs: list[tuple[Example, str]] = []
    for place, name, text in _read_texts(file):
        if name is not None:
            if name not in by_id:
                raise TadError(
                    f"{place}: no example '{name}' in this split (ids look like '{examples[0].id}')"
                )
            pairs.append((by_id[name], text))
        elif len(pairs) < len(examples):
            pairs.append((examples[len(pairs)], text))
        else:
            raise TadError(f"{place}: more texts than the {len(examples)} examples of the split")
    if not pairs:
        raise TadError(f"{file}: no texts to grade")
    return pairs


def _read_texts(file: Path) -> Iterator[tuple[str, str | None, str]]:
    """Place, id (if given) and text of each entry; a file gives ids to all of them or to none."""
    from tad.tasks.source import parse_json, read_lines

    structured = file.name.endswith((".jsonl", ".jsonl.gz", ".json"))
    named: bool | None = None
    for place, line in read_lines(file):
        if not structured:
            yield place, None, line
        elif line.strip():
            name, text = _read_entry(parse_json(line, place), place)
            if named is not None and named != (name is not None):
                raise TadError(
                    f"{place}: some texts have an id and some have none; give one to all or to none"
                )
            named = name is not None
            yield place, name, text


def _read_entry(entry: Any, place: str) -> tuple[str | None, str]:
    if isinstance(entry, str):
        return None, entry
    if not isinstance(entry, dict):
        raise TadError(
            f"{place}: expected an object with 'text', or a string; this is {type(entry).__name__}"
        )
    if not isinstance(entry.get("text"), str):
        raise TadError(f"{place}: field 'text' is missing or not a string")
    name = entry.get("id")
    return (None if name is None else str(name)), entry["text"]


def _grade(task: Task, pairs: list[tuple[Example, str]], workers: int | None) -> list[Verdict]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress.update(done, len(pairs))

    with Progress() as progress:
        progress.begin("grading")
        return task.grade_many(pairs, workers, advance)


def _write(out: Path, pairs: list[tuple[Example, str]], verdicts: list[Verdict]) -> None:
    if not out.parent.is_dir():
        raise TadError(f"--out {out}: the directory does not exist")
    with out.open("w", encoding="utf-8") as lines:
        for (example, _), verdict in zip(pairs, verdicts, strict=True):
            row = {
                "id": example.id,
                "correct": verdict.correct,
                "reason": verdict.reason,
                "extracted": verdict.extracted,
            }
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
