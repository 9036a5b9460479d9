"""From engine events to what a client reads: one JSON object, or server-sent events, until it has it all or is gone.

The same answer in both forms: `Answer` counts and describes it, `chunks` writes the events, `EventStream` sends them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tad.decoding.decoders import parameters
from tad.serving.engine import Engine, Event, Failed, Finished, Job, Revealed, Ticket
from tad.serving.errors import error_body
from tad.serving.offer import Offer
from tad.serving.schema import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatRequest,
    CompletionAnswer,
    CompletionChoice,
    CompletionRequest,
    Details,
    Usage,
)

log = logging.getLogger("tad.serving")


class Listener:
    """A client's side of a job: its events, until the last one or until the client goes away, which cancels the job."""

    def __init__(self, engine: Engine, receive: Receive) -> None:
        self.engine = engine
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._ticket: Ticket | None = None
        self._watch: asyncio.Task[None] | None = None
        self._over = False
        self.gone = False  # the client hung up

    def submit(self, job: Job, steps: bool) -> None:
        def notify(event: Event) -> None:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._ticket = self.engine.submit(job, notify, steps)
        self._watch = asyncio.create_task(self._watch_client())

    async def next(self) -> Event | None:
        """The next event; None when the client has gone."""
        event = await self._events.get()
        self._over = isinstance(event, (Finished, Failed))
        return event

    def close(self) -> None:
        """Stop listening; a job that is not over is cancelled."""
        if self._watch is not None:
            self._watch.cancel()
        if self._ticket is not None and not self._over:
            self.engine.cancel(self._ticket)

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self.gone = True
        if self._ticket is not None:
            self.engine.cancel(self._ticket)
        self._events.put_nowait(None)


class Answer:
    """One request on its way to an answer, in OpenAI's terms."""

    def __init__(self, offer: Offer, request: ChatRequest | CompletionRequest, job: Job) -> None:
        self.offer, self.request, self.job = offer, request, job
        self.chat = isinstance(request, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.queued = 0.0

    def usage(self, finished: Finished) -> Usage:
        prompt = len(self.job.prompt)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=finished.counted,
            total_tokens=prompt + finished.counted,
            forwards=finished.forwards,
            tpf=finished.tpf,
        )

    def details(self, finished: Finished) -> Details:
        return Details(
            **self.choices(), gen_length=self.job.length, seconds=finished.seconds, queued=self.queued
        )

    def choices(self) -> dict[str, Any]:
        """What was asked or, where nothing was, taken."""
        return {
            "decoder": self.job.decoder.name,
            "threshold": parameters(self.job.decoder).get("threshold"),
            "adapter": self.job.adapter,
            "seed": self.job.seed,
        }

    def whole(self, finished: Finished) -> dict[str, Any]:
        """The answer as one object."""
        about: dict[str, Any] = {
            "id": self.id,
            "created": self.created,
            "model": self.offer.name,
            "usage": self.usage(finished),
            "tad": self.details(finished),
        }
        reason = finished.reason
        if self.chat:
            message = AnswerMessage(content=finished.text)
            return ChatAnswer(
                **about, choices=[ChatChoice(message=message, finish_reason=reason)]
            ).model_dump()
        return CompletionAnswer(
            **about, choices=[CompletionChoice(text=finished.text, finish_reason=reason)]
        ).model_dump()

    def chunk(self, text: str | None, reason: str | None = None, **more: Any) -> bytes:
        """A piece of the text; `text` None is the last chunk's empty one."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self.chat:
            choice["delta"] = {} if text is None else {"content": text}
        else:
            choice["text"] = text or ""
        return self._chunk([choice], **more)

    def opening(self) -> bytes:
        """A chat's first chunk, which only says whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": 0, "finish_reason": None, "logprobs": None, "delta": delta}])

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.offer.name}
        return write_event({**about, "choices": choices, **more})

    async def chunks(
        self, listener: Listener, on_first_text: Callable[[float], None]
    ) -> AsyncIterator[bytes]:
        """Every event of the stream, from the moment the job has begun; the callback gets the seconds until text came."""
        reveals, silent = bool(self.request.reveals), True
        if reveals:
            yield write_event(self._begin(), "begin")
        if self.chat:
            yield self.opening()
        while True:
            event = await listener.next()
            if event is None:
                return
            if isinstance(event, Revealed):
                if reveals:
                    yield write_event(self._reveal(event), "reveal")
                if event.text and silent:
                    silent = False
                    on_first_text(self.queued + event.seconds)
                if event.text:
                    yield self.chunk(event.text)
            elif isinstance(event, Failed):
                yield write_event(error_body(500 if event.cause == "internal" else 503, event.message))
                return
            elif isinstance(event, Finished):
                for piece in self._ending(event, reveals):
                    yield piece
                return

    def _ending(self, finished: Finished, reveals: bool) -> list[bytes]:
        usage = self.usage(finished).model_dump()
        pieces = [write_event(self._end(finished, usage), "end")] if reveals else []
        pieces.append(self.chunk(None, finished.reason, tad=self.details(finished).model_dump()))
        options = self.request.stream_options
        if options is not None and options.include_usage:
            pieces.append(self._chunk([], usage=usage))
        return [*pieces, b"data: [DONE]\n\n"]

    def _begin(self) -> dict[str, Any]:
        lm = self.offer.lm
        return {
            "id": self.id,
            "prompt_tokens": len(self.job.prompt),
            "gen_length": self.job.length,
            "max_tokens": self.job.max_tokens,
            "block": self.job.block,
            "mask": self._spell([lm.tokens.mask])[0],
            "ends": list(lm.tokens.ends),
            **self.choices(),
            "queued": self.queued,
        }

    def _reveal(self, event: Revealed) -> dict[str, Any]:
        step = event.step
        return {
            "forward": step.forward,
            "positions": step.positions,
            "tokens": step.tokens,
            "texts": self._spell(step.tokens),
            "confidence": step.confidence,
            "blocks": event.blocks,
            "masks": event.masks,
            "seconds": event.seconds,
        }

    def _end(self, finished: Finished, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "finish_reason": finished.reason,
            "text": finished.text,
            "tokens": finished.tokens,
            "texts": self._spell(finished.tokens),
            "steps": finished.steps,
            "confidence": finished.confidence,
            "usage": usage,
            "forwards": finished.forwards,
            "tpf": finished.tpf,
            "seconds": finished.seconds,
        }

    def _spell(self, tokens: list[int]) -> list[str]:
        return [self.offer.lm.decode([token], skip_special=False) for token in tokens]


def write_event(data: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event, named or not."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


class EventStream(Response):
    """Sends pieces as they come. A client that does not take one for `patience` seconds is let go."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes], patience: float, done: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.pieces, self.patience, self.done = pieces, patience, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for piece in self.pieces:
                message = {"type": "http.response.body", "body": piece, "more_body": True}
                await asyncio.wait_for(send(message), self.patience)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.TimeoutError:
            log.warning("a client took nothing for %g s and was let go", self.patience)
        finally:
            self.done()
