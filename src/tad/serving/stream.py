"""From engine events to what a client reads: one JSON object, or server-sent events, until it has it all or is gone.

A request is one job, or several: `n` answers to each of its prompts. `Listener` hears of all of them, `Answer` puts them
into OpenAI's words in either form, `EventStream` sends the pieces of a stream.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tad.decoding.decoders import parameters
from tad.serving.engine import Begun, Engine, Event, Failed, Finished, Job, Revealed, Ticket
from tad.serving.errors import error_body
from tad.serving.schema import ChatRequest, CompletionRequest
from tad.serving.validation import RequestValidator

log = logging.getLogger("tad.serving")
_UNREAD = 1024  # events that wait for a client to take them; more, and it is dropped
_NEVER = -9999.0  # logprob of probability 0, which JSON cannot write otherwise


class Listener:
    """A client's side of its jobs: their events, until the last one or until the client is gone, which cancels the jobs."""

    def __init__(self, engine: Engine, receive: Receive) -> None:
        self.engine = engine
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
        self._open: dict[int, Ticket] = {}  # jobs that have not had their last event
        self._watch: asyncio.Task[None] | None = None

    def submit(self, jobs: Sequence[Job], steps: bool) -> None:
        for number, job in enumerate(jobs):
            self._open[number] = self.engine.submit(job, self._notify(number), steps)
        self._watch = asyncio.create_task(self._watch_client())

    async def next(self) -> tuple[int, Event] | None:
        """The number of a job and its next event; None when the client has gone."""
        found = await self._events.get()
        if found is not None and isinstance(found[1], (Finished, Failed)):
            self._open.pop(found[0])
        return found

    @property
    def over(self) -> bool:
        return not self._open

    def close(self) -> None:
        """Stop listening; jobs that are not over are cancelled."""
        if self._watch is not None:
            self._watch.cancel()
        for ticket in self._open.values():
            self.engine.cancel(ticket)
        self._open.clear()

    def _notify(self, number: int) -> Callable[[Event], None]:
        def notify(event: Event) -> None:
            self._loop.call_soon_threadsafe(self._put, number, event)

        return notify

    def _put(self, number: int, event: Event) -> None:
        if self._events.qsize() >= _UNREAD:
            log.warning("a client did not take its stream and was dropped")
            self._events = asyncio.Queue()
            self._leave()
        elif number in self._open:
            self._events.put_nowait((number, event))

    def _leave(self) -> None:
        self.close()
        self._events.put_nowait(None)

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._leave()


