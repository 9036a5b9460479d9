"""The losses of block diffusion against the public trainers, in fp32: values, gradient norms."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import Case, meta, model, parameters
from test_losses_golden import close
from torch import Tensor

from tad.models import family_of
from tad.training.objectives import LossModule, LossOutput, Objective, View, get_objective

NAMES = {"fdv2_loss": "fast-dllm-v2", "sdar_loss": "sdar", "llada2_loss": "llada2"}


def view(
    case: Case, ids: Tensor, noisy: Tensor, weights: Tensor, answer_tokens: int = 0, start: int = 0
) -> View:
    """A stored row, all of it from `start` on taken as the answer: what was prompt has no weight."""
    size = case["args"].get("bd_size") or case["args"]["block_size"]
    terms = {"hard": weights[start:]}
    return View("", ids[:start], noisy[start:], ids[start:], terms, None, size, True, answer_tokens)


def fast_dllm_views(case: Case) -> list[View]:
    """Mask and complement. The first token of a row has no output before it and is never scored: here it is a prompt."""
    tensors = case["tensors"]
    return [
        view(case, ids, noisy, masked.float(), start=1)
        for end in ("", "_rev")
        for ids, noisy, masked in zip(
            tensors["input_ids"], tensors[f"noisy{end}"], tensors[f"masked{end}"], strict=True
        )
    ]


def sdar_views(case: Case) -> list[View]:
    """One view per packed sample; what fills up a packed row has position 0 and no labels."""
    tensors, found = case["tensors"], []
    for row in range(len(tensors["input_ids"])):
        starts = (tensors["position_ids"][row] == 0).nonzero()[:, 0].tolist()
        for low, high in zip(starts, [*starts[1:], len(tensors["input_ids"][row])], strict=True):
            part = {name: values[row, low:high] for name, values in tensors.items()}
            weights = torch.where(part["masked"], 1 / part["p_mask"], 0.0)
            answer = int((part["labels"] != -100).sum())
            if answer:
                found.append(view(case, part["input_ids"], part["noisy"], weights, answer))
    return found


def llada2_views(case: Case) -> list[View]:
    tensors = case["tensors"]
    rows = zip(tensors["input_ids"], tensors["noisy"], tensors["masked"], strict=True)
    return [view(case, ids, noisy, masked.float()) for ids, noisy, masked in rows]


VIEWS = {"fdv2_loss": fast_dllm_views, "sdar_loss": sdar_views, "llada2_loss": llada2_views}


def objective_of(case: Case) -> Objective:
    family = case["family"]
    return get_objective(
        NAMES[case["strategy"]],
        mask_token=meta(family)["mask_token_id"],
        family=family_of(model(family).config.model_type),
        layout=model(family).shape.blocks,
    )


def run(case: Case) -> tuple[LossOutput, LossModule]:
    objective = objective_of(case)
    module = LossModule(copy.deepcopy(model(case["family"])), objective, chunk=7)
    batch = objective.collate(VIEWS[case["strategy"]](case))
    if case["strategy"] == "fdv2_loss":  # the public code masks the first token too
        batch.student.ids[:, 0] = torch.cat((case["tensors"]["noisy"], case["tensors"]["noisy_rev"]))[:, 0]
    totals = objective.counts(batch)
    if case["args"].get("num_items_in_batch"):
        totals["hard"] = case["args"]["num_items_in_batch"]
    output = module(batch, totals)
    output.total.backward()
    return output, module


def grad_norm(module: LossModule) -> float:
    """Over all parameters. The public code gives the embedding of the config's padding token no gradient."""
    embedding, pad = module.student.embedding().weight, module.student.config.pad_token_id
    if pad is not None:
        embedding.grad[pad] = 0
    return float(torch.stack([weight.grad.norm() for weight in module.student.parameters()]).norm())


@pytest.mark.parametrize("case", parameters(lambda case: case["strategy"] in NAMES))
def test_block_diffusion_loss_equals_the_reference(case: Case) -> None:
    output, module = run(case)
    close(output.total, case)
    close(output.stats["hard/tokens"], case, "tokens")
    close(grad_norm(module), case, "grad_norm_all_params")
    if "answer_tokens" in case["expected"]:
        batch = module.objective.collate(VIEWS[case["strategy"]](case))
        assert batch.answer_tokens == case["expected"]["answer_tokens"]
