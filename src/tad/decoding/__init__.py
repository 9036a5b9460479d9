"""How masks become tokens: block table, block schedules, reveal rules, caches, and one loop. Token ids only.

`decode` runs the loop as it stands, or the engine, which gives the same tokens faster on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, cast

from tad.decoding.decoders import DECODERS, Decoder, get_decoder
from tad.decoding.engine import Engine, engine_for, why_not
from tad.decoding.loop import decode_batch
from tad.decoding.result import Decoded, Step, StepCallback
from tad.errors import TadError
from tad.models import LM

__all__ = [
    "DECODERS",
    "Decoded",
    "Decoder",
    "Engine",
    "EngineChoice",
    "Step",
    "StepCallback",
    "check_prompt",
    "decode",
    "get_decoder",
]

EngineChoice = Literal["auto", "plain", "graph"]
ENGINE_VARIABLE = "TAD_ENGINE"  # decides where no engine is asked for
DEFAULT_ENGINE: EngineChoice = "auto"


def decode(
    lm: LM,
    prompts: Sequence[Sequence[int]],
    decoder: str | Decoder = "tad",
    gen_length: int = 256,
    seed: int | Sequence[int] = 0,
    batch_size: int | None = None,
    on_step: StepCallback | None = None,
    engine: EngineChoice | Engine | None = None,
    **overrides: Any,
) -> list[Decoded]:
    """Decode prompts (token ids) and return one result per prompt, in order.

    `seed` is one for all rows or one per row; a row's samples depend on its own seed and prompt alone. `batch_size`
    cuts the prompts into batches of similar length. `overrides` are the decoder's parameters, see `get_decoder`.

    `engine`: `auto`, the default, is the engine on CUDA where it serves model and decoder, else the loop; `plain` the loop;
    `graph` the engine with its recorded steps (on a CPU the same steps, not recorded). An `Engine` of one's own is used as it is. Where none is given, the environment's TAD_ENGINE decides. With
    the engine `batch_size` rows are decoded side by side, and the next one takes the place of one that ends.
    """
    chosen = get_decoder(decoder, lm.family.name, **overrides).prepared(gen_length, lm.family.logit_shift)
    seeds = [seed] * len(prompts) if isinstance(seed, int) else list(seed)
    if len(seeds) != len(prompts):
        raise TadError(f"{len(seeds)} seeds for {len(prompts)} prompts: give one per prompt, or a single one")
    for one in seeds:
        if not -(2**63) <= one < 2**63:
            raise TadError(f"seed {one} should fit into 64 bits")
    for row, prompt in enumerate(prompts):
        check_prompt(lm, prompt, gen_length, f"prompt {row}")
    size = batch_size or max(1, len(prompts))
    order = (
        sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        if size < len(prompts)
        else range(len(prompts))
    )
    if engine is None:
        engine = cast(EngineChoice, os.environ.get(ENGINE_VARIABLE) or DEFAULT_ENGINE)
    runner = _choose(lm, chosen, engine)
    # The engine takes all rows and keeps `size` of them going; the loop takes one batch after the other.
    step = len(order) if runner is not None else size
    found: dict[int, Decoded] = {}
    for low in range(0, len(order), max(1, step)):
        rows = list(order[low : low + step])
        callback = _renumbered(on_step, rows) if on_step is not None else None
        mine, own_seeds = [prompts[row] for row in rows], [seeds[row] for row in rows]
        about = (chosen, gen_length, lm.tokens, lm.family.logit_shift, own_seeds)
        if runner is not None:
            done = runner.decode(mine, *about, size, callback)
        else:
            done = decode_batch(lm.model, mine, *about, callback)
        found |= dict(zip(rows, done, strict=True))
    return [found[row] for row in range(len(prompts))]


def _choose(lm: LM, decoder: Decoder, engine: EngineChoice | Engine) -> Engine | None:
    """The engine to use; None for the loop."""
    if engine == "plain":
        return None
    if not isinstance(engine, Engine) and engine not in ("auto", "graph"):
        raise TadError(f"engine is one of auto, plain, graph, not {engine!r}")
    if engine == "auto" and lm.device.type != "cuda":
        return None
    reason = why_not(lm.model, decoder)
    if reason is None:
        return engine if isinstance(engine, Engine) else engine_for(lm.model)
    if engine == "auto":
        return None
    raise TadError(f"the engine does not serve this: {reason}; use engine='plain'")


def _renumbered(on_step: StepCallback, rows: list[int]) -> StepCallback:
    """Report rows by their place among all prompts, not in the batch."""

    def report(step: Step) -> None:
        on_step(Step(**{**step.__dict__, "row": rows[step.row]}))

    return report


def check_prompt(lm: LM, prompt: Sequence[int], gen_length: int, name: str = "prompt") -> None:
    """Refuse a prompt that cannot be decoded; `name` is how the error calls it."""
    if not prompt:
        raise TadError(f"{name} is empty: a model needs at least one token to start from")
    if len(prompt) + gen_length > lm.context:
        raise TadError(
            f"{name} has {len(prompt)} tokens; with gen_length {gen_length} that is over the context of {lm.context}"
        )
    if lm.tokens.mask in prompt:
        where = list(prompt).index(lm.tokens.mask)
        raise TadError(f"{name} contains the mask token {lm.tokens.mask} at position {where}")
    vocab = lm.model.shape.vocab
    for token in prompt:
        if not 0 <= token < vocab:
            raise TadError(f"{name} contains token {token}, outside the vocabulary of {vocab}")
