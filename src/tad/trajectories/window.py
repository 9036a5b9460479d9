"""The window, measured: how the student's confidence in the teacher's tokens decays with the steps until their reveal.

For states of stored trajectories the student (plain prompt) is asked for the probability of each masked position's
token; averaged by d = reveal step - state, that is the paper's decay curve. The Quality window is where it falls to
0.5, the Speed window where it falls to 0.2. Trajectories are the unit of resampling for the intervals.

Of a converted autoregressive model the probability that a draft's position is kept is measured instead (`acceptance`): entry k is
the k-th token of a draft.

End filler is what stands behind the first end token, whenever it was revealed: it is easy to foresee from any distance, and
with it in the mean a curve hardly falls.

`measure_window` does all of it on a store and leaves window.json and its picture there; the rest of this file are its parts:
the curve, the crossings, the file, the same in words, and as a picture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tad.config import parse_recipe
from tad.decoding.canvas import left_pad
from tad.errors import TadError
from tad.files import write_json
from tad.models import LM
from tad.trajectories.acceptance import accepted_drafts
from tad.trajectories.partition import masked, state, unfinished_block
from tad.trajectories.recipe import WindowSection
from tad.trajectories.store import Trajectory, TrajectoryStore

WINDOW = "window.json"
FEW = 32  # trajectories below which a window is a guess
LEVELS = {"quality": 0.5, "speed": 0.2}


@dataclass(frozen=True)
class Decay:
    """The curve. Entry d - 1 of each list belongs to distance d."""

    mean: list[float]
    low: list[float]  # 95 % bootstrap interval over trajectories
    high: list[float]
    count: list[int]  # positions behind each mean
    trajectories: int
    states: int
    filler: bool  # whether end filler counts


@dataclass(frozen=True)
class Window:
    """Where the curve falls to a level: the crossing, the whole number to use, and the interval of the crossing."""

    level: float
    crossing: float  # nan where the curve does not fall so far within the measured steps; the window then is their cap
    window: int
    low: float
    high: float

    @property
    def reached(self) -> bool:
        return not math.isnan(self.crossing)

    def __str__(self) -> str:
        if self.reached:
            return f"{self.window} ({self.low:.1f} to {self.high:.1f})"
        return f"{self.window}, the cap: {self.level} is not reached"


@dataclass(frozen=True)
class WindowReport:
    """What `tad window` writes."""

    order: str
    model: str
    decay: Decay
    with_filler: Decay
    windows: dict[str, Window]
    of: str = "confidence"  # or acceptance, of a converted model's drafts


def measure_window(
    lm: LM,
    store: TrajectoryStore,
    use_adapter: bool = False,
    **settings: int | None,
) -> WindowReport:
    """Measure on trajectories from all over the store and write the report there. Settings are those of `WindowSection`."""
    section = parse_recipe(WindowSection, settings, where="window")
    store.check_graded()
    decay, filled, sums = measure_decay(
        lm,
        spread_rows(store, section.limit),
        section.states,
        section.distances or max(2, store.meta.gen_length // 2),
        section.batch_size,
        use_adapter=use_adapter,
    )
    order = str(store.meta.recipe.get("order", "teacher"))
    of = "acceptance" if _drafts(lm) else "confidence"
    report = WindowReport(order, store.meta.model, decay, filled, choose_windows(decay, sums), of)
    plot_decay(report, store.folder / "window")
    write_report(report, store.folder)  # last: its presence says that the measurement is complete
    return report


def spread_rows(store: TrajectoryStore, limit: int) -> list[Trajectory]:
    """At most `limit` trajectories at equal distances over the store, whose tasks stand one after the other."""
    rows = list(store.rows())
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(limit, len(rows))).round().astype(int))
    return [rows[index] for index in chosen]


def measure_decay(
    lm: LM,
    trajectories: Sequence[Trajectory],
    states: int,
    distances: int,
    batch_size: int,
    seed: int = 0,
    use_adapter: bool = False,
) -> tuple[Decay, Decay, np.ndarray]:
    """The curve without and with end filler, and the per-trajectory sums behind the first ([n, distances, 2]).

    `states` are drawn per trajectory, one from each of as many equal parts of its real steps.
    """
    if not trajectories:
        raise TadError("no trajectories to measure: the store is empty")
    draws, layout = np.random.default_rng(seed), lm.model.shape.blocks
    items: list[tuple[int, int]] = []  # (trajectory, step)
    for index, trajectory in enumerate(trajectories):
        parts = min(states, trajectory.n_real)
        edges = np.linspace(0, trajectory.n_real, parts + 1)
        steps = np.floor(edges[:-1] + draws.random(parts) * np.diff(edges)).astype(int)
        items += [(index, int(step)) for step in steps]
    items.sort(key=lambda item: len(trajectories[item[0]].plain_ids))
    sums = np.zeros((2, len(trajectories), distances, 2))  # without and with filler; sum and count
    for low in range(0, len(items), batch_size):
        batch = items[low : low + batch_size]
        if _drafts(lm):
            kept = accepted_drafts(lm, [(trajectories[i], step) for i, step in batch])
            for (index, _), row in zip(batch, kept, strict=True):
                known = np.flatnonzero(~np.isnan(row))[:distances]
                sums[:, index, known, 0] += row[known]
                sums[:, index, known, 1] += 1
            continue
        with nullcontext() if use_adapter else lm.base():
            confidence = _student_confidence(lm, [(trajectories[i], step) for i, step in batch])
        for (index, step), row in zip(batch, confidence, strict=True):
            trajectory = trajectories[index]
            reveal = np.array(trajectory.reveal)
            distance = reveal - step
            near_enough = (distance > 0) & (distance <= distances)
            # A block-diffusion model has not seen later blocks behind an unfinished one.
            if layout is not None:
                start, hidden = len(trajectory.plain_ids), torch.from_numpy(distance > 0)
                near_enough &= unfinished_block(hidden, start, int(layout.size)).numpy()
            for which, use in enumerate((near_enough & _content(trajectory, lm.tokens.ends), near_enough)):
                np.add.at(sums[which, index, :, 0], distance[use] - 1, row[use])
                np.add.at(sums[which, index, :, 1], distance[use] - 1, 1)
    plain, filled = (_curve(part, len(items), bool(which), seed) for which, part in enumerate(sums))
    return plain, filled, sums[0]


def _drafts(lm: LM) -> bool:
    """Whether this is a converted model, whose drafts are measured."""
    return lm.model.shape.blocks is not None and lm.model.shape.blocks.drafts


def _content(trajectory: Trajectory, ends: Collection[int]) -> np.ndarray:
    """[length] bool: up to the first end token, which belongs to the answer."""
    after = np.cumsum(np.isin(trajectory.tokens, list(ends)))
    return np.concatenate(([True], after[:-1] == 0))


@torch.inference_mode()
def _student_confidence(lm: LM, items: Sequence[tuple[Trajectory, int]]) -> list[np.ndarray]:
    """The student's probability of every position's token in the given states: [length] each."""
    length = len(items[0][0].tokens)
    canvas, pad = left_pad([trajectory.plain_ids for trajectory, _ in items], length, lm.tokens)
    prompt = canvas.shape[1] - length
    final = torch.tensor([trajectory.tokens for trajectory, _ in items])
    reveal = torch.tensor([trajectory.reveal for trajectory, _ in items])
    step = torch.tensor([[step] for _, step in items])
    canvas[:, prompt:] = state(final, reveal, step, lm.tokens.mask)
    pad = pad.to(lm.device)[:, None]
    column = torch.arange(prompt + length, device=lm.device)
    hidden = lm.model(
        canvas.to(lm.device),
        position_ids=(column - pad).clamp(min=0),
        mask=lm.model.attention_mask(column - pad, prompt - pad, real=column >= pad),
        head=False,
    ).hidden
    assert hidden is not None
    start = prompt - lm.family.logit_shift
    answers = hidden[:, start : start + length]
    wanted = masked(reveal, step).to(lm.device)
    logits = lm.model.head(answers[wanted]).float()
    own = logits.log_softmax(-1).gather(-1, final.to(lm.device)[wanted][:, None])[:, 0].exp()
    probability = torch.zeros(wanted.shape, device=lm.device)
    probability[wanted] = own
    return list(probability.cpu().numpy())


def _curve(sums: np.ndarray, states: int, filler: bool, seed: int) -> Decay:
    total = sums.sum(0)
    reached = int((total[:, 1] > 0).cumprod().sum())  # up to the first distance nobody has
    means = total[:reached, 0] / total[:reached, 1]
    samples = _bootstrap(sums[:, :reached], seed)
    low, high = np.nanpercentile(samples, [2.5, 97.5], axis=0)
    return Decay(
        means.tolist(),
        low.tolist(),
        high.tolist(),
        total[:reached, 1].astype(int).tolist(),
        len(sums),
        states,
        filler,
    )


def _bootstrap(sums: np.ndarray, seed: int, draws: int = 500) -> np.ndarray:
    """[draws, distances] curves of resampled trajectories."""
    random = np.random.default_rng(seed + 1)
    weights = random.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=draws)
    total = np.tensordot(weights.astype(float), sums, axes=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total[..., 0] / total[..., 1])


def find_crossing(curve: Sequence[float], level: float) -> float:
    """The distance at which a curve that starts at d = 1 first falls to `level`, between whole distances linearly.

    nan where it never does; below 1 it is 0.
    """
    if not len(curve):
        return math.nan
    if curve[0] <= level:
        return 0.0
    for d in range(1, len(curve)):
        if curve[d] <= level:
            before, after = curve[d - 1], curve[d]
            return d + (before - level) / (before - after)
    return math.nan


def choose_windows(decay: Decay, sums: np.ndarray, seed: int = 0) -> dict[str, Window]:
    """Quality and Speed windows of a measured curve; the whole number nearest to the crossing, at least 1."""
    samples = _bootstrap(sums[:, : len(decay.mean)], seed)
    windows = {}
    for name, level in LEVELS.items():
        crossing = find_crossing(decay.mean, level)
        spread = np.array([find_crossing(list(sample), level) for sample in samples])
        spread = spread[~np.isnan(spread)]
        low, high = np.percentile(spread, [2.5, 97.5]) if len(spread) else (math.nan, math.nan)
        # A curve that never falls to the level makes every measured distance near.
        whole = len(decay.mean) if math.isnan(crossing) else max(1, round(crossing))
        windows[name] = Window(level, crossing, whole, float(low), float(high))
    return windows


def write_report(report: WindowReport, folder: str | Path) -> None:
    """window.json beside the trajectories; recipes that say `window: quality` read it."""
    write_json(Path(folder) / WINDOW, asdict(report))


def read_report(folder: str | Path) -> WindowReport:
    """What `measure_window` wrote into a store's directory."""
    path = Path(folder) / WINDOW
    try:
        values = _with_nan(json.loads(path.read_bytes()))
        decay, filled = (Decay(**values[name]) for name in ("decay", "with_filler"))
        windows = {name: Window(**entry) for name, entry in values["windows"].items()}
        of = str(values.get("of", "confidence"))
        return WindowReport(values["order"], values["model"], decay, filled, windows, of)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise TadError(f"{path}: is not what 'tad window' writes; run 'tad window {folder}' again") from None


