"""Rows in numbers: accuracy and tokens per forward, by task, template and level, with standard errors. Percentages.

A row's *content* is what was generated up to and including its first end token; *all* its positions include the filler
behind that. Over a set of rows, tokens per forward is the sum of tokens over the sum of forwards: the mean of the rows'
ratios would let short answers count as much as long ones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from tad.evaluation.row import UNFIT, Row
from tad.tasks import Score, is_unjudged

Z95 = 1.959963984540054
OWN = "each task's own template"


def measure(rows: Sequence[Row]) -> dict[str, Any]:
    """What one group of rows shows. Accuracy is over the graded ones; what does not fit the context is wrong."""
    graded = [row for row in rows if row.correct is not None]
    score = Score(len(graded), sum(bool(row.correct) for row in graded))
    low, high = wilson(score.count, score.accuracy)
    tokens, tokens_all, forwards, seconds = (
        np.array([getattr(row, name) for row in rows])
        for name in ("tokens", "tokens_all", "forwards", "share")
    )
    return {
        "n": len(rows),
        "graded": score.count,
        "correct": score.correct,
        "accuracy": 100 * score.accuracy,
        "se": 100 * score.standard_error,
        "interval": [100 * low, 100 * high],
        "tpf": divide(tokens.sum(), forwards.sum()),
        "tpf_se": float(ratio_error(ratio_residuals(tokens, forwards))),
        "tpf_all": divide(tokens_all.sum(), forwards.sum()),
        "tokens": int(tokens.sum()),
        "tokens_all": int(tokens_all.sum()),
        "forwards": int(forwards.sum()),
        "decoding_seconds": float(seconds.sum()),
        "tokens_per_second": divide(tokens.sum(), seconds.sum()),
        "cannot_judge": sum(is_unjudged(row.correct, row.reason) for row in rows),
        "unfit": sum(row.reason == UNFIT for row in rows),
        **measure_drafts(rows),
    }


def measure_drafts(rows: Sequence[Row]) -> dict[str, Any]:
    """Of rows whose drafts were verified: tokens per cycle, and the share of drafts kept up to each of their positions."""
    found = [row.drafting for row in rows if row.drafting is not None]
    if not found:
        return {}
    proposed, kept = (_add_up([one[name] for one in found]) for name in ("proposed", "kept"))
    cycles = np.array([row.drafting["cycles"] for row in rows if row.drafting is not None])
    tokens = np.array([row.tokens for row in rows if row.drafting is not None])
    return {
        "drafts": {
            "cycles": int(cycles.sum()),
            "drafted": sum(proposed),
            "accepted": sum(kept),
            "kept_per_cycle": divide(tokens.sum(), cycles.sum()),
            "kept_per_cycle_se": float(ratio_error(ratio_residuals(tokens, cycles))),
            "acceptance": [divide(above, below) for above, below in zip(kept, proposed, strict=True)],
        }
    }


def _add_up(counts: Sequence[Sequence[int]]) -> list[int]:
    """Position by position, where some lists are shorter."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def divide(above: float, below: float) -> float:
    """A ratio; nan where nothing was counted."""
    return float(above / below) if below else math.nan


def ratio_residuals(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """What each problem adds to the error of sum(above) / sum(below): [..., problems] (the delta method)."""
    total = below.sum(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        residuals: np.ndarray = (above - above.sum(-1, keepdims=True) / total * below) / total
    return residuals


def ratio_error(residuals: np.ndarray) -> np.ndarray:
    """Standard error of a ratio of sums over independent problems: [..., problems] -> [...]; nan for one problem."""
    n = residuals.shape[-1]
    error: np.ndarray = np.sqrt((residuals**2).sum(-1) * (n / (n - 1) if n > 1 else math.nan))
    return error


def wilson(n: int, p: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's 95 % interval of a share `p` of `n`: it is not empty at 0 or 1, as the standard error is."""
    if not n:
        return math.nan, math.nan
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Groups by task, template and level; over all tasks of a template, or of each task's own where every task has one; and each task's spread over its templates."""
    groups: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row.task][row.template].append(row)
    tasks = {
        task: {template: _with_levels(found) for template, found in by_template.items()}
        for task, by_template in groups.items()
    }
    templates = list(dict.fromkeys(row.template for row in rows))
    overall = {
        name: _over_tasks(
            [row for row in rows if row.template == name],
            [by_template[name] for by_template in tasks.values() if name in by_template],
        )
        for name in templates
    }
    if len(templates) > 1 and all(len(by_template) == 1 for by_template in tasks.values()):
        own = [found for by_template in tasks.values() for found in by_template.values()]
        overall[OWN] = _over_tasks(rows, own)
    summary: dict[str, Any] = {"n": len(rows), "tasks": tasks, "overall": overall}
    spread = {task: _spread(found) for task, found in tasks.items() if len(found) > 1}
    return summary | ({"spread": spread} if spread else {})


def _with_levels(rows: Sequence[Row]) -> dict[str, Any]:
    levels = sorted({row.level for row in rows if row.level is not None})
    wrong = Counter(_reason_class(row.reason) for row in rows if row.correct is False and row.reason)
    return {
        **measure(rows),
        "levels": {level: measure([row for row in rows if row.level == level]) for level in levels},
        "wrong": dict(wrong.most_common(10)),
    }


def _over_tasks(rows: Sequence[Row], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All examples alike, and beside it the mean over tasks, as published tables average."""
    mean = {
        "tasks": len(found),
        "accuracy": sum(entry["accuracy"] for entry in found) / len(found),
        "se": math.sqrt(sum(entry["se"] ** 2 for entry in found)) / len(found),
        "tpf": sum(entry["tpf"] for entry in found) / len(found),
    }
    return {**measure(rows), "mean_of_tasks": mean}


def _spread(by_template: dict[str, Any]) -> dict[str, Any]:
    """How far a task's numbers move with the template."""

    def extent(name: str) -> float:
        values = [entry[name] for entry in by_template.values()]
        return float(max(values) - min(values))

    best = max(by_template, key=lambda name: by_template[name]["accuracy"])
    return {"templates": len(by_template), "accuracy": extent("accuracy"), "tpf": extent("tpf"), "best": best}


def _reason_class(reason: str) -> str:
    """A reason without its particulars, so that reasons can be counted."""
    return "".join("n" if c.isdigit() else c for c in reason.partition(";")[0])[:60]
