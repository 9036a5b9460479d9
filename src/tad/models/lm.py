"""A language model ready to use: weights, tokenizer, special tokens and family facts in one object.

`load` takes a hub id or a directory. Token-level code (decoding, training) uses `model`, `tokens` and `family`;
only `encode` and `decode` need the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tad.errors import TadError
from tad.models.family import Family
from tad.models.transformer import MaskedDiffusionModel

Message = dict[str, str]  # {"role": "user" | "assistant" | "system", "content": ...}


@dataclass(frozen=True)
class SpecialTokens:
    """Ids from the checkpoint's own files. `eot` ends a turn, `eos` fills the rest of the canvas."""

    mask: int
    eos: int
    pad: int
    bos: int | None = None
    eot: int | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return (self.eos,) if self.eot is None or self.eot == self.eos else (self.eos, self.eot)


@dataclass
class LM:
    """See the module. `adapter` names the attached PEFT adapter, if any."""

    model: MaskedDiffusionModel
    family: Family
    tokens: SpecialTokens
    tokenizer: Any = None
    source: str = ""
    adapter: str | None = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def context(self) -> int:
        """The longest canvas the checkpoint was made for."""
        return self.model.shape.context

    def encode(self, prompt: str | list[Message]) -> list[int]:
        """Token ids of a chat (a string is one user turn), ready for the assistant's answer, BOS exactly once."""
        raise NotImplementedError

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Text of token ids."""
        raise NotImplementedError


def load(source: str) -> LM:
    """Placeholder."""
    raise TadError("not built yet")
