"""Continuous batching: requests join and leave running batches between forwards.

One thread owns the model and steps `tad.decoding.Scheduler`, whose batches take turns, so every running request advances at
the same pace. Here are the queue with its limits and deadlines, and what clients are told: requests are let in first come,
first served, and hear what happens by a callback on the engine's thread. HTTP is not in here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import Literal

from tad.decoding import Decoder, Request, Scheduler, Step
from tad.models import LM
from tad.serving.transcript import Reason, Transcript

log = logging.getLogger("tad.serving")


@dataclass(frozen=True)
class Job:
    """What is asked, in tokens. `decoder` is bound to the model (`Decoder.bind`)."""

    prompt: tuple[int, ...]
    decoder: Decoder
    length: int  # positions to generate, whole blocks
    max_tokens: int  # where the answer is cut
    seed: int = 0
    stops: tuple[str, ...] = ()
    adapter: bool = True  # False: the base model

    @property
    def block(self) -> int:
        return self.decoder.schedule.block or self.length


@dataclass(frozen=True)
class Begun:
    """The request has left the queue."""

    queued: float  # seconds


@dataclass(frozen=True)
class Revealed:
    """One forward of this request."""

    step: Step
    blocks: list[int]  # active before it
    masks: int  # left after it
    text: str  # that became final
    seconds: float  # since it began


@dataclass(frozen=True)
class Finished:
    """The answer is complete; no event follows."""

    reason: Reason
    text: str
    tokens: list[int]
    steps: list[int]
    confidence: list[float]
    counted: int  # tokens of the answer, the end token included
    forwards: int
    seconds: float
    drafted: int = 0  # tokens of drafts that were verified, and how many of them were kept
    accepted: int = 0

    @property
    def tpf(self) -> float:
        return self.counted / self.forwards


Cause = Literal["waited", "timeout", "shutdown", "internal"]


@dataclass(frozen=True)
class Failed:
    """There will be no (further) answer; no event follows."""

    cause: Cause
    message: str


Event = Begun | Revealed | Finished | Failed
Notify = Callable[[Event], None]


class RefusedError(Exception):
    """Not taken: the queue is full, or the engine is stopping."""

    def __init__(self, cause: Literal["full", "shutdown"], message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(eq=False)
class Ticket:
    """A request in the engine's hands."""

    job: Job
    notify: Notify
    transcript: Transcript
    name: int
    submitted: float
    begun: float | None = None
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    cancelled: bool = False
    steps: bool = True  # whether its listener wants to hear of every forward

    @property
    def request(self) -> Request:
        job = self.job
        return Request(self.name, job.prompt, job.length, job.decoder, job.seed, job.adapter)


@dataclass
class Counts:
    """Totals since the start, for the metrics."""

    forwards: int = 0  # of the model
    row_forwards: int = 0  # summed over the rows of each
    prompt_tokens: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0


