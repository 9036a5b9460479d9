"""The JSONL format of the published trainer: one object per trajectory, with every intermediate state written out.

`prompt` (templated, without the reference), `groundtruth` and `trajectory` {step0: ids, step1: ids, ...}, as that trainer
reads them. Writing only.
"""

from __future__ import annotations

from typing import Any

import torch

from tad.models import LM
from tad.trajectories.partition import state
from tad.trajectories.store import Trajectory


def export_row(lm: LM, row: Trajectory, groundtruth: str) -> dict[str, Any]:
    """One line of the published format."""
    tokens, reveal = torch.tensor(row.tokens), torch.tensor(row.reveal)
    states = {
        f"step{s}": state(tokens, reveal, s, lm.tokens.mask).tolist() for s in range(len(row.tokens) + 1)
    }
    return {
        "id": row.id,
        "prompt": lm.decode(row.plain_ids, skip_special=False),
        "groundtruth": groundtruth,
        "output_text": lm.decode(row.tokens),
        "trajectory": states,
    }
