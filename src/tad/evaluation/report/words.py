"""The words of the page that depend on what was found: its first sentences, facts, warnings."""

from __future__ import annotations

from collections.abc import Sequence

from tad.evaluation.report.board import POOLED, Board
from tad.evaluation.report.data import Gathered
from tad.evaluation.report.rows import SMOKE
from tad.evaluation.report.studies import StudyPart


def lede(found: Gathered, boards: Sequence[Board], studies: Sequence[StudyPart]) -> str:
    """What the page is of, in a sentence."""

    def count(number: int, one: str, many: str) -> str:
        return f"{number} {one if number == 1 else many}"

    parts = []
    if studies:
        runs = sum(len(study.runs) for study in studies)
        titles = {row.title for study in studies for row in study.main.rows if row.numbers}
        parts.append(
            f"{count(len(studies), 'study', 'studies')} of {_listed([study.base for study in studies])} with "
            f"{count(len(titles), 'method', 'methods')} and {count(runs, 'evaluation run', 'evaluation runs')}"
        )
    if boards:
        runs = sum(len(board.runs) for board in boards)
        methods = len({method for board in boards for method in board.methods})
        parts.append(
            f"{count(methods, 'method', 'methods')} on {_listed([board.name for board in boards])}, "
            f"from {count(runs, 'evaluation run', 'evaluation runs')}"
        )
    if found.trainings:
        parts.append(count(len(found.trainings), "training run", "training runs"))
    if found.stores:
        kept = sum(store.summary.kept for store in found.stores)
        parts.append(
            f"{count(len(found.stores), 'trajectory store', 'trajectory stores')} with {kept:,} trajectories"
        )
    return f"{_listed(parts)}." if parts else "Nothing was found in the directories given."


def _listed(words: Sequence[str]) -> str:
    words = list(dict.fromkeys(words))
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def facts(found: Gathered, boards: Sequence[Board], studies: Sequence[StudyPart]) -> list[tuple[str, str]]:
    """Names and values that hold for everything on the page."""
    runs = [*found.runs, *(run for study in studies for run in study.runs)]
    origins = [run.origin for run in runs] + [run.origin for run in found.trainings]
    examples = sorted(
        {study.examples(task) for study in studies for task in study.main.tasks}
        | {
            line.curve.n
            for board in boards
            for line in board.lines
            if line.curve.task != POOLED or len(board.questions) == 1
        }
    )
    every: dict[str, list[str | None]] = {
        "examples per task": [f"{n:,}" for n in examples],
        "machines": [origin.device for origin in origins],
        "commits": [origin.commit and origin.commit[:10] + origin.commit[40:] for origin in origins],
        "sampling seeds": [str(run.meta.seed) for run in runs],
        "training seeds": [str(run.seed) for run in found.trainings if run.seed is not None],
        "precision": [run.meta.dtype for run in runs],
        "positions generated": [str(run.meta.gen_length) for run in runs],
    }
    shown = []
    for name, values in every.items():
        known = list(dict.fromkeys(value for value in values if value))
        if known:
            more = f" and {len(known) - 4} more" if len(known) > 4 else ""
            shown.append((name, ", ".join(known[:4]) + more))
    return shown


def smoke(boards: Sequence[Board], studies: Sequence[StudyPart], everything: bool) -> str:
    """Why numbers here are not to be relied on; empty where they may be."""
    counts = {study.examples(task) for study in studies for task in study.main.tasks}
    small = sorted(
        {n for n in counts if n < SMOKE}
        | {
            line.curve.n
            for board in boards
            for line in board.lines
            if line.curve.n < SMOKE and line.curve.task != POOLED
        }
    )
    least = f" Tasks have as few as {small[0]} examples." if small else ""
    if everything:
        return f"This run shows that everything works, not how well.{least} Errors are wide; do not quote these numbers."
    if small:
        return f"Some numbers rest on fewer than {SMOKE} examples and are marked.{least} Their errors are wide; do not quote them."
    return ""


def about(board: Board) -> str:
    metas = [run.meta for run, _ in board.runs]
    parts = [
        f"family {board.family}",
        f"split {'/'.join(board.splits)}",
        "/".join(dict.fromkeys(meta.dtype for meta in metas)),
        f"gen_length {'/'.join(dict.fromkeys(str(meta.gen_length) for meta in metas))}",
    ]
    return ", ".join(parts)


def y_max_note(boards: Sequence[Board]) -> str:
    sources = {source for board in boards for source in board.y_max_from.values()}
    if sources == {"given"}:
        return "as given"
    where = "the highest accuracy of any point on that task and base"
    return f"as given for some tasks, else {where}" if "given" in sources else where


def no_replay(notes: Sequence[str]) -> str:
    """The reason, from the notes, or what a replay needs."""
    found = next((note for note in notes if note.startswith("replay")), None)
    return (
        found
        or "A replay needs evaluation runs of a base and a student, or --model to decode an example now."
    )
