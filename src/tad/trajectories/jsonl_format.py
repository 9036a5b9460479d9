"""The JSONL format of the published trainer: one object per trajectory, with every intermediate state written out.

`prompt` (templated, without the reference), `groundtruth` (the reference that its teacher is shown) and `trajectory` {step0:
ids, step1: ids, ...}. Written from a store, and read into one: prompts of one user turn, the reference in a system turn as
that trainer shows it, without confidences and verdicts, which the format does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tad.errors import TadError
from tad.models import LM
from tad.models.tokenizer import render_chat
from tad.tasks.source import Row, read_rows
from tad.trajectories.mix import list_references
from tad.trajectories.partition import state
from tad.trajectories.recipe import CollectRecipe
from tad.trajectories.store import ShardStats, StoreMeta, Trajectory, TrajectoryStore

_QUESTION = "QUESTION"  # stands for the user's turn in a rendered chat


def export_rows(lm: LM, store: TrajectoryStore, data_dir: str | None = None) -> Iterable[dict[str, Any]]:
    """The store's rows in the published format. References are read from the data, since a store keeps only their ids."""
    references: dict[str, str] = {}
    store.check_graded()
    if "imported" in store.meta.recipe:
        raise TadError(
            f"{store.folder}: was imported from {store.meta.recipe['imported']}, which has this format"
        )
    if store.meta.recipe.get("privileged"):
        if store.meta.recipe.get("reference") == "majority":
            raise TadError(
                f"{store.folder}: references by majority are not kept as text; export needs gold ones"
            )
        values = {**store.meta.recipe, "model": lm.source, "data_dir": data_dir}
        references = list_references(CollectRecipe.model_validate(values))
    for row in store.rows():
        if references and row.example not in references:
            raise TadError(
                f"{store.folder}: example {row.example} is not in the data; name it with --data-dir"
            )
        tokens, reveal = torch.tensor(row.tokens), torch.tensor(row.reveal)
        yield {
            "id": row.id,
            "prompt": lm.decode(row.plain_ids, skip_special=False),
            "groundtruth": references.get(row.example, ""),
            "output_text": lm.decode(row.tokens),
            "trajectory": {
                f"step{s}": state(tokens, reveal, s, lm.tokens.mask).tolist()
                for s in range(max(row.reveal) + 1)
            },
        }


def import_rows(lm: LM, path: Path, folder: Path) -> TrajectoryStore:
    """A new store of the trajectories in a file of the published format."""
    rows = [_read_row(lm, row) for row in read_rows(path)]
    lengths = {len(row.tokens) for row in rows}
    if len(lengths) != 1:
        raise TadError(f"{path}: trajectories should be of one length, these are of {sorted(lengths)}")
    meta = StoreMeta.of(
        lm,
        gen_length=lengths.pop(),
        examples=len(rows),
        shards=1,
        recipe={
            "imported": path.name,
            "prompt": "system",
            "privileged": all(row.privileged_ids for row in rows),
        },
    )
    store = TrajectoryStore.open_or_create(folder, meta)
    with store.writing():
        steps = sum(row.n_real for row in rows)
        store.write(0, rows, ShardStats(len(rows), len(rows), 0, {}, steps, 0, {}, ungraded=len(rows)))
    return store


def _read_row(lm: LM, row: Row) -> Trajectory:
    where, prompt, reference = row.place, row.text("prompt"), row.text("groundtruth")
    states = _read_states(row["trajectory"], where)
    length, tokens = len(states[0]), states[-1]
    if lm.tokens.mask in tokens:
        raise TadError(f"{where}: trajectory: its last state still has masks")
    reveal = [
        next(s for s, ids in enumerate(states) if ids[place] != lm.tokens.mask) for place in range(length)
    ]
    end = next((place for place, token in enumerate(tokens) if token in lm.tokens.ends), length - 1)
    name = str(row.get("id", where.rpartition(":")[2]))
    privileged: list[int] = []
    if reference:
        question = {"role": "user", "content": _read_question(lm, prompt, where)}
        privileged = lm.encode([lm.family.reference_turn(reference), question])
    return Trajectory(
        id=name,
        task="imported",
        example=name.partition("#")[0],
        sample=0,
        level=None,
        seed=0,
        plain_ids=lm.encode_text(prompt, allow_special=True),
        privileged_ids=privileged,
        tokens=tokens,
        reveal=reveal,
        n_real=max(reveal[: end + 1]),
        teacher_confidence=[math.nan] * length,
        student_confidence=[math.nan] * length,
        correct=None,
        reason="imported",
        extracted=None,
        reference="gold" if reference else "none",
    )


def _read_states(trajectory: Any, where: str) -> list[list[int]]:
    """The states in order: lists of token ids of one length."""
    if not isinstance(trajectory, dict) or set(trajectory) != {f"step{s}" for s in range(len(trajectory))}:
        raise TadError(f"{where}: trajectory: should map step0, step1, ... to token ids")
    states = [trajectory[f"step{s}"] for s in range(len(trajectory))]
    whole = states and all(isinstance(ids, list) and ids and set(map(type, ids)) == {int} for ids in states)
    if not whole or len({len(ids) for ids in states}) > 1:
        raise TadError(f"{where}: trajectory: every state should be a list of token ids, all of one length")
    return states


def _read_question(lm: LM, prompt: str, where: str) -> str:
    """The user's turn of a templated prompt."""
    rendered = render_chat(lm.tokenizer, lm.family, [{"role": "user", "content": _QUESTION}])
    before, _, after = rendered.rpartition(_QUESTION)
    bos = lm.tokenizer.bos_token or "" if lm.tokenizer is not None else ""
    body = prompt.removeprefix(bos)
    before = before.removeprefix(bos)
    if not (body.startswith(before) and body.endswith(after)):
        raise TadError(
            f"{where}: prompt: should be one user turn in the model's chat format, to put the reference before it"
        )
    return body[len(before) : len(body) - len(after)]
