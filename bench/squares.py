"""A task that is not solved from left to right: filling a 5 x 5 Latin square with holes. Which order of trajectories wins there?

    python bench/squares.py --out runs/squares                      # about an hour of one CPU core
    python bench/squares.py --out runs/squares --tiny               # seconds: whether it runs

The question is a square with holes whose completion is unique, the answer the whole square, 25 tokens in reading order. What a
hole must be follows from its row and its column, so some holes are known at once and others only after them, wherever they stand.
No square of the test is the completion of a training question.

A base of 0.5M parameters is trained from scratch on random masks, with and without the reference in the prompt. Then TAD
(near cross-entropy, distant KL to the base that sees the reference) on trajectories of the same questions in three orders: the
privileged teacher's own, from left to right, and the one in which the base without the reference is most confident. Windows are
measured for every order in one way. `random masks` is cross-entropy on random masks of the same texts. All weights are
trained, with one rate and equally many steps and states; the shape and the losses are those of the package. Every student is
decoded one token per forward and at several entropies, with the most confident or the leftmost mask beside them.

Not covered: adapters, rounds, blocks (the answer is one block), other sizes of square.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tad.models import LLADA, MaskedDiffusionModel
from tad.training.losses import plain_losses
from tad.trajectories.partition import partition, state
from tad_lab.results import write

SIDE = 5
CELLS = SIDE * SIDE
HOLE, MASK, SEPARATOR, END = 0, 6, 7, 8  # 1 to 5 are the symbols
VOCAB = 16
ORDERS = ("teacher", "left-to-right", "base")
THRESHOLDS = {"best": (0.05, 0.1, 0.2, 0.3, 0.5, 1.0), "leftmost": (0.1, 0.3, 1.0)}
WINDOW = 8  # the paper's quality window for LLaDA
LEVEL = 0.5  # of confidence: the quality window ends where the curve over steps falls below it


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    width: int = 96
    layers: int = 4
    heads: int = 4
    mlp: int = 256
    holes: int = 15
    train: int = 40_000
    pretrain_steps: int = 3_500
    pretrain_rows: int = 128
    questions: int = 800
    steps: int = 150
    rows: int = 64
    test: int = 400
    seeds: int = 3
    drop_wrong: bool = True


TINY = Sizes(32, 2, 2, 64, 8, 64, 4, 8, 8, 2, 8, 8, 1, drop_wrong=False)


@functools.cache
def all_squares() -> np.ndarray:
    """Every Latin square of symbols 1 to 5: [161280, 25]."""
    rows = np.array(list(itertools.permutations(range(1, SIDE + 1))), dtype=np.int8)
    found = rows[:, None]
    for _ in range(SIDE - 1):
        fits = (found[:, None] != rows[None, :, None]).all((2, 3))
        one, other = fits.nonzero()
        found = np.concatenate([found[one], rows[other, None]], axis=1)
    return found.reshape(-1, CELLS)


def draw(rng: np.random.Generator, holes: int, test: bool) -> tuple[np.ndarray, np.ndarray]:
    """A question and its only answer. A tenth of the squares is the test's."""
    squares = all_squares()
    while True:
        chosen = int(rng.integers(len(squares)))
        if (chosen * 2_654_435_761 % 2**32 < 2**32 // 10) != test:
            continue
        kept = rng.permutation(CELLS)[holes:]
        fits = np.arange(len(squares))
        for cell in kept:
            fits = fits[squares[fits, cell] == squares[chosen, cell]]
        if len(fits) == 1:
            question = np.zeros(CELLS, dtype=np.int64)
            question[kept] = squares[chosen, kept]
            return question, squares[chosen].astype(np.int64)


def draw_many(count: int, seed: int, holes: int, test: bool = False) -> tuple[Tensor, Tensor]:
    """Questions and answers, both [count, 25]."""
    rng = np.random.default_rng(seed)
    drawn = [draw(rng, holes, test) for _ in range(count)]
    questions, answers = (np.stack(side) for side in zip(*drawn, strict=True))
    return torch.from_numpy(questions), torch.from_numpy(answers)


def prompts(questions: Tensor, references: Tensor | None = None) -> Tensor:
    """The question and a separator; with references those and another separator."""
    mark = torch.full((len(questions), 1), SEPARATOR)
    parts = [questions, mark] if references is None else [questions, mark, references, mark]
    return torch.cat(parts, 1)


def build(sizes: Sizes, seed: int) -> MaskedDiffusionModel:
    torch.manual_seed(seed)
    config = LLADA.config_class.from_sizes(
        width=sizes.width, layers=sizes.layers, heads=sizes.heads, kv_heads=sizes.heads, mlp=sizes.mlp,
        vocab=VOCAB, context=128, mask_token_id=MASK, eos_token_id=END, pad_token_id=END, bos_token_id=END,
    )  # fmt: skip
    return LLADA.model_class(config)


def predict(model: MaskedDiffusionModel, prompt: Tensor, canvas: Tensor) -> Tensor:
    """Logits of the answer's cells [rows, 25, vocab]; only symbols can be chosen."""
    ids = torch.cat([prompt, canvas], 1)
    logits = model(ids, logits_at=torch.arange(prompt.shape[1], ids.shape[1])).logits
    wanted = torch.full((VOCAB,), -torch.inf)
    wanted[1 : SIDE + 1] = 0
    return logits + wanted


def optimizer_of(model: MaskedDiffusionModel, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)


def step(
    model: MaskedDiffusionModel,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    rate: float,
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def cosine(now: int, steps: int, rate: float, warmup: int = 0) -> float:
    if now < warmup:
        return rate * (now + 1) / warmup
    return rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (now - warmup) / max(1, steps - warmup))))


