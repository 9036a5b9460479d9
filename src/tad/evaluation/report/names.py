"""Who made an evaluation run: which base, and which student of it, trained with which seed.

Runs name weights by path and fingerprint. People read names: a student is called after its recipe, and training runs that
differ in their seed alone are one student.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tad.errors import TadError
from tad.evaluation.report.data import Run, Training, read_training
from tad.evaluation.results import RunMeta
from tad.training.distill import ADAPTER, MODEL
from tad.training.record import RECORD

BASE = "base"


@dataclass(frozen=True)
class Who:
    """`model` is 'base', or a student's name within its base's part of the report."""

    base: str  # fingerprint
    model: str
    seed: int | None = None  # of the training

    @property
    def is_student(self) -> bool:
        return self.model != BASE


def name_bases(runs: Sequence[Run], trainings: Sequence[Training]) -> dict[str, str]:
    """Fingerprint -> name, each name once: the dtype tells copies of one model apart, else the fingerprint does."""
    named: dict[str, tuple[str, str]] = {}
    for run in sorted(runs, key=lambda run: run.meta.adapter is not None):  # plain ones know the name best
        training = find_training(run.meta, trainings)
        full = run.meta.adapter is None and training is not None
        source = training.recipe.get("model") if full and training else run.meta.source["model"]
        named.setdefault(base_of(run.meta, training), (path_name(str(source)), run.meta.dtype))
    names = {key: name for key, (name, _) in named.items()}
    for finer in (lambda key: f"{named[key][0]} ({named[key][1]})", lambda key: f"{named[key][0]} ({key})"):
        for key in names:
            if sum(other == names[key] for other in names.values()) > 1:
                names = {k: finer(k) if named[k][0] == named[key][0] else name for k, name in names.items()}
                break
    return names


def name_runs(runs: Sequence[Run], trainings: Sequence[Training], bases: dict[str, str]) -> list[Who]:
    """Who made each run, in the order of the runs."""
    owners = [find_training(run.meta, trainings) for run in runs]
    labels = _student_labels([owner for owner in owners if owner is not None])
    found = []
    for run, owner in zip(runs, owners, strict=True):
        base = base_of(run.meta, owner)
        if run.meta.adapter is None and owner is None:
            found.append(Who(base, BASE))
            continue
        source = str(run.meta.source["adapter"] or run.meta.source["model"])
        label, seed = _unseeded(path_name(source)) if owner is None else (labels[owner.series], owner.seed)
        found.append(Who(base, label.removeprefix(f"{bases[base]}-") or label, seed))
    return found


def base_of(meta: RunMeta, training: Training | None) -> str:
    """The fingerprint of the base: of a model that was trained whole, its record knows it."""
    if meta.adapter is None and training is not None:
        return str(training.facts.get("fingerprints", {}).get("model", meta.model))
    return meta.model


def find_training(meta: RunMeta, trainings: Sequence[Training]) -> Training | None:
    """The training run that the adapter, or the model trained whole, came from; None for a base."""
    source = meta.source["adapter"] or meta.source["model"]
    if not source:
        return None
    path = Path(str(source))
    folder = path.parent if path.name in (ADAPTER, MODEL) else path
    for training in trainings:
        if training.folder.resolve() == folder.resolve():
            return training if _is_student(training, meta) else None
    # Directories may have been moved together: the last two names still fit.
    for training in trainings:
        if training.folder.resolve().parts[-2:] == folder.parts[-2:] and _is_student(training, meta):
            return training
    if (folder / RECORD).is_file():
        try:
            training = read_training(folder, [])
        except TadError:
            return None
        return training if _is_student(training, meta) else None
    return None


def _is_student(training: Training, meta: RunMeta) -> bool:
    """A base that was pretrained here has a training run too, and is a base all the same."""
    return "objective" in training.recipe or meta.adapter is not None


def _student_labels(owners: Sequence[Training]) -> dict[str, str]:
    """Series -> the recipe's name without its seed; the directory's where two series share a name."""
    labels: dict[str, str] = {}
    for owner in owners:
        labels.setdefault(owner.series, _unseeded(owner.name)[0])
    for owner in owners:
        label = labels[owner.series]
        if list(labels.values()).count(label) > 1:
            labels[owner.series] = _unseeded(owner.folder.name)[0]
    return labels


def _unseeded(name: str) -> tuple[str, int | None]:
    """'speed-seed2' as 'speed' and 2."""
    found = re.fullmatch(r"(.+?)[-_., ]*seed[-_= ]?(\d+)", name)
    return (found[1], int(found[2])) if found else (name, None)


def shorten(task: str) -> str:
    """A task's name; of a file of one's own, the file's."""
    return Path(task.partition(":")[2]).name if task.startswith("jsonl:") else task


def path_name(source: str) -> str:
    """The last part of a path that says something."""
    path = Path(source)
    return path.parent.name if path.name in (ADAPTER, MODEL) and path.parent.name else path.name
