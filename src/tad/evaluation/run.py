"""A run: every item of a recipe decoded, graded and written, resumable at any moment.

Rows of similar prompt length share a batch. A row is a function of the model, the recipe and its example, whatever the
batch, the number of processes or the interruptions (in fp32; in half precision a kernel may round differently for
another batch shape). Batches are graded while the next ones are decoded.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import tad
from tad.decoding import Decoded, decode, get_decoder
from tad.decoding.decoders import describe, parameters
from tad.errors import TadError
from tad.evaluation.questions import Item, Questions, sections_of
from tad.evaluation.recipe import EvalRecipe
from tad.evaluation.results import Results, RunMeta
from tad.evaluation.row import UNFIT, Row
from tad.models import LM
from tad.runs.fingerprint import fingerprint_model, fingerprint_tokenizer, row_seed
from tad.runs.identity import find_rank
from tad.runs.record import complete_record, read_record, write_record
from tad.trajectories.privileged import plain_ids

_WINDOW = 16  # batches' worth of items that are sorted by length together
_AHEAD = 4  # batches that may wait for a grader


@dataclass(frozen=True)
class Identity:
    """Which weights a model has. Reads them all, so it is made once per model."""

    model: str
    adapter: str | None
    tokenizer: str

    @classmethod
    def of(cls, lm: LM) -> Identity:
        return cls(fingerprint_model(lm), fingerprint_adapter(lm), fingerprint_tokenizer(lm))


def fingerprint_adapter(lm: LM) -> str | None:
    """Of the values of the attached adapter; None without one."""
    if lm.peft is None:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(lm.model.named_parameters()):
        if "lora_" in name or name == "mask_embedding":
            digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


class Runner:
    """Turns items into rows. Holds the model; writes nothing and grades nothing."""

    def __init__(self, lm: LM, recipe: EvalRecipe, identity: Identity | None = None) -> None:
        self.lm, self.recipe = lm, recipe
        self.identity = identity or Identity.of(lm)
        chosen = get_decoder(recipe.decoder, lm.family.name, **recipe.settings)
        chosen.bind(lm, recipe.gen_length)  # refused now, not at the first batch
        self.decoder = chosen
        self._size = recipe.batch_size

    def meta(self, questions: Questions) -> RunMeta:
        decoder = self.decoder
        return RunMeta(
            model=self.identity.model,
            adapter=self.identity.adapter,
            tokenizer=self.identity.tokenizer,
            family=self.lm.family.name,
            dtype=str(self.lm.dtype).removeprefix("torch."),
            decoder={"name": decoder.name, **describe(decoder), **parameters(decoder)},
            gen_length=self.recipe.gen_length,
            seed=self.recipe.seed,
            tasks=questions.facts,
            source={"model": self.lm.source, "adapter": self.lm.adapter, "name": self.recipe.name},
            code=tad.__version__,
        )

    def run(self, items: Sequence[Item]) -> Iterator[list[Row]]:
        """Ungraded rows, a batch at a time."""
        size = self.recipe.batch_size
        room = self.lm.context - self.recipe.gen_length
        for low in range(0, len(items), _WINDOW * size):
            chosen = items[low : low + _WINDOW * size]
            window = [(item, plain_ids(self.lm, item.task, item.example, item.template)) for item in chosen]
            unfit = [self._unfit(item, ids) for item, ids in window if len(ids) > room]
            if unfit:
                yield unfit
            fitting = sorted(
                (entry for entry in window if len(entry[1]) <= room), key=lambda entry: len(entry[1])
            )
            while fitting:
                batch, fitting = fitting[: self._size], fitting[self._size :]
                yield from self._decode(batch)

    def _decode(self, batch: Sequence[tuple[Item, list[int]]]) -> Iterator[list[Row]]:
        seeds = [row_seed(self.recipe.seed, item.example.id, 0) for item, _ in batch]
        began = time.perf_counter()
        try:
            found = decode(self.lm, [ids for _, ids in batch], self.decoder, self.recipe.gen_length, seeds)
        except torch.OutOfMemoryError:
            found = None
        if found is None:  # outside the handler, whose traceback holds the tensors
            if len(batch) == 1:
                raise TadError(
                    f"one row of {len(batch[0][1])} prompt tokens does not fit the device's memory; "
                    "use a smaller --gen-length or --dtype bf16"
                )
            torch.cuda.empty_cache()
            half = self._size = len(batch) // 2  # later batches are that small from the start
            yield from self._decode(batch[:half])
            yield from self._decode(batch[half:])
            return
        share = (time.perf_counter() - began) / len(batch)
        yield [self._row(item, ids, one, share) for (item, ids), one in zip(batch, found, strict=True)]

    def _row(self, item: Item, ids: list[int], found: Decoded, share: float) -> Row:
        return Row(
            **self._asked(item, ids),
            text=item.prompt.cut(self.lm.decode(found.answer)),
            correct=None,
            reason=None,
            extracted=None,
            tokens=len(found.content),
            tokens_all=len(found.tokens),
            forwards=found.forwards,
            seconds=round(found.seconds, 6),
            share=round(share, 6),
            ids=found.tokens,
            steps=found.steps,
            drafting=None if found.drafting is None else asdict(found.drafting),
        )

    def _unfit(self, item: Item, ids: list[int]) -> Row:
        return Row(
            **self._asked(item, ids), text="", correct=False, reason=UNFIT, extracted=None, tokens=0, tokens_all=0,
            forwards=0, seconds=0.0, share=0.0, ids=[], steps=[],
        )  # fmt: skip

    def _asked(self, item: Item, ids: list[int]) -> dict[str, Any]:
        return {
            "task": item.label,
            "template": item.template,
            "id": item.example.id,
            "level": item.example.level,
            "question": item.digest,
            "prompt": self.lm.decode(ids, skip_special=False),
        }


@dataclass
class RunProgress:
    """How far a run is, with what the rows show so far; rows of earlier calls included."""

    total: int
    rows: int = 0
    graded: int = 0
    correct: int = 0
    tokens: int = 0
    tokens_all: int = 0
    forwards: int = 0
    made: int = 0  # by this call

    def take(self, rows: Sequence[Row], new: bool = True) -> None:
        self.rows += len(rows)
        self.made += len(rows) if new else 0
        for row in rows:
            self.tokens += row.tokens
            self.tokens_all += row.tokens_all
            self.forwards += row.forwards
        self.judge(rows)

    def judge(self, rows: Sequence[Row]) -> None:
        """Count verdicts."""
        self.graded += sum(row.correct is not None for row in rows)
        self.correct += sum(bool(row.correct) for row in rows)

    @property
    def accuracy(self) -> float:
        return 100 * self.correct / self.graded if self.graded else math.nan


OnProgress = Callable[[RunProgress], None]


def evaluate(
    lm: LM,
    recipe: EvalRecipe,
    out: str | Path,
    report: OnProgress | None = None,
    stopping: Callable[[], bool] = lambda: False,
    grade: bool | Collection[str] = True,
    questions: Questions | None = None,
    identity: Identity | None = None,
    slim: bool = False,
    decode_items: Callable[[list[Item]], Iterator[list[Row]]] | None = None,
) -> Results:
    """Do what is missing of a run, in this process; under torchrun, this process's share of it.

    With `grade` off, or for tasks that are not in it, rows are written without verdicts and `regrade` adds them, perhaps
    elsewhere. `slim` rows are without prompts, token ids and reveal steps. `questions` and `identity` are passed by callers
    that evaluate the same examples or the same model many times. `decode_items` takes the place of this process's decoding.
    """
    rank, world = find_rank()
    questions = questions or Questions(recipe.tasks, recipe.data_dir)
    runner = Runner(lm, recipe, identity)
    results = Results.open_or_create(out, runner.meta(questions))
    order = [item.key for item in questions.items]
    with results.writing(rank, world):
        with results.quiet():
            found = {row.key: row for row in results.rows()}
        mine = [item for item in questions.items[rank::world] if item.key not in found]
        progress = RunProgress(len(order[rank::world]))
        share = set(order[rank::world])
        earlier = [row for key, row in found.items() if key in share]
        tasks = questions.labels if grade is True else grade or ()
        ungraded = [row for row in earlier if row.correct is None and row.task in tasks]
        if grade is True and (mine or ungraded):
            questions.check_graders()
        progress.take(earlier, new=False)
        if rank == 0 and mine:
            write_record(
                results.folder, recipe.model_dump(mode="json"), rows_before=len(found), processes=world
            )
        began = time.monotonic()
        with Grading(questions, results, progress, recipe.graders, tasks, report) as grading:
            grading.put(ungraded, new=False)
            for rows in (decode_items or runner.run)(mine) if mine else ():
                grading.put([replace(row, prompt="", ids=[], steps=[]) for row in rows] if slim else rows)
                if stopping():
                    break
        if rank == 0 and mine:
            complete_record(
                results.folder, rows_made=progress.made, seconds=round(time.monotonic() - began, 2)
            )
        results.close(order)
    return results


class Grading:
    """A thread that grades and writes batches while the next ones are decoded."""

    def __init__(
        self,
        questions: Questions,
        results: Results,
        progress: RunProgress,
        workers: int | None,
        tasks: Collection[str],
        report: OnProgress | None,
    ) -> None:
        """`tasks`: those whose answers get a verdict."""
        self._questions, self._results, self._progress = questions, results, progress
        self._workers, self._tasks, self._report = workers, tasks, report
        self._thread = ThreadPoolExecutor(1)
        self._pending: list[Future[None]] = []

    def __enter__(self) -> Grading:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            for future in self._pending if kind is None else ():
                future.result()
        finally:
            self._thread.shutdown(cancel_futures=True)

    def put(self, rows: list[Row], new: bool = True) -> None:
        """Hand over rows; waits where the graders fall behind. `new` is off for rows that lack only a verdict."""
        if not rows:
            return
        self._pending.append(self._thread.submit(self._finish, rows, new))
        while self._pending and (len(self._pending) > _AHEAD or self._pending[0].done()):
            self._pending.pop(0).result()

    def _finish(self, rows: list[Row], new: bool) -> None:
        rows = self._questions.grade(rows, self._workers, self._tasks)
        self._results.add(rows)
        (self._progress.take if new else self._progress.judge)(rows)
        if self._report is not None:
            self._report(self._progress)


def questions_of(results: Results, data_dir: str | None = None) -> Questions:
    """The questions of a run, from the data at hand, which must be what the run was made with."""
    questions = Questions(
        sections_of(results.meta.tasks),
        data_dir or read_record(results.folder).get("recipe", {}).get("data_dir"),
    )
    for there, here in zip(results.meta.tasks, questions.facts, strict=True):
        if there["digest"] != here["digest"]:
            raise TadError(
                f"{results.folder}: the examples of '{here['name']}' are not those of the run; name its data with --data-dir"
            )
    return questions


def regrade(
    folders: Sequence[str | Path],
    data_dir: str | None = None,
    only_missing: bool = False,
    workers: int | None = None,
    questions: Questions | None = None,
    tasks: Collection[str] | None = None,
) -> Iterator[tuple[Results, int]]:
    """Grade the rows of runs again (or those without a verdict; or of some tasks); each run with how many verdicts changed.

    `questions` are passed by callers that know them; else they are those of the runs.
    """
    for folder in folders:
        results = Results.open(folder)
        if questions is None or questions.facts != results.meta.tasks:
            questions = questions_of(results, data_dir)
        with results.writing():
            rows = results.rows()
            chosen = [row for row in rows if row.correct is None or not only_missing]
            judged = {row.key: row for row in questions.grade(chosen, workers, tasks)}
            changed = sum(row.correct != judged[row.key].correct for row in chosen)
            results.settle([item.key for item in questions.items], [judged.get(row.key, row) for row in rows])
        yield results, changed
