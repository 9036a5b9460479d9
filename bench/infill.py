"""Text that is not written from left to right: the middle of a worked-out answer, given its question and both ends.

    python bench/infill.py nano-llada --adapters nano-llada-quality runs/x/students/ltr-round4/adapter --size 512

A share of every test answer's tokens around its middle is masked. The model fills it in three ways: the surest position first,
one per forward (`any order`), the leftmost first (`left to right`), and every position whose entropy is below --threshold, at
least the surest (`parallel`). An answer is *sound* if all its calculations are true and the last one gives the number at its end;
*recovered* are the masked tokens that are as they were (an answer can be worded in other ways, so not all need be).
Standard errors are over problems.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import tad
from tad.models import LM
from tad.runs.record import describe_machine
from tad.tasks import get_task
from tad.trajectories.privileged import plain_ids

ORDERS = ("any order", "left to right", "parallel")
_CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
_RESULT: dict[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
}  # fmt: skip


@dataclass(frozen=True)
class Gap:
    """A problem with a hole: all token ids, where the answer begins, and which part of it is masked."""

    ids: list[int]
    start: int
    low: int
    high: int
    answer: int


@dataclass(frozen=True)
class Filled:
    """One model filling in one way. Shares of problems and of masked tokens, and masked tokens per forward."""

    model: str
    order: str
    problems: int
    sound: float
    sound_se: float
    recovered: float
    tokens_per_forward: float


def make_gaps(lm: LM, size: int, share: float) -> list[Gap]:
    task = get_task("nano-word", size=size)
    found = []
    for example in task.examples("test"):
        answer = lm.encode_text(str(example.meta["solution"]))
        width = max(1, round(share * len(answer)))
        low = (len(answer) - width) // 2
        prompt = plain_ids(lm, task, example)
        found.append(
            Gap(
                [*prompt, *answer, lm.tokens.ends[-1]],
                len(prompt),
                len(prompt) + low,
                len(prompt) + low + width,
                int(str(example.answer)),
            )
        )
    return sorted(found, key=lambda gap: len(gap.ids))


def is_sound(text: str, answer: int) -> bool:
    """Whether all calculations are true and the last one gives the answer."""
    found = _CALCULATION.findall(text)
    true = all(b != "0" and _RESULT[sign](int(a), int(b)) == int(c) for a, sign, b, c in found)
    return bool(found) and true and int(found[-1][3]) == answer


@torch.inference_mode()
def fill(lm: LM, gaps: list[Gap], order: str, threshold: float) -> tuple[list[list[int]], int]:
    """The ids with their gaps filled, and the forwards of all rows."""
    width, forwards = max(len(gap.ids) for gap in gaps), 0
    ids = torch.full((len(gaps), width), lm.tokens.eos)
    for row, gap in enumerate(gaps):
        ids[row, : len(gap.ids)] = torch.tensor(gap.ids)
        ids[row, gap.low : gap.high] = lm.tokens.mask
    ids = ids.to(lm.device)
    column = torch.arange(width, device=lm.device)
    real = column < torch.tensor([[len(gap.ids)] for gap in gaps], device=lm.device)
    prompt = torch.tensor([[gap.start] for gap in gaps], device=lm.device)
    while (masked := ids == lm.tokens.mask).any():
        forwards += int(masked.any(1).sum())
        positions = column.expand_as(ids)
        logits = lm.model(ids, mask=lm.model.attention_mask(positions, prompt, real)).logits.float()
        if lm.family.logit_shift:  # position i is predicted where i - 1 stands
            logits = logits.roll(1, dims=1)
        logits[..., lm.tokens.mask] = -torch.inf
        chosen = choose(logits, masked, order, threshold)
        ids[chosen] = logits.argmax(-1)[chosen]
    return [row[: len(gap.ids)] for row, gap in zip(ids.tolist(), gaps, strict=True)], forwards


def choose(logits: Tensor, masked: Tensor, order: str, threshold: float) -> Tensor:
    """[rows, width] bool: the masks that are revealed now."""
    rows = masked.any(1)
    if order == "left to right":
        best = masked.float().argmax(1)
    else:
        best = logits.softmax(-1).amax(-1).where(masked, -1.0).argmax(1)
    chosen = torch.zeros_like(masked)
    chosen[rows, best[rows]] = True
    if order == "parallel":
        entropy = torch.distributions.Categorical(logits=logits.clamp(min=-1e4)).entropy()
        chosen |= masked & (entropy < threshold)
    return chosen


def measure(lm: LM, name: str, gaps: list[Gap], order: str, threshold: float, batch: int) -> Filled:
    sound = recovered = masks = forwards = 0
    for low in range(0, len(gaps), batch):
        some = gaps[low : low + batch]
        rows, spent = fill(lm, some, order, threshold)
        forwards += spent
        for gap, row in zip(some, rows, strict=True):
            sound += is_sound(lm.decode(row[gap.start :]), gap.answer)
            recovered += sum(
                a == b for a, b in zip(row[gap.low : gap.high], gap.ids[gap.low : gap.high], strict=True)
            )
            masks += gap.high - gap.low
    n = len(gaps)
    share = sound / n
    return Filled(
        name, order, n, share, math.sqrt(share * (1 - share) / n), recovered / masks, masks / forwards
    )


def main(words: list[str] | None = None) -> list[Filled]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--adapters", nargs="*", default=[], help="students beside the base")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--share", type=float, default=0.5, help="of an answer's tokens that is masked")
    parser.add_argument("--threshold", type=float, default=0.5, help="nats, of `parallel`")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    options = parser.parse_args(words)
    found = []
    print("| model | order | sound, % | recovered, % | masks per forward |\n|---|---|---|---|---|")
    for adapter in (None, *options.adapters):
        lm = tad.load(options.model, adapter=adapter, device=options.device, dtype=options.dtype, merge=True)
        gaps = make_gaps(lm, options.size, options.share)
        for order in ORDERS:
            one = measure(lm, adapter or options.model, gaps, order, options.threshold, options.batch)
            print(
                f"| {one.model} | {order} | {100 * one.sound:.1f} ± {100 * one.sound_se:.1f} | {100 * one.recovered:.1f} "
                f"| {one.tokens_per_forward:.2f} |",
                flush=True,
            )
            found.append(one)
    if options.out is not None:
        record = {"machine": describe_machine(), "options": {k: str(v) for k, v in vars(options).items()}}
        options.out.write_text(json.dumps(record | {"filled": [asdict(one) for one in found]}, indent=1))
    return found


if __name__ == "__main__":
    main()
