"""What a table says, in sentences: how fast each student is at equal accuracy, and whether training was worth it.

*At equal accuracy* is at most the table's tolerance below the base decoded one token at a time. Computes nothing: the numbers
are the analysis's.
"""

from __future__ import annotations

from tad.evaluation.analysis import ResultRow, ResultTable, ScopeResult
from tad.evaluation.sweep import FIRST

CANNOT = 40.0  # percent; a base that is right less often says little about decoding faster
HELP = "docs/guide/your-data.md says what to try"


def rank_rows(table: ResultTable) -> list[ResultRow]:
    """The students, the fastest at equal accuracy first; without students, the base's decoders."""
    rows = [row for row in table.rows if table.scope in row.scopes and row.method != table.base]
    rows = [row for row in rows if row.trained] or rows

    def speed(row: ResultRow) -> tuple[float, float]:
        found = row.scopes[table.scope]
        return (found.tpf_at_target.tpf or 0.0) if found.tpf_at_target else 0.0, found.accuracy.value

    return sorted(rows, key=speed, reverse=True)


def list_verdicts(table: ResultTable, most: int = 3) -> list[str]:
    """A sentence for each of the best students."""
    found = [(row.title, row.scopes[table.scope]) for row in rank_rows(table)]
    shown = [(title, one) for title, one in found if one.to_base and not one.setting.startswith(FIRST)]
    return [f"{title}: {describe(table, one)}; n = {one.n}" for title, one in shown[:most]]


def describe(table: ResultTable, found: ScopeResult) -> str:
    """'7.07 tokens per forward at equal accuracy: 9.1x one token at a time, 1.82 [1.50, 2.10] times 'fast-dllm''; of a student that
    is never so accurate, what it is at its own setting."""
    at, one = found.tpf_at_target, _base_tpf(table)
    if at is None or at.tpf is None or at.accuracy <= 0 or not one:
        assert found.to_base is not None
        times = found.to_base.speedup.value
        word = "fewer" if times >= 1 else "as many"
        cost = found.to_base.accuracy.with_interval(1, "+")
        return f"{times:.1f}x {word} forwards at {cost} points"
    least = "at least " if at.at_least else ""
    ratio = found.times_baseline
    against = "" if ratio is None else f", {ratio.with_interval(2)} times '{_title(table, table.baseline)}'"
    return f"{least}{at.tpf:.2f} tokens per forward at equal accuracy: {at.tpf / one:.1f}x one token at a time{against}"


def conclude(table: ResultTable, kept: float | None = None) -> str:
    """Whether training was worth it, in a sentence or two. `kept`: the share of the teacher's rollouts that were right."""
    if table.base is None or table.scope not in _row(table, table.base).scopes:
        return "No verdict: the base was not evaluated one token at a time."
    base = _row(table, table.base).scopes[table.scope]
    students = [row for row in rank_rows(table) if row.trained]
    right = f"the base answers {base.accuracy.value:.0f} % of {base.n} questions right"
    if base.accuracy.value < CANNOT:
        wrong = "" if kept is None else f", and {100 * kept:.0f} % of its rollouts were kept"
        return (
            f"This model can hardly do the task: {right}{wrong}. Speeds say nothing then; give it an easier task, or take a "
            f"model that can do this one ({HELP})."
        )
    if not students:
        return f"No student was evaluated; {right}."
    best = students[0]
    found = best.scopes[table.scope]
    at, ratio = found.tpf_at_target, found.times_baseline
    allowed = f"{table.tolerance:g} points"
    if at is None or at.tpf is None:
        return f"Not better: '{best.title}' is more than {allowed} below the base at every setting; {right} ({HELP})."
    speed = f"'{best.title}' makes {'at least ' if at.at_least else ''}{at.tpf:.2f} tokens per forward"
    within = f"at most {allowed} below the base"
    rival = None if table.baseline is None else _title(table, table.baseline)
    if rival is None:
        return f"{speed}, {within}: {describe(table, found)}."
    if ratio is None or ratio.interval is None:
        return f"{speed}, {within}; '{rival}', which needs no training, is never so accurate."
    shown = f"{ratio.with_interval(2)} times '{rival}', which needs no training"
    if ratio.interval[0] > 1:
        return f"Better: {speed}, {within}: {shown}."
    if ratio.interval[1] < 1:
        return f"Not better: {speed}, {within}: {shown} ({HELP})."
    return (
        f"Not established: {speed}, {within}: {shown}. The interval includes 1; {base.n} questions are too few to tell, or "
        f"there is no gain ({HELP})."
    )


def _base_tpf(table: ResultTable) -> float | None:
    scopes = {} if table.base is None else _row(table, table.base).scopes
    return scopes[table.scope].tpf.value if table.scope in scopes else None


def _row(table: ResultTable, method: str) -> ResultRow:
    return next(row for row in table.rows if row.method == method)


def _title(table: ResultTable, method: str | None) -> str:
    return next((row.title for row in table.rows if row.method == method), method or "")
