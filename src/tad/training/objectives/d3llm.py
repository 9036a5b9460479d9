"""d3LLM's pseudo-trajectories: certainty forcing on what the teacher had not yet revealed, with two curricula.

Which tokens of the window are masked is the trajectory's: the state t of the way before the window's end, t ~ U(m, most),
where m rises from 0 to `most` over the run. The window grows over the run. Only the trajectory's order is used; what
stands before the window is clean text, not the state of that time, which is why it is called pseudo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveFloat
from torch import Tensor

from tad.config import Positive
from tad.training.objectives.dparallel import CertaintyForcing, draw_window
from tad.training.states import TrajectoryArrays
from tad.trajectories.partition import masked


@dataclass(frozen=True)
class D3LLM(CertaintyForcing):
    """Defaults are LLaDA's."""

    name: ClassVar[str] = "d3llm"
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "llada": {"entropy_weight": 2.0, "complement_entropy": False, "windows": (16, 16, 24, 24, 32, 32)},
        "dream": {"entropy_weight": 1.0, "complement_entropy": True, "windows": (16, 24, 32)},
    }

    complement_entropy: bool = False
    divide_by: PositiveFloat = 4.0
    hard_average: Literal["view", "token"] = "token"
    windows: Annotated[tuple[Positive, ...], Field(min_length=1)] = (16, 16, 24, 24, 32, 32)
    """Window lengths at equal parts of the run (the published ones: at its epochs), linear in between."""
    most: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The largest share of the window that is masked."""

    def window(self, progress: float) -> int:
        """The window's length at a point of the run: from each entry towards the next; the last one stays."""
        place = min(max(progress, 0.0), 1.0) * len(self.windows)
        index = min(int(place), len(self.windows) - 1)
        here, ahead = self.windows[index], self.windows[min(index + 1, len(self.windows) - 1)]
        return int(here + (ahead - here) * min(place - index, 1.0))

    def pattern(
        self, row: TrajectoryArrays, rng: np.random.Generator, progress: float
    ) -> tuple[int, int, Tensor]:
        size = self.window(progress)
        start, end = draw_window(len(row.tokens), size, rng)
        ratio = rng.uniform(self.most * min(max(progress, 0.0), 1.0), self.most)
        step = min(start + int((1 - ratio) * size), int(row.reveal.max()))
        return start, end, masked(row.reveal, step)
