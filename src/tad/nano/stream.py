"""Token rows of the nano world, generated ahead of training by worker processes.

A chunk is a function of (spec, number): its examples, their prompts, and the width each is laid out in. The stream of
batches is a function of the spec alone, so a run resumes at a step without replaying: it needs the chunk the step lies in
and that chunk's first step. Rows are prompt, answer, end of turn, then end tokens to the full width, all of which are
part of the answer; there is no padding.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from tad.errors import TadError
from tad.models.family import family_named
from tad.models.tokenizer import render_chat
from tad.tasks.nano import WORLD
from tad.tasks.nano.task import INSTRUCTION
from tad.tasks.nano.tokenizer import build_tokenizer, special_ids
from tad.tasks.task import privileged_prompt

Chunk = dict[
    int, tuple[np.ndarray, np.ndarray]
]  # width -> (ids uint16 [rows, width], prompt lengths uint16 [rows])
_MARK = "MARK"


@dataclass(frozen=True)
class StreamSpec:
    """Everything the stream depends on. `mix` holds (task, weight)."""

    family: str
    mix: tuple[tuple[str, float], ...]
    privileged: float
    widths: tuple[int, ...]
    room: int
    chunk: int
    chunks: int  # distinct chunks; then the next epoch begins
    tokens_per_step: int
    seed: int

    def __post_init__(self) -> None:
        for name, _ in self.mix:
            if name not in WORLD:
                raise TadError(f"data.families: '{name}' cannot be generated; known: {', '.join(WORLD)}")
        for width in self.widths:
            if self.tokens_per_step < width:
                raise TadError(
                    f"optimization.tokens_per_step={self.tokens_per_step} is less than one row of {width} tokens"
                )


@dataclass(frozen=True)
class _Writer:
    """A family's tokenizer and the tokens its chat format puts around a user turn."""

    tokenizer: Any
    before: list[int]
    after: list[int]
    eot: int
    eos: int


@cache
def _writer(name: str) -> _Writer:
    from transformers import PreTrainedTokenizerFast

    family = family_named(name)
    tokenizer = build_tokenizer(family)
    ids = special_ids(family)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=tokenizer.id_to_token(ids["bos_token_id"])
    )
    text = render_chat(wrapped, family, [{"role": "user", "content": _MARK}])
    before, after = (tokenizer.encode(part).ids for part in text.split(_MARK))
    return _Writer(tokenizer, before, after, ids["eot_token_id"], ids["eos_token_id"])


def make_chunk(spec: StreamSpec, number: int) -> Chunk:
    """Generate and lay out the examples of one chunk."""
    writer = _writer(spec.family)
    names = [name for name, _ in spec.mix]
    weights = [weight for _, weight in spec.mix]
    prompts, answers, roomy = [], [], []
    for index in range(number * spec.chunk, (number + 1) * spec.chunk):
        rng = random.Random(f"mix/{spec.seed}/{index}")
        problem = WORLD[rng.choices(names, weights)[0]].problem("train", index, spec.seed)
        prompt = problem.question
        if rng.random() < spec.privileged:
            prompt = privileged_prompt(problem.question, problem.reference, INSTRUCTION).text
        prompts.append(prompt)
        answers.append(problem.solution)
        roomy.append(rng.random() < 0.5)
    rows: dict[int, list[tuple[list[int], int]]] = {width: [] for width in spec.widths}
    encode = writer.tokenizer.encode_batch_fast
    for prompt, answer, wide in zip(encode(prompts), encode(answers), roomy, strict=True):
        head = [*writer.before, *prompt.ids, *writer.after]
        row = [*head, *answer.ids, writer.eot]
        rows[_choose_width(spec, len(head), len(row), wide)].append((row, len(head)))
    return {width: _stack(found, width, writer.eos) for width, found in rows.items()}


def _choose_width(spec: StreamSpec, head: int, row: int, wide: bool) -> int:
    needed = max(row, head + spec.room) if wide else row
    for width in spec.widths:
        if needed <= width:
            return width
    if row <= spec.widths[-1]:
        return spec.widths[-1]
    raise TadError(f"data.widths: an example has {row} tokens, the widest row only {spec.widths[-1]}")


