"""Objectives by name. `get_objective("tad", mask_token=..., family="llada", window=8)` gives one with published defaults."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tad.errors import TadError
from tad.models import BlockLayout, Family, family_named
from tad.training.objectives.base import (
    Batch,
    LossOutput,
    Objective,
    PaddedIds,
    TermTargets,
    TextObjective,
    View,
    averages,
)
from tad.training.objectives.block_diffusion import BlockDiffusion, FastDLLMv2, LLaDA2, Sdar
from tad.training.objectives.causal_blocks import CausalBlocks
from tad.training.objectives.d2f import D2F
from tad.training.objectives.d3llm import D3LLM
from tad.training.objectives.dparallel import DParallel
from tad.training.objectives.module import LossModule, ModelOutputs, adapters_off
from tad.training.objectives.next_token import NextToken
from tad.training.objectives.sft import Sft
from tad.training.objectives.tad import Tad

OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind
    for kind in (Tad, DParallel, D3LLM, D2F, Sft, NextToken, FastDLLMv2, Sdar, LLaDA2, CausalBlocks)
}

__all__ = [
    "D2F",
    "D3LLM",
    "OBJECTIVES",
    "Batch",
    "BlockDiffusion",
    "CausalBlocks",
    "DParallel",
    "FastDLLMv2",
    "LLaDA2",
    "LossModule",
    "LossOutput",
    "ModelOutputs",
    "NextToken",
    "Objective",
    "PaddedIds",
    "Sdar",
    "Sft",
    "Tad",
    "TermTargets",
    "TextObjective",
    "View",
    "adapters_off",
    "averages",
    "check_settings",
    "get_objective",
]


def get_objective(
    name: str, *, mask_token: int, family: str | Family, layout: BlockLayout | None = None, **settings: Any
) -> Objective:
    """An objective for a family: its published settings, changed by `settings` (`lambda` as recipes write it).

    `layout` is the attention of the model, where it is block-causal: objectives of block diffusion take its block size.
    """
    given, kind = check_settings(name, settings), OBJECTIVES[name]
    if layout is not None and layout.causal and kind not in (CausalBlocks, NextToken):
        raise TadError(
            f"objective '{name}' is for other models: this one is autoregressive, and learns by causal-blocks or next-token"
        )
    if layout is not None and (issubclass(kind, BlockDiffusion) or (kind is CausalBlocks and layout.drafts)):
        given = {"block": layout.size, **given}
    if kind is NextToken and (layout is None or (layout.size != 1 and not layout.causal)):
        raise TadError(f"objective '{name}' needs token-causal attention: a model whose block size is 1")
    if layout is not None and given.get("block_causal") is not None:
        raise TadError(
            f"objective.block_causal: this model is block-causal by itself, in blocks of {layout.size}; leave it out"
        )
    found = family if isinstance(family, Family) else family_named(family)
    given = {key: _checked(kind, key, value) for key, value in given.items()}
    return kind(
        mask_token=mask_token,
        logit_shift=found.logit_shift,
        model_block=None if layout is None else int(layout.size),
        **{**kind.published.get(found.name, {}), **given},
    )


def check_settings(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings by the names of the objective's fields; an unknown objective or setting is refused."""
    if name not in OBJECTIVES:
        raise TadError(f"objective '{name}' is not known; known: {', '.join(OBJECTIVES)}")
    given = {"lambda_" if key == "lambda" else key: value for key, value in settings.items()}
    known = [
        f.name for f in fields(OBJECTIVES[name]) if f.name not in ("mask_token", "logit_shift", "model_block")
    ]
    for key in given:
        if key not in known:
            shown = [field.removesuffix("_") for field in known]
            close = get_close_matches(key, shown, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(shown)}"
            raise TadError(f"objective '{name}' has no setting '{key}'; {hint}")
    return given


def _checked(kind: type[Objective], key: str, value: Any) -> Any:
    """The value as the setting's type; a list becomes a tuple."""
    try:
        return TypeAdapter(get_type_hints(kind, include_extras=True)[key]).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise TadError(f"objective.{key.removesuffix('_')}: {message} (got {value!r})") from None
