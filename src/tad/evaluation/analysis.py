"""The one analysis: measurements of methods in; points, differences, tokens per forward at a target accuracy and AUP out.

Every number of `tad run`, `tad study`, `tad points`, `tad compare`, `tad report` and the demo is made here; docs/reference/metrics.md
has the definitions. A method is measured in several scopes: each task, the mean over tasks (the paper's Average) and all
problems pooled. The spread over training seeds stands beside the interval over problems. Reads no files and makes no text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tad.errors import TadError
from tad.evaluation.aup import DROP, TpfAtAccuracy, accuracies_at_tpf, tpf_at_accuracy, tpfs_at_accuracy
from tad.evaluation.measurement import (
    RESAMPLES,
    Bootstrap,
    Interval,
    Measurement,
    MethodRuns,
    average,
    interval,
    measure_task,
)

TOLERANCE = 1.5  # points below the base's accuracy one token at a time
SPEEDS = (4.0, 6.0, 8.0, 10.0)  # tokens per forward at which accuracies are read off the curves
MEAN, POOLED = "mean over tasks", "all problems pooled"
_Z_POWER = 1.959963984540054 + 0.8416212335729143  # two-sided 5 %, power 80 %


@dataclass(frozen=True)
class Estimate:
    """A number with what is known of its error: `se` and `interval` (95 %) over problems, `sd` over training seeds."""

    value: float
    se: float | None = None
    sd: float | None = None
    interval: Interval | None = None
    few: bool = False  # the interval is to be shown, not the standard error

    def with_interval(self, digits: int, sign: str = "") -> str:
        """'-6.7 [-12.5, -0.8]'."""
        return f"{self.value:{sign}.{digits}f} {self.interval_text(digits, sign)}".rstrip()

    def interval_text(self, digits: int, sign: str = "") -> str:
        """'[-12.5, -0.8]'; nothing where there is none."""
        if self.interval is None or math.isnan(self.interval[0]):
            return ""
        return f"[{self.interval[0]:{sign}.{digits}f}, {self.interval[1]:{sign}.{digits}f}]"


@dataclass(frozen=True)
class CurvePoint:
    """A method at one setting."""

    setting: str  # the name of the run
    value: float | None  # of the threshold, or steps; None: one token at a time
    accuracy: Estimate
    tpf: Estimate
    tpf_all: float
    forwards: float  # per problem
    tokens_per_second: float  # while these rows were decoded: of the machine and the batch, too
    dropped: bool  # not in the area: more than 5 below the first point, or slower than it


@dataclass(frozen=True)
class PairedDifference:
    """A method less a reference, on the same problems. McNemar's test and the effect are of one training seed only."""

    n: int
    accuracy: Estimate
    tpf: Estimate
    speedup: Estimate  # the reference's forwards over the method's
    gained: int  # problems wrong in the reference and right here, summed over seeds
    lost: int
    p_value: float | None
    minimum_detectable_effect: float | None  # points that so many problems would have shown with 80 % power


@dataclass(frozen=True)
class ScopeResult:
    """A method in one scope. Without a base, its own run one token at a time stands for it."""

    n: int
    setting: str  # the default setting, at which these numbers are
    first: Estimate | None  # accuracy one token at a time
    accuracy: Estimate
    tpf: Estimate
    to_base: PairedDifference | None
    to_baseline: PairedDifference | None
    tpf_at_target: TpfAtAccuracy | None
    tpf_at_target_interval: Interval
    accuracy_at: dict[
        float, Estimate
    ]  # the accuracy at fixed tokens per forward, those of SPEEDS that the curve reaches
    times_baseline: Estimate | None  # the ratio of the two tokens per forward at the target accuracy
    aup: Estimate | None
    points: list[CurvePoint]


@dataclass(frozen=True)
class ResultRow:
    """A method of a table; no scopes where it has no numbers, and `state` says why."""

    method: str
    title: str
    state: str
    seeds: list[int | None] = field(default_factory=list)
    planned_seeds: int = 0
    trained: bool = False
    scopes: dict[str, ScopeResult] = field(default_factory=dict)


@dataclass(frozen=True)
class RowSpec:
    """A row to make: the method's runs as far as they are there."""

    method: str
    title: str
    runs: MethodRuns | None
    planned_seeds: int = 1
    state: str = ""


