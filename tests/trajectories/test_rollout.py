"""Rollouts: the paper's order is the one-by-one decoder, the other orders do what they say, all replay exactly."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from tad.decoding import GraphEngine, decode
from tad.errors import TadError
from tad.models import LM
from tad.trajectories.partition import state
from tad.trajectories.rollout import ORDERS, Rollout, RolloutConfig, roll_out

LENGTH, BLOCK = 32, 16
ONE_BY_ONE = [order for order in ORDERS if order != "parallel"]


def roll(lm: LM, privileged, plain, **config) -> list[Rollout]:
    references = [[40 + i for i in range(10)]] * len(plain)
    tokens = {"references": references} if config.get("tokens") == "reference" else {}
    return roll_out(
        lm, privileged, plain, LENGTH, RolloutConfig(block=BLOCK, **config), seeds=range(len(plain)), **tokens
    )


def predictions(lm: LM, prompt: list[int], canvas: list[int]) -> torch.Tensor:
    """Probabilities [length, vocab] of the generated part, by a plain forward of one row."""
    with torch.inference_mode():
        logits = lm.model(torch.tensor([[*prompt, *canvas]])).logits[0].float()
    first = len(prompt) - lm.family.logit_shift
    return logits[first : first + len(canvas)].softmax(-1)


def current_block(reveal: list[int], step: int) -> range:
    """Positions of the first block that still has masks before `step`."""
    first = min(i for i, r in enumerate(reveal) if r >= step)
    return range(first // BLOCK * BLOCK, first // BLOCK * BLOCK + BLOCK)


@pytest.mark.parametrize("stop_at_end", [True, False])
def test_the_papers_order_is_the_one_by_one_decoder_on_the_privileged_prompt(
    lm, privileged, plain, stop_at_end
) -> None:
    rollouts = roll(lm, privileged, plain, stop_at_end=stop_at_end)
    stop = "end" if stop_at_end else "off"
    for rollout, row in zip(
        rollouts, decode(lm, privileged, "one-by-one", LENGTH, block=BLOCK, stop=stop), strict=True
    ):
        assert rollout.tokens == row.tokens
        assert rollout.n_real == row.forwards
        real = [r if r <= rollout.n_real else 0 for r in rollout.reveal]
        assert real == row.steps
        assert sorted(rollout.reveal) == list(range(1, LENGTH + 1))
        for mine, theirs in zip(rollout.teacher, row.confidence, strict=True):
            assert math.isnan(mine) == (theirs == 0)
            assert math.isnan(mine) or abs(mine - theirs) < 1e-5


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"stop_at_end": False},
        {"temperature": 0.7},
        {"order": "random"},
        {"order": "left-to-right"},
        {"order": "left-to-right", "floor": 0.5},
        {"order": "student"},
        {"order": "parallel", "threshold": 3.0},
    ],
)
def test_rollouts_by_the_graph_engine_are_the_same(lm, privileged, plain, config) -> None:
    usual = roll(lm, privileged, plain, **config)
    seeds = range(len(plain))
    found = roll_out(
        lm,
        privileged,
        plain,
        LENGTH,
        RolloutConfig(block=BLOCK, **config),
        seeds,
        engine=GraphEngine(lm.model),
    )
    for one, other in zip(found, usual, strict=True):
        assert (one.tokens, one.reveal, one.n_real) == (other.tokens, other.reveal, other.n_real)
        assert one.teacher == pytest.approx(other.teacher, abs=1e-4, nan_ok=True)
        assert one.student == pytest.approx(other.student, abs=1e-4, nan_ok=True)


def test_a_separate_student_scores_with_its_own_weights(lm, privileged, plain) -> None:
    other = copy.deepcopy(lm)
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    config = RolloutConfig(order="student", block=BLOCK)
    for row, rollout in enumerate(roll_out(lm, privileged, plain, LENGTH, config, student=other)[:2]):
        tokens, reveal = torch.tensor(rollout.tokens), torch.tensor(rollout.reveal)
        for step in range(1, rollout.n_real + 1):
            canvas = state(tokens, reveal, step - 1, lm.tokens.mask).tolist()
            position = rollout.reveal.index(step)
            for who, prompt, told in ((lm, privileged, rollout.teacher), (other, plain, rollout.student)):
                p = predictions(who, prompt[row], canvas)[position, rollout.tokens[position]]
                assert abs(told[position] - p) < 1e-5


@pytest.mark.parametrize("order", ONE_BY_ONE)
def test_replaying_gives_the_recorded_token_at_each_recorded_step(lm, privileged, plain, order: str) -> None:
    for row, rollout in enumerate(roll(lm, privileged, plain, order=order)[:3]):
        tokens, reveal = torch.tensor(rollout.tokens), torch.tensor(rollout.reveal)
        for step in range(1, rollout.n_real + 1):
            canvas = state(tokens, reveal, step - 1, lm.tokens.mask).tolist()
            position = rollout.reveal.index(step)
            assert position in current_block(rollout.reveal, step)
            teacher = predictions(lm, privileged[row], canvas)
            teacher[:, lm.tokens.mask] = 0
            assert rollout.tokens[position] == teacher[position].argmax()
            assert abs(rollout.teacher[position] - teacher[position].max()) < 1e-5


def test_the_parallel_order_is_the_decoder_of_that_rule_on_the_privileged_prompt(
    lm, privileged, plain
) -> None:
    several = False
    for threshold in (2.0, 3.0):
        rollouts = roll(lm, privileged, plain, order="parallel", threshold=threshold)
        decoded = decode(lm, privileged, "tad-leftmost", LENGTH, block=BLOCK, threshold=threshold)
        for row, (rollout, wanted) in enumerate(zip(rollouts, decoded, strict=True)):
            assert rollout.tokens == wanted.tokens
            assert rollout.n_real == len({*wanted.steps} - {0})
            assert [r if r <= rollout.n_real else 0 for r in rollout.reveal] == wanted.steps
            tokens, reveal = torch.tensor(rollout.tokens), torch.tensor(rollout.reveal)
            for step in range(1, rollout.n_real + 1):
                canvas = state(tokens, reveal, step - 1, lm.tokens.mask).tolist()
                teacher = predictions(lm, privileged[row], canvas)
                teacher[:, lm.tokens.mask] = 0
                now = [i for i, at in enumerate(rollout.reveal) if at == step]
                several |= len(now) > 2
                assert canvas.index(lm.tokens.mask) in now
                assert [rollout.tokens[i] for i in now] == teacher[now].argmax(-1).tolist()
    assert several


@pytest.mark.parametrize("order", ["student", "student-max"])
def test_student_orders_reveal_where_the_student_without_the_reference_is_surest(
    lm, privileged, plain, order
) -> None:
    for row, rollout in enumerate(roll(lm, privileged, plain, order=order)[:3]):
        tokens, reveal = torch.tensor(rollout.tokens), torch.tensor(rollout.reveal)
        for step in range(1, rollout.n_real + 1):
            canvas = state(tokens, reveal, step - 1, lm.tokens.mask).tolist()
            student = predictions(lm, plain[row], canvas)
            token = predictions(lm, privileged[row], canvas)
            token[:, lm.tokens.mask] = 0
            student_best = student.clone()
            student_best[:, lm.tokens.mask] = 0
            of_token = student.gather(1, token.argmax(1, keepdim=True))[:, 0]
            sure = of_token if order == "student" else student_best.amax(1)
            masks = [i for i in current_block(rollout.reveal, step) if canvas[i] == lm.tokens.mask]
            position = rollout.reveal.index(step)
            assert sure[position] >= max(sure[i] for i in masks) - 1e-6
            assert abs(rollout.student[position] - of_token[position]) < 1e-5


def test_left_to_right_asks_the_head_for_the_next_position_alone(lm, privileged, plain, monkeypatch) -> None:
    asked, head = [], lm.model.head
    monkeypatch.setattr(lm.model, "head", lambda hidden: asked.append(len(hidden)) or head(hidden))
    (rollout,) = roll(lm, privileged[:1], plain[:1], order="left-to-right")
    assert asked == [1] * LENGTH
    assert rollout.reveal == list(range(1, LENGTH + 1))


@pytest.mark.parametrize("order", ORDERS)
def test_rows_do_not_depend_on_their_batch_but_on_their_seed(lm, privileged, plain, order: str) -> None:
    together = roll(lm, privileged, plain, order=order, temperature=0.7)
    config = RolloutConfig(order=order, block=BLOCK, temperature=0.7)

    def alone(row: int, seed: int) -> tuple[list[int], list[int], int]:
        prompts = privileged[row : row + 1], plain[row : row + 1]
        (found,) = roll_out(lm, *prompts, LENGTH, config, seeds=[seed])
        return found.tokens, found.reveal, found.n_real

    for row in (0, 2, 4):  # of different lengths
        assert alone(row, row) == (together[row].tokens, together[row].reveal, together[row].n_real)
    assert alone(2, 7) != alone(2, 2)


@pytest.mark.parametrize("order", ["student", "student-max", "left-to-right", "random"])
def test_reference_tokens_are_written_as_they_are_and_end_in_eos(lm, privileged, plain, order: str) -> None:
    for rollout in roll(lm, privileged, plain, order=order, tokens="reference"):
        assert rollout.tokens == [*range(40, 50), *[lm.tokens.eos] * (LENGTH - 10)]
        assert all(math.isnan(sure) for sure in rollout.teacher)


def test_a_floor_of_one_gives_the_teachers_positions(lm, privileged, plain) -> None:
    # Nobody is surer than 1, so every step falls back to the teacher's best position.
    floored = roll(lm, privileged, plain, order="left-to-right", floor=1.1)
    assert [r.reveal for r in floored] == [r.reveal for r in roll(lm, privileged, plain)]


def test_filler_follows_the_end_from_left_to_right(lm, privileged, plain) -> None:
    rollouts = roll(lm, privileged, plain, order="random")
    assert any(rollout.n_real < LENGTH for rollout in rollouts)
    for rollout in rollouts:
        later = [(r, i) for i, r in enumerate(rollout.reveal) if r > rollout.n_real]
        assert later == sorted(later)
        assert all(rollout.tokens[i] == lm.tokens.eos for _, i in later)
        assert all(math.isnan(rollout.teacher[i]) for _, i in later)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"order": "backwards"}, "order 'backwards' is not known"),
        ({"tokens": "gold"}, "tokens 'gold' is not known"),
        ({"tokens": "reference"}, "needs another order"),
        ({"block": 5}, "not a multiple of the block length 5"),
    ],
)
def test_bad_config_is_refused(config: dict, message: str) -> None:
    with pytest.raises(TadError, match=message):
        RolloutConfig(**config).check(LENGTH)