@dataclass
class Engine:
    """`start` it, `submit` jobs, `close` it. Every method may be called from any thread, `drain` from a signal too."""

    lm: LM
    batch: int = 16  # rows at once
    queue: int = 256  # requests that may wait
    queue_seconds: float = 60.0
    seconds: float = 300.0
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._inbox: SimpleQueue[Ticket | None] = SimpleQueue()  # None only wakes the thread
        self._names = count()
        self._lock = threading.Lock()  # guards _open
        self._open = 0  # tickets that have not had their last event
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}
        self._revealed: list[Step] = []
        self._scheduler = Scheduler(self.lm, on_step=self._revealed.append, merges=True)
        self._deadline: float | None = None  # set once: nothing is taken any more, and all ends by then
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tad-engine", daemon=True)

    # For callers

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job, notify: Notify, steps: bool = True) -> Ticket:
        """Queue a job. `notify` gets its events on the engine's thread and must not block; without `steps`, no `Revealed`."""
        with self._lock:
            if self.draining:
                raise RefusedError("shutdown", "the server is shutting down")
            if self._open >= self.batch + self.queue:
                self.counts.refused += 1
                raise RefusedError("full", f"{self.queue} requests are waiting already; try again later")
            self._open += 1
        transcript = Transcript(
            self.lm.decode, job.length, job.max_tokens, self.lm.tokens.mask, self.lm.tokens.ends, job.stops
        )
        ticket = Ticket(job, notify, transcript, next(self._names), time.monotonic(), steps=steps)
        self._inbox.put(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Forget a request: no event follows, and no forward but the one under way."""
        ticket.cancelled = True
        self._inbox.put(None)

    def drain(self, seconds: float) -> None:
        """Take nothing more; what is not finished after this time fails."""
        if self._deadline is None:
            self._deadline = time.monotonic() + seconds
        self._inbox.put(None)

    def close(self) -> None:
        """Fail whatever is left and end the thread."""
        self.drain(0)
        self._closed = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._receive()
        self._drop()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def draining(self) -> bool:
        return self._deadline is not None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return max(0, self._open - len(self._running))

    @property
    def batches(self) -> int:
        return len(self._scheduler.batches)

    # On the engine's thread

    def _run(self) -> None:
        while not (self._closed and not (self._running or self._waiting)):
            try:
                self._receive()
                self._drop()
                self._admit()
                self._step()
            except Exception:  # a thread that ends here would leave every client waiting
                log.exception("the engine failed between forwards; all running requests fail")
                self._scheduler.close(failed=True)
                for ticket in list(self._running.values()):
                    self._close_ticket(ticket, _INTERNAL)

    def _receive(self) -> None:
        """Take what came in; sleep where there is nothing to do."""
        idle = not (self._running or self._waiting or self._closed)
        try:
            while True:
                ticket = self._inbox.get(block=idle)
                idle = False
                if ticket is not None:
                    self._waiting.append(ticket)
        except Empty:
            return

    def _drop(self) -> None:
        """Let go of requests whose client has gone or whose time is over."""
        now = time.monotonic()
        for ticket in [*self._waiting, *self._running.values()]:
            failure = self._failure(ticket, now)
            if not ticket.cancelled and failure is None:
                continue
            if ticket.begun is None:
                self._waiting.remove(ticket)
            else:
                self._leave([ticket])
            self._close_ticket(ticket, failure)

    def _failure(self, ticket: Ticket, now: float) -> Failed | None:
        if self._closed or (self._deadline is not None and now >= self._deadline):
            return Failed("shutdown", "the server is shutting down")
        if ticket.begun is None:
            late = now - ticket.submitted > self.queue_seconds
            return Failed("waited", f"no room within {self.queue_seconds:g} s; try again") if late else None
        late = now - ticket.begun > self.seconds
        return Failed("timeout", f"not finished within {self.seconds:g} s") if late else None

    def _admit(self) -> None:
        """First come, first served, while there is room in the batch."""
        joining = []
        while self._waiting and len(self._running) < self.batch:
            ticket = self._waiting.popleft()
            joining.append(ticket)
            self._running[ticket.name] = ticket
        if not joining:
            return
        try:
            self._scheduler.admit([ticket.request for ticket in joining])
        except Exception:
            log.exception("a request could not join its batch; all of that batch fail")
            self._fail_missing()
        for ticket in joining:
            if ticket.name not in self._running:
                continue
            ticket.begun = time.monotonic()
            self.counts.prompt_tokens += len(ticket.job.prompt)
            self._tell(ticket, Begun(ticket.begun - ticket.submitted))

    def _step(self) -> None:
        """One forward of the batch whose turn it is."""
        if not len(self._scheduler):
            return
        self._revealed.clear()
        try:
            self._scheduler.step()
        except Exception:
            log.exception("a forward failed; all requests of its batch fail")
            self._fail_missing()
            return
        self.counts.forwards += 1
        self.counts.row_forwards += len(self._revealed)
        over = []
        for step in self._revealed:
            ticket = self._running[step.row]
            try:
                event = self._record(ticket, step)
            except Exception:
                log.exception("the text of a request could not be made; it fails")
                event = _INTERNAL
            if event is not None:
                over.append((ticket, event))
        self._leave([ticket for ticket, _ in over])
        for ticket, event in over:
            self._close_ticket(ticket, event)

    def _record(self, ticket: Ticket, step: Step) -> Finished | Failed | None:
        """Bring a row's transcript up to date and tell its client; the last event if the answer is complete."""
        transcript = ticket.transcript
        ticket.forwards = step.forward
        if step.drafted:
            ticket.drafted += step.drafted
            ticket.accepted += len(step.tokens) - 1
            self.counts.drafted += step.drafted
            self.counts.accepted += len(step.tokens) - 1
        blocks = transcript.active(ticket.job.block, step.created)
        text = transcript.write(step.forward, step.positions, step.tokens, step.confidence)
        seconds = time.monotonic() - (ticket.begun or 0.0)
        if ticket.steps:
            self._tell(ticket, Revealed(step, blocks, transcript.masks, text, seconds))
        if transcript.reason is None:
            return None
        transcript.fill_end()
        return Finished(
            reason=transcript.reason,
            text=transcript.text,
            tokens=transcript.tokens,
            steps=transcript.steps,
            confidence=transcript.confidence,
            counted=transcript.counted,
            forwards=ticket.forwards,
            seconds=seconds,
            drafted=ticket.drafted,
            accepted=ticket.accepted,
        )

    def _leave(self, tickets: list[Ticket]) -> None:
        """Take rows out of their batches, those that are still in one."""
        self._scheduler.drop([ticket.name for ticket in tickets if ticket.name in self._scheduler])

    def _fail_missing(self) -> None:
        """Fail the requests whose batch is gone."""
        for ticket in list(self._running.values()):
            if ticket.name not in self._scheduler:
                self._close_ticket(ticket, _INTERNAL)

    def _close_ticket(self, ticket: Ticket, event: Finished | Failed | None) -> None:
        """The ticket's last moment: make room, count it, tell its last event."""
        self._running.pop(ticket.name, None)
        with self._lock:
            self._open -= 1
        if ticket.cancelled:
            self.counts.cancelled += 1
            return
        if isinstance(event, Finished):
            self.counts.finished += 1
            self.counts.tokens += event.counted
        else:
            self.counts.failed += 1
        if event is not None:
            self._tell(ticket, event)

    def _tell(self, ticket: Ticket, event: Event) -> None:
        if ticket.cancelled:
            return
        try:
            ticket.notify(event)
        except Exception:  # a listener that is gone must not take the others down with it
            log.exception("a listener failed; its request is dropped")
            ticket.cancelled = True


_INTERNAL = Failed("internal", "the request failed inside the server; its log says why")