class Answer:
    """One request on its way to an answer, in OpenAI's terms."""

    def __init__(
        self, validator: RequestValidator, request: ChatRequest | CompletionRequest, jobs: Sequence[Job]
    ) -> None:
        self.lm, self.model = validator.lm, validator.name
        self.request, self.jobs = request, jobs
        self.chat = isinstance(request, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.queued = 0.0  # longest
        self.finished: dict[int, Finished] = {}  # by number of the job

    def take(self, number: int, event: Event) -> None:
        """Keep what the answer as a whole says."""
        if isinstance(event, Begun):
            self.queued = max(self.queued, event.queued)
        elif isinstance(event, Finished):
            self.finished[number] = event

    def usage(self, numbers: Sequence[int] | None = None) -> dict[str, Any]:
        """Of these jobs, or of all. A prompt that is answered `n` times counts once."""
        numbers = range(len(self.jobs)) if numbers is None else numbers
        each = self.request.n or 1
        prompt = sum(
            len(self.jobs[number].prompt) for number in numbers if number % each == 0 or len(numbers) == 1
        )
        counted = sum(self.finished[number].counted for number in numbers)
        forwards = sum(self.finished[number].forwards for number in numbers)
        drafted, accepted = (
            sum(getattr(self.finished[number], name) for number in numbers)
            for name in ("drafted", "accepted")
        )
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": counted,
            "total_tokens": prompt + counted,
            "forwards": forwards,
            "tpf": counted / forwards,
            **({"completion_tokens_details": details} if drafted else {}),
        }

    def facts(self) -> dict[str, Any]:
        """For the request log."""
        if len(self.finished) < len(self.jobs):
            return {"choices": len(self.jobs), "finished": len(self.finished)}
        usage = self.usage()
        said = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "forwards")}
        reasons = ",".join(sorted({one.reason for one in self.finished.values()}))
        return {"choices": len(self.jobs), **said, "finish": reasons}

    def details(self) -> dict[str, Any]:
        """How the answer came about."""
        seconds = max(one.seconds for one in self.finished.values())
        length = max(job.length for job in self.jobs)
        return {**self._used(0), "gen_length": length, "seconds": seconds, "queued": self.queued}

    def _used(self, number: int) -> dict[str, Any]:
        """What was asked or, where nothing was, taken."""
        job = self.jobs[number]
        return {
            "decoder": job.decoder.name,
            "threshold": parameters(job.decoder).get("threshold"),
            "adapter": job.adapter,
            "seed": job.seed,
        }

    def _about(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    # One object

    def whole(self) -> dict[str, Any]:
        choices = []
        for number, done in sorted(self.finished.items()):
            said: Any = {"message": {"role": "assistant", "content": done.text}}
            choice = {"index": number, **(said if self.chat else {"text": done.text})}
            choices.append({**choice, "logprobs": self.logprobs(number), "finish_reason": done.reason})
        about = self._about("chat.completion" if self.chat else "text_completion")
        return {**about, "choices": choices, "usage": self.usage(), "tad": self.details()}

    def logprobs(self, number: int) -> dict[str, Any] | None:
        """Of each token of a finished answer, the end token aside: log of its probability when it was revealed."""
        if not self.request.wants_logprobs:
            return None
        done = self.finished[number]
        rows = [
            (text, math.log(sure) if sure > 0 else _NEVER)
            for text, token, sure in zip(
                self._spell(done.tokens[: done.counted]), done.tokens, done.confidence, strict=False
            )
            if token not in self.lm.tokens.ends
        ]
        if self.chat:
            entries = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in rows
            ]
            return {"content": entries, "refusal": None}
        texts = [text for text, _ in rows]
        starts = [sum(map(len, texts[:position])) for position in range(len(texts))]
        best = [{text: value} for text, value in rows] if getattr(self.request, "logprobs", 0) else None
        return {
            "tokens": texts,
            "token_logprobs": [value for _, value in rows],
            "top_logprobs": best,
            "text_offset": starts,
        }

    # A stream

    async def chunks(
        self, listener: Listener, first: tuple[int, Event], on_first_text: Callable[[float], None]
    ) -> AsyncIterator[bytes]:
        """Every event of the stream, `first` included; the callback gets the seconds until text came."""
        reveals, silent = bool(self.request.reveals), True
        found: tuple[int, Event] | None = first
        while found is not None:
            number, event = found
            self.take(number, event)
            if isinstance(event, Begun):
                if reveals:
                    yield write_event(self._begin(number), "begin")
                if self.chat:
                    yield self._chunk(number, {"role": "assistant", "content": ""})
            elif isinstance(event, Revealed):
                if reveals:
                    yield write_event(self._reveal(number, event), "reveal")
                if event.text and silent:
                    silent = False
                    on_first_text(self.queued + event.seconds)
                if event.text:
                    yield self._chunk(number, {"content": event.text})
            elif isinstance(event, Failed):
                yield write_event(error_body(500 if event.cause == "internal" else 503, event.message))
                return
            elif isinstance(event, Finished):
                if reveals:
                    yield write_event(self._end(number, event), "end")
                more = {"tad": self.details()} if listener.over else {}
                yield self._chunk(number, {}, event.reason, **more)
                if listener.over:
                    break
            found = await listener.next()
        if found is None:
            return
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield self._write([], usage=self.usage())
        yield b"data: [DONE]\n\n"

    def _chunk(self, number: int, delta: dict[str, str], reason: str | None = None, **more: Any) -> bytes:
        logprobs = None if reason is None else self.logprobs(number)  # all of them with the last chunk
        choice: dict[str, Any] = {"index": number, "finish_reason": reason, "logprobs": logprobs}
        choice |= {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return self._write([choice], **more)

    def _write(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        about = self._about("chat.completion.chunk" if self.chat else "text_completion")
        return write_event({**about, "choices": choices, **more})

    def _begin(self, number: int) -> dict[str, Any]:
        job = self.jobs[number]
        return {
            "id": self.id,
            "index": number,
            "prompt_tokens": len(job.prompt),
            "gen_length": job.length,
            "max_tokens": job.max_tokens,
            "block": job.block,
            "mask": "" if self.lm.tokens.mask < 0 else self._spell([self.lm.tokens.mask])[0],
            "ends": list(self.lm.tokens.ends),
            **self._used(number),
            "queued": self.queued,
        }

    def _reveal(self, number: int, event: Revealed) -> dict[str, Any]:
        step = event.step
        return {
            "index": number,
            "forward": step.forward,
            "positions": step.positions,
            "tokens": step.tokens,
            "texts": self._spell(step.tokens),
            "confidence": step.confidence,
            "blocks": event.blocks,
            "masks": event.masks,
            "seconds": event.seconds,
        }

    def _end(self, number: int, finished: Finished) -> dict[str, Any]:
        return {
            "index": number,
            "finish_reason": finished.reason,
            "text": finished.text,
            "tokens": finished.tokens,
            "texts": self._spell(finished.tokens),
            "steps": finished.steps,
            "confidence": finished.confidence,
            "usage": self.usage([number]),
            "forwards": finished.forwards,
            "tpf": finished.tpf,
            "seconds": finished.seconds,
        }

    def _spell(self, tokens: list[int]) -> list[str]:
        return [self.lm.decode([token], skip_special=False) for token in tokens]


def write_event(data: dict[str, Any], name: str | None = None) -> bytes:
    """A server-sent event, named or not."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


class EventStream(Response):
    """Sends pieces as they come. A client that stops reading is the connection's business."""

    media_type = "text/event-stream"

    def __init__(
        self, pieces: AsyncIterator[bytes], done: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self.pieces, self.done = pieces, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            await send(start)
            async for piece in self.pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.done()
