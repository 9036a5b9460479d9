"""The parameters of decoders: what each means, in a line, and the values that it takes."""

from __future__ import annotations

from typing import Any, NamedTuple

from tad.errors import TadError


class Parameter(NamedTuple):
    """A number between bounds, a switch (`kind` bool), or one of some words."""

    meaning: str
    kind: type = float
    low: float = 0
    high: float | None = None
    optional: bool = False  # None says something too
    words: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that does not fit."""
        if value is None and self.optional:
            return
        if self.words:
            if value not in self.words:
                raise TadError(f"{name} is one of {', '.join(self.words)}, not {value!r}")
            return
        if self.kind is bool:
            if not isinstance(value, bool):
                raise TadError(f"{name} is true or false, not {value!r}")
            return
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else (int, float)):
            raise TadError(f"{name} must be a {'whole ' if self.kind is int else ''}number, not {value!r}")
        if not (value >= self.low and (self.high is None or value <= self.high)):  # also refuses nan
            bound = f"at least {self.low}" if self.high is None else f"between {self.low} and {self.high}"
            raise TadError(f"{name} must be {bound}, not {value!r}")


PARAMETERS = {
    "block": Parameter(
        "positions per block; none: the whole canvas is one block, or block by block the model's own size",
        int, 1, optional=True,
    ),
    "sub_block": Parameter(
        "parts of a block that are decoded from left to right; none: the block at once", int, 1, optional=True
    ),
    "store": Parameter(
        "a finished block has one more forward that stores its keys and values; else the next block's first does", bool
    ),
    "post_steps": Parameter(
        "tokens of the block may be edited, for so many forwards after its last mask; none: no editing",
        int, optional=True,
    ),
    "draft": Parameter("masks per draft; none: the model's block size", int, 1, 4096, optional=True),
    "ends": Parameter(
        "likely ends of a draft that the verifying forward already puts masks behind; 0: a forward of its own drafts",
        int, high=64,
    ),
    "rest": Parameter("forwards without a draft, at most, after drafts of which nothing was kept", int, high=4096),
    "block_add": Parameter("share of the last block decoded before the next one opens", high=1),
    "decoded": Parameter(
        "share of a block decoded before the next one must make progress at every forward", high=1
    ),
    "threshold": Parameter("depends on the rule, see `THRESHOLDS`"),
    "strict": Parameter("the threshold itself does not pass", bool),
    "keep": Parameter(
        "what is revealed at every forward, whatever the threshold: the best candidate, the leftmost one, or none",
        optional=True, words=("best", "leftmost"),
    ),
    "score": Parameter(
        "what surest means: confidence, entropy or margin", words=("confidence", "entropy", "margin")
    ),
    "steps": Parameter(
        "forwards in all, block by block those of a block; none: one per position", int, 1, optional=True
    ),
    "leftmost": Parameter(
        "a forward's share of the block is the candidates to the left, not the surest", bool
    ),
    "bound": Parameter("sum of entropies (nats) up to which tokens are revealed"),
    "edit_threshold": Parameter("confidence above which a token of the block is replaced"),
    "least": Parameter("masks that a forward reveals at least", int, 1),
    "timesteps": Parameter("Dream's timestep schedule instead of an even split", bool),
    "eps": Parameter("where Dream's timestep schedule ends", high=1),
    "factor": Parameter(
        "the r-th surest is revealed while its confidence is at least 1 - factor / (r + 1)"
    ),
    "low": Parameter("confidence that the best of a run of adjacent masks needs", high=1),
    "alpha": Parameter("weight of the credit in the logits"),
    "beta": Parameter("what is left of the credit after a forward", high=1),
    "gamma": Parameter("exponent of the probability that is added to the credit"),
    "delay": Parameter("forwards between the end of a block and the freezing of its keys and values", int),
    "refresh": Parameter(
        "every so many forwards all (`active`: the prompt and what is not frozen) is fed again; 1 equals no cache",
        int, 1,
    ),
    "temperature": Parameter("of sampling; 0: greedy"),
    "top_p": Parameter(
        "sample from the smallest set of tokens with this probability; none: all", high=1, optional=True
    ),
    "top_k": Parameter("sample from this many tokens; none: all", int, 1, optional=True),
    "filtered_scores": Parameter(
        "score the tempered and filtered distribution instead of the model's own", bool
    ),
    "cfg": Parameter("classifier-free guidance; 0: off"),
    "suppress_ends": Parameter(
        "no; eos-logits: EOS is never proposed; confidence: end tokens are revealed last",
        words=("no", "eos-logits", "confidence"),
    ),
    "stop": Parameter(
        "end: at an end token with no mask before it; block: at the end of its block; eager: at any end token; off: never",
        words=("end", "block", "eager", "off"),
    ),
}  # fmt: skip
THRESHOLDS = {  # by rule
    "confidence": "confidence from which a token is revealed",
    "entropy": "entropy (nats) up to which a token is revealed",
    "contiguous-prefix": "entropy (nats) below which the prefix goes on; with another score, its least value",
    "hierarchy": "confidence above which a token is revealed",
    "credit": "confidence, credit included, from which a token is revealed",
    "block-quota": "confidence above which a token is revealed, if enough are; none: always the forward's share of the block",
    "editing": "confidence above which a mask becomes a token",
}
