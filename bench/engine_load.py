"""The serving engine under load, without HTTP, at a released shape with random weights: `serve_load.py --shape`.

Two kinds of load: so many clients, each of which asks again when it is answered (a closed loop), and requests that arrive at a
rate whatever became of the earlier ones (an open loop, Poisson arrivals). Every load has the same requests, of different prompt
and answer lengths. Predictions are made sure at an assumed TPF (`machine.AssumedTpf`).

Each load is put on for half of `--seconds`, which does not count, and for `--seconds` that do; then what was asked has as long
again to end. A warm-up with the same requests comes first; what is still captured while it counts is in the table. Rates are of
the seconds that count, latencies of the requests that arrived in them. A server *keeps up* with a rate if nothing was refused or
cut off, and at the end no more requests are under way than at the beginning, but for two and a tenth of those that came: where
it is asked too much they pile up. Higher rates are not tried on it then. Its *goodput* is the highest rate that it keeps up with
while the latency's p99 is at most 2 times its p50.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import torch

from machine import (
    ASSUMED_TPF,
    describe,
    describe_machine,
    free_memory,
    random_lm,
    random_prompts,
    read_decoder,
    save_json,
    write_markdown,
)
from tad.decoding.engine import engine_for
from tad.decoding.scheduler import ENGINE_VARIABLE
from tad.serving import Begun, Engine, Event, Failed, Job, RefusedError, Revealed

Row = dict[str, Any]
SPREAD = 2.0  # of latencies, for goodput


class Numbers:
    """Stands in for a tokenizer: the text of random weights is the number of its tokens."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "." * len(ids)


@dataclass(frozen=True)
class Load:
    """A server, and what is asked of it: by clients, or at a rate."""

    decoder: str
    forward: str  # auto, graph, plain
    batch: int  # rows at once
    clients: int = 0
    rate: float = 0.0  # requests per second
    shared: bool = False  # all prompts begin alike

    @property
    def server(self) -> str:
        return f"{self.decoder}, {self.forward} forward, {self.batch} rows at once"

    def __str__(self) -> str:
        asked = f"{self.rate:g} per s" if self.rate else f"{self.clients} clients"
        return f"{asked}, shared prefix" if self.shared else asked


@dataclass
class Asked:
    """A request, and when what came of it was heard; `listen` runs on the engine's thread."""

    arrived: float
    block: int
    answered: SimpleQueue[Asked]
    forwards: list[tuple[float, int, int]] = field(default_factory=list)  # when; tokens revealed and computed
    in_first_block: int = 0
    waited: float = 0.0
    first_block: float | None = None  # seconds since it arrived
    seconds: float | None = None  # until it was answered
    failure: str = ""

    def listen(self, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, Begun):
            self.waited = now - self.arrived
        elif isinstance(event, Revealed):
            places = event.step.positions
            self.forwards.append((now, len(places), event.step.queries))
            self.in_first_block += sum(place < self.block for place in places)
            if self.in_first_block == self.block and self.first_block is None:
                self.first_block = now - self.arrived
        else:
            if isinstance(event, Failed):
                self.failure = event.message
            else:
                self.seconds = now - self.arrived
            self.answered.put(self)


