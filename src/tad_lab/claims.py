"""`make check-claims`: the bundled models again, problem by problem, against the rows in results/claims.json.gz.

    python -m tad_lab.claims                       # about ten minutes of two CPU cores
    python -m tad_lab.claims --only nano-llada-speed
    python -m tad_lab.claims --record              # makes the file anew

Greedy decoding in fp32 on a CPU: the same problems, the same tokens, as many forwards, the same verdict. Another processor
may round otherwise, and a token whose two best logits lie within rounding then differs; the check says how many rows do, and
fails where they are more than a few or where accuracy or speed move. Without a sandbox programs get no new verdict: equal
tokens have the stored one.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tad_lab.results import Shown, read, show, write

NAME = "claims"
LENGTH = 96
FAMILIES = ("nano-word", "nano-math", "nano-code")
# What another processor's rounding may do before the check fails.
ROWS, POINTS, SHARE = 0.98, 1.0, 0.01


@dataclass(frozen=True)
class Claim:
    """A model with a decoder on the first `size` test problems of each family."""

    name: str
    title: str
    model: str
    adapter: str | None = None
    decoder: str | None = None  # the directory's own by default
    settings: dict[str, Any] = field(default_factory=dict)
    size: int = 100


def _list() -> Iterator[Claim]:
    for base in ("nano-llada", "nano-dream"):
        yield Claim(f"{base}-one-by-one", "base, one token per forward", base, decoder="one-by-one", size=30)
        yield Claim(f"{base}-fast-dllm", "Fast-dLLM, 0.9", base, None, "fast-dllm", {"threshold": 0.9})
        yield Claim(f"{base}-tad", "base, TAD's decoder, 0.5", base, None, "tad", {"threshold": 0.5})
        yield Claim(f"{base}-quality", "TAD-Q", base, f"{base}-quality")
        yield Claim(f"{base}-speed", "TAD-S", base, f"{base}-speed")
        yield Claim(f"{base}-ltr", "left to right, rounds, its own decoder", base, f"{base}-ltr")
    settings = {"threshold": 0.3}
    yield Claim(
        "nano-llada-leftmost", "base, always the leftmost, 0.3", "nano-llada", None, "tad-leftmost", settings
    )
    base = "nano-fast-dllm-v2"
    yield Claim(base, "Fast-dLLM v2", base, None, "fast-dllm-v2", {"threshold": 0.9})
    yield Claim(f"{base}-ltr", "left to right, rounds, its own decoder", base, f"{base}-ltr")


CLAIMS = {claim.name: claim for claim in _list()}
Made = dict[str, Any]


def decode_claim(name: str) -> Made:
    """Decode and grade one claim in this process, on one thread."""
    import torch

    import tad
    from tad.errors import TadError
    from tad.evaluation.questions import Questions
    from tad.evaluation.recipe import EvalRecipe, list_tasks
    from tad.evaluation.run import Identity, Runner
    from tad.runs.fingerprint import short_digest

    torch.set_num_threads(1)
    claim = CLAIMS[name]
    lm = tad.load(claim.model, adapter=claim.adapter, device="cpu", merge=claim.adapter is not None)
    decoder, _, settings = lm.defaults.fill(claim.decoder, LENGTH, claim.settings)
    recipe = EvalRecipe(
        model=claim.model,
        adapter=claim.adapter,
        tasks=list_tasks(FAMILIES, "test", claim.size),
        decoder=decoder,
        settings=settings,
        gen_length=LENGTH,
        batch_size=4,
        graders=1,
    )
    questions = Questions(recipe.tasks)
    identity = Identity.of(lm)
    rows = [row for batch in Runner(lm, recipe, identity).run(questions.items) for row in batch]
    graded = True
    try:
        rows = questions.grade(rows, 1)
    except TadError:  # no sandbox here: what needs none is graded
        graded = False
        rows = questions.grade(rows, 1, [task for task in FAMILIES if task != "nano-code"])
    order = {item.key: place for place, item in enumerate(questions.items)}
    rows.sort(key=lambda row: order[row.key])
    return {
        "name": name,
        "title": claim.title,
        "model": claim.model,
        "adapter": claim.adapter,
        "decoder": recipe.decoder,
        "settings": settings,
        "fingerprints": {"model": identity.model, "adapter": identity.adapter},
        "graded": graded,
        "columns": ["task", "id", "question", "correct", "tokens", "forwards", "answer"],
        "rows": [
            [row.task, row.id, row.question, None if row.correct is None else int(row.correct), row.tokens,
             row.forwards, short_digest(row.ids)]
            for row in rows
        ],
    }  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A claim made again beside the stored one."""

    made: Shown
    stored: Shown
    rows: int
    identical: int  # same problem, tokens, forwards and verdict

    @property
    def agrees(self) -> bool:
        close = abs(self.made.accuracy - self.stored.accuracy) <= POINTS
        fast = abs(self.made.tpf / self.stored.tpf - 1) <= SHARE
        return self.identical == self.rows or (self.identical >= ROWS * self.rows and close and fast)


def compare(made: Made, stored: Made) -> Compared:
    """Row by row. A row without a verdict of its own takes the stored one where the tokens are the same."""
    rows, identical = [], 0
    kept = {(row[0], row[1]): row for row in stored["rows"]}
    for row in made["rows"]:
        other = kept.get((row[0], row[1]))
        mine = list(row)
        if other is not None and row[3] is None and row[4:] == other[4:]:
            mine[3] = other[3]
        rows.append(mine)
        identical += mine == other
    return Compared(show(made | {"rows": rows}), show(stored), len(stored["rows"]), identical)


def make(names: Sequence[str], workers: int) -> Iterator[Made]:
    """Claims as they are done, the slowest first, in so many processes."""
    order = sorted(names, key=lambda name: ("one-by-one" not in name, "fast-dllm" not in name, name))
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that follow
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(decode_claim, order)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(CLAIMS), default=list(CLAIMS), metavar="NAME")
    parser.add_argument("--record", action="store_true", help="write the file instead of comparing with it")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="the folder with claims.json.gz"
    )
    options = parser.parse_args(words)
    began = time.monotonic()
    if options.record:
        every = {one["name"]: one for one in make(options.only, options.workers)}
        write(
            options.results, NAME, "python -m tad_lab.claims --record", {name: every[name] for name in CLAIMS if name in every},
        )  # fmt: skip
        print(f"written: {options.results / NAME}.json.gz")
        return 0
    stored = read(options.results, NAME)["entries"]
    failed = 0
    print(f"{'claim':32} {'here':>22} {'stored':>22}  identical rows", flush=True)
    for made in make(options.only, options.workers):
        found = compare(made, stored[made["name"]])
        failed += not found.agrees
        mark = "" if found.agrees else "  DIFFERS"
        print(
            f"{made['name']:32} {found.made.text:>22} {found.stored.text:>22}  {found.identical} of {found.rows}{mark}",
            flush=True,
        )
    minutes = math.ceil((time.monotonic() - began) / 60)
    print(
        f"{len(options.only) - failed} of {len(options.only)} claims agree with {options.results / NAME}.json.gz ({minutes} min)"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
