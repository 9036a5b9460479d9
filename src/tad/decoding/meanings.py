"""What each parameter of a decoder means, in a line: for lists of them, and for the playground."""

from __future__ import annotations

from tad.decoding.decoders import Decoder, describe

# Parameter -> meaning, in a line; `threshold` depends on the rule.
MEANINGS = {
    "block": "positions per block; none: the whole canvas is one block, or block by block the model's own size",
    "sub_block": "parts of a block that are decoded from left to right; none: the block at once",
    "store": "a finished block has one more forward that stores its keys and values; else the next block's first does",
    "post_steps": "tokens of the block may be edited, for so many forwards after its last mask; none: no editing",
    "block_add": "share of the last block decoded before the next one opens",
    "decoded": "share of a block decoded before the next one must make progress at every forward",
    "strict": "the threshold itself does not pass",
    "keep_best": "the best candidate is revealed at every forward, whatever the threshold",
    "score": "what surest means: confidence, entropy or margin",
    "steps": "forwards in all, block by block those of a block; none: one per position",
    "leftmost": "a forward's share of the block is the candidates to the left, not the surest",
    "bound": "sum of entropies (nats) up to which tokens are revealed",
    "edit_threshold": "confidence above which a token of the block is replaced",
    "least": "masks that a forward reveals at least",
    "timesteps": "Dream's timestep schedule instead of an even split",
    "eps": "where Dream's timestep schedule ends",
    "factor": "the r-th surest is revealed while its confidence is at least 1 - factor / (r + 1)",
    "low": "confidence that the best of a run of adjacent masks needs",
    "alpha": "weight of the credit in the logits",
    "beta": "what is left of the credit after a forward",
    "gamma": "exponent of the probability that is added to the credit",
    "delay": "forwards between the end of a block and the freezing of its keys and values",
    "refresh": "every so many forwards all (`active`: the prompt and what is not frozen) is fed again; 1 equals no cache",
    "temperature": "of sampling; 0: greedy",
    "top_p": "sample from the smallest set of tokens with this probability; none: all",
    "top_k": "sample from this many tokens; none: all",
    "filtered_scores": "score the tempered and filtered distribution instead of the model's own",
    "cfg": "classifier-free guidance; 0: off",
    "suppress_ends": "no; eos-logits: EOS is never proposed; confidence: end tokens are revealed last",
    "stop": "end: at an end token with no mask before it; block: at the end of its block; eager: at any end token; off: never",
}
_THRESHOLDS = {
    "confidence": "confidence from which a token is revealed",
    "entropy": "entropy (nats) up to which a token is revealed",
    "contiguous-prefix": "entropy (nats) below which the prefix goes on; with another score, its least value",
    "hierarchy": "confidence above which a token is revealed",
    "credit": "confidence, credit included, from which a token is revealed",
    "block-quota": "confidence above which a token is revealed, if enough are; none: always the forward's share of the block",
    "editing": "confidence above which a mask becomes a token",
}


def explain(key: str, decoder: Decoder) -> str:
    """One line on a parameter of a decoder."""
    return _THRESHOLDS[describe(decoder)["rule"]] if key == "threshold" else MEANINGS[key]
