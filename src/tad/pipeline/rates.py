"""The rates that estimates are made from: a recipe's own, those of this machine, or those of a measured network by size."""

from __future__ import annotations

import time

import torch

from tad.models import LM, load
from tad.models.info import describe
from tad.pipeline.recipe import ModelRecipe, RatesSection

_TRIED = 5e8  # parameters up to which a model is tried on this machine
_ROWS = 16  # of a batch, at most: enough for its speed per row on a small model
_PROMPT = 80  # tokens of a prompt, where it is tried


def find_rates(recipe: ModelRecipe) -> RatesSection:
    """The recipe's; else, of a model that is small enough to try, measured on this machine in some seconds; else those of a
    network of 8B parameters, by size."""
    if recipe.rates is not None:
        return recipe.rates
    parameters = describe(recipe.model).parameters
    if parameters <= _TRIED:
        return measure_rates(recipe)
    times = parameters / 8.0e9
    return RatesSection(
        machine=f"one H200, bf16, random weights of LLaDA-8B shape; times {times:.2f} for {parameters / 1e9:.1f}B parameters",
        rollout_ms=18.3 * times,
        rollout_cached_ms=1.8 * times,
        state_ms=73 * times,
        forward_ms=10.2 * times,
        decode_gb=2e-9 * parameters,
    )


def measure_rates(recipe: ModelRecipe) -> RatesSection:
    """A forward of a batch as rollouts and answers have it, and one with its gradients, on the recipe's device."""
    lm = load(recipe.model, device=recipe.device, dtype=recipe.dtype)
    collect = recipe.collect_recipe()
    rollout = _time_forward(lm, min(_ROWS, collect.batch_size), collect.gen_length)
    answer = _time_forward(
        lm, min(_ROWS, recipe.evaluate.batch_size), recipe.evaluate.gen_length or collect.gen_length
    )
    trained = _time_forward(lm, 8, collect.gen_length, backward=True)
    where = "this machine" if lm.device.type == "cpu" else torch.cuda.get_device_name(lm.device)
    return RatesSection(
        machine=f"{where}, measured now; {torch.get_num_threads()} threads"
        if lm.device.type == "cpu"
        else where,
        rollout_ms=rollout,
        forward_ms=answer,
        state_ms=trained + rollout,  # the student's, and the teacher's forward
        decode_gb=1e-9 * sum(one.numel() * one.element_size() for one in lm.model.parameters()),
    )


def _time_forward(lm: LM, rows: int, length: int, backward: bool = False) -> float:
    """Milliseconds per row, the fastest of three."""
    ids = torch.full((rows, _PROMPT + length), lm.tokens.mask, device=lm.device)
    times = []
    with torch.set_grad_enabled(backward):
        for _ in range(3):
            began = time.perf_counter()
            logits = lm.model(ids).logits
            if backward:
                logits.float().mean().backward()
                lm.model.zero_grad(set_to_none=True)
            if lm.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return 1000 * min(times) / rows
