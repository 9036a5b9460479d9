"""Fingerprints: of weights of any size, and of every value that is looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from tad.models import LM
from tad.runs.fingerprint import fingerprint_model


def weights(size: int) -> Any:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(size, dtype=torch.bfloat16), requires_grad=False)
    return model


def fingerprint(model: nn.Module) -> str:
    return fingerprint_model(cast(LM, SimpleNamespace(model=model)))


def test_a_tensor_whose_last_place_fp32_cannot_hold_is_read_to_its_end() -> None:
    model = weights(2**24 + 4)  # an embedding of the released checkpoints has 2**29
    before = fingerprint(model)
    model.weight[-1] = 1
    assert fingerprint(model) != before