@dataclass(frozen=True)
class ResultTable:
    """Methods on the same problems, with what their numbers have in common."""

    name: str
    title: str
    rows: list[ResultRow]
    tasks: dict[str, int]  # with their problems
    ungraded: list[str]
    tolerance: float
    targets: dict[str, float]  # by scope: the accuracy that speeds are compared at; empty without a base
    base: str | None
    baseline: str | None
    y_max: dict[str, float]
    y_max_given: bool
    resamples: int
    note: str | None = None

    @property
    def scopes(self) -> list[str]:
        """The first one is shown first."""
        return list_scopes(list(self.tasks))

    @property
    def scope(self) -> str:
        return self.scopes[0]


def list_scopes(tasks: Sequence[str]) -> list[str]:
    return [MEAN, POOLED, *tasks] if len(tasks) > 1 else list(tasks) or [MEAN]


def analyse(
    name: str,
    title: str,
    specs: Sequence[RowSpec],
    base: MethodRuns | None,
    baseline: MethodRuns | None = None,
    tolerance: float = TOLERANCE,
    everyone: Sequence[MethodRuns] = (),
    y_max: float | Mapping[str, float] | None = None,
    resamples: int = RESAMPLES,
    note: str | None = None,
) -> ResultTable:
    """A table. The target accuracy is the base's at its first setting less `tolerance`.

    `everyone`: further methods that share the table's y_max, which is the highest accuracy of any method on the task unless
    it is given. Tasks that are not graded for every method are left out for all.
    """
    present = [spec.runs for spec in specs if spec.runs is not None]
    known = [*([base] if base else []), *present]
    if not known:
        rows = [_without_numbers(spec) for spec in specs]
        return ResultTable(name, title, rows, {}, [], tolerance, {}, None, None, {}, False, resamples, note)
    check_same([*known, *([baseline] if baseline else [])])
    asked = known[0].runs[0][0].task
    every_task = list(dict.fromkeys(asked.tolist()))
    tasks = [task for task in every_task if all(task in one.graded for one in known)]
    tops = _tops([*known, *everyone], tasks, y_max)
    maker = _Maker(base, baseline, asked, tasks, tolerance, tops, max(resamples, 1))
    return ResultTable(
        name=name,
        title=title,
        rows=[maker.row(spec) for spec in specs],
        tasks={task: int((asked == task).sum()) for task in tasks},
        ungraded=[task for task in every_task if task not in tasks],
        tolerance=tolerance,
        targets=maker.targets,
        base=base.name if base else None,
        baseline=baseline.name if baseline else None,
        y_max=tops,
        y_max_given=y_max is not None,
        resamples=resamples,
        note=note,
    )


def _without_numbers(spec: RowSpec) -> ResultRow:
    seeds = [] if spec.runs is None else spec.runs.seeds
    state = spec.state or ("not run yet" if spec.runs is None else "not graded yet")
    return ResultRow(spec.method, spec.title, state, seeds, spec.planned_seeds)


def check_same(methods: Sequence[MethodRuns]) -> None:
    """Refuse to pair runs that were not asked the same problems."""
    first = methods[0].runs[0][0]
    for method in methods:
        for run in (run for runs in method.runs for run in runs):
            if not np.array_equal(run.problem, first.problem):
                raise TadError(
                    f"method '{method.name}' was asked other questions than '{methods[0].name}'; they cannot be compared"
                )


def _tops(
    methods: Sequence[MethodRuns], tasks: Sequence[str], y_max: float | Mapping[str, float] | None
) -> dict[str, float]:
    """y_max of every task: as given, else the highest accuracy of any method at any setting, seeds averaged."""
    if isinstance(y_max, int | float):
        return dict.fromkeys(tasks, float(y_max))
    given: dict[str, float] = {}
    for name, top in (y_max or {}).items():
        labels = [task for task in tasks if task == name or task.startswith(f"{name} (")]  # with its template
        if not labels:
            raise TadError(f"y_max of '{name}', which is not in the table: {', '.join(tasks)}")
        given |= dict.fromkeys(labels, top)
    found = dict.fromkeys(tasks, 0.0)
    for method in methods:
        for task in (task for task in tasks if task in method.graded):
            chosen = method.runs[0][0].task == task
            scores = np.mean([[run.correct[chosen].mean() for run in runs] for runs in method.runs], axis=0)
            found[task] = max(found[task], 100 * float(scores.max()))
    return found | given


