"""What this server offers, one model with its decoders and limits, and the jobs that requests within it become."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import Any

from tad.decoding import DECODERS, Decoder, check_prompt, get_decoder
from tad.decoding.decoders import describe, parameters
from tad.errors import TadError
from tad.generation import encode_prompt
from tad.models import LM
from tad.serving.engine import Job
from tad.serving.errors import ApiError
from tad.serving.schema import ChatRequest, CompletionRequest, GenerationRequest
from tad.serving.settings import Settings

_DEFAULT_TOKENS = 256
# Rule -> largest threshold worth trying, and what the threshold is.
_THRESHOLDS = {
    "confidence": (1.0, "confidence from which a token is revealed"),
    "entropy": (2.0, "entropy (nats) up to which a token is revealed"),
}
_EXAMPLE_TASKS = ("nano-word", "nano-math", "nano-code")


class Offer:
    """Made once, when the server starts; raises `TadError` where the settings do not fit the model."""

    def __init__(self, lm: LM, settings: Settings) -> None:
        if lm.tokenizer is None:
            raise TadError(f"{lm.source}: has no tokenizer; a server needs one")
        self.lm, self.settings = lm, settings
        source = Path(lm.source)
        self.name = settings.name or (source.resolve().name if source.is_dir() else lm.source)
        self.created = int(time.time())
        self.decoders = {name: get_decoder(name, lm.family.name) for name in DECODERS}
        own = {} if settings.threshold is None else {"threshold": settings.threshold}
        chosen = get_decoder(settings.decoder, lm.family.name, **own)
        self.decoders[settings.decoder] = chosen
        block = chosen.schedule.block or 1
        chosen.prepared(block, lm.family.logit_shift)
        self.max_tokens = settings.max_tokens or max(block, min(2048, lm.context // 2 // block * block))
        if not block <= self.max_tokens < lm.context:
            raise TadError(
                f"--max-tokens {self.max_tokens}: should be at least a block of {block} and below the context of {lm.context}"
            )
        self.default_tokens = min(_DEFAULT_TOKENS, self.max_tokens)
        self._encoding = threading.Lock()  # the tokenizers library lends a tokenizer to one thread at a time

    # Requests

    def check_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(
                404, f"model '{name}' is not here; this server has '{self.name}'", "model", "model_not_found"
            )

    def job(self, request: ChatRequest | CompletionRequest) -> Job:
        """The job of a request; an `ApiError` names the field that does not fit."""
        self.check_model(request.model)
        _check_stream(request)
        decoder = self._decoder(request)
        prompt, source = self._prompt(request)
        limit, length = self._length(request, decoder, len(prompt))
        try:
            check_prompt(self.lm, prompt, length, source)
        except TadError as error:
            raise ApiError(400, str(error), source, "invalid_prompt") from None
        try:
            prepared = decoder.prepared(length, self.lm.family.logit_shift)
        except TadError as error:
            raise ApiError(400, f"decoder '{decoder.name}': {error}", "decoder") from None
        return Job(
            prompt=tuple(prompt),
            decoder=prepared,
            length=length,
            max_tokens=limit,
            seed=secrets.randbelow(2**31) if request.seed is None else request.seed,
            stops=request.stops,
            adapter=self._adapter(request),
        )

    def _decoder(self, request: GenerationRequest) -> Decoder:
        name = request.decoder or self.settings.decoder
        if name not in self.decoders:
            raise ApiError(
                400, f"decoder '{name}' is not known; one of: {', '.join(self.decoders)}", "decoder"
            )
        decoder = self.decoders[name]
        for field in ("threshold", "temperature", "top_p"):
            value = getattr(request, field)
            if value is None:
                continue
            try:
                decoder = get_decoder(decoder, self.lm.family.name, **{field: value})
            except TadError as error:
                raise ApiError(400, str(error), field) from None
        return decoder

    def _prompt(self, request: ChatRequest | CompletionRequest) -> tuple[list[int], str]:
        """Token ids, and the field they came from."""
        source = "messages" if isinstance(request, ChatRequest) else "prompt"
        try:
            with self._encoding:
                if isinstance(request, ChatRequest):
                    messages = [{"role": one.role, "content": one.text} for one in request.messages]
                    return encode_prompt(self.lm, messages), source
                if isinstance(request.prompt, str):
                    return encode_prompt(self.lm, request.prompt, raw=True), source
                return request.prompt, source
        except TadError as error:
            raise ApiError(400, str(error).removeprefix("prompt 0: "), source, "invalid_prompt") from None

    def _length(self, request: GenerationRequest, decoder: Decoder, prompt: int) -> tuple[int, int]:
        """Tokens of the answer, and positions to generate: whole blocks that hold them."""
        block = decoder.schedule.block or 1
        room = (self.lm.context - prompt) // block * block
        limit = request.limit
        if isinstance(request, ChatRequest) and None not in (
            request.max_tokens,
            request.max_completion_tokens,
        ):
            raise ApiError(400, "max_tokens and max_completion_tokens are the same; give one", "max_tokens")
        if limit is None:
            limit = min(self.default_tokens, max(room, block))
        if limit > self.max_tokens:
            raise ApiError(400, f"max_tokens {limit} is over the limit of {self.max_tokens}", "max_tokens")
        length = -(-limit // block) * block
        if prompt + length > self.lm.context:
            raise ApiError(
                400,
                f"a prompt of {prompt} tokens and {length} to generate (max_tokens in blocks of {block}) are over the"
                f" context of {self.lm.context}",
                "max_tokens" if room > 0 else None,
                "context_length_exceeded",
            )
        return limit, length

    def _adapter(self, request: GenerationRequest) -> bool:
        if request.adapter and self.lm.peft is None:
            raise ApiError(400, "this server has no adapter; leave adapter out or make it false", "adapter")
        return self.lm.peft is not None if request.adapter is None else request.adapter

    # What it says of itself

    def card(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "tad",
            "tad": {
                "family": self.lm.family.name,
                "context": self.lm.context,
                "device": str(self.lm.device),
                "dtype": str(self.lm.dtype).removeprefix("torch."),
                "adapter": self.lm.adapter,
                "decoder": self.settings.decoder,
                "decoders": [_describe(decoder) for decoder in self.decoders.values()],
                "mask": self._special(self.lm.tokens.mask),
                "ends": [self._special(token) for token in self.lm.tokens.ends],
                "limits": self._limits(),
                "examples": self._examples(),
            },
        }

    def _special(self, token: int) -> dict[str, Any]:
        return {"id": token, "text": self.lm.decode([token], skip_special=False)}

    def _limits(self) -> dict[str, Any]:
        block = self.decoders[self.settings.decoder].schedule.block or 1
        return {
            "max_tokens": self.max_tokens,
            "default_max_tokens": self.default_tokens,
            "prompt_tokens": self.lm.context - block,
            "body_bytes": self.settings.body_bytes,
            "batch": self.settings.batch,
            "queue": self.settings.queue,
            "queue_seconds": self.settings.queue_seconds,
            "seconds": self.settings.seconds,
        }

    def _examples(self) -> list[dict[str, str]]:
        """Two problems of each family of the nano world, where the model is one of its own."""
        if not Path(self.lm.source).name.startswith("nano-"):
            return []
        from tad.tasks import get_task

        return [
            {"title": f"{name} {number}", "prompt": example.question}
            for name in _EXAMPLE_TASKS
            for number, example in enumerate(get_task(name, size=2).examples("test"), start=1)
        ]


def _check_stream(request: GenerationRequest) -> None:
    for field in ("reveals", "stream_options"):
        if getattr(request, field) and not request.stream:
            raise ApiError(400, f"{field} needs stream: true", field)


def _describe(decoder: Decoder) -> dict[str, Any]:
    settable, parts = parameters(decoder), describe(decoder)
    threshold = None
    if "threshold" in settable:
        largest, meaning = _THRESHOLDS[parts["rule"]]
        threshold = {
            "default": settable["threshold"],
            "min": 0.0,
            "max": max(largest, settable["threshold"]),
            "step": 0.01,
            "meaning": meaning,
        }
    return {
        "name": decoder.name,
        **parts,
        "block": decoder.schedule.block,
        "temperature": decoder.sampling.temperature,
        "top_p": decoder.sampling.top_p,
        "threshold": threshold,
    }
