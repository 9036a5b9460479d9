"""The factorization gap of a model, before and after distillation.

    tad collect collect-nano-llada --out runs/gap 'tasks=[{name: nano-word, split: test, limit: 32}, {name: nano-math, split: test, limit: 32}]'
    python bench/factorization.py runs/gap --model nano-llada --adapter nano-llada-quality --adapter nano-llada-speed

For a state of a trajectory, the K masks that the teacher reveals next are unmasked one after the other in the teacher's order,
each token drawn from the model; that is the model's joint over them, by the chain rule. The gap is

    KL(joint || product of marginals) = sum_k E_{x_<k} KL(p(x_k | state, x_<k) || p(x_k | state))

with every inner KL exact and `--samples` draws of x_<k. Beside it stand the entropy of the joint, since a model that is sure
of everything has no gap, and the *transfer* of the paper's theorem: sum_k E KL(p_base(x_k | state, x_<k) || p_model(x_k | state)),
x_<k drawn from the base: what TAD minimises. Nats per state, +- the standard error over trajectories.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from machine import write_markdown
from tad.decoding.canvas import left_pad
from tad.models import LM, load
from tad.trajectories.partition import state
from tad.trajectories.store import Trajectory, TrajectoryStore
from tad.trajectories.window import spread_rows

Item = tuple[int, Trajectory, int]  # index of the trajectory, the trajectory, the step of its state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--adapter", action="append", default=[], help="a student; may be given several times"
    )
    parser.add_argument("--near", type=int, nargs="+", default=[2, 4, 8], help="how many masks: K")
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--states", type=int, default=4, help="per trajectory")
    parser.add_argument("--samples", type=int, default=4, help="draws of x_<k per state")
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = spread_rows(TrajectoryStore.open(options.store), options.trajectories)
    base = load(options.model)
    items = draw_states(rows, options.states, max(options.near), base.tokens.ends)
    print(
        f"{len(rows)} trajectories, {len(items)} states with {max(options.near)} masks of the answer left",
        flush=True,
    )
    table = []
    for adapter in [None, *options.adapter]:
        model = base if adapter is None else load(options.model, adapter=adapter, merge=True)
        gap, entropy, transfer = (np.zeros((len(items), max(options.near))) for _ in range(3))
        for low in range(0, len(items), options.batch):
            part = slice(low, low + options.batch)
            gap[part], entropy[part] = measure(model, model, items[part], options.samples, max(options.near))
            transfer[part] = measure(base, model, items[part], options.samples, max(options.near))[0]
        for near in options.near:
            cells = [average(values[:, :near].sum(1), items) for values in (gap, entropy, transfer)]
            table.append([adapter or options.model, str(near), *cells])
    columns = ["model", "K", "gap", "entropy of the joint", "transfer from the base"]
    print(write_markdown("nats per state", columns, table))


def draw_states(rows: Sequence[Trajectory], states: int, near: int, ends: Sequence[int]) -> list[Item]:
    """Random states of each trajectory that have `near` masks of the answer left, end filler aside."""
    random, found = np.random.default_rng(0), []
    for index, row in enumerate(rows):
        last = row.n_real - near
        if last >= 1:
            steps = random.choice(last + 1, size=min(states, last + 1), replace=False)
            found += [(index, row, int(step)) for step in sorted(steps)]
    return sorted(found, key=lambda item: len(item[1].plain_ids))


@torch.inference_mode()
def measure(source: LM, target: LM, items: Sequence[Item], samples: int, near: int) -> tuple[Tensor, Tensor]:
    """Of `near` masks in the teacher's order: KL(source given the earlier ones || target given the state), and the source's entropy. [states, near]"""
    items = [item for item in items for _ in range(samples)]
    tokens = torch.tensor([row.tokens for _, row, _ in items])
    reveal = torch.tensor([row.reveal for _, row, _ in items])
    step = torch.tensor([[step] for _, _, step in items])
    answer = state(tokens, reveal, step, source.tokens.mask)
    places = (reveal - step).masked_fill(reveal <= step, 10**6).argsort(1)[:, :near]  # [states, near]
    prompts = [row.plain_ids for _, row, _ in items]
    marginal = log_probabilities(target, prompts, answer, places)  # [states, near, vocabulary]
    kl, entropy = [], []
    for k in range(near):
        place = places[:, k : k + 1]
        conditional = log_probabilities(source, prompts, answer, place)[:, 0]
        kl.append((conditional.exp() * (conditional - marginal[:, k])).sum(-1))
        entropy.append(-(conditional.exp() * conditional).sum(-1))
        answer = answer.scatter(1, place, torch.multinomial(conditional.exp(), 1).cpu())
    per_state = [torch.stack(values, 1).view(-1, samples, near).mean(1).cpu() for values in (kl, entropy)]
    return per_state[0], per_state[1]


def log_probabilities(lm: LM, prompts: Sequence[Sequence[int]], answer: Tensor, places: Tensor) -> Tensor:
    """[rows, m, vocabulary] at `places` [rows, m] of the answers [rows, length] after their prompts. The mask token is never predicted."""
    canvas, pad = left_pad(prompts, answer.shape[1], lm.tokens)
    start = canvas.shape[1] - answer.shape[1]
    canvas[:, start:] = answer
    pad = pad[:, None].to(lm.device)
    column = torch.arange(canvas.shape[1], device=lm.device)
    logits = lm.model(
        canvas.to(lm.device),
        position_ids=(column - pad).clamp(min=0),
        mask=lm.model.attention_mask(column - pad, start - pad, real=column >= pad),
        logits_at=(places + start - lm.family.logit_shift).to(lm.device),
    ).logits.float()
    logits[..., lm.tokens.mask] = -30.0
    return logits.log_softmax(-1)


def average(values: np.ndarray, items: Sequence[Item]) -> str:
    """Mean over states, and its standard error with trajectories as the unit."""
    owner = np.array([index for index, _, _ in items])
    means = np.array([values[owner == one].mean() for one in np.unique(owner)])
    return f"{means.mean():.3f} ± {means.std(ddof=1) / len(means) ** 0.5:.3f}"


if __name__ == "__main__":
    main()
