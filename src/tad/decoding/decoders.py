"""Named decoders: every published method as a block schedule, an unmasking strategy and a cache policy.

`get_decoder(name, family, **overrides)` gives one with its published defaults for that family. An override is a field
of one of the parts (`threshold=0.4`, `block=16`, `temperature=0.7`) or a whole part by name (`cache="dual"`).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from tad.decoding.cache_policy import (
    ActiveCache,
    BlockCache,
    BlockCausalCache,
    CachePolicy,
    DelayedCache,
    DualCache,
    NoCache,
    PrefixCache,
    SubBlockCache,
)
from tad.decoding.parameters import PARAMETERS, THRESHOLDS
from tad.decoding.sampler import Sampling
from tad.decoding.schedule import (
    BlockByBlock,
    MultiBlock,
    Pipelined,
    Schedule,
    Sequential,
    TokenByToken,
    Verified,
)
from tad.decoding.unmasking import (
    BlockQuota,
    ConfidenceThreshold,
    ContiguousPrefix,
    Credit,
    EntropyBound,
    EntropyThreshold,
    Factor,
    Hierarchy,
    Strategy,
    TokenEditing,
    Top1,
    TopKPerStep,
)
from tad.errors import TadError
from tad.models import LM, BlockLayout

Stop = Literal["end", "block", "eager", "off"]


@dataclass(frozen=True)
class Decoder:
    """A method. `stop`: `end` when an end token stands with no mask before it (the text is as without stopping), `block`
    when the block of an end token is finished (block by block only), `eager` as soon as an end token appears (d3LLM's and TAD's early stop), `off` to decode every position."""

    schedule: Schedule | Verified
    rule: Strategy  # which candidates are unmasked
    cache: CachePolicy = field(default_factory=NoCache)
    sampling: Sampling = field(default_factory=Sampling)
    stop: Stop = "end"
    first_opens: bool = False
    """In a shifted family, the forward that opens a block reveals the block's first position and nothing else."""
    name: str = field(default="custom", compare=False)

    def opens_with_first(self, logit_shift: int) -> bool:
        return self.first_opens and logit_shift > 0 and self.cache.needs == "sequential"

    def bind(self, lm: LM, length: int | None = None) -> Decoder:
        """The decoder for answers of this length by this model: its parts checked against each other, the model and the length,
        and what depends on them filled in. The scheduler binds every request; others ask before whether it can be decoded.
        Without a length: what depends on the model alone, such as its blocks. Binding twice is binding once."""
        _check_values(self)
        bound = self._with_blocks(lm.model.shape.blocks)
        return bound if length is None else bound._with_length(length, lm.family.logit_shift, lm.context)

    def longest(self, lm: LM, room: int) -> int:
        """The longest answer that has whole blocks, where blocks must be whole, in `room` positions; 0: none fits."""
        schedule = self.bind(lm).schedule
        whole = 1 if isinstance(schedule, BlockByBlock) else schedule.block or 1
        return max(0, room) // whole * whole

    def check(self, length: int) -> None:
        """What can be refused before a model is there."""
        self._with_length(length, 0)

    def _with_length(self, length: int, logit_shift: int, context: int | None = None) -> Decoder:
        _check_values(self)
        block = length if self.schedule.block is None else self.schedule.block
        if length < 1:
            raise TadError(f"gen_length must be positive, not {length}")
        by_block = isinstance(self.schedule, BlockByBlock)
        edits = isinstance(self.schedule, BlockByBlock) and self.schedule.post_steps is not None
        if self.stop == "block" and not by_block:
            raise TadError("stop 'block' needs schedule 'block-by-block'")
        if length % block and not by_block:
            fits = length if context is None else min(length, context - 1)  # a prompt has at least one token
            nearest = max(1, fits // block) * block
            raise TadError(
                f"gen_length {length} is not a multiple of the block length {block}; use {nearest}"
            )
        if isinstance(self.schedule, Verified):
            return self._check_verified()
        needs = self.cache.needs
        kind = "block-causal" if self.schedule.block_causal else "bidirectional"
        if needs == "block-by-block" and not by_block:
            raise TadError(f"cache '{_label(self.cache)}' needs schedule 'block-by-block'")
        if isinstance(self.cache, BlockCausalCache) and by_block:
            raise TadError("cache 'block-causal' needs schedule 'pipelined'; use cache 'block'")
        if isinstance(self.rule, TokenEditing) != edits:
            raise TadError(
                "rule 'editing' needs schedule 'block-by-block' with post_steps, and post_steps that rule"
            )
        if isinstance(self.rule, BlockQuota) and not by_block:
            raise TadError("rule 'block-quota' needs schedule 'block-by-block'")
        if needs == "sequential" and not isinstance(self.schedule, Sequential):
            raise TadError(f"cache '{_label(self.cache)}' needs schedule 'sequential'")
        if needs in ("bidirectional", "block-causal") and needs != kind:
            raise TadError(
                f"cache '{_label(self.cache)}' needs {needs} attention; schedule '{_label(self.schedule)}' is {kind}"
            )
        if self.sampling.cfg and not isinstance(self.cache, NoCache):
            raise TadError("cfg needs cache 'none': the rows without prompt have no cache")
        if not isinstance(self.rule, TopKPerStep):
            return self
        if not isinstance(self.schedule, Sequential):
            raise TadError("rule 'quota' needs schedule 'sequential'")
        blocks = length // block
        steps = self.rule.steps or length
        if steps % blocks or not 0 < steps <= length:
            raise TadError(
                f"steps {steps} must be a multiple of the {blocks} blocks and at most gen_length {length}"
            )
        opened = int(self.rule.timesteps and self.opens_with_first(logit_shift))
        if steps // blocks <= opened:
            raise TadError(
                f"steps {steps} leave {steps // blocks} forward(s) per block; this method needs more"
            )
        return replace(self, rule=replace(self.rule, per_block=(block, steps // blocks), opened=opened))

    def _check_verified(self) -> Decoder:
        if not isinstance(self.rule, ContiguousPrefix) or not isinstance(self.cache, BlockCache):
            raise TadError("schedule 'verified' needs rule 'contiguous-prefix' and cache 'block'")
        if self.sampling.cfg:
            raise TadError("schedule 'verified' verifies what the model says without guidance; leave cfg out")
        return self

    def _with_blocks(self, layout: BlockLayout | None) -> Decoder:
        """With the block size of the model, where both go by blocks of the model's own; where neither does, as it is."""
        schedule, rule = self.schedule, self.rule
        if isinstance(schedule, TokenByToken | Verified) and (layout is None or not layout.causal):
            raise TadError(
                f"decoder '{self.name}' is for models with a token-causal context (llama, qwen2, qwen3, converted or not);"
                " this one's context sees in both directions"
            )
        if layout is not None and layout.causal and not layout.drafts:
            if not isinstance(schedule, TokenByToken):
                raise TadError(
                    f"decoder '{self.name}' fills masks, which this model has not learned: it is autoregressive; use decoder"
                    " 'autoregressive', or convert it first (tad convert)"
                )
            return self
        if isinstance(schedule, TokenByToken):
            return self
        if isinstance(schedule, Verified):
            assert layout is not None
            return replace(self, schedule=replace(schedule, draft=schedule.draft or int(layout.size)))
        if not isinstance(schedule, BlockByBlock):
            if layout is not None and layout.grid == "absolute":
                # With several blocks at once, or blocks of another size, it would ask for tokens behind unfinished blocks,
                # which such a model has not learned to predict.
                raise TadError(
                    f"decoder '{self.name}': schedule '{_label(schedule)}' is for models of full attention; this one is "
                    "decoded block by block: use decoder 'sdar' or 'fast-dllm-v2', with any rule (rule=entropy is TAD's)"
                )
            return self
        if layout is None or layout.grid != "absolute":
            raise TadError(
                f"decoder '{self.name}' is for block-diffusion models; this one's attention is full"
            )
        block = schedule.block or int(layout.size)
        if schedule.sub_block is not None and block % schedule.sub_block:
            raise TadError(f"sub_block {schedule.sub_block} does not divide the block of {block} positions")
        if isinstance(rule, BlockQuota):
            rule = replace(rule, per_block=(block, rule.steps or block))
        return replace(self, schedule=replace(schedule, block=block), rule=rule)


def _check_values(decoder: Decoder) -> None:
    """A strategy that is not one of `RULES` has parameters of its own, which nobody knows here."""
    for name, value in parameters(decoder).items():
        by_share = name == "threshold" and value is None and isinstance(decoder.rule, BlockQuota)
        if name in PARAMETERS and not by_share:
            PARAMETERS[name].check(name, value)


# The parts by name, for overrides and for listing.
SCHEDULES: dict[str, type[Any]] = {
    "token-by-token": TokenByToken,
    "verified": Verified,
    "sequential": Sequential,
    "multi-block": MultiBlock,
    "pipelined": Pipelined,
    "block-by-block": BlockByBlock,
}
RULES: dict[str, type[Any]] = {
    "best": Top1,
    "quota": TopKPerStep,
    "confidence": ConfidenceThreshold,
    "entropy": EntropyThreshold,
    "contiguous-prefix": ContiguousPrefix,
    "factor": Factor,
    "hierarchy": Hierarchy,
    "credit": Credit,
    "block-quota": BlockQuota,
    "entropy-bound": EntropyBound,
    "editing": TokenEditing,
}
CACHES: dict[str, type[Any]] = {
    "none": NoCache,
    "prefix": PrefixCache,
    "dual": DualCache,
    "delayed": DelayedCache,
    "active": ActiveCache,
    "block-causal": BlockCausalCache,
    "block": BlockCache,
    "sub-block": SubBlockCache,
}
_PARTS: dict[str, dict[str, type[Any]]] = {"schedule": SCHEDULES, "rule": RULES, "cache": CACHES}
_DERIVED = ("per_block", "opened", "count_table")  # fields that no user sets

_FAST = Decoder(Sequential(32), ConfidenceThreshold(0.9), first_opens=True)
_DREAM_TOP_K = TopKPerStep(timesteps=True, score="entropy")
_TAD = Decoder(MultiBlock(32, block_add=0.1, decoded=0.95), EntropyThreshold(0.5, strict=True))
_D3LLM = replace(_TAD, rule=EntropyThreshold(0.5, strict=False))
_D3LLM_DREAM = replace(_TAD, rule=EntropyThreshold(0.4, strict=True, keep=None))
_D2F = Decoder(
    Pipelined(32, block_add=0.1, decoded=0.95),
    ConfidenceThreshold(0.9, strict=True, keep=None),
    BlockCausalCache(),
)

_ON_GRID = Decoder(BlockByBlock(store=False), Top1("confidence"), BlockCache())

# Method -> defaults, with a row of its own where a family's published defaults differ.
DECODERS: dict[str, Decoder] = {
    "autoregressive": Decoder(TokenByToken(), Top1("confidence"), BlockCache()),
    "verified": Decoder(Verified(), ContiguousPrefix(0.0, "confidence"), BlockCache()),
    "one-by-one": Decoder(Sequential(32), Top1("confidence")),
    "llada": Decoder(Sequential(32), TopKPerStep()),
    "dream": Decoder(Sequential(None), _DREAM_TOP_K, sampling=Sampling(filtered_scores=True)),
    "fast-dllm": _FAST,
    "fast-dllm-prefix": replace(_FAST, cache=PrefixCache()),
    "fast-dllm-dual": replace(_FAST, cache=DualCache()),
    "dparallel": Decoder(Sequential(32), EntropyThreshold(0.5, strict=False)),
    "d2f": _D2F,
    "d3llm": _D3LLM,
    "d3llm-cached": replace(_D3LLM, cache=DelayedCache(delay=2, refresh=3)),
    "tad": _TAD,
    "tad-cached": replace(_TAD, cache=ActiveCache(delay=1, refresh=3)),
    "tad-leftmost": replace(_TAD, rule=EntropyThreshold(0.5, keep="leftmost")),
    "fast-dllm-v2": Decoder(BlockByBlock(sub_block=8), ConfidenceThreshold(0.9, strict=True), BlockCache()),
    "sdar": Decoder(BlockByBlock(), BlockQuota(0.95), BlockCache(), stop="block"),
    "llada2": Decoder(BlockByBlock(store=False), BlockQuota(0.95), BlockCache(), stop="block"),
    "llada2.1": Decoder(
        BlockByBlock(store=False, post_steps=16), TokenEditing(0.95, 0.9), BlockCache(), stop="block"
    ),
}
FAMILY_DECODERS: dict[tuple[str, str], Decoder] = {
    **{
        ("one-by-one", family): _ON_GRID
        for family in ("sdar", "sdar-moe", "llada2", "llama", "qwen2", "qwen3")
    },
    ("one-by-one", "fast-dllm-v2"): replace(_ON_GRID, schedule=BlockByBlock(sub_block=8, store=False)),
    ("dparallel", "dream"): Decoder(Sequential(32), EntropyThreshold(0.5, strict=True)),
    ("d3llm", "dream"): _D3LLM_DREAM,
    ("d3llm-cached", "dream"): replace(_D3LLM_DREAM, cache=DelayedCache(delay=2, refresh=3)),
}


def decoders_for(layout: BlockLayout | None) -> list[str]:
    """The names of the decoders that a model of this attention can be decoded with."""
    if layout is not None and layout.causal and not layout.drafts:
        return ["autoregressive"]
    by_block = layout is not None and layout.grid == "absolute"
    causal = layout is not None and layout.causal
    return [
        name
        for name, decoder in DECODERS.items()
        if name == "one-by-one"
        or (
            causal
            if isinstance(decoder.schedule, TokenByToken | Verified)
            else isinstance(decoder.schedule, BlockByBlock) == by_block
        )
    ]


def get_decoder(name: str | Decoder, family: str = "llada", /, **overrides: Any) -> Decoder:
    """The named decoder with its defaults for a family, and overrides applied."""
    if isinstance(name, Decoder):
        decoder = name
    else:
        if name not in DECODERS:
            close = difflib.get_close_matches(name, DECODERS, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise TadError(f"unknown decoder '{name}'{hint or ';'} known: {', '.join(DECODERS)}")
        decoder = replace(FAMILY_DECODERS.get((name, family), DECODERS[name]), name=name)
    for part, known in _PARTS.items():
        if part in overrides:
            decoder = replace(decoder, **{part: _part(part, overrides.pop(part), known)})
    for key, value in overrides.items():
        decoder = _override(decoder, key, value)
    return decoder


def parameters(decoder: Decoder) -> dict[str, Any]:
    """Every field that can be overridden, with its value: name -> value."""
    found: dict[str, Any] = {}
    parts: tuple[Any, ...] = (decoder.schedule, decoder.rule, decoder.cache, decoder.sampling)
    for part in parts:
        for item in fields(part):
            if item.name not in (*_DERIVED, *getattr(part, "fixed", ())):
                found[item.name] = getattr(part, item.name)
    return {**found, "stop": decoder.stop}


def describe(decoder: Decoder) -> dict[str, str]:
    """The parts in words, for `tad decoders`."""
    return {name: _label(getattr(decoder, name)) for name in _PARTS}


def explain(key: str, decoder: Decoder) -> str:
    """One line on a parameter of a decoder."""
    return THRESHOLDS[describe(decoder)["rule"]] if key == "threshold" else PARAMETERS[key].meaning


def _label(part: Any) -> str:
    for known in _PARTS.values():
        for name, kind in known.items():
            if type(part) is kind:
                return name
    return type(part).__name__


def _part(kind: str, value: Any, known: dict[str, type[Any]]) -> Any:
    value = "none" if value is None else value  # how a command line reads the cache of that name
    if isinstance(value, tuple(known.values())):
        return value
    if value not in known:
        raise TadError(f"unknown {kind} '{value}'; known: {', '.join(known)}")
    return known[value]()


def _override(decoder: Decoder, key: str, value: Any) -> Decoder:
    if key == "stop":
        return replace(decoder, stop=value)
    for part in ("schedule", "rule", "cache", "sampling"):
        current = getattr(decoder, part)
        if key in {item.name for item in fields(current)} - {*_DERIVED, *getattr(current, "fixed", ())}:
            return replace(decoder, **{part: replace(current, **{key: value})})
    known = parameters(decoder)
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ";"
    raise TadError(
        f"decoder '{decoder.name}' has no parameter '{key}'{hint} its parameters: {', '.join(known)}"
    )