class Bench:
    """The model, and the loads that are put on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device or "cpu")
        self.lm = random_lm(options.shape, self.device, options.tiny)
        self.lm.tokenizer = Numbers()

    def loads(self) -> Iterator[Load]:
        """What matters most comes first: a run may be cut short."""
        options = self.options
        for forward in options.forward:
            for decoder in options.decoders:
                for clients in options.together:
                    for shared in (False, True) if options.prefix else (False,):
                        yield Load(decoder, forward, clients, clients, shared=shared)
                for batch in options.batches:
                    for rate in sorted(options.rates):
                        yield Load(decoder, forward, batch, rate=rate)

    def job(self, load: Load, number: int) -> Job:
        """The request of this number: the same in every load."""
        dice, options = random.Random(number), self.options
        prompt, answer = dice.choice(options.prompts), dice.choice(options.answers)
        begin = random_prompts(self.lm, 1, options.prefix, seed=0 if load.shared else 2 * number + 1)
        own = random_prompts(self.lm, 1, prompt, seed=2 * number + 2)
        decoder = read_decoder(load.decoder, self.lm.family.name)
        block = decoder.schedule.block or 1
        length = -(-answer // block) * block
        prepared = decoder.bind(self.lm, length)
        return Job((*begin[0], *own[0]), prepared, length, answer, adapter=False)

    def warm_up(self, load: Load) -> None:
        """Clients in every number that doubles, most first: compiles, reserves memory once, and captures what comes again. The
        plain forward does none of it, and takes one client."""
        options, counts = self.options, [1]
        if load.forward != "plain":
            most = max(options.together + (options.batches if options.rates else []))
            counts = [clients for clients in (64, 32, 16, 8, 4, 1) if clients < most]
            counts = [most, *counts]
        for clients in counts:
            self.put(replace(load, batch=clients, clients=clients, rate=0.0), 0.0, options.seconds / 2, 300.0)

    def measure(self, load: Load) -> Row:
        seconds = self.options.seconds
        return self.put(load, seconds / 2, seconds, seconds)

    def put(self, load: Load, lead: float, seconds: float, patience: float) -> Row:
        """A load for `lead` and `seconds`, of which only the latter count; what was asked then has `patience` seconds to end."""
        os.environ[ENGINE_VARIABLE] = load.forward
        engine = Engine(self.lm, batch=load.batch, queue=max(self.options.queue, load.clients))
        answered: SimpleQueue[Asked] = SimpleQueue()
        asked: list[Asked] = []
        refused: list[float] = []
        numbers = count()
        began = time.perf_counter()
        first, last = began + lead, began + lead + seconds

        def ask(arrived: float) -> None:
            job = self.job(load, next(numbers))
            one = Asked(arrived, job.block, answered)
            try:
                engine.submit(job, one.listen)
                asked.append(one)
            except RefusedError:
                refused.append(arrived)

        def wait(until: float) -> bool:
            """For the next answer; whether one came in time."""
            try:
                one = answered.get(timeout=max(0.0, until - time.perf_counter()))
            except Empty:
                return False
            if one.failure:
                raise SystemExit(f"a request failed: {one.failure}")
            return True

        totals: list[dict[str, float]] = []
        read_totals = partial(self.read_totals, engine, load, totals)
        clocks = [threading.Timer(after, read_totals) for after in (lead, lead + seconds)]
        for clock in clocks:
            clock.start()
        engine.start()
        if load.rate:
            for arrival in draw_arrivals(load.rate, (began, first), (first, last)):
                time.sleep(max(0.0, arrival - time.perf_counter()))
                ask(arrival)
        else:
            for _ in range(load.clients):
                ask(began)
            while wait(last):
                ask(time.perf_counter())
        for clock in clocks:
            clock.join()
        while any(one.seconds is None for one in asked) and wait(last + patience):
            pass
        engine.close()
        spent = {key: totals[1][key] - value for key, value in totals[0].items()}
        late = sum(first <= arrived for arrived in refused)
        return summarise(load, asked, first, last, spent) | {"refused": late}

    def read_totals(self, engine: Engine, load: Load, into: list[dict[str, float]]) -> None:
        graph = load.forward == "graph" or (load.forward == "auto" and self.device.type == "cuda")
        graphs = engine_for(self.lm.model).graphs if graph else None
        into.append(
            {
                "forwards": engine.counts.forwards,
                "graphs": graphs.made if graphs else 0,
                "capturing": graphs.seconds if graphs else 0.0,
            }
        )


def draw_arrivals(rate: float, *spans: tuple[float, float]) -> list[float]:
    """Poisson arrivals given their number: in each span as many as the rate says, so that few seconds have the rate too."""
    dice = random.Random(0)
    return sorted(dice.uniform(*span) for span in spans for _ in range(round(rate * (span[1] - span[0]))))


def summarise(load: Load, asked: list[Asked], first: float, last: float, spent: dict[str, float]) -> Row:
    """What counts are the times from `first` to `last`; `spent` is what the engine did in them."""
    seconds, forwards = max(last - first, 1e-9), max(spent["forwards"], 1)
    steps = [step for one in asked for step in one.forwards if first <= step[0] < last]
    ends = [one.arrived + one.seconds for one in asked if one.seconds is not None]
    counted = [one for one in asked if first <= one.arrived]
    latencies = [one.seconds for one in counted if one.seconds is not None]
    blocks = [one.first_block for one in counted if one.first_block is not None]
    begun, left = (
        sum(one.arrived < now and (one.seconds is None or one.arrived + one.seconds >= now) for one in asked)
        for now in (first, last)
    )
    return {
        "server": load.server,
        "load": str(load),
        "rate": load.rate,
        "tokens/s": sum(revealed for _, revealed, _ in steps) / seconds,
        "requests/s": sum(first <= end < last for end in ends) / seconds,
        "first block p50 s": percentile(blocks, 50),
        "first block p99 s": percentile(blocks, 99),
        "latency p50 s": percentile(latencies, 50),
        "latency p99 s": percentile(latencies, 99),
        "longest wait s": max((one.waited for one in counted), default=None),
        "more under way": left - begun,
        "forwards/s": spent["forwards"] / seconds,
        "rows/forward": len(steps) / forwards,
        "fed/forward": sum(fed for _, _, fed in steps) / forwards,
        "graphs made": spent["graphs"],
        "s making them": spent["capturing"],
        "answered": len(latencies),
        "cut off": len(counted) - len(latencies),
    }


def percentile(values: list[float], part: int) -> float | None:
    return sorted(values)[min(len(values) * part // 100, len(values) - 1)] if values else None


def keeps_up(row: Row) -> bool:
    allowed = 2 + (row["answered"] + row["cut off"]) // 10
    return not (row["refused"] or row["cut off"]) and row["more under way"] <= allowed


def is_good(row: Row) -> bool:
    return keeps_up(row) and bool(row["answered"]) and row["latency p99 s"] <= SPREAD * row["latency p50 s"]


def list_goodput(rows: list[Row]) -> Iterator[str]:
    """A line for every server that was asked at a rate."""
    for server in dict.fromkeys(row["server"] for row in rows if row["rate"]):
        good = [row for row in rows if row["server"] == server and row["rate"] and is_good(row)]
        best = max(good, key=lambda row: row["rate"], default=None)
        found = (
            f"{best['rate']:g} requests/s, {best['tokens/s']:.0f} tokens/s" if best else "none of these rates"
        )
        yield f"goodput of {server}: {found}"


def as_markdown(results: Row) -> str:
    """The table, and goodput."""
    options = results["options"]
    head = f"{options['shape']}{' (tiny)' if options['tiny'] else ''}, prompts of {options['prompts']}, answers of {options['answers']}"
    head += f", at assumed TPF {options['tpf']}, {options['seconds']} s a row, {describe(results)}"
    rows = results["rows"]
    columns = [key for key in rows[0] if key != "rate"] if rows else []
    table = write_markdown(head, columns, ([show(row[key]) for key in columns] for row in rows))
    return "\n".join([table, "", *list_goodput(rows)])


def show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def run(options: argparse.Namespace) -> Row:
    """All loads, one after the other; serve_load.json is written anew after each."""
    bench = Bench(options)
    rows: list[Row] = []
    results: Row = {
        "machine": describe_machine(bench.device),
        "options": {**vars(options), "out": str(options.out)},
    }
    results["rows"] = rows
    warm, overloaded = set[tuple[str, str]](), set[str]()
    with ASSUMED_TPF.at(bench.device, options.tpf):
        for load in bench.loads():
            if load.rate and load.server in overloaded:
                continue
            if (load.decoder, load.forward) not in warm:
                warm.add((load.decoder, load.forward))
                began = time.perf_counter()
                bench.warm_up(load)
                print(
                    f"{load.decoder}, {load.forward} forward: warm after {time.perf_counter() - began:.1f} s",
                    flush=True,
                )
            rows.append(bench.measure(load))
            some = ("tokens/s", "latency p50 s", "latency p99 s", "rows/forward")
            print(
                f"{load.server}, {load}: " + ", ".join(f"{key} {show(rows[-1][key])}" for key in some),
                flush=True,
            )
            save_json(options.out and options.out / "serve_load.json", results)
            if load.rate and not keeps_up(rows[-1]):
                overloaded.add(load.server)
            free_memory(bench.device)
    print(as_markdown(results))
    return results