class _Maker:
    """Rows of one table, all on the same resamples."""

    def __init__(
        self,
        base: MethodRuns | None,
        baseline: MethodRuns | None,
        asked: np.ndarray,
        tasks: list[str],
        tolerance: float,
        tops: Mapping[str, float],
        resamples: int,
    ) -> None:
        self.tasks, self.tolerance, self.tops = tasks, tolerance, tops
        self.chosen = np.isin(asked, tasks)
        self.scopes = list_scopes(tasks) if tasks else []
        if not tasks:
            self.targets: dict[str, float] = {}
            return
        self.bootstrap = Bootstrap(asked[self.chosen], resamples)
        self.base = self.measure(base) if base else None
        # A baseline with ungraded tasks of its own cannot be measured on the table's.
        able = baseline is not None and set(tasks) <= baseline.graded
        self.baseline = (baseline, self.measure(baseline)) if able and baseline else None
        self.targets = {
            scope: float(found.accuracy[:, 0].mean()) - tolerance
            for scope, found in (self.base or {}).items()
        }

    def measure(self, method: MethodRuns) -> dict[str, Measurement]:
        """In every scope."""
        taken = MethodRuns(
            method.name,
            method.settings,
            method.seeds,
            [[run.take(self.chosen) for run in runs] for runs in method.runs],
        )
        masks = self.bootstrap.masks
        found = {task: measure_task(taken, masks[task], self.bootstrap.of_task[task]) for task in self.tasks}
        if len(found) == 1:
            return found
        every = np.full(int(self.chosen.sum()), True)
        pooled = measure_task(taken, every, self.bootstrap.pooled)
        return {MEAN: average(list(found.values())), POOLED: pooled, **found}

    def row(self, spec: RowSpec) -> ResultRow:
        runs = spec.runs
        if runs is None or not self.tasks:
            return _without_numbers(spec)
        state = spec.state or ("" if len(runs.seeds) >= spec.planned_seeds else "some seeds are not run yet")
        found = self.measure(runs)
        area = {task: self._area([found[task]], [task]) for task in self.tasks} if runs.has_first else {}
        if runs.has_first and len(self.tasks) > 1:
            area[MEAN] = self._area([found[task] for task in self.tasks], self.tasks)
        scopes = {scope: self._scope(scope, runs, found, area.get(scope)) for scope in self.scopes}
        return ResultRow(spec.method, spec.title, state, runs.seeds, spec.planned_seeds, runs.trained, scopes)

    def _scope(
        self, scope: str, runs: MethodRuns, every: Mapping[str, Measurement], area: Estimate | None
    ) -> ScopeResult:
        found, own = every[scope], runs.default_point
        reference = self.base[scope] if self.base else found if runs.has_first else None
        at, at_interval, drawn = None, (math.nan, math.nan), np.array([])
        if reference is not None:
            target = float(reference.accuracy[:, 0].mean()) - self.tolerance
            targets = reference.drawn_accuracy[:, 0].mean(0) - self.tolerance
            at, drawn = tpf_at_accuracy(found.points(), target), _drawn_tpf_at(found, targets)
            at_interval = interval(drawn)
        return ScopeResult(
            n=found.n,
            setting=runs.settings[own].name,
            first=_accuracy(found, 0) if runs.has_first else None,
            accuracy=_accuracy(found, own),
            tpf=_tpf(found, own),
            to_base=None if reference is None else _pair(found, own, reference, 0),
            to_baseline=None
            if self.baseline is None
            else _pair(found, own, self.baseline[1][scope], self.baseline[0].default_point),
            tpf_at_target=at,
            tpf_at_target_interval=at_interval,
            accuracy_at=_accuracy_at(found),
            times_baseline=None if at is None or self.base is None else self._ratio(scope, at, drawn),
            aup=area,
            points=_curve(runs, found),
        )

    def _ratio(self, scope: str, at: TpfAtAccuracy, drawn: np.ndarray) -> Estimate | None:
        """Tokens per forward at the target accuracy over the baseline's."""
        if self.baseline is None or self.base is None:
            return None
        other = self.baseline[1][scope]
        theirs = tpf_at_accuracy(other.points(), at.accuracy).tpf
        if at.tpf is None or theirs is None:
            return None
        drawn_theirs = _drawn_tpf_at(other, self.base[scope].drawn_accuracy[:, 0].mean(0) - self.tolerance)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(drawn_theirs > 0, drawn / drawn_theirs, np.nan)
        return Estimate(at.tpf / theirs, interval=interval(ratios))

    def _area(self, found: Sequence[Measurement], tasks: Sequence[str]) -> Estimate | None:
        """The mean over these tasks; None where no answer of a task is right."""
        if any(self.tops[task] <= 0 for task in tasks):
            return None
        each = [one.areas(self.tops[task]) for one, task in zip(found, tasks, strict=True)]
        own, drawn = (np.mean([area[side] for area in each], axis=0) for side in (0, 1))
        return Estimate(float(own.mean()), sd=_sd(own), interval=interval(drawn))