def _stack(rows: list[tuple[list[int], int]], width: int, fill: int) -> tuple[np.ndarray, np.ndarray]:
    ids: np.ndarray = np.full((len(rows), width), fill, dtype=np.uint16)
    for i, (row, _) in enumerate(rows):
        ids[i, : len(row)] = row
    return ids, np.array([head for _, head in rows], dtype=np.uint16)


class TokenStream(IterableDataset):
    """Batches (ids [rows, width], prompt lengths [rows]) without end, from a given step on.

    `position(step)` is what a checkpoint stores and `start` takes.
    """

    def __init__(self, spec: StreamSpec, workers: int, start: dict[str, int] | None = None) -> None:
        self.spec, self.workers = spec, workers
        start = start or {"chunk": 0, "chunk_step": 0, "step": 0}
        self.first_step = start["step"]
        self.starts = [(start["chunk_step"], start["chunk"])]  # (first step, place) of every chunk begun
        self.made: dict[int, Chunk] = {}

    def position(self, step: int) -> dict[str, int]:
        """Where the batch of a step lies, for steps since the start."""
        chunk_step, place = max(entry for entry in self.starts if entry[0] <= step)
        return {"chunk": place, "chunk_step": chunk_step, "step": step}

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        step, place = self.starts[0]
        for chunk in self._chunks(place):
            if self.starts[-1][1] != place:
                self.starts.append((step, place))
            for width, rows in self._batches(chunk, place):
                if step >= self.first_step:
                    ids, prompts = (torch.from_numpy(part[rows].astype(np.int64)) for part in chunk[width])
                    yield ids, prompts
                step += 1
            place += 1

    def _batches(self, chunk: Chunk, place: int) -> list[tuple[int, np.ndarray]]:
        """The batches of a chunk, as (width, row numbers), in a random order that depends on the place alone."""
        rng = np.random.default_rng([self.spec.seed, 1, place])
        batches = []
        for width, (ids, _) in sorted(chunk.items()):
            size = self.spec.tokens_per_step // width
            order = rng.permutation(len(ids))
            batches += [(width, order[low : low + size]) for low in range(0, len(ids) - size + 1, size)]
        if not batches:
            raise TadError(
                f"data.chunk={self.spec.chunk} does not fill one batch of {self.spec.tokens_per_step} tokens; raise it"
            )
        return [batches[i] for i in rng.permutation(len(batches))]

    def _number(self, place: int) -> int:
        """The chunk at a place: in order at first, then a new permutation for every pass over the pool."""
        epoch, index = divmod(place, self.spec.chunks)
        if epoch == 0:
            return index
        return int(np.random.default_rng([self.spec.seed, 2, epoch]).permutation(self.spec.chunks)[index])

    def _chunks(self, place: int) -> Iterator[Chunk]:
        """Chunks from a place on; workers keep a few ahead. Each distinct chunk is made once and kept."""
        if self.workers == 0:
            while True:
                number = self._number(place)
                if number not in self.made:
                    self.made[number] = make_chunk(self.spec, number)
                yield self.made[number]
                place += 1
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        pool = ProcessPoolExecutor(self.workers, mp_context=get_context("spawn"), initializer=_be_quiet)
        waiting: dict[int, Future[Chunk]] = {}
        try:
            while True:
                for ahead in range(place, place + 2 * self.workers):
                    number = self._number(ahead)
                    if number not in self.made and number not in waiting:
                        waiting[number] = pool.submit(make_chunk, self.spec, number)
                number = self._number(place)
                if number in waiting:
                    try:
                        self.made[number] = waiting.pop(number).result()
                    except BrokenProcessPool:
                        raise TadError(
                            "a process that generates data was killed (out of memory?); go on with --resume, "
                            "with fewer data.workers"
                        ) from None
                yield self.made[number]
                place += 1
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _be_quiet() -> None:
    """Workers leave Ctrl-C to the main process and use one core each."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
