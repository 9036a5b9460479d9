"""Request validation: from the fields of a request to the jobs it asks for, or to an error that names the field."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path

from tad.decoding import Decoder, check_prompt, decoders_for, get_decoder
from tad.errors import TadError
from tad.generation import encode_prompt
from tad.models import LM
from tad.serving.engine import Job
from tad.serving.errors import ApiError
from tad.serving.schema import ChatRequest, CompletionRequest, GenerationRequest
from tad.serving.settings import Settings

_ROLES = {"developer": "system"}  # OpenAI's newer name
_ONE_LOGPROB = "of each position only the probability of the token that was revealed is known"


class RequestValidator:
    """Knows the model, its decoders and the limits. Raises `TadError` where the settings do not fit the model."""

    def __init__(self, lm: LM, settings: Settings) -> None:
        if lm.tokenizer is None:
            raise TadError(f"{lm.source}: has no tokenizer; a server needs one")
        self.lm, self.settings = lm, settings
        source = Path(lm.source)
        local = source.stem if source.is_file() else source.resolve().name
        self.name = settings.name or (local if source.exists() else lm.source)
        self.created = int(time.time())
        layout = lm.model.shape.blocks
        self.decoders: dict[str, Decoder] = {}
        for name in decoders_for(layout):
            with suppress(TadError):  # sub-blocks that do not divide the model's block
                self.decoders[name] = get_decoder(name, lm.family.name).bind(lm)
        given = {} if settings.threshold is None else {"threshold": settings.threshold}
        self.decoder, self.default_tokens, own = lm.defaults.fill(settings.decoder, None, given)
        chosen = get_decoder(self.decoder, lm.family.name, **own).bind(lm)
        self.decoders[self.decoder] = chosen
        block = chosen.schedule.block or 1
        chosen.bind(lm, block)
        self.max_tokens = settings.max_tokens or max(block, min(2048, lm.context // 2 // block * block))
        if not block <= self.max_tokens < lm.context:
            raise TadError(
                f"--max-tokens {self.max_tokens}: should be at least a block of {block} and below the context of {lm.context}"
            )
        self.default_tokens = min(self.default_tokens, self.max_tokens)
        self._encoding = threading.Lock()  # the tokenizers library lends a tokenizer to one thread at a time

    def check_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(
                404, f"model '{name}' is not here; this server has '{self.name}'", "model", "model_not_found"
            )

    def jobs(self, request: ChatRequest | CompletionRequest) -> list[Job]:
        """`n` jobs for each prompt, in the order of the choices; an `ApiError` names the field that does not fit."""
        self.check_model(request.model)
        _check_fields(request)
        decoder = self._decoder(request)
        prompts, source = self._prompts(request)
        each = request.n or 1
        if len(prompts) * each > self.settings.batch:
            count = f"{each} answers to {len(prompts)} prompts" if len(prompts) > 1 else f"{each} answers"
            raise ApiError(
                400,
                f"{count} are over the limit of {self.settings.batch} at once",
                "n" if each > 1 else source,
            )
        seed = secrets.randbelow(2**31) if request.seed is None else request.seed
        jobs: list[Job] = []
        for prompt in prompts:
            limit, length = self._length(request, decoder, len(prompt))
            try:
                check_prompt(self.lm, prompt, length, source)
            except TadError as error:
                raise ApiError(400, str(error), source, "invalid_prompt") from None
            try:
                prepared = decoder.bind(self.lm, length)
            except TadError as error:
                raise ApiError(400, f"decoder '{decoder.name}': {error}", "decoder") from None
            for _ in range(each):
                jobs.append(
                    Job(
                        prompt=tuple(prompt),
                        decoder=prepared,
                        length=length,
                        max_tokens=limit,
                        seed=(seed + len(jobs)) % 2**63 if jobs else seed,
                        stops=request.stops,
                        adapter=self._adapter(request),
                    )
                )
        return jobs

    def _decoder(self, request: GenerationRequest) -> Decoder:
        name = request.decoder or self.decoder
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

    def _prompts(self, request: ChatRequest | CompletionRequest) -> tuple[list[list[int]], str]:
        """Token ids of each prompt, and the field they came from."""
        source = "messages" if isinstance(request, ChatRequest) else "prompt"
        try:
            with self._encoding:
                if isinstance(request, ChatRequest):
                    messages = [
                        {"role": _ROLES.get(one.role, one.role), "content": one.text}
                        for one in request.messages
                    ]
                    return [encode_prompt(self.lm, messages, request.prefix or "")], source
                return [
                    encode_prompt(self.lm, prompt, raw=True, allow_special=request.allow_special)
                    if isinstance(prompt, str)
                    else prompt
                    for prompt in request.prompts
                ], source
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


def _check_fields(request: ChatRequest | CompletionRequest) -> None:
    """Refuse what the schema lets through and this server does not do."""
    for field in ("reveals", "stream_options"):
        if getattr(request, field) and not request.stream:
            raise ApiError(400, f"{field} needs stream: true", field)
    if isinstance(request, CompletionRequest):
        if (request.logprobs or 0) > 1:
            raise ApiError(400, f"logprobs {request.logprobs}: {_ONE_LOGPROB}; give 0 or 1", "logprobs")
        return
    if request.top_logprobs:
        raise ApiError(400, f"top_logprobs {request.top_logprobs}: {_ONE_LOGPROB}; give 0", "top_logprobs")
    if request.response_format is not None and request.response_format.type != "text":
        raise ApiError(
            400,
            f"response_format {request.response_format.type}: decoding is not constrained to a grammar here; ask for "
            "JSON in the messages, or begin the answer with prefix",
            "response_format",
        )
