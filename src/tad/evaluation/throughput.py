"""Tokens per second of several methods beside each other, one row at a time as published tables have it, or in batches.

Methods take turns at every batch, so that whatever the machine does in between meets all of them. The clock runs over whole
batches, between two device synchronisations; the first batches of each size are run and not counted. Tokenising, text and
grading are outside. What is measured is this machine as much as the method.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tad.decoding import Decoded, Decoder, decode
from tad.errors import TadError
from tad.evaluation.questions import Item
from tad.evaluation.tables import align
from tad.models import LM
from tad.trajectories.privileged import plain_ids


@dataclass(frozen=True)
class TimedMethod:
    """A model and how it decodes."""

    name: str
    lm: LM
    decoder: Decoder


@dataclass(frozen=True)
class Speed:
    """Of one method at one batch size. Rates are totals over the total time; `spread` is that of the batches' own rates: the
    middle half of them, or from the lowest to the highest of fewer than four."""

    method: str
    batch: int
    rows: int
    seconds: float
    correct: int | None  # of the rows; None where they cannot be graded here
    tokens: int  # content, to the first end token
    tokens_all: int  # every generated position
    forwards: int  # summed over rows
    calls: int  # of the model: the longest row of each batch
    spread: tuple[float, float]
    memory: int | None  # peak bytes on the device; None on a CPU

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_all_per_second(self) -> float:
        return self.tokens_all / self.seconds

    @property
    def milliseconds_per_call(self) -> float:
        return 1000 * self.seconds / self.calls

    @property
    def tpf(self) -> float:
        return self.tokens / self.forwards

    @property
    def accuracy(self) -> float | None:
        """Percent."""
        return None if self.correct is None else 100 * self.correct / self.rows


@dataclass
class _Timing:
    """What a method has done so far at one batch size."""

    batches: list[tuple[float, list[Decoded]]] = field(default_factory=list)  # seconds, rows
    memory: int = 0


def measure_speeds(
    methods: Sequence[TimedMethod],
    items: Sequence[Item],
    gen_length: int = 256,
    batch_sizes: Sequence[int] = (1,),
    warmup: int = 1,
    seed: int = 0,
    grade: bool = True,
) -> Iterator[Speed]:
    """A `Speed` per batch size and method, over all items in their order. `warmup` batches of each size come first."""
    for size in batch_sizes:
        if not 1 <= size <= len(items):
            raise TadError(
                f"batch size {size} with {len(items)} prompts; use 1 to {len(items)}, or more prompts"
            )
        # Whole batches only: a smaller last one would be another measurement.
        batches = [items[low : low + size] for low in range(0, len(items) - size + 1, size)]
        timings = [_Timing() for _ in methods]  # names may be the same: two adapters of one run's name
        for number in range(warmup):
            for method in methods:
                _decode(method, batches[number % len(batches)], gen_length, seed, _Timing())
        for batch in batches:
            for method, timing in zip(methods, timings, strict=True):
                _decode(method, batch, gen_length, seed, timing)
        asked = [item for batch in batches for item in batch]
        for method, timing in zip(methods, timings, strict=True):
            yield _speed(method, size, timing, asked if grade else None)


def _decode(method: TimedMethod, items: Sequence[Item], gen_length: int, seed: int, timing: _Timing) -> None:
    lm = method.lm
    on_gpu = lm.device.type == "cuda"
    prompts = [plain_ids(lm, item.task, item.example, item.template) for item in items]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(lm.device)
        torch.cuda.synchronize(lm.device)
    began = time.perf_counter()
    rows = decode(lm, prompts, method.decoder, gen_length, seed)
    if on_gpu:
        torch.cuda.synchronize(lm.device)
    timing.batches.append((time.perf_counter() - began, rows))
    if on_gpu:
        timing.memory = max(timing.memory, torch.cuda.max_memory_allocated(lm.device))


def _speed(method: TimedMethod, size: int, timing: _Timing, asked: Sequence[Item] | None) -> Speed:
    rows = [row for _, found in timing.batches for row in found]
    rates = [sum(len(row.content) for row in found) / seconds for seconds, found in timing.batches]
    if len(rates) >= 4:
        low, _, high = statistics.quantiles(rates, n=4)
    else:
        low, high = min(rates), max(rates)
    return Speed(
        method=method.name,
        batch=size,
        rows=len(rows),
        seconds=sum(seconds for seconds, _ in timing.batches),
        correct=None if asked is None else _count_correct(method.lm, asked, rows),
        tokens=sum(len(row.content) for row in rows),
        tokens_all=sum(len(row.tokens) for row in rows),
        forwards=sum(row.forwards for row in rows),
        calls=sum(max(row.forwards for row in found) for _, found in timing.batches),
        spread=(low, high),
        memory=timing.memory or None,
    )


def _count_correct(lm: LM, items: Sequence[Item], rows: Sequence[Decoded]) -> int | None:
    """How many answers are right; None where the sandbox that programs need does not work."""
    texts = [item.prompt.cut(lm.decode(row.answer)) for item, row in zip(items, rows, strict=True)]
    pairs = [(item.example, text) for item, text in zip(items, texts, strict=True)]
    try:
        return sum(verdict.correct is True for verdict in items[0].task.grade_many(pairs))
    except TadError:
        return None


def show_speeds(speeds: Sequence[Speed], base: str | None = None) -> str:
    """A line per batch size and method; rates over that of the method `base` and of the first one, at the same batch size."""
    head = ("method", "batch", "rows", "accuracy %", "TPF", "tokens/s", "spread", "x base", "x first", "tokens/s all",
            "ms per call", "peak GiB")  # fmt: skip
    rows = [head]
    for speed in speeds:
        beside = {one.method: one.tokens_per_second for one in speeds if one.batch == speed.batch}
        over_base = f"{speed.tokens_per_second / beside[base]:.2f}" if base in beside else "-"
        low, high = speed.spread
        rows.append(
            (
                speed.method,
                f"{speed.batch}",
                f"{speed.rows}",
                "-" if speed.accuracy is None else f"{speed.accuracy:.1f}",
                f"{speed.tpf:.2f}",
                f"{speed.tokens_per_second:.1f}",
                f"{low:.1f} to {high:.1f}",
                over_base,
                f"{speed.tokens_per_second / beside[speeds[0].method]:.2f}",
                f"{speed.tokens_all_per_second:.1f}",
                f"{speed.milliseconds_per_call:.2f}",
                "-" if speed.memory is None else f"{speed.memory / 2**30:.2f}",
            )
        )
    return align(rows)