def random_masks(answers: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The canvas and its masks: every row has a ratio of its own, and at least one mask."""
    ratio = torch.rand(len(answers), 1, generator=generator)
    hidden = torch.rand(answers.shape, generator=generator) < ratio
    hidden[torch.arange(len(answers)), torch.randint(CELLS, (len(answers),), generator=generator)] = True
    return torch.where(hidden, MASK, answers), hidden


def pretrain(sizes: Sizes, seed: int = 0, rate: float = 3e-3) -> MaskedDiffusionModel:
    """Cross-entropy of random masks, each row's masks averaged; a third of the batches has the reference in the prompt."""
    model = build(sizes, seed)
    optimizer, generator = optimizer_of(model, rate), torch.Generator().manual_seed(seed)
    questions, answers = draw_many(sizes.train, 1 + seed, sizes.holes)
    began = time.monotonic()
    for now in range(sizes.pretrain_steps):
        chosen = torch.randint(len(questions), (sizes.pretrain_rows,), generator=generator)
        answer = answers[chosen]
        prompt = prompts(questions[chosen], answer if now % 3 == 2 else None)
        canvas, hidden = random_masks(answer, generator)
        losses = plain_losses(predict(model, prompt, canvas)[hidden], answer[hidden]).cross_entropy
        loss = (losses / hidden.sum(1, keepdim=True).expand_as(hidden)[hidden]).sum() / len(chosen)
        step(model, optimizer, loss, cosine(now, sizes.pretrain_steps, rate, sizes.pretrain_steps // 20))
        if now % 100 == 0:
            print(f"pretrain {now} loss {loss.item():.4f} {time.monotonic() - began:.0f} s", flush=True)
    return model.eval()


@torch.inference_mode()
def decode(
    model: MaskedDiffusionModel, prompt: Tensor, threshold: float | None, keep: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [rows, 25], reveal steps [rows, 25] and forwards [rows].

    Revealed are masks with an entropy below the threshold (None: no others), and the most confident or the leftmost one.
    """
    rows = len(prompt)
    canvas = torch.full((rows, CELLS), MASK)
    reveal = torch.zeros(rows, CELLS, dtype=torch.long)
    forward = 0
    while (open_rows := (canvas == MASK).any(1).nonzero()[:, 0]).numel():
        forward += 1
        logits = predict(model, prompt[open_rows], canvas[open_rows]).double()
        hidden = canvas[open_rows] == MASK
        p = logits.softmax(-1)
        if keep == "leftmost":
            best = hidden.float().argmax(1)
        else:
            best = p.amax(-1).where(hidden, torch.tensor(-1.0, dtype=p.dtype)).argmax(1)
        taken = torch.zeros_like(hidden)
        taken[torch.arange(len(best)), best] = True
        if threshold is not None:
            taken |= hidden & (torch.special.entr(p).sum(-1) < threshold)
        canvas[open_rows] = torch.where(taken, p.argmax(-1), canvas[open_rows])
        reveal[open_rows] = torch.where(taken, forward, reveal[open_rows])
    return canvas, reveal, reveal.amax(1)


@dataclass(frozen=True)
class Trajectories:
    """Right ones only. `kept` is the share of the questions that they are of."""

    questions: Tensor
    tokens: Tensor
    reveal: Tensor
    kept: float


def collect(
    base: MaskedDiffusionModel, questions: Tensor, answers: Tensor, order: str, drop_wrong: bool = True
) -> Trajectories:
    """The privileged teacher's rollouts in its own order or from left to right; or the base's own, without the reference."""
    prompt = prompts(questions, None if order == "base" else answers)
    tokens, reveal, _ = decode(base, prompt, None, "leftmost" if order == "left-to-right" else "best")
    right = (tokens == answers).all(1)
    kept = right if drop_wrong else torch.ones_like(right)
    return Trajectories(questions[kept], tokens[kept], reveal[kept], float(right.double().mean()))


@torch.inference_mode()
def measure_window(base: MaskedDiffusionModel, rows: Trajectories, states: int, seed: int = 0) -> int:
    """The last number of steps until a reveal at which the base's mean confidence, without the reference, is LEVEL or more; the
    paper's quality window where it is so everywhere, as it is on squares: many cells are given, and no symbol is unlikely."""
    generator = torch.Generator().manual_seed(seed)
    total, count = torch.zeros(CELLS + 1), torch.zeros(CELLS + 1)
    for _ in range(states):
        at = torch.randint(CELLS, (len(rows.tokens), 1), generator=generator)
        canvas = state(rows.tokens, rows.reveal, at, MASK)
        p = predict(base, prompts(rows.questions), canvas).softmax(-1)
        own = p.gather(-1, rows.tokens[..., None])[..., 0]
        distance = (rows.reveal - at).clamp(min=0)
        total.index_add_(0, distance.flatten(), own.flatten())
        count.index_add_(0, distance.flatten(), torch.ones(own.numel()))
    curve = (total / count.clamp(min=1))[1:]
    print("confidence by steps until the reveal:", [round(x, 2) for x in curve.tolist()], flush=True)
    below = ((curve < LEVEL) & (count[1:] > 0)).nonzero()
    return max(1, int(below[0])) if len(below) else WINDOW


def distil(
    base: MaskedDiffusionModel, rows: Trajectories, sizes: Sizes, window: int | None, seed: int, rate: float
) -> MaskedDiffusionModel:
    """TAD with this window; without one, cross-entropy on random masks of the same texts."""
    student = copy.deepcopy(base).train()
    optimizer, generator = optimizer_of(student, rate), torch.Generator().manual_seed(1000 + seed)
    for now in range(sizes.steps):
        chosen = torch.randint(len(rows.tokens), (sizes.rows,), generator=generator)
        question, tokens = rows.questions[chosen], rows.tokens[chosen]
        if window is None:
            canvas, near = random_masks(tokens, generator)
            distant = torch.zeros_like(near)
        else:
            reveal = rows.reveal[chosen]
            at = torch.randint(CELLS, (len(chosen), 1), generator=generator)
            canvas = state(tokens, reveal, at, MASK)
            near, distant = partition(reveal, at, window)
        logits = predict(student, prompts(question), canvas)
        loss = plain_losses(logits[near], tokens[near]).cross_entropy.mean()
        if distant.any():
            with torch.no_grad():
                taught = predict(base, prompts(question, tokens), canvas)[distant]
            symbols = slice(1, SIDE + 1)  # the others are impossible on both sides
            kl = plain_losses(logits[distant][:, symbols], tokens[distant] - 1, taught[:, symbols]).kl
            assert kl is not None
            loss = loss + kl.mean()
        step(student, optimizer, loss, cosine(now, sizes.steps, rate))
    return student.eval()


def evaluate(
    model: MaskedDiffusionModel, questions: Tensor, answers: Tensor, thresholds: Mapping[str, Sequence[float]]
) -> list[dict[str, object]]:
    """A run for every setting: whether each problem is right, and its forwards."""
    runs: list[dict[str, object]] = []
    for keep, values in thresholds.items():
        for threshold in (None, *values):
            found = [decode(model, prompts(part), threshold, keep) for part in questions.split(250)]
            tokens, _, forwards = (torch.cat(column) for column in zip(*found, strict=True))
            correct = (tokens == answers).all(1)
            runs.append({
                "keep": keep, "threshold": threshold, "correct": correct.int().tolist(), "forwards": forwards.tolist(),
            })  # fmt: skip
            print(
                f"   {keep} {threshold}: {100 * correct.double().mean():.1f} % @ {CELLS / forwards.double().mean():.2f}",
                flush=True,
            )
    return runs


def main(words: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the base and squares.json.gz")
    parser.add_argument("--tiny", action="store_true", help="sizes at which nothing is learned")
    parser.add_argument("--rate", type=float, default=5e-4, help="of every student")
    options = parser.parse_args(words)
    sizes = TINY if options.tiny else Sizes()
    options.out.mkdir(parents=True, exist_ok=True)
    thresholds = {"best": (0.3,), "leftmost": (0.3,)} if options.tiny else THRESHOLDS
    test = draw_many(sizes.test, 7_000_001, sizes.holes, test=True)
    train = draw_many(sizes.questions, 5_000_003, sizes.holes)
    stored = options.out / "base.pt"
    base = build(sizes, 0)
    if stored.exists():
        base.load_state_dict(torch.load(stored, weights_only=True))
        base.eval()
    else:
        base = pretrain(sizes)
        torch.save(base.state_dict(), stored)
    rows = {order: collect(base, *train, order, sizes.drop_wrong) for order in ORDERS}
    windows = {order: measure_window(base, rows[order], 4) for order in ORDERS}
    orders = {order: {"kept": rows[order].kept, "window": windows[order]} for order in ORDERS}
    print(orders, flush=True)
    record = {
        "sizes": sizes.__dict__, "parameters": sum(p.numel() for p in base.parameters()), "rate": options.rate,
        "orders": orders, "runs": [],
    }  # fmt: skip
    runs: list[dict[str, object]] = []
    record["runs"] = runs
    where = options.out / "squares.json.gz"

    def note(method: str, seed: int | None, model: MaskedDiffusionModel) -> None:
        print(method, seed, flush=True)
        runs.extend({"method": method, "seed": seed, **run} for run in evaluate(model, *test, thresholds))
        write(options.out, "squares", "python bench/squares.py --out runs/squares", None, **record)

    note("base", None, base)
    for seed in range(sizes.seeds):
        # The two controls have one seed: they say what else could explain a difference, not how large it is.
        for order in ORDERS if seed == 0 else ORDERS[:2]:
            note(f"tad, {order}", seed, distil(base, rows[order], sizes, windows[order], seed, options.rate))
        if seed == 0:
            note("random masks", seed, distil(base, rows["teacher"], sizes, None, seed, options.rate))
    return where


if __name__ == "__main__":
    main()
