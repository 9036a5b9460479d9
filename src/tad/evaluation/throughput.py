"""Tokens per second, as published tables measure it (one row at a time) and with larger batches.

The clock runs over whole batches, between two device synchronisations; the first batches of each size are run and not
counted. Tokenising, text and grading are outside. What is measured is this machine as much as the decoder.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tad.decoding import Decoded, Decoder, decode, get_decoder
from tad.errors import TadError
from tad.models import LM


@dataclass(frozen=True)
class Speed:
    """Of one batch size. Rates are totals over the total time; `spread` is the range of the batches' own rates."""

    batch: int
    rows: int
    batches: int
    seconds: float
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
    def tpf_all(self) -> float:
        return self.tokens_all / self.forwards


def measure_speed(
    lm: LM,
    prompts: Sequence[Sequence[int]],
    decoder: str | Decoder = "tad",
    gen_length: int = 256,
    batch_sizes: Sequence[int] = (1,),
    warmup: int = 1,
    seed: int = 0,
    **settings: object,
) -> Iterator[Speed]:
    """One `Speed` per batch size, over all prompts in the order given. `warmup` batches of each size come first."""
    chosen = get_decoder(decoder, lm.family.name, **settings)
    for size in batch_sizes:
        if not 1 <= size <= len(prompts):
            raise TadError(
                f"batch size {size} with {len(prompts)} prompts; use 1 to {len(prompts)}, or more prompts"
            )
        # Whole batches only: a smaller last one would be another measurement.
        batches = [prompts[low : low + size] for low in range(0, len(prompts) - size + 1, size)]
        for number in range(warmup):
            decode(lm, batches[number % len(batches)], chosen, gen_length, seed)
        if lm.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(lm.device)
        timed = [_time(lm, batch, chosen, gen_length, seed) for batch in batches]
        yield _speed(lm, size, timed)


def _time(
    lm: LM, prompts: Sequence[Sequence[int]], decoder: Decoder, gen_length: int, seed: int
) -> tuple[float, list[Decoded]]:
    _synchronize(lm)
    began = time.perf_counter()
    rows = decode(lm, prompts, decoder, gen_length, seed)
    _synchronize(lm)
    return time.perf_counter() - began, rows


def _synchronize(lm: LM) -> None:
    if lm.device.type == "cuda":
        torch.cuda.synchronize(lm.device)


def _speed(lm: LM, size: int, timed: Sequence[tuple[float, list[Decoded]]]) -> Speed:
    rows = [row for _, found in timed for row in found]
    rates = [sum(len(row.content) for row in found) / seconds for seconds, found in timed]
    if len(rates) >= 4:
        low, _, high = statistics.quantiles(rates, n=4)
    else:
        low, high = min(rates), max(rates)
    return Speed(
        batch=size,
        rows=len(rows),
        batches=len(timed),
        seconds=sum(seconds for seconds, _ in timed),
        tokens=sum(len(row.content) for row in rows),
        tokens_all=sum(len(row.tokens) for row in rows),
        forwards=sum(row.forwards for row in rows),
        calls=sum(max(row.forwards for row in found) for _, found in timed),
        spread=(low, high),
        memory=torch.cuda.max_memory_allocated(lm.device) if lm.device.type == "cuda" else None,
    )
