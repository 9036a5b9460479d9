"""Which model made a run: the base, or a student of it, by name, with its training seed.

Runs name weights by path and fingerprint; people read names. Training runs are one student only where everything but the seed
is equal: recipe, data, steps and base, as their records say; without a record, only where the weights are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tad.evaluation.results import RunMeta
from tad.runs.fingerprint import short_digest
from tad.runs.record import ADAPTER, MODEL, last_call, read_record

BASE = "base"
_WHERE = (
    "seed",
    "name",
    "device",
    "workers",
    "report_to",
)  # of a training recipe: what does not make it another method


@dataclass(frozen=True)
class RunLabel:
    """Which model made a run. Runs of one `series` differ in the training seed alone."""

    base: str  # fingerprint
    model: str  # 'base', or the student's name
    series: str
    seed: int | None = None

    @property
    def is_base(self) -> bool:
        return self.model == BASE


def find_training(meta: RunMeta, trainings: Sequence[Path] = ()) -> dict[str, Any] | None:
    """The record of the training that the adapter, or the model trained whole, came from; None for a base.

    It is looked for where the weights were, then among `trainings`: directories may have been moved together, and then the
    last two names still fit.
    """
    source = meta.source["adapter"] or meta.source["model"]
    path = Path(str(source))
    folder = path.parent if path.name in (ADAPTER, MODEL) else path
    moved = (one for one in trainings if one.resolve().parts[-2:] == folder.parts[-2:])
    for place in (folder, *moved):
        record = read_record(place)
        # A base that was pretrained here has a record too, and is a base all the same.
        if "recipe" in record and (meta.adapter is not None or "objective" in record["recipe"]):
            return record
    return None


def training_series(recipe: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """What training runs share that differ in their seed alone; `facts` are of the record's last call."""
    own = {key: value for key, value in recipe.items() if key not in _WHERE}
    data = {key: facts.get(key) for key in ("fingerprints", "stores", "trajectories", "steps")}
    return json.dumps([own, data], sort_keys=True)


def label_runs(metas: Sequence[RunMeta], trainings: Sequence[Path] = ()) -> list[RunLabel]:
    """Which model made each run. A name belongs to one series: where two would share it, their directories tell them apart."""
    labels: list[RunLabel] = []
    sources: dict[str, str] = {}  # series -> where its weights were
    weights: dict[tuple[str, int | None], str] = {}
    for meta in metas:
        record = find_training(meta, trainings)
        if meta.adapter is None and record is None:
            labels.append(RunLabel(meta.model, BASE, meta.model))
            continue
        own = str(meta.adapter or meta.model)
        facts = last_call(record or {})
        base = meta.model if meta.adapter else str(facts.get("fingerprints", {}).get("model", meta.model))
        source = str(meta.source["adapter"] or meta.source["model"])
        name, seed = unseeded(str(meta.source.get("name") or path_name(source)))
        series = own
        if record is not None:
            seed = record["recipe"].get("seed", seed)
            series = f"{base} {training_series(record['recipe'], facts)}"
        if (
            weights.setdefault((series, seed), own) != own
        ):  # the same seed and other weights: something else differs
            series = own
        sources.setdefault(series, source)
        labels.append(RunLabel(base, name, series, seed))
    return _tell_apart(labels, sources)


def _tell_apart(labels: Sequence[RunLabel], sources: Mapping[str, str]) -> list[RunLabel]:
    """With one name per series: the first one's, with more of its path where another series has the same."""
    first: dict[str, str] = {}
    for label in labels:
        first.setdefault(label.series, label.model)
    paths, digests = [], []
    for series, name in first.items():
        parts = [part for part in Path(sources.get(series, name)).parts if part not in (ADAPTER, MODEL, "/")]
        paths.append("/".join(parts[-2:]))
        digests.append(f"{paths[-1]} ({short_digest(series)[:8]})" if series in sources else name)
    names = dict(zip(first, distinguish(list(first.values()), paths, digests), strict=True))
    return [RunLabel(one.base, names[one.series], one.series, one.seed) for one in labels]


def distinguish(names: Sequence[str], *finer: Sequence[str]) -> list[str]:
    """Names, those that several share by their `finer` ones: the first that tell them apart."""
    found = list(names)
    for longer in finer:
        found = [more if found.count(name) > 1 else name for name, more in zip(found, longer, strict=True)]
    return found


def unseeded(name: str) -> tuple[str, int | None]:
    """'speed-seed2' as 'speed' and 2."""
    found = re.fullmatch(r"(.+?)[-_., ]*seed[-_= ]?(\d+)", name)
    return (found[1], int(found[2])) if found else (name, None)


def path_name(source: str) -> str:
    """The last part of a path that says something."""
    path = Path(source)
    return path.parent.name if path.name in (ADAPTER, MODEL) and path.parent.name else path.name


def tell_apart(folders: Sequence[Path]) -> list[str]:
    """The directories' names, each with as many parents as it takes to be the only one of its name."""
    parts = [folder.resolve().parts for folder in folders]
    names = []
    for own in parts:
        depth = 1
        while sum(other[-depth:] == own[-depth:] for other in parts) > 1 and depth < len(own):
            depth += 1
        names.append("/".join(own[-depth:]))
    return names
