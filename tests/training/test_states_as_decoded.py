"""The trainer sees a state as the decoder that made it did: block-causal students, and block-diffusion models."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from golden_lm import golden_lm, golden_meta
from tad.decoding import decode
from tad.models import LM
from tad.training.objectives import LossModule, View, get_objective
from tad.training.states import TrajectoryArrays
from tad.trajectories.partition import partition, state
from tad.trajectories.rollout import ORDERS, RolloutConfig, roll_out

LENGTH = 32
BLOCK_MODELS = ("fastdllm_v2", "sdar", "llada2")


def trajectory(prompt: list[int], tokens: list[int], reveal: list[int]) -> TrajectoryArrays:
    """The privileged prompt is of another length, so that it moves an absolute grid of blocks."""
    ids, privileged = torch.tensor(prompt), torch.tensor([7, *prompt, 9, 11])
    return TrajectoryArrays(
        "row", ids, privileged, torch.tensor(tokens), torch.tensor(reveal), n_real=len(tokens)
    )


def next_token_losses(lm: LM, rows: list[TrajectoryArrays], steps: range, **settings: Any) -> list[float]:
    """The near loss of the token that is revealed next, as the trainer computes it: padded rows, one batch per state."""
    layout = lm.model.shape.blocks
    objective = get_objective(
        "tad",
        mask_token=lm.tokens.mask,
        family=lm.family,
        layout=layout,
        window=1,
        distant="none",
        **settings,
    )
    module, found = LossModule(lm.model, objective), []
    with torch.no_grad():
        for step in steps:
            for row in rows:
                # Beside another row, so that there is padding on the right.
                views = [*objective.views(row, step, None), *objective.views(rows[0], 0, None)]
                views[1] = replace(views[1], terms={name: w * 0 for name, w in views[1].terms.items()})
                batch = objective.collate(views)
                found.append(float(module(batch, objective.counts(batch)).terms["near"]))
    return found


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("folder", ["llada", "dream"])
def test_a_block_causal_student_is_trained_under_the_mask_it_is_decoded_with(folder: str, block: int) -> None:
    """Sequential blocks with the exact cache: later blocks are not even fed, in training they are masks nobody sees."""
    lm, prompts = golden_lm(folder), golden_meta(folder)["prompts"][:3]
    done = decode(lm, prompts, "d2f", LENGTH, block=block, block_add=1, rule="best", stop="off")
    rows = [trajectory(prompt, row.tokens, row.steps) for prompt, row in zip(prompts, done, strict=True)]
    steps = range(0, LENGTH, 5)
    wanted = [-math.log(row.confidence[row.steps.index(step + 1)]) for step in steps for row in done]
    assert next_token_losses(lm, rows, steps, block_causal=block) == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert next_token_losses(lm, rows, steps) != pytest.approx(wanted, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("folder", BLOCK_MODELS)
def test_a_state_of_a_block_diffusion_rollout_gives_the_confidence_it_was_revealed_with(
    folder: str, order: Any
) -> None:
    """The last block is decoded whole and then cut. What was revealed behind the cut is lost, but for the order from left
    to right, in which nothing is revealed there before the cut is reached."""
    lm, prompts, length = golden_lm(folder), golden_meta(folder)["prompts"][:3], 2 * LENGTH
    size = int(lm.model.shape.blocks.size)
    config = RolloutConfig(order=order, stop_at_end=False)
    done = roll_out(lm, prompts, prompts, length, config, seeds=[1, 2, 3])
    rows = [trajectory(prompt, row.tokens, row.reveal) for prompt, row in zip(prompts, done, strict=True)]
    last = min(row.n_real for row in done)
    steps = range(0, last, max(1, last // 7))
    found = next_token_losses(lm, rows, steps)
    compared = 0
    for number, loss in enumerate(found):
        step, row, prompt = steps[number // 3], done[number % 3], prompts[number % 3]
        now = [position for position, revealed in enumerate(row.reveal) if revealed == step + 1]
        end = -(-(len(prompt) + max(now) + 1) // size) * size
        if order == "left-to-right" or end <= len(prompt) + length:
            compared += 1
            wanted = -sum(math.log(row.teacher[position]) for position in now) / len(now)
            assert loss == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert compared > 9


@pytest.mark.parametrize("folder", BLOCK_MODELS)
def test_near_and_distant_losses_are_those_of_a_plain_forward_of_the_state(folder: str) -> None:
    """Student and teacher each on the grid of their own prompt, with the family's shift; what either would predict behind an
    unfinished block does not count."""
    lm = golden_lm(folder)
    lm = LM(deepcopy(lm.model), lm.family, lm.tokens, source=folder)
    prompts = golden_meta(folder)["prompts"][:3]
    done = roll_out(lm, prompts, prompts, LENGTH, RolloutConfig(order="left-to-right", stop_at_end=False))
    rows = [trajectory(prompt, row.tokens, row.reveal) for prompt, row in zip(prompts, done, strict=True)]
    torch.manual_seed(0)
    student = lm.attach(rank=2)
    with torch.no_grad():
        for name, weight in student.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.1)
    objective = get_objective(
        "tad", mask_token=lm.tokens.mask, family=lm.family, layout=lm.model.shape.blocks, window=1
    )
    steps = [3, 10, 20]
    views = [objective.views(row, step, None)[0] for row, step in zip(rows, steps, strict=True)]
    batch = objective.collate(views)
    with torch.no_grad():
        found = LossModule(student, objective)(batch, objective.counts(batch)).terms

    def log_p(view: View, noisy: Tensor, teacher: bool) -> Tensor:
        """Of the answer's positions, from whole logits under the mask the model has by itself."""
        prompt = view.teacher_prompt if teacher else view.prompt
        size = int(lm.model.shape.blocks.size)
        rest = torch.full((-(len(prompt) + LENGTH) % size,), lm.tokens.mask)  # of the last block
        with torch.no_grad():
            logits = lm.model(torch.cat((prompt, noisy, rest))[None]).logits[0]
        start = len(prompt) - lm.family.logit_shift
        return logits[start : start + LENGTH].log_softmax(-1)

    def in_first_block(row: TrajectoryArrays, step: int, start: int) -> Tensor:
        """Positions that stand in the block of the leftmost mask: all that a decoder asks for."""
        size = int(lm.model.shape.blocks.size)
        low = (start + min(i for i, r in enumerate(row.reveal.tolist()) if r > step)) // size * size - start
        return torch.tensor([low <= i < low + size for i in range(LENGTH)])

    near, distant = [], []
    for view, row, step in zip(views, rows, steps, strict=True):
        soon, later = partition(row.reveal, step, 1)
        counted = in_first_block(row, step, len(view.prompt)) & in_first_block(
            row, step, len(view.teacher_prompt)
        )
        soon, later = soon & counted, later & counted
        noisy = state(row.tokens, row.reveal, step, lm.tokens.mask)
        ours = log_p(view, noisy, teacher=False)
        with lm.base():
            theirs = log_p(view, noisy, teacher=True)
        near += (-ours.gather(1, row.tokens[:, None])[soon, 0]).tolist()
        distant += (theirs.exp() * (theirs - ours)).sum(-1)[later].tolist()
    assert near
    assert distant
    assert float(found["near"]) == pytest.approx(sum(near) / len(near), rel=1e-4)
    assert float(found["distant"]) == pytest.approx(sum(distant) / len(distant), rel=1e-4)


@pytest.mark.parametrize("name", ["tad", "dparallel"])
def test_end_filler_of_a_block_diffusion_rollout_does_not_count(name: str) -> None:
    """Such a model ends with its text: it has never seen what fills the canvas behind it."""
    lm = golden_lm("fastdllm_v2")
    row = replace(trajectory([5, 6, 7], list(range(20, 20 + LENGTH)), list(range(1, LENGTH + 1))), n_real=4)
    objective = get_objective(
        name, mask_token=lm.tokens.mask, family=lm.family, layout=lm.model.shape.blocks, filler=True
    )
    views = objective.views(row, 1, np.random.default_rng(0))
    weights = [weight for view in views for weight in view.terms.values()]
    assert sum(float(weight[:4].sum()) for weight in weights) > 0
    assert sum(float(weight[4:].sum()) for weight in weights) == 0
