"""Resampled examples: how far a number would move if other examples had been drawn.

All numbers of one comparison are resampled together, example by example, so that differences are paired.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tad.evaluation.row import Row

RESAMPLES = 2000
_CHUNK = 200  # resamples held at once


class Resampled:
    """Accuracy (percent) and tokens per forward of several lists of rows over the same examples: [lists, resamples]."""

    def __init__(self, lists: Sequence[Sequence[Row]], resamples: int = RESAMPLES, seed: int = 0) -> None:
        examples = len(lists[0])
        # [3 x lists, examples]: correct, tokens, forwards of every list
        values = np.array(
            [
                column
                for rows in lists
                for column in (
                    [bool(row.correct) for row in rows],
                    [row.tokens for row in rows],
                    [row.forwards for row in rows],
                )
            ],
            dtype=np.float64,
        )
        draws = np.random.default_rng(seed)
        sums = []
        for low in range(0, resamples, _CHUNK):
            size = min(_CHUNK, resamples - low)
            times = draws.multinomial(examples, np.full(examples, 1 / examples), size=size)
            sums.append(values @ times.T)
        correct, tokens, forwards = np.concatenate(sums, axis=1).reshape(len(lists), 3, -1).transpose(1, 0, 2)
        self.accuracy = 100 * correct / examples
        with np.errstate(invalid="ignore"):
            self.tpf = tokens / forwards


def interval(values: np.ndarray, share: float = 0.95) -> tuple[float, float]:
    """The middle `share` of resampled values; nan where there are none."""
    values = values[np.isfinite(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)
