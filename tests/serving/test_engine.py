"""Continuous batching: answers as alone, order, limits, cancelling, failing, ending."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from queue import Queue
from typing import Any

import pytest
from live_server import wait_until

from tad.decoding import Scheduler, decode, get_decoder
from tad.models import LM
from tad.serving import Begun, Engine, Event, Failed, Finished, Job, RefusedError

BLOCK = 8


def job(lm: LM, text: str, length: int = 32, decoder: str = "tad", **more: Any) -> Job:
    sampling = {key: more.pop(key) for key in ("threshold", "temperature") if key in more}
    blocks = {} if decoder == "dream" else {"block": BLOCK}
    chosen = get_decoder(decoder, lm.family.name, **blocks, **sampling).bind(lm, length)
    more.setdefault("max_tokens", length)
    return Job(
        tuple(lm.encode(text)), chosen, length, adapter=more.pop("adapter", lm.peft is not None), **more
    )


@contextmanager
def running(lm: LM, **settings: Any) -> Iterator[Engine]:
    engine = Engine(lm, **settings)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


class Heard:
    """Everything one request was told, and a wait for its end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._over: Queue[Event] = Queue()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, (Finished, Failed)):
            self._over.put(event)

    def end(self, seconds: float = 60.0) -> Event:
        return self._over.get(timeout=seconds)


def noting(kind: type, name: Any, order: list[Any], heard: Heard) -> Any:
    """A listener that also notes its name at every event of a kind."""

    def listen(event: Event) -> None:
        if isinstance(event, kind):
            order.append(name)
        heard(event)

    return listen