def read_window(folder: str | Path, window: int | str) -> int:
    """A window as recipes give it: a number, or `quality` / `speed` as measured by `tad window`."""
    if isinstance(window, int):
        return window
    if window not in LEVELS:
        raise TadError(f"window is a number, 'quality' or 'speed', not {window!r}")
    if not (Path(folder) / WINDOW).is_file():
        raise TadError(
            f"window '{window}' has not been measured: run 'tad window {folder}' first, or give a number"
        )
    return read_report(folder).windows[window].window


def explain_caps(used: Iterable[tuple[str, str | Path, int | str | None]]) -> str | None:
    """A sentence about the windows of (student, store, window as its recipe gives it) that are the cap of the measurement."""
    found: dict[str, None] = {}
    for student, folder, window in used:
        if window in LEVELS and (Path(folder) / WINDOW).is_file():
            measured = read_report(folder).windows[str(window)]
            if not measured.reached:
                found[f"{student} {measured}"] = None
    return f"Windows whose level the confidence does not fall to: {'; '.join(found)}." if found else None


def _with_nan(value: Any) -> Any:
    """JSON's null back to nan."""
    if isinstance(value, dict):
        return {key: _with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nan(item) for item in value]
    return math.nan if value is None else value


def keep_better_window(folder: Path, limit: int, states: int) -> None:
    """Refuse to replace a window that was measured in more states than these would be."""
    if not (folder / WINDOW).is_file():
        return
    try:
        before = read_report(folder).decay
    except TadError:  # damaged, so there is nothing to lose
        return
    if before.states > min(limit, before.trajectories) * states:
        raise TadError(
            f"{folder / WINDOW}: was measured in {before.states} states of {before.trajectories} trajectories, which is more "
            f"than --limit {limit} --states {states}; raise them, or replace it with --overwrite"
        )


