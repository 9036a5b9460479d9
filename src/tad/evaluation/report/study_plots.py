"""The charts of a study: a curve per method, speeds at the base's accuracy, areas. Training seeds are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from tad.evaluation.aup import DROP
from tad.evaluation.report.marks import (
    AREA,
    Bar,
    Spot,
    bars_height,
    css_name,
    draw_bars,
    draw_curve,
    draw_first,
    label_curves,
)
from tad.evaluation.report.names import shorten
from tad.evaluation.report.palette import FIRST_LOOK, HUES, Look, look
from tad.evaluation.report.panels import Panel
from tad.evaluation.report.studies import StudyPart
from tad.evaluation.study.tables import Entry, Estimate, Facts, Shown, Table

BARS = "bars: standard deviation over training seeds where a method has several, else one standard error over problems"


@dataclass(frozen=True)
class Charts:
    """Of one table: all its tasks together, each task, speeds, areas; nothing where no method but the base has numbers."""

    curve: Panel | None
    tasks: list[Panel]
    reach: Panel | None
    area: Panel | None
    looks: dict[str, Look]  # by title, of the rows that have numbers

    @property
    def first(self) -> list[Panel]:
        return [panel for panel in (self.curve, self.reach, self.area) if panel is not None]

    @property
    def curves(self) -> list[Panel]:
        return [] if self.curve is None else [self.curve, *self.tasks]


def rows_with_numbers(table: Table) -> list[tuple[Entry, Facts]]:
    return [(row, row.numbers) for row in table.rows if row.numbers is not None]


def give_table_looks(parts: Sequence[StudyPart]) -> dict[tuple[str, str], dict[str, Look]]:
    """(study, table) -> title -> look. Methods of the main tables look the same everywhere; others take what is left."""
    shared: dict[str, Look] = {}
    for part in parts:
        for row, _ in rows_with_numbers(part.main):
            if row.method != part.main.base and row.title not in shared:
                shared[row.title] = look(len(shared))
    found = {}
    for part in parts:
        for table in part.tables:
            mine: dict[str, Look] = {}
            rows = rows_with_numbers(table)
            taken = {shared[row.title] for row, _ in rows if row.title in shared}
            free = [look(slot) for slot in range(3 * HUES) if look(slot) not in taken]
            for row, _ in rows:
                if row.method == table.base:
                    mine[row.title] = FIRST_LOOK
                elif row.title in shared:
                    mine[row.title] = shared[row.title]
                else:
                    mine[row.title] = free.pop(0) if free else look(len(mine))
            found[part.name, table.name] = mine
    return found


def make_charts(part: StudyPart, table: Table, looks: Mapping[str, Look], name: str) -> Charts:
    """Every chart of a table, not yet drawn."""
    rows = rows_with_numbers(table)
    if all(row.method == table.base for row, _ in rows):
        return no_charts(looks)
    tasks = [curve_panel(part, table, task, looks, f"{name}-task-{i}") for i, task in enumerate(table.tasks)]
    return Charts(
        curve_panel(part, table, None, looks, f"{name}-all"),
        tasks if len(tasks) > 1 else [],
        reach_panel(table, looks, f"{name}-reach"),
        area_panel(table, looks, f"{name}-area"),
        dict(looks),
    )


def no_charts(looks: Mapping[str, Look]) -> Charts:
    return Charts(None, [], None, None, dict(looks))


def is_news(table: Table, main: Table) -> bool:
    """Whether a table has numbers of methods that the main table does not show."""
    known = {row.title for row, _ in rows_with_numbers(main)}
    return table is main or any(row.title not in known for row, _ in rows_with_numbers(table))


def curve_panel(
    part: StudyPart, table: Table, task: str | None, looks: Mapping[str, Look], name: str
) -> Panel:
    """Accuracy against tokens per forward, on one task or on all problems together."""
    rows = rows_with_numbers(table)
    n = rows[0][1].n if task is None else part.examples(task)
    title = f"{'all tasks' if task is None else shorten(task)} (n = {n:,})"

    def draw(axes: Axes) -> None:
        for row, facts in rows:
            spots = as_spots(facts.points if task is None else facts.tasks[task])
            gid = css_name(row.title)
            if row.method == table.base:
                draw_first(axes, spots[0], looks[row.title], gid, is_base=True)
            else:
                draw_curve(axes, spots, looks[row.title], gid)
        label_curves(axes)

    spoken = "; ".join(
        _spoken(row, facts.points if task is None else facts.tasks[task]) for row, facts in rows
    )
    return Panel(name, title, f"Accuracy against tokens per forward, {title}: {spoken}", draw, n)


def as_spots(points: Sequence[Shown]) -> list[Spot]:
    """One token at a time first, then by speed."""
    first = points[0].accuracy.mean
    spots = [
        Spot(
            point.tpf.mean,
            point.accuracy.mean,
            error_of(point.tpf),
            error_of(point.accuracy),
            faint=point.accuracy.mean < first - DROP,
        )
        for point in points
    ]
    return [spots[0], *sorted(spots[1:], key=lambda spot: spot.tpf)]


def error_of(estimate: Estimate) -> float:
    """The spread over seeds where there are several, else the standard error over problems."""
    return estimate.se if estimate.sd is None else estimate.sd


def _spoken(row: Entry, points: Sequence[Shown]) -> str:
    fast = max(points, key=lambda point: point.tpf.mean)
    return f"{row.title} up to TPF {fast.tpf.mean:.1f} at {fast.accuracy.mean:.0f} %"


def reach_panel(table: Table, looks: Mapping[str, Look], name: str) -> Panel | None:
    """The highest speed at which each method is at the base's accuracy less the study's margin."""
    if table.bar is None or table.bar <= 0:
        return None
    rows = sorted(rows_with_numbers(table), key=lambda entry: entry[1].reach.tpf or 0.0)
    bars = [_reach_bar(row, facts, looks[row.title]) for row, facts in rows]

    def draw(axes: Axes) -> None:
        draw_bars(axes, bars, "tokens per forward (TPF)")

    spoken = "; ".join(f"{row.title} {facts.reach}" for row, facts in reversed(rows))
    title = f"TPF at {table.bar:.1f} % (base − {table.below:g})"
    alt = f"Highest tokens per forward at an accuracy of {table.bar:.1f} %: {spoken}"
    return Panel(name, title, alt, draw, rows[0][1].n, bars_height(bars))


def _reach_bar(row: Entry, facts: Facts, look: Look) -> Bar:
    speed = facts.reach.tpf
    low, high = (0.0, 0.0) if speed is None else facts.reach_interval
    text = str(facts.reach).replace(">=", "≥")
    return Bar(row.title, speed or 0.0, low, high, text, look.colour, css_name(row.title))


def area_panel(table: Table, looks: Mapping[str, Look], name: str) -> Panel | None:
    """AUP of each method, the mean over tasks; whiskers are the spread over seeds."""
    areas = [
        (row, facts.aup)
        for row, facts in rows_with_numbers(table)
        if facts.aup is not None and row.method != table.base
    ]
    if not areas:
        return None
    areas.sort(key=lambda entry: entry[1].mean)
    bars = [_area_bar(row, area, looks[row.title]) for row, area in areas]

    def draw(axes: Axes) -> None:
        draw_bars(axes, bars, AREA)

    spoken = "; ".join(f"{row.title} {area.mean:.0f}" for row, area in reversed(areas))
    of = f"mean over {len(table.tasks)} tasks" if len(table.tasks) > 1 else shorten(table.tasks[0])
    n = next(facts.n for _, facts in rows_with_numbers(table))
    return Panel(name, f"AUP, {of}", f"AUP, {of}: {spoken}", draw, n, bars_height(bars))


def _area_bar(row: Entry, area: Estimate, look: Look) -> Bar:
    spread = area.sd or 0.0
    short = len(row.seeds) < row.planned_seeds
    seeds = f", {len(row.seeds)} of {row.planned_seeds} seeds" if short else ""
    return Bar(
        row.title,
        area.mean,
        area.mean - spread,
        area.mean + spread,
        f"{area.mean:.0f}{seeds}",
        look.colour,
        css_name(row.title),
    )