class Gate:
    """Lets forwards of a model through one by one."""

    def __init__(self, lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self._permits = threading.Semaphore(0)
        forward = lm.model.forward

        def gated(*args: Any, **rest: Any) -> Any:
            self.begun += 1
            assert self._permits.acquire(timeout=60)
            return forward(*args, **rest)

        monkeypatch.setattr(lm.model, "forward", gated)

    def let(self, forwards: int) -> None:
        for _ in range(forwards):
            self._permits.release()

    def wait_for(self, forward: int) -> None:
        """Until this forward (1, 2, ...) is under way."""
        wait_until(lambda: self.begun >= forward)


def assert_as_alone(lm: LM, asked: Job, finished: Event) -> None:
    assert isinstance(finished, Finished), finished
    model = nullcontext() if asked.adapter else lm.base()
    with model:
        alone = decode(lm, [asked.prompt], asked.decoder, asked.length, seed=asked.seed)[0]
    assert finished.tokens == alone.tokens
    assert finished.steps == alone.steps
    assert finished.forwards == alone.forwards
    assert finished.counted == len(alone.content)
    assert finished.text == lm.decode(alone.answer)
    assert finished.tpf == alone.tpf


@pytest.mark.parametrize("family", ["plain", "dream"])
def test_requests_that_come_at_any_moment_are_answered_as_alone(
    family: str, request: pytest.FixtureRequest
) -> None:
    lm: LM = request.getfixturevalue(family)
    dice = random.Random(5)
    names = ("tad", "tad-cached", "fast-dllm-dual", "llada", "d2f", "dream")
    jobs = [
        job(
            lm,
            "word " * dice.randint(1, 9),
            dice.choice((8, 16, 24)),
            dice.choice(names),
            seed=number,
            temperature=dice.choice((0.0, 0.9)),
        )
        for number in range(12)
    ]
    with running(lm, batch=6) as engine:
        heard = []
        for asked in jobs:
            heard.append(Heard())
            engine.submit(asked, heard[-1])
            time.sleep(dice.random() * 0.02)
        for asked, one in zip(jobs, heard, strict=True):
            assert_as_alone(lm, asked, one.end())
        assert engine.counts.finished == 12
        assert engine.counts.forwards < engine.counts.row_forwards  # some forwards were shared


def test_the_adapter_is_a_choice_of_each_request(student: LM) -> None:
    jobs = [job(student, f"question {number}", adapter=number % 2 == 0) for number in range(6)]
    with running(student, batch=6) as engine:
        heard = [Heard() for _ in jobs]
        for asked, one in zip(jobs, heard, strict=True):
            engine.submit(asked, one)
        answers = [one.end() for one in heard]
    for asked, answer in zip(jobs, answers, strict=True):
        assert_as_alone(student, asked, answer)
    both = [decode(student, [jobs[0].prompt], jobs[0].decoder, 32)[0].tokens]
    with student.base():
        both.append(decode(student, [jobs[0].prompt], jobs[0].decoder, 32)[0].tokens)
    assert both[0] != both[1]  # the switch does something


def test_a_listener_without_steps_hears_of_beginning_and_end_only(plain: LM) -> None:
    with running(plain) as engine:
        heard = Heard()
        engine.submit(job(plain, "hello", 16), heard, steps=False)
        heard.end()
    assert [type(event) for event in heard.events] == [Begun, Finished]


def test_a_cut_answer_stops_decoding_when_its_tokens_are_there(plain: LM) -> None:
    whole, cut = job(plain, "hello there", 32), job(plain, "hello there", 32, max_tokens=9)
    with running(plain) as engine:
        first, second = Heard(), Heard()
        engine.submit(whole, first)
        engine.submit(cut, second)
        long, short = first.end(), second.end()
    assert isinstance(long, Finished)
    assert isinstance(short, Finished)
    assert short.counted == 9
    assert short.reason == "length"
    assert short.tokens[:9] == long.tokens[:9]
    assert short.text == plain.decode(long.tokens[:9])
    assert short.forwards < long.forwards


def test_cancelling_costs_no_forward_but_the_one_under_way(
    plain: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(plain, monkeypatch)
    with running(plain) as engine:
        heard, other = Heard(), Heard()
        ticket = engine.submit(job(plain, "leaves"), heard)
        engine.submit(job(plain, "stays"), other)
        gate.let(3)
        gate.wait_for(4)  # three are done, the fourth is under way
        before = ticket.forwards
        engine.cancel(ticket)
        gate.let(1000)
        assert isinstance(other.end(), Finished)
        assert ticket.forwards - before <= 1
        assert not any(isinstance(event, (Finished, Failed)) for event in heard.events)
        assert engine.counts.cancelled == 1


def test_a_request_cancelled_in_the_queue_is_never_decoded(
    plain: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(plain, monkeypatch)
    with running(plain, batch=1) as engine:
        first, second, third = Heard(), Heard(), Heard()
        engine.submit(job(plain, "first", 8), first)
        ticket = engine.submit(job(plain, "second", 8), second)
        engine.submit(job(plain, "third", 8), third)
        gate.wait_for(1)
        engine.cancel(ticket)
        gate.let(1000)
        assert isinstance(third.end(), Finished)
        assert second.events == []
        assert ticket.forwards == 0


def test_requests_are_let_in_in_the_order_they_came(plain: LM) -> None:
    order: list[int] = []
    dice = random.Random(2)
    with running(plain, batch=2) as engine:
        heard = [Heard() for _ in range(12)]
        for number, one in enumerate(heard):
            asked = job(plain, "x" * dice.randint(1, 40), dice.choice((8, 32)), dice.choice(("tad", "llada")))
            engine.submit(asked, noting(Begun, number, order, one))
        for one in heard:
            one.end()
    assert order == sorted(order)


def test_waiting_and_decoding_have_limits(plain: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(plain, monkeypatch)
    with running(plain, batch=1, queue_seconds=0.05, seconds=0.3) as engine:
        first, second = Heard(), Heard()
        engine.submit(job(plain, "x"), first)
        engine.submit(job(plain, "y"), second)
        gate.wait_for(1)
        time.sleep(0.35)
        gate.let(1000)
        assert getattr(first.end(), "cause", None) == "timeout"
        assert getattr(second.end(), "cause", None) == "waited"
        assert engine.counts.failed == 2


def test_what_is_left_at_the_end_of_the_grace_fails_cleanly(
    plain: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(plain, monkeypatch)
    with running(plain, batch=1) as engine:
        heard = [Heard(), Heard()]
        for one in heard:
            engine.submit(job(plain, "x"), one)
        gate.wait_for(1)
        engine.drain(0)
        with pytest.raises(RefusedError) as refusal:
            engine.submit(job(plain, "y"), Heard())
        assert refusal.value.cause == "shutdown"
        gate.let(1)
        assert [getattr(one.end(), "cause", None) for one in heard] == ["shutdown", "shutdown"]
        assert gate.begun == 1


def test_a_forward_that_fails_takes_only_its_own_batch_with_it(
    plain: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = plain.model.forward
    calls = []

    def failing(ids: Any, **rest: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(ids, **rest)

    monkeypatch.setattr(plain.model, "forward", failing)
    with running(plain) as engine:
        heard, again = Heard(), Heard()
        engine.submit(job(plain, "x"), heard)
        failure = heard.end()
        assert isinstance(failure, Failed)
        assert failure.cause == "internal"
        assert "memory" not in failure.message
        asked = job(plain, "x")
        engine.submit(asked, again)
        answer = again.end()
    monkeypatch.undo()
    assert_as_alone(plain, asked, answer)


def test_a_listener_that_fails_is_dropped_and_the_others_go_on(plain: LM) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("gone")

    with running(plain) as engine:
        heard = Heard()
        engine.submit(job(plain, "x"), broken)
        engine.submit(job(plain, "y"), heard)
        assert isinstance(heard.end(), Finished)
        wait_until(lambda: engine.running == 0)
        assert engine.counts.cancelled == 1


def test_rows_of_a_similar_width_share_forwards_and_others_do_not(
    plain: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(plain, monkeypatch)
    with running(plain) as engine:
        heard = [Heard() for _ in range(3)]
        for text, one in zip(("short", "short as well", "long " * 70), heard, strict=True):
            engine.submit(job(plain, text, 8), one)
        gate.let(1)
        gate.wait_for(2)
        assert engine.batches == 2
        gate.let(1000)
        for one in heard:
            one.end()


def test_a_failure_between_forwards_leaves_nobody_waiting(plain: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    drop, fails = Scheduler.drop, [True]

    def fail_once(scheduler: Scheduler, names: Any) -> None:
        if fails:
            fails.pop()
            raise RuntimeError("out of memory")
        drop(scheduler, names)

    monkeypatch.setattr(Scheduler, "drop", fail_once)
    with running(plain, batch=2) as engine:
        first, second, third = Heard(), Heard(), Heard()
        engine.submit(job(plain, "a", length=8), first)
        engine.submit(job(plain, "b", length=32), second)
        for heard in (first, second):
            event = heard.end(20)
            assert isinstance(event, (Failed, Finished))
        assert not fails
        engine.submit(job(plain, "c"), third)
        assert isinstance(third.end(20), Finished)
        assert engine.alive
        assert (engine.running, engine.waiting) == (0, 0)
        assert engine.counts.failed >= 1