def explain_windows(report: WindowReport) -> list[str]:
    """A line per window: where the curve falls to its level, or that it does not and what stands in."""
    lines = []
    for name, window in report.windows.items():
        if not window.reached:
            lines.append(
                f"{name} window {window.window}, the cap: {report.of} does not fall to {window.level} within the {window.window} "
                f"steps that were measured (it is {report.decay.mean[-1]:.2f} there), so all of those count as near"
            )
        else:
            lines.append(
                f"{name} window {window.window}: {report.of} falls to {window.level} after {window.crossing:.1f} steps "
                f"(95 %: {window.low:.1f} to {window.high:.1f})"
            )
    if report.decay.trajectories < FEW:
        lines.append(
            f"WARNING: measured on {report.decay.trajectories} trajectories; with fewer than {FEW} the windows are a guess"
        )
    sizes = [window.window for window in report.windows.values()]
    if len(set(sizes)) < len(sizes):
        lines.append("the windows are equal, so students that differ in them alone are the same student")
    return lines


def show_decay(report: WindowReport) -> list[str]:
    """The curve at a few distances."""
    marks = [d for d in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128) if d <= len(report.decay.mean)]
    values = {
        "steps to reveal": [f"{d:>7d}" for d in marks],
        report.of: [f"{report.decay.mean[d - 1]:>7.3f}" for d in marks],
        "positions": [f"{report.decay.count[d - 1]:>7d}" for d in marks],
    }
    return [f"{name:15s}  " + "".join(cells) for name, cells in values.items()]


