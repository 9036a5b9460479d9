"""The window, measured: how the student's confidence in the teacher's tokens decays with the steps until their reveal.

For states of stored trajectories the student (plain prompt) is asked for the probability of each masked position's
token; averaged by d = reveal step - state, that is the paper's decay curve. The Quality window is where it falls to
0.5, the Speed window where it falls to 0.2. Trajectories are the unit of resampling for the intervals.

Of a converted autoregressive model the probability that a draft's position is kept is measured instead (`acceptance`): entry k is
the k-th token of a draft.

End filler is what stands behind the first end token, whenever it was revealed: it is easy to foresee from any distance, and
with it in the mean a curve hardly falls.

`measure_window` does all of it on a store and leaves window.json and its picture there: `window_report` and `window_picture`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from tad.config import parse_recipe
from tad.decoding.canvas import left_pad
from tad.errors import TadError
from tad.models import LM
from tad.trajectories.acceptance import accepted_drafts
from tad.trajectories.partition import masked, state, unfinished_block
from tad.trajectories.recipe import WindowSection
from tad.trajectories.store import Trajectory, TrajectoryStore
from tad.trajectories.window_picture import plot_decay
from tad.trajectories.window_report import LEVELS, Decay, Window, WindowReport, write_report


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
