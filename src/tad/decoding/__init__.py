"""How masks become tokens: block table, block schedules, reveal rules, caches, and one loop. Token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tad.decoding.decoders import DECODERS, Decoder, get_decoder
from tad.decoding.loop import decode_batch
from tad.decoding.result import Decoded, Step, StepCallback
from tad.errors import TadError
from tad.models import LM

__all__ = ["DECODERS", "Decoded", "Decoder", "Step", "StepCallback", "check_prompt", "decode", "get_decoder"]


def decode(
    lm: LM,
    prompts: Sequence[Sequence[int]],
    decoder: str | Decoder = "tad",
    gen_length: int = 256,
    seed: int | Sequence[int] = 0,
    batch_size: int | None = None,
    on_step: StepCallback | None = None,
    **overrides: Any,
) -> list[Decoded]:
    """Decode prompts (token ids) and return one result per prompt, in order.

    `seed` is one for all rows or one per row; a row's samples depend on its own seed and prompt alone. `batch_size`
    cuts the prompts into batches of similar length. `overrides` are the decoder's parameters, see `get_decoder`.
    """
    chosen = get_decoder(decoder, lm.family.name, **overrides).prepared(gen_length, lm.family.shift)
    seeds = [seed] * len(prompts) if isinstance(seed, int) else list(seed)
    if len(seeds) != len(prompts):
        raise TadError(f"{len(seeds)} seeds for {len(prompts)} prompts: give one per prompt, or a single one")
    for row, prompt in enumerate(prompts):
        check_prompt(lm, prompt, gen_length, f"prompt {row}")
    size = batch_size or max(1, len(prompts))
    order = (
        sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        if size < len(prompts)
        else range(len(prompts))
    )
    results: list[Decoded | None] = [None] * len(prompts)
    for low in range(0, len(prompts), size):
        rows = list(order[low : low + size])
        callback = _renumbered(on_step, rows) if on_step is not None else None
        batch = decode_batch(
            lm.model,
            [prompts[row] for row in rows],
            chosen,
            gen_length,
            lm.tokens,
            lm.family.shift,
            [seeds[row] for row in rows],
            callback,
        )
        for row, result in zip(rows, batch, strict=True):
            results[row] = result
    return [result for result in results if result is not None]


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
