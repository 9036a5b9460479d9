"""Pause a pretraining run on a GPU, resume it, and show the losses on both sides of the break.

python bench/resume_gpu.py RECIPE WORK [--minutes 0.8] [--override section.field=value ...]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tad.config import load_recipe
from tad.nano.pretrain import LOG, pretrain
from tad.nano.recipe import PretrainRecipe


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("work", type=Path)
    parser.add_argument("--minutes", type=float, default=0.8)
    parser.add_argument("--override", action="append", default=[])
    options = parser.parse_args()
    recipe = load_recipe(PretrainRecipe, options.recipe, options.override)
    pretrain(recipe, options.work, pause_after=options.minutes, quiet=True)
    lines = (options.work / LOG).read_text(encoding="utf-8").splitlines()
    pretrain(recipe, options.work, resume=True, pause_after=options.minutes, quiet=True)
    after = (options.work / LOG).read_text(encoding="utf-8").splitlines()[len(lines) :]
    print("before:", [(line["step"], round(line["loss"], 4)) for line in map(json.loads, lines[-6:])])
    print("after: ", [(line["step"], round(line["loss"], 4)) for line in map(json.loads, after[:6])])


if __name__ == "__main__":
    main()