def _drawn_tpf_at(found: Measurement, targets: np.ndarray) -> np.ndarray:
    """Tokens per forward at the target accuracy of every resample, against its own target; 0 where it is not reached."""
    drawn = tpfs_at_accuracy(found.drawn_tpf.mean(0), found.drawn_accuracy.mean(0), targets)
    return np.nan_to_num(drawn)


def _accuracy_at(found: Measurement) -> dict[float, Estimate]:
    """Of the curve of the seeds' means; a resample that is nowhere so fast is left out of the interval."""
    estimates = {}
    for speed in SPEEDS:
        value = float(
            accuracies_at_tpf(found.tpf.mean(0)[:, None], found.accuracy.mean(0)[:, None], speed)[0]
        )
        if not math.isnan(value):
            drawn = accuracies_at_tpf(found.drawn_tpf.mean(0), found.drawn_accuracy.mean(0), speed)
            estimates[speed] = Estimate(value, interval=interval(drawn))
    return estimates


def _pair(found: Measurement, point: int, other: Measurement, other_point: int) -> PairedDifference:
    """`found` at a setting less `other` at one of its own."""
    mine, theirs = found.correct[:, point], other.correct[:, other_point]
    if len(theirs) not in (1, len(mine)):
        theirs = theirs[:1]
    gained, lost = int(((mine == 1) & (theirs == 0)).sum()), int(((mine == 0) & (theirs == 1)).sum())

    def difference(name: str) -> Estimate:
        values, reference = getattr(found, name)[:, point], getattr(other, name)[:, other_point].mean()
        drawn = getattr(found, f"drawn_{name}")[:, point].mean(0) - getattr(other, f"drawn_{name}")[
            :, other_point
        ].mean(0)
        return Estimate(float(values.mean() - reference), sd=_sd(values), interval=interval(drawn))

    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(other.forwards[:, other_point].mean() / found.forwards[:, point].mean())
        ratios = other.drawn_forwards[:, other_point].mean(0) / found.drawn_forwards[:, point].mean(0)
    single = len(found.correct) == len(other.correct) == 1
    return PairedDifference(
        n=found.n,
        accuracy=difference("accuracy"),
        tpf=difference("tpf"),
        speedup=Estimate(ratio, interval=interval(ratios)),
        gained=gained,
        lost=lost,
        p_value=mcnemar(gained, lost) if single else None,
        minimum_detectable_effect=minimum_detectable_effect(found.n, gained + lost) if single else None,
    )


def _accuracy(found: Measurement, point: int) -> Estimate:
    low, high = found.accuracy_interval[point]
    values, few = found.accuracy[:, point], bool(found.few[point])
    return Estimate(
        float(values.mean()), float(found.accuracy_se[point]), _sd(values), (float(low), float(high)), few
    )


def _tpf(found: Measurement, point: int) -> Estimate:
    values = found.tpf[:, point]
    return Estimate(float(values.mean()), float(found.tpf_se[point]), _sd(values))


def _curve(runs: MethodRuns, found: Measurement) -> list[CurvePoint]:
    """The first setting first, then by speed."""
    points = found.points()
    first = points[0]
    counts = [first.accuracy - point.accuracy <= DROP and point.tpf > first.tpf for point in points]
    made = [
        CurvePoint(
            setting.name,
            setting.value,
            _accuracy(found, i),
            _tpf(found, i),
            float(found.tpf_all[:, i].mean()),
            float(found.forwards[:, i].mean()),
            float(found.tokens_per_second[:, i].mean()),
            runs.has_first and i > 0 and not counts[i],
        )
        for i, setting in enumerate(runs.settings)
    ]
    head = 1 if runs.has_first else 0
    return made[:head] + sorted(made[head:], key=lambda point: (point.tpf.value, point.accuracy.value))


def _sd(values: np.ndarray) -> float | None:
    """Standard deviation over training seeds; None for one."""
    return float(values.std(ddof=1)) if len(values) > 1 else None


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value of `gained` against `lost` if both were equally likely."""
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**changed)


def minimum_detectable_effect(problems: int, changed: int) -> float:
    """Percentage points that so many pairs would show as different (5 %, two-sided) with 80 % power.

    From the share of problems on which the runs disagree. Where they agree on all, that share is taken as 3 / n, which it
    exceeds with a probability of 5 % at most.
    """
    return 100 * _Z_POWER * math.sqrt(max(changed, 3) / problems / problems)
