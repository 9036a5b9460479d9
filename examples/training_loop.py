"""TAD's objective in a plain PyTorch loop over trajectories: nothing of the trainer, one row at a time.

    python examples/training_loop.py nano-llada runs/trajectories --steps 50 --out runs/plain

Near masks (revealed within the next `window` steps) are learned from the trajectory, distant ones from the teacher, which sees
the reference answer: CE(near) + lambda * KL(teacher || student, distant). `tad distill` does the same in padded batches, with
chunked losses, checkpoints and exact resuming.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import tad
from tad.models import LM
from tad.trajectories.partition import partition, state
from tad.trajectories.store import Trajectory, TrajectoryStore


def answer_logits(lm: LM, prompt: list[int], canvas: Tensor) -> Tensor:
    """[length, vocab]: what predicts each position of the answer. The output of position i - shift predicts token i."""
    ids = torch.cat((torch.tensor(prompt), canvas)).to(lm.device)
    logits = lm.model(ids[None]).logits[0].float()
    start = len(prompt) - lm.family.logit_shift
    return logits[start : start + len(canvas)]


def tad_loss(lm: LM, row: Trajectory, step: int, window: int, weight: float) -> tuple[Tensor, Tensor]:
    """Near cross-entropy and weighted distant KL in one state of a trajectory, means over their masks."""
    tokens, reveal = torch.tensor(row.tokens), torch.tensor(row.reveal)
    near, distant = partition(reveal, step, window)  # [length] each, disjoint
    canvas = state(tokens, reveal, step, lm.tokens.mask)
    student = answer_logits(lm, row.plain_ids, canvas).log_softmax(-1)
    with torch.no_grad(), lm.base():  # the same weights without the adapter
        teacher = answer_logits(lm, row.privileged_ids, canvas).log_softmax(-1)
    near, distant, tokens = (one.to(lm.device) for one in (near, distant, tokens))
    hard = F.nll_loss(student[near], tokens[near], reduction="sum") / near.sum().clamp(min=1)
    kl = F.kl_div(student[distant], teacher[distant], log_target=True, reduction="sum")
    return hard, weight * kl / distant.sum().clamp(min=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("store", help="made by `tad collect`")
    parser.add_argument("--out", type=Path, default=Path("runs/plain"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--window", type=int, default=8, help="what `tad window` measured")
    given = parser.parse_args()
    lm = tad.load(given.model)
    rows = list(TrajectoryStore.open(given.store).rows())
    adapter = lm.attach(rank=16)
    optimizer = torch.optim.AdamW([p for p in lm.model.parameters() if p.requires_grad], lr=1e-3)
    draws = random.Random(0)
    for count in range(1, given.steps + 1):
        row = draws.choice(rows)
        near, distant = tad_loss(lm, row, draws.randrange(row.n_real), given.window, weight=1.0)
        optimizer.zero_grad()
        (near + distant).backward()
        optimizer.step()
        print(f"step {count}: near {near.item():.3f}, distant {distant.item():.3f}")
    adapter.save_pretrained(given.out)
    print(f"adapter: {given.out}")


if __name__ == "__main__":
    main()
