"""Tiny models with adapters that do something, rows to train them on, and their logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tad.models import DREAM, LLADA, MaskedDiffusionModel
from tad.models.lora import attach
from tad.models.shapes import build
from tad.training.objectives import LossModule, LossOutput, Objective, View, get_objective
from tad.training.objectives.module import adapters_off, plain_model
from tad.training.states import TrajectoryArrays

VOCAB, MASK, EOS = 48, 46, 47
FAMILIES = {"llada": LLADA, "dream": DREAM}
both_families = pytest.mark.parametrize("family", ["llada", "dream"])


def tiny_model(family: str = "llada", seed: int = 0, **changes: Any) -> MaskedDiffusionModel:
    """Random weights in fp32, large enough for opinions."""
    config = FAMILIES[family].config_class.from_sizes(
        width=16, layers=2, heads=2, kv_heads=2 if family == "llada" else 1, mlp=24, vocab=VOCAB, context=64,
        mask_token_id=MASK, eos_token_id=EOS, pad_token_id=EOS, **changes,
    )  # fmt: skip
    model = build(config, "cpu", torch.float32, seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(12.0)
    return model


def adapted(family: str = "llada", seed: int = 0, rank: int = 2) -> Any:
    """PEFT's handle on a tiny model whose adapters are not the identity."""
    model = tiny_model(family, seed)
    torch.manual_seed(seed)
    handle = attach(model, rank)
    with torch.no_grad():
        for name, weight in handle.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3)
    return handle.train()


def make_row(
    seed: int, length: int = 12, prompt: int | None = None, n_real: int | None = None
) -> TrajectoryArrays:
    """A trajectory: random ids and a random order; the last steps are end filler where `n_real` says so."""
    draws = np.random.default_rng(seed)
    prompt = int(draws.integers(3, 9)) if prompt is None else prompt
    n_real = length if n_real is None else n_real
    reveal = np.concatenate((draws.permutation(n_real), np.arange(n_real, length))) + 1
    tokens = np.where(reveal > n_real, EOS, draws.integers(0, MASK, length))
    return TrajectoryArrays(
        str(seed),
        torch.from_numpy(draws.integers(0, MASK, prompt)),
        torch.from_numpy(draws.integers(0, MASK, prompt + int(draws.integers(2, 6)))),
        torch.from_numpy(tokens),
        torch.from_numpy(reveal),
        n_real,
    )


ROWS = [make_row(seed) for seed in range(5)]


def objective_of(name: str, family: str = "llada", **settings: Any) -> Objective:
    return get_objective(name, mask_token=MASK, family=family, **settings)


def views_of(
    objective: Objective, rows: list[TrajectoryArrays], step: int = 2, progress: float = 0.3
) -> list[View]:
    """One draw of every row, at steps that differ."""
    found = []
    for index, row in enumerate(rows):
        rng = np.random.default_rng(int(row.id))
        found += objective.views(row, (step + 3 * index) % len(row.tokens), rng, progress)
    return found


def loss_of(model: Any, objective: Objective, views: list[View], **settings: Any) -> LossOutput:
    batch = objective.collate(views)
    return LossModule(model, objective, **settings)(batch, objective.counts(batch))


def gradients(model: Any, loss: torch.Tensor) -> torch.Tensor:
    """All gradients of the trainable parameters, as one vector."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, params)])


def logits_of(module: LossModule, ids: Tensor, teacher: bool = False) -> Tensor:
    """Whole logits of one unpadded row, moved so that entry i predicts token i."""
    model = plain_model(module.student)
    if teacher:
        with adapters_off(model), torch.no_grad():
            logits = model(ids[None]).logits[0]
    else:
        logits = model(ids[None]).logits[0]
    shift = module.objective.logit_shift
    return torch.cat((logits[:shift], logits[: len(ids) - shift]))
