"""Requests of the API, field by field. Wrong types and unknown fields are refused, nothing is converted. Fields that clients
of other servers often send, and that mean nothing here, are set aside: an answer names them, or a strict server refuses them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from typing_extensions import Self

# Of OpenAI's API, then of other servers that speak it.
IGNORED = frozenset(
    {
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "reasoning_effort", "reasoning"),
        *("verbosity", "modalities", "audio", "prediction", "web_search_options", "prompt_cache_retention"),
        *("top_k", "min_p", "top_a", "typical_p", "tfs_z", "repetition_penalty", "repeat_penalty", "repeat_last_n"),
        *("mirostat", "mirostat_eta", "mirostat_tau", "length_penalty", "min_tokens", "ignore_eos", "use_beam_search"),
        *("cache_prompt", "keep_alive", "options", "chat_template_kwargs", "skip_special_tokens", "provider", "plugins"),
    }
)  # fmt: skip
_PENALTIES = ("presence_penalty", "frequency_penalty")


def _check_text(text: str) -> str:
    """JSON's escapes can write half a surrogate pair, which is no character and which no tokenizer takes."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("half of a surrogate pair is not text")
    return text


Text = Annotated[str, AfterValidator(_check_text)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        """Null says nothing: clients send back messages with every field that OpenAI's have, `refusal: null` and so on."""
        if not isinstance(fields, dict):
            return fields
        return {
            name: value for name, value in fields.items() if value is not None or name in cls.model_fields
        }


class TextPart(_Request):
    type: Literal["text"]
    text: Text


class ChatMessage(_Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]
    name: Text | None = None  # of a participant; chat templates here have no place for it

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(_Request):
    include_usage: bool = False


class ResponseFormat(_Request):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Any = None


class GenerationRequest(_Request):
    """What both kinds of request have."""

    model: Text
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    decoder: Text | None = None
    threshold: Annotated[float, Field(ge=0)] | None = None
    adapter: bool | None = None
    reveals: bool | None = None
    # Of OpenAI's: these change nothing.
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: Text | None = None

    _aside: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _set_aside(cls, fields: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(fields, dict):
            return handler(fields)
        aside = tuple(name for name, value in fields.items() if name in IGNORED and value is not None)
        found = handler({name: value for name, value in fields.items() if name not in aside})
        found._aside = aside
        return found

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields that were sent and change nothing, though their sender may think so."""
        return (*self._aside, *(name for name in _PENALTIES if getattr(self, name)))

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_logprobs(self) -> bool:
        return False


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    prefix: Text | None = None  # the answer already begins with it
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


_PromptText = Annotated[Text, Field(min_length=1)]
_PromptIds = Annotated[list[int], Field(min_length=1)]


class CompletionRequest(GenerationRequest):
    prompt: (
        _PromptText
        | _PromptIds
        | Annotated[list[_PromptText], Field(min_length=1)]
        | Annotated[list[_PromptIds], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: None = None
    allow_special: bool = False
    """Control tokens written in a text prompt are control tokens; otherwise they are text."""

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None
