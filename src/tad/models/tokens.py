"""Special token ids, read from a checkpoint's own files: config.json, generation_config.json, the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from tad.errors import TadError
from tad.models.checkpoint import Checkpoint
from tad.models.shape import NO_TOKEN


@dataclass(frozen=True)
class SpecialTokens:
    """Ids from the checkpoint's own files. `eot` ends a turn, `eos` fills the rest of the canvas.

    `mask` is `NO_TOKEN` in an autoregressive model, which has none; `stops` are further tokens that end an answer.
    """

    mask: int
    eos: int
    pad: int
    bos: int | None = None
    eot: int | None = None
    stops: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int | None, ...]:
        """Every special token; None where there is none."""
        return (self.mask, self.eos, self.pad, self.bos, self.eot, *self.stops)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        named = (self.eos, *(() if self.eot is None else (self.eot,)), *self.stops)
        return tuple(dict.fromkeys(named))


def read_special_tokens(checkpoint: Checkpoint, tokenizer: Any = None) -> SpecialTokens:
    """Ids in config.json come first, then generation_config.json, then the tokenizer's own.

    BOS is the tokenizer's alone: Dream's config.json repeats the end token there.
    """
    family, folder = checkpoint.family, checkpoint.folder
    known = tokenizer.get_vocab() if tokenizer is not None else {}
    generation = checkpoint.optional("generation_config.json")

    rows = checkpoint.config.shape.vocab

    def find(name: str, text: str | None, released: int = rows) -> int | None:
        """In the files, else the tokenizer's token `text`, else the released id where the vocabulary has it."""
        for source in (checkpoint.values, generation):
            value = source.get(f"{name}_token_id")
            if isinstance(value, list) and value:
                value = value[0]
            if value is not None:
                return check(value, f"{name}_token_id")
        return known.get(text or "", released if 0 <= released < rows else None)

    def check(value: Any, field: str) -> int:
        if type(value) is not int or not 0 <= value < rows:
            raise TadError(f"{folder / 'config.json'}: {field} is {value!r}, the vocabulary has {rows} rows")
        return value

    layout = checkpoint.config.shape.blocks
    if layout is not None and layout.causal and not layout.drafts:
        mask: int | None = NO_TOKEN
    else:
        mask = find("mask", getattr(tokenizer, "mask_token", None) or family.mask_text, family.mask_token_id)
    if mask is None:
        raise TadError(
            f"{folder / 'config.json'}: no mask token; set mask_token_id (or add {family.mask_text} to the tokenizer)"
        )
    eos = find("eos", getattr(tokenizer, "eos_token", None), family.eos_token_id)
    if eos is None:
        raise TadError(f"{folder / 'config.json'}: no end token; set eos_token_id")
    pad = find("pad", getattr(tokenizer, "pad_token", None))
    bos = known.get(getattr(tokenizer, "bos_token", None) or "")
    eot = known.get(family.end_of_turn_text)
    stops = generation.get("eos_token_id")
    if eot is None and isinstance(stops, list) and stops and stops[0] != eos:
        # Qwen's generation_config.json lists the end of a turn first.
        eot = check(stops[0], "eos_token_id")
    listed = [one for one in (checkpoint.values.get("eos_token_id"), stops) if isinstance(one, list)]
    further = (check(one, "eos_token_id") for one in dict.fromkeys(chain.from_iterable(listed)))
    others = (
        tuple(one for one in further if one not in (eos, eot)) if layout is not None and layout.causal else ()
    )
    return SpecialTokens(mask, eos, eos if pad is None else pad, bos, eot, others)
