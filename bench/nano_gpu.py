"""Train and decode one base model in a single call on a machine with a GPU, and pack the results into few files.

    python bench/nano_gpu.py RECIPE DEST --minutes 4 [--count 1024] [--override section.field=value ...]

DEST gets NAME.tar.gz (model, log, record, texts) in parts of at most 15 MB: join with `cat NAME.tar.gz.* | tar xz`.
Needs neither the command line's packages nor a sandbox; grade afterwards with nano_eval.py.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

from nano_eval import decode_all
from tad.config import load_recipe
from tad.nano.pretrain import LOG, RESULT, pretrain
from tad.nano.recipe import PretrainRecipe
from tad.training.record import RECORD

PART = 15 * 2**20


def pack(work: Path, name: str, dest: Path) -> None:
    archive = work / f"{name}.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for part in (RESULT, LOG, RECORD, "eval"):
            if (work / part).exists():
                tar.add(work / part, f"{name}/{part}")
    data = archive.read_bytes()
    dest.mkdir(parents=True, exist_ok=True)
    for i in range(0, len(data), PART):
        (dest / f"{name}.tar.gz.{i // PART}").write_bytes(data[i : i + PART])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("dest", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--count", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--work", type=Path, default=Path("/tmp/nano-run"))
    parser.add_argument("--override", action="append", default=[])
    parser.add_argument("--split", default="test")
    options = parser.parse_args()
    recipe = load_recipe(PretrainRecipe, options.recipe, options.override)
    work = options.work / recipe.name
    pretrain(recipe, work, max_minutes=options.minutes, quiet=True)
    for line in (work / LOG).read_text(encoding="utf-8").splitlines()[:: max(1, 4000 // recipe.log_every)]:
        print(line)
    print((work / LOG).read_text(encoding="utf-8").splitlines()[-1])
    pack(work, recipe.name, options.dest)  # before decoding, so that a late failure loses nothing
    device = "cuda" if torch.cuda.is_available() else None
    decode_all(work / RESULT, work / "eval", options.count, options.batch_size, device, options.split)
    pack(work, recipe.name, options.dest)


if __name__ == "__main__":
    main()
