"""The JSONL format of the published trainer: one object per trajectory, with every intermediate state written out.

Export writes `prompt` (templated, without the reference), `groundtruth` and `trajectory` {step0: ids, step1: ids, ...}
as that trainer reads them. Import finds reveal steps by comparing states; it accepts histories that start at the
all-masked state, with one or more tokens revealed per step, and refuses tokens that change after their reveal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tad.errors import TadError
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


def import_rows(lm: LM, path: str | Path, task: str = "imported") -> Iterator[Trajectory]:
    """Trajectories from a file of the published format; lines without a trajectory (its summary line) are left out."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise TadError(f"{path}:{number}: not valid JSON ({error.msg})") from None
            if isinstance(record, dict) and len(record.get("trajectory") or ()) > 1:
                yield _import_row(lm, record, f"{path}:{number}", f"{task}/{number}", task)


def _import_row(lm: LM, record: dict[str, Any], where: str, name: str, task: str) -> Trajectory:
    history = record["trajectory"]
    states = [history[key] for key in sorted(history, key=lambda key: int(key.removeprefix("step")))]
    mask = lm.tokens.mask
    if any(token != mask for token in states[0]):
        raise TadError(f"{where}: the first state is not all masks ({mask}); is this another model's file?")
    if mask in states[-1]:
        raise TadError(f"{where}: the last state still has masks")
    reveal = [0] * len(states[0])
    step = 0
    for before, after in pairwise(states):
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        if any(before[i] != mask for i in changed):
            raise TadError(f"{where}: a token changes after its reveal")
        for position in changed:  # several at once follow each other from left to right
            step += 1
            reveal[position] = step
    prompt = record.get("prompt")
    if not isinstance(prompt, str):
        raise TadError(f"{where}: field 'prompt' is missing")
    ids = lm.encode_text(prompt, allow_special=True)
    nan = [float("nan")] * len(reveal)
    return Trajectory(
        id=f"{name}#0",
        task=task,
        example=name,
        sample=0,
        level=None,
        seed=0,
        plain_ids=ids,
        privileged_ids=ids,
        tokens=states[-1],
        reveal=reveal,
        n_real=len(reveal),
        teacher_confidence=nan,
        student_confidence=nan,
        correct=True,
        reason="imported",
        extracted=None,
        reference="none",
    )
