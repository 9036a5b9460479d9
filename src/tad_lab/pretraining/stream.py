"""Token rows of the nano world, generated ahead of training by worker processes.

A chunk is a function of (recipe, number): its examples, their prompts, and the width each is laid out in. The stream of
batches is a function of the recipe alone, so a run resumes at a step without replaying: it needs the chunk the step lies in
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
from tad_lab.pretraining.recipe import DataSection, PretrainRecipe

# width -> (ids uint16 [rows, width], prompt lengths uint16 [rows])
Chunk = dict[int, tuple[np.ndarray, np.ndarray]]
_MARK = "MARK"


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


def make_chunk(recipe: PretrainRecipe, number: int) -> Chunk:
    """Generate and lay out the examples of one chunk."""
    writer, data = _writer(recipe.model.family), recipe.data
    names, weights = zip(*sorted(data.families.items()), strict=True)
    prompts, answers, roomy = [], [], []
    for index in range(number * data.chunk, (number + 1) * data.chunk):
        rng = random.Random(f"mix/{recipe.seed}/{index}")
        problem = WORLD[rng.choices(names, weights)[0]].problem("train", index, recipe.seed)
        prompt = problem.question
        if rng.random() < data.privileged:
            prompt = privileged_prompt(problem.question, problem.reference, INSTRUCTION).text
        prompts.append(prompt)
        answers.append(problem.solution)
        roomy.append(rng.random() < 0.5)
    rows: dict[int, list[tuple[list[int], int]]] = {width: [] for width in data.widths}
    encode = writer.tokenizer.encode_batch_fast
    for prompt, answer, wide in zip(encode(prompts), encode(answers), roomy, strict=True):
        head = [*writer.before, *prompt.ids, *writer.after]
        row = [*head, *answer.ids, writer.eot]
        rows[_choose_width(data, len(head), len(row), wide)].append((row, len(head)))
    return {width: _stack(found, width, writer.eos) for width, found in rows.items()}


def _choose_width(data: DataSection, head: int, row: int, wide: bool) -> int:
    needed = max(row, head + data.room) if wide else row
    for width in data.widths:
        if needed <= width:
            return width
    if row <= data.widths[-1]:
        return data.widths[-1]
    raise TadError(f"data.widths: an example has {row} tokens, the widest row only {data.widths[-1]}")


def _stack(rows: list[tuple[list[int], int]], width: int, fill: int) -> tuple[np.ndarray, np.ndarray]:
    ids: np.ndarray = np.full((len(rows), width), fill, dtype=np.uint16)
    for i, (row, _) in enumerate(rows):
        ids[i, : len(row)] = row
    return ids, np.array([head for _, head in rows], dtype=np.uint16)


class TokenStream(IterableDataset):
    """Batches (ids [rows, width], prompt lengths [rows]) without end, from a given step on.

    `position(step)` is what a checkpoint stores and `start` takes.
    """

    def __init__(self, recipe: PretrainRecipe, start: dict[str, int] | None = None) -> None:
        self.recipe, self.seed = recipe, recipe.seed
        # Distinct chunks; then the next epoch begins.
        self.pool = -(-recipe.data.examples // recipe.data.chunk)
        workers = recipe.data.workers
        self.workers = max(1, len(os.sched_getaffinity(0)) - 2) if workers is None else workers
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
        rng, tokens = np.random.default_rng([self.seed, 1, place]), self.recipe.optimization.tokens_per_step
        batches = []
        for width, (ids, _) in sorted(chunk.items()):
            size = tokens // width
            order = rng.permutation(len(ids))
            batches += [(width, order[low : low + size]) for low in range(0, len(ids) - size + 1, size)]
        if not batches:
            raise TadError(
                f"data.chunk={self.recipe.data.chunk} does not fill one batch of {tokens} tokens; raise it"
            )
        return [batches[i] for i in rng.permutation(len(batches))]

    def _number(self, place: int) -> int:
        """The chunk at a place: in order at first, then a new permutation for every pass over the pool."""
        epoch, index = divmod(place, self.pool)
        if epoch == 0:
            return index
        return int(np.random.default_rng([self.seed, 2, epoch]).permutation(self.pool)[index])

    def _chunks(self, place: int) -> Iterator[Chunk]:
        """Chunks from a place on; workers keep a few ahead. Each distinct chunk is made once and kept."""
        if self.workers == 0:
            while True:
                number = self._number(place)
                if number not in self.made:
                    self.made[number] = make_chunk(self.recipe, number)
                yield self.made[number]
                place += 1
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        processes = ProcessPoolExecutor(self.workers, mp_context=get_context("spawn"), initializer=_be_quiet)
        waiting: dict[int, Future[Chunk]] = {}
        try:
            while True:
                for ahead in range(place, place + 2 * self.workers):
                    number = self._number(ahead)
                    if number not in self.made and number not in waiting:
                        waiting[number] = processes.submit(make_chunk, self.recipe, number)
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
            processes.shutdown(wait=False, cancel_futures=True)


def _be_quiet() -> None:
    """Workers leave Ctrl-C to the main process and use one core each."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
