"""How masks become tokens: block table, block schedules, unmasking strategies, cache policies, one step and one scheduler.

Token ids only. A step's forward is the model's own, or a CUDA graph, which gives the same tokens faster on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tad.decoding.decoders import DECODERS, Decoder, decoders_for, get_decoder
from tad.decoding.engine import GraphEngine
from tad.decoding.result import Decoded, Step, StepCallback
from tad.decoding.scheduler import EngineChoice, Scheduler
from tad.decoding.state import Request
from tad.errors import TadError
from tad.models import LM

__all__ = [
    "DECODERS",
    "Decoded",
    "Decoder",
    "EngineChoice",
    "GraphEngine",
    "Request",
    "Scheduler",
    "Step",
    "StepCallback",
    "advise_length",
    "check_prompt",
    "decode",
    "decoders_for",
    "get_decoder",
]


def decode(
    lm: LM,
    prompts: Sequence[Sequence[int]],
    decoder: str | Decoder = "tad",
    gen_length: int = 256,
    seed: int | Sequence[int] = 0,
    batch_size: int | None = None,
    on_step: StepCallback | None = None,
    engine: EngineChoice | GraphEngine | None = None,
    **overrides: Any,
) -> list[Decoded]:
    """Decode prompts (token ids) and return one result per prompt, in order.

    `seed` is one for all rows or one per row; a row's samples depend on its own seed and prompt alone. `batch_size` rows
    are decoded side by side, all by default; when one ends, the next one takes its place. `overrides` are the decoder's
    parameters, see `get_decoder`.

    `engine`: `auto`, the default, is CUDA graphs on CUDA where they serve model and decoder, else the plain forward;
    `plain` the plain forward; `graph` CUDA graphs (on a CPU the same steps, not captured). A `GraphEngine` of one's own is
    used as it is. Where none is given, the environment's TAD_ENGINE decides.
    """
    chosen = get_decoder(decoder, lm.family.name, **overrides)
    seeds = [seed] * len(prompts) if isinstance(seed, int) else list(seed)
    if len(seeds) != len(prompts):
        raise TadError(f"{len(seeds)} seeds for {len(prompts)} prompts: give one per prompt, or a single one")
    for one in seeds:
        if not -(2**63) <= one < 2**63:
            raise TadError(f"seed {one} should fit into 64 bits")
    for row, prompt in enumerate(prompts):
        check_prompt(lm, prompt, gen_length, f"prompt {row}", chosen)
    requests = [
        Request(row, prompt, gen_length, chosen, one)
        for row, (prompt, one) in enumerate(zip(prompts, seeds, strict=True))
    ]
    slots = min(batch_size or len(prompts), len(prompts))
    if slots < len(prompts):  # rows of similar length side by side
        requests.sort(key=lambda request: len(request.prompt))
    room = max((len(prompt) for prompt in prompts), default=0), gen_length
    found = Scheduler(lm, engine, on_step, room, slots).run(requests)
    return [found[row] for row in range(len(prompts))]


def advise_length(lm: LM, decoder: Decoder, prompt_tokens: int) -> str:
    """What to do where prompt and answer are over the context: the longest answer of whole blocks that fits, if there is one."""
    longest = decoder.longest(lm, lm.context - prompt_tokens)
    return f"the longest answer that fits has {longest}" if longest else "give a shorter prompt"


def check_prompt(
    lm: LM, prompt: Sequence[int], gen_length: int, name: str = "prompt", decoder: Decoder | None = None
) -> None:
    """Refuse a prompt that cannot be decoded; `name` is how the error calls it. With the decoder, an error about the length names
    one that fits."""
    if not prompt:
        raise TadError(f"{name} is empty: a model needs at least one token to start from")
    if len(prompt) + gen_length > lm.context:
        advice = f"; {advise_length(lm, decoder, len(prompt))}" if decoder else ""
        raise TadError(
            f"{name} has {len(prompt)} tokens; with gen_length {gen_length} that is over the context of {lm.context}{advice}"
        )
    if lm.tokens.mask in prompt:
        where = list(prompt).index(lm.tokens.mask)
        raise TadError(f"{name} contains the mask token {lm.tokens.mask} at position {where}")
    vocab = lm.model.shape.vocab
    for token in prompt:
        if not 0 <= token < vocab:
            raise TadError(f"{name} contains token {token}, outside the vocabulary of {vocab}")
