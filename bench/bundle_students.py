"""Put the students of a study into the package: adapter in bf16 (as it was measured), run record, card.

    python bench/bundle_students.py runs/study-nano-llada study-nano-llada [--seed 0]

Takes the methods tad-quality and tad-speed at one training seed, and writes src/tad/bundled/BASE-quality and BASE-speed.
The numbers of the card are the study's: all seeds, test problems.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tad.config import load_recipe
from tad.errors import TadError
from tad.evaluation.analysis import ResultTable
from tad.evaluation.study import Study, StudyRecipe
from tad.evaluation.study.pool import find_result
from tad.evaluation.tables import as_markdown
from tad.models.checkpoint import BUNDLED
from tad.models.lora import CONFIG, WEIGHTS
from tad.training.record import RECORD

NAMES = {"tad-quality": "quality", "tad-speed": "speed"}
# What a record says of the machine's folders is of no use elsewhere.
_DROPPED = ("argv", "threads")


def bundle(study: Study, seed: int) -> None:
    table = study.tables()[0]
    for method, name in NAMES.items():
        cell = next(
            cell
            for _, found, number, get in study.cells()
            if found == method and number == seed and (cell := get()) is not None and cell.trial is None
        )
        folder = study.student_folder(cell)
        result = find_result(folder) if folder is not None else None
        if folder is None or result is None:
            raise TadError(f"{method}: seed {seed} has no adapter in {study.out}; pack it with --keep")
        dest = BUNDLED / f"{study.recipe.model}-{name}"
        shutil.rmtree(dest, ignore_errors=True)
        dest.mkdir()
        shutil.copy(result / CONFIG, dest / CONFIG)
        weights = {key: value.to(torch.bfloat16) for key, value in load_file(result / WEIGHTS).items()}
        save_file(weights, dest / WEIGHTS, {"format": "pt"})
        (dest / WEIGHTS).chmod(0o644)
        record = clean(json.loads((folder / RECORD).read_text(encoding="utf-8")))
        (dest / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        (dest / "README.md").write_text(write_card(study, table, method, record), encoding="utf-8")
        print(f"{dest}: {sum(path.stat().st_size for path in dest.iterdir()) / 1e6:.2f} MB")


def clean(record: dict[str, Any]) -> dict[str, Any]:
    """Without the folders of the machine where it was made."""
    for call in record["calls"]:
        for key in _DROPPED:
            call.pop(key, None)
        for store in call["stores"]:
            store["folder"] = Path(store["folder"]).name
    record["recipe"]["trajectories"] = [Path(path).name for path in record["recipe"]["trajectories"]]
    return record


def write_card(study: Study, table: ResultTable, method: str, record: dict[str, Any]) -> str:
    base, name, call = study.recipe.model, NAMES[method], record["calls"][-1]
    learning = record["recipe"]["learning"]
    wanted = (study.recipe.base, study.recipe.baseline, "base-tad", method)
    shown = replace(table, title="Measured", rows=[row for row in table.rows if row.method in wanted])
    return f"""---
license: apache-2.0
library_name: peft
base_model: {base}
tags: [diffusion-language-model, lora]
---
# {base}-{name}

The {name.capitalize()} student of [{base}](../{base}): a LoRA adapter of rank {record["recipe"]["adapter"]["rank"]} on all seven projections, stored in bf16.

    import tad
    lm = tad.load("{base}", adapter="{base}-{name}")

## Training
TAD on {call["trajectories"]:,} privileged trajectories, window {call["objective"]["window"]} ({name}, measured), lambda {call["objective"]["lambda_"]:g}, {record["recipe"]["states"]} states per trajectory and
epoch, {call["steps"]} steps of {record["recipe"]["batch"]["size"]} states, rate {learning["lr"]:g} (of two tried on validation problems), seed {record["recipe"]["seed"]}, {call["minutes"]:.1f} minutes on one {call["device"]}
that other jobs shared. `tad distill {base}-{name}` is the recipe, `run.json` the record.

{as_markdown(shown).replace("### ", "## ", 1)}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, help="the directory of the study")
    parser.add_argument("recipe")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bundle(Study(load_recipe(StudyRecipe, options.recipe), options.study), options.seed)


if __name__ == "__main__":
    main()