_COLOURS = {
    "answer": "#4053d3", "filler": "#9aa0b5", "quality": "#14826d", "speed": "#bf8b00", "level": "#777777", "text": "#222222",
}  # fmt: skip


def draw_decay(axes: Any, report: WindowReport, colours: Mapping[str, str] = _COLOURS) -> None:
    """The decay curve with its interval and both windows, on matplotlib's axes."""
    for decay, label, colour, at, is_below in (
        (report.with_filler, "with end filler", colours["filler"], 3 / 4, False),
        (report.decay, "answer", colours["answer"], 1 / 3, True),
    ):
        distance = np.arange(1, len(decay.mean) + 1)
        axes.fill_between(distance, decay.low, decay.high, color=colour, alpha=0.18, linewidth=0, zorder=2)
        axes.plot(distance, decay.mean, color=colour, zorder=3)
        place = int(at * len(decay.mean))
        rising = decay.mean[-1] > decay.mean[place]
        axes.annotate(
            label,
            (place + 1, decay.mean[place]),
            (-4, -12) if is_below else (0, 8),
            textcoords="offset points",
            ha="right" if is_below or rising else "left",  # to the side on which the line makes room
            color=colour,
            fontsize=9.5,
        )
    for name, window in report.windows.items():
        colour, reached = colours.get(name, colours["level"]), window.reached
        axes.axhline(window.level, color=colours["level"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        if reached and not math.isnan(window.low):
            axes.axvspan(window.low, window.high, color=colour, alpha=0.25, linewidth=0, zorder=1)
        if reached:
            axes.axvline(window.window, color=colour, linewidth=1.3, zorder=2)
        axes.annotate(
            f"{name} {window.window}" if reached else f"{name} {window.window}, the cap: not reached",
            (window.window, 1.0) if reached else (len(report.decay.mean), window.level),
            (3, -2) if reached else (-2, 3),
            textcoords="offset points",
            va="top" if reached else "bottom",
            ha="left" if reached else "right",
            color=colours["text"],
            fontsize=9.5,
        )
    drafts = report.of == "acceptance"
    axes.set_xlabel("position in a draft" if drafts else "steps until the teacher reveals the token")
    axes.set_ylabel("share of drafts kept so far" if drafts else "student's probability of it")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(1, None)


def plot_decay(report: WindowReport, stem: Path) -> list[Path]:
    """The decay curve as PNG and SVG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw_decay(axes, report)
    axes.set_title(
        f"Confidence decay, order: {report.order} ({report.decay.trajectories} trajectories, "
        f"{report.decay.states} states; bands: 95 %)",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths
