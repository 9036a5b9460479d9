"""The small study of data/analysis.json on disk: a base with two decoders, a student of two training seeds, one of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval_world import made_row

from tad.decoding import get_decoder
from tad.decoding.decoders import describe, parameters
from tad.evaluation import Results
from tad.evaluation.results import RunMeta
from tad.runs.record import write_record

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "analysis.json").read_text())
TASKS, N = ("word", "math"), 30


def write_golden(root: Path, records: bool = True) -> Path:
    """Runs under evaluation/MODEL-SEED; with `records`, the students' trainings beside them."""
    for run in GOLDEN["runs"]:
        label = run["model"] if run["seed"] is None else f"{run['model']}-seed{run['seed']}"
        own = {} if run["threshold"] is None else {"threshold": run["threshold"]}
        adapter = None if run["model"] == "base" else root / "students" / label / "adapter"
        if adapter is not None and records and not adapter.is_dir():
            write_training(adapter.parent, run["model"], run["seed"])
        write_run(
            root / "evaluation" / label / ",".join([run["decoder"], *(f"{k}={v}" for k, v in own.items())]),
            run["decoder"],
            run["rows"],
            adapter,
            **own,
        )
    return root


def write_training(folder: Path, name: str, seed: int, **changes: Any) -> None:
    """A record of a training that is over."""
    (folder / "adapter").mkdir(parents=True)
    recipe = {
        "name": f"{name}-seed{seed}",
        "seed": seed,
        "objective": {"name": "tad", "window": name},
        "learning": {"steps": 400},
    }
    facts = {"steps": 400, "fingerprints": {"model": "f00d"}, "trajectories": 300}
    write_record(
        folder,
        recipe | {k: v for k, v in changes.items() if k in recipe},
        finished=True,
        **(facts | {k: v for k, v in changes.items() if k in facts}),
    )


def write_run(
    folder: Path, decoder: str, rows: list[list[Any]], adapter: Path | None = None, **settings: Any
) -> Results:
    """A run with these rows: task, number, whether right, tokens, forwards."""
    chosen = get_decoder(decoder, "llada", **settings)
    tasks = list(dict.fromkeys(row[0] for row in rows))
    facts = {"split": "test", "limit": None, "sample": None, "templates": ["tad"], "options": {}}
    meta = RunMeta(
        model="f00d",
        adapter=None if adapter is None else f"weights of {adapter.parent.name}",
        tokenizer="t",
        family="llada",
        dtype="float32",
        decoder={"name": decoder, **describe(chosen), **parameters(chosen)},
        gen_length=96,
        seed=0,
        tasks=[
            {"name": task, **facts, "examples": sum(row[0] == task for row in rows), "digest": task}
            for task in tasks
        ],
        source={"model": "nano-llada", "adapter": None if adapter is None else str(adapter)},
    )
    made = [
        made_row(
            task=task,
            id=str(number),
            question=f"{task}{number}",
            correct=bool(right),
            tokens=tokens,
            tokens_all=96,
            forwards=forwards,
        )
        for task, number, right, tokens, forwards in rows
    ]
    results = Results.open_or_create(folder, meta)
    results.settle([row.key for row in made], made)
    return results
