"""A language model ready to use: weights, tokenizer, special tokens and family facts in one object.

`load` takes a hub id or a directory. Token-level code (decoding, training) uses `model`, `tokens` and `family`;
only `encode`, `encode_text` and `decode` need the tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from tad.errors import TadError
from tad.models import lora
from tad.models.checkpoint import Checkpoint
from tad.models.conversion import Conversion
from tad.models.defaults import DecodingDefaults, read_defaults
from tad.models.family import Family
from tad.models.gated import attach_gated
from tad.models.quantize import KINDS, Kind
from tad.models.quantize import quantize as quantize_model
from tad.models.source import locate
from tad.models.stored import parse_dtype
from tad.models.tokenizer import FILES, Message, encode_chat, encode_text, load_tokenizer
from tad.models.tokens import SpecialTokens, read_special_tokens
from tad.models.transformer import MaskedDiffusionModel

_LARGE = 2 * 10**9  # bytes of weights whose reading shows a bar
ATTENTION = ("sdpa", "flex_attention")


@dataclass(repr=False)
class LM:
    """See the module. `adapter` names the attached PEFT adapter, if any; `peft` is PEFT's handle on it."""

    model: MaskedDiffusionModel
    family: Family
    tokens: SpecialTokens
    tokenizer: Any = None
    source: str = ""
    adapter: str | None = None
    peft: Any = None
    conversion: Conversion | None = (
        None  # of a converted model whose parent is frozen: `peft` acts on masks only
    )
    defaults: DecodingDefaults = field(default_factory=DecodingDefaults)

    @property
    def device(self) -> torch.device:
        """Where token ids go: the device of the embedding."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def context(self) -> int:
        """The longest canvas the checkpoint was made for."""
        return self.model.shape.context

    def encode(self, prompt: str | list[Message], prefix: str = "") -> list[int]:
        """Token ids of a chat (a string is one user turn), ready for the assistant's answer.

        `prefix` is text the answer already begins with. BOS stands there once where the family's format has it.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return encode_chat(self._tokenizer(), self.family, messages, prefix)

    def encode_text(self, text: str, bos: bool = False, allow_special: bool = False) -> list[int]:
        """Token ids of plain text, without a chat around it; `bos` puts the begin token first.

        Control tokens written in the text are text, unless `allow_special` says that they are meant.
        """
        ids = encode_text(self._tokenizer(), text, allow_special)
        if bos and self.tokens.bos is None:
            raise TadError(f"{self.source}: its tokenizer has no begin token (bos_token)")
        return [self.tokens.bos, *ids] if bos and self.tokens.bos is not None else ids

    def decode(self, ids: Iterable[int] | torch.Tensor, skip_special: bool = True) -> str:
        """Text of token ids. The special tokens of this checkpoint are left out, also those its tokenizer calls plain."""
        plain = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        if skip_special:
            plain = [token for token in plain if token not in self.tokens.all]
        text = self._tokenizer().decode(
            plain, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def attach(self, rank: int = 128, alpha: float | None = None, dropout: float = 0.0) -> Any:
        """Put fresh, trainable adapters into the model; returns PEFT's handle."""
        if self.peft is not None:
            raise TadError(
                f"an adapter is already attached ({self.adapter}); load the model again without it"
            )
        self.peft = lora.attach(self.model, rank, alpha, dropout)
        self.adapter = f"new, rank {rank}"
        return self.peft

    def start_from(self, adapter: str | Path) -> lora.Factors:
        """Make a student the base: add an adapter of a directory or the hub to the weights. Returns what was added."""
        if self.peft is not None:
            raise TadError("the model already carries an adapter; load it without one")
        factors = lora.read_factors(lora.verify_adapter(adapter, self.model, self.family))
        lora.add_factors(self.model, factors)
        self.adapter = str(adapter)
        return factors

    def merge(self) -> None:
        """Add the adapter to the weights and let go of it: the same outputs up to rounding, at the base's speed.

        For decoding; there is no way back to the base, and nothing to train.
        """
        if self.conversion is not None:
            raise TadError(
                f"{self.source}: its adapter acts on masks only and cannot be merged; without it the model is its parent, "
                f"{self.conversion.parent}"
            )
        if self.peft is not None:
            self.model = self.peft.merge_and_unload().eval()
            self.peft = None

    @contextmanager
    def base(self) -> Iterator[MaskedDiffusionModel]:
        """The model with its adapter switched off, for the time of a `with` block."""
        with self.peft.disable_adapter() if self.peft is not None else nullcontext():
            yield self.model

    def __repr__(self) -> str:
        packed = 2  # int4 weights in a byte
        size = sum(
            one.numel() * (packed if one.dtype == torch.uint8 else 1)
            for name, one in self.model.named_parameters()
            if ".lora_" not in name
        )
        adapter = f", adapter {self.adapter}" if self.adapter else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"LM({self.source}, {self.family.name}, {size / 1e6:,.1f}M parameters, {dtype} on {self.device}{adapter})"

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise TadError(f"{self.source}: has no tokenizer (expected {FILES}); only token ids can be used")
        return self.tokenizer


def load(
    source: str | Path,
    adapter: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: str | dict[str, Any] | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    merge: bool = False,
    quantize: Kind | None = None,
    weights: bool = True,
) -> LM:
    """Load a model of a known family from the hub or a directory, in eval mode, after checking that the directory is whole.

    The dtype defaults to the checkpoint's own, the device to CUDA where there is one. `device_map` spreads the model
    over devices instead (accelerate). No remote code runs and no pickle is read.

    For decoding: `merge` adds the adapter to the weights (see `LM.merge`), and `quantize` (`fp8`, `int8` or `int4`) makes the
    weights of the layers smaller at the price of their rounding (`tad.models.quantize`); it merges too, and the unrounded model
    passes through the memory of the host, not the device's. Without `weights` only texts are read: a model of empty tensors
    that encodes, decodes ids and says what it is.
    """
    placement = _placement(device, device_map)
    if quantize is not None and quantize not in KINDS:
        raise TadError(f"quantize '{quantize}' is not known; use {', '.join(KINDS)} or leave it out")
    if quantize is not None and device_map is not None:
        raise TadError("quantize needs the model on one device; give device, not device_map")
    if attn_implementation is not None and attn_implementation not in ATTENTION:
        raise TadError(f"attention '{attn_implementation}' is not known; use {' or '.join(ATTENTION)}")
    precision = None if dtype is None else parse_dtype(dtype)
    checkpoint = Checkpoint.open(locate(source, revision, weights))
    if weights:
        checkpoint.verify()
    tokenizer = load_tokenizer(checkpoint)
    tokens = read_special_tokens(checkpoint, tokenizer)
    checked, conversion = None, checkpoint.conversion
    if conversion is not None:
        if adapter is not None or merge or quantize is not None:
            raise TadError(
                f"{source}: a converted model has its own adapter, which acts on masks only: no other one is added to it, and it "
                "is neither merged nor quantized"
            )
        checked = lora.verify_adapter(conversion.folder, checkpoint.on_meta(), checkpoint.family, gated=True)
    if adapter is not None:  # a wrong adapter is refused before minutes are spent on the weights
        checked = lora.verify_adapter(adapter, checkpoint.on_meta(), checkpoint.family)
    defaults = read_defaults(checkpoint, None if checked is None else checked.folder)
    if not weights:
        empty = checkpoint.on_meta().eval()
        return LM(
            empty, checkpoint.family, tokens, tokenizer, str(source), defaults=defaults, conversion=conversion
        )
    with _bar_of_large_files(checkpoint):
        model = checkpoint.family.model_class.from_pretrained(
            checkpoint.folder,
            config=checkpoint.config,
            dtype=precision or checkpoint.dtype,
            device_map=placement if quantize is None else {"": torch.device("cpu")},
            attn_implementation=attn_implementation or "sdpa",
            use_safetensors=True,
        ).eval()
    lm = LM(
        model=model,
        family=checkpoint.family,
        tokens=tokens,
        tokenizer=tokenizer,
        source=str(source),
        adapter=None if adapter is None else str(adapter),
        defaults=defaults,
        conversion=conversion,
    )
    if conversion is not None and checked is not None:
        lm.peft, lm.adapter = attach_gated(model, checked, conversion.mask_token_id), str(source)
    elif checked is not None:
        lm.peft = lora.load_adapter(model, checked)
    if merge or quantize is not None:
        lm.merge()
    if quantize is not None:
        quantize_model(lm.model, quantize, placement[""])
    return lm


@contextmanager
def _bar_of_large_files(checkpoint: Checkpoint) -> Iterator[None]:
    """Hide transformers' bar of loaded weights, unless reading them takes long enough to be watched."""
    shown = logging.is_progress_bar_enabled()
    if sum(shard.stat().st_size for shard in checkpoint.shards) < _LARGE:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _default_device() -> str:
    """A GPU where there is one; under torchrun, the one that is this process's."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else "cuda"


def _placement(device: str | torch.device | None, device_map: str | dict[str, Any] | None) -> Any:
    """What transformers calls a device map, for either way of saying it."""
    if device_map is not None:
        if device is not None:
            raise TadError("give either device or device_map, not both")
        return device_map
    try:
        chosen = torch.device(device or _default_device())
    except RuntimeError:
        raise TadError(f"device '{device}' is not known; use cpu, cuda or cuda:N") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise TadError(f"device '{device}': no CUDA device here; use device='cpu'")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise TadError(f"device '{device}': only {torch.cuda.device_count()} CUDA devices here")
    return {"": chosen}
