"""Verdicts on rollouts: while they are collected, or later, where the machine that collected them has no sandbox.

A task with `graded: later` leaves all of its rollouts in the store, without verdicts. `grade_store` gives the verdicts, drops
what the recipe does not keep and counts: afterwards a shard is, byte for byte, what a graded collection writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tad.config import parse_recipe
from tad.errors import TadError
from tad.models import LM
from tad.runs.fingerprint import fingerprint_tokenizer
from tad.tasks import CANNOT_JUDGE, Verdict, is_unjudged
from tad.trajectories.mix import Item, mix_tasks
from tad.trajectories.privileged import plain_ids
from tad.trajectories.recipe import CollectRecipe
from tad.trajectories.store import META, WRONG_KEPT, ShardStats, Trajectory, TrajectoryStore, choose_wrong

_CHARACTERS = 2000  # of a text that is kept to be read
_REASONS = 20  # that a shard counts


def read_text(lm: LM, item: Item, tokens: Sequence[int]) -> str:
    """The answer in a rollout's final tokens."""
    end = next((place for place, token in enumerate(tokens) if token in lm.tokens.ends), len(tokens))
    return item.task.prompt(item.example, item.template).cut(lm.decode(list(tokens[:end])))


def judge(lm: LM, answers: Sequence[tuple[Item, Sequence[int]]], workers: int | None = None) -> list[Verdict]:
    """Verdicts on final tokens, in order."""
    by_task: dict[int, list[int]] = {}  # sections may name one task with different options
    for i, (item, _) in enumerate(answers):
        by_task.setdefault(id(item.task), []).append(i)
    found: dict[int, Verdict] = {}
    for indices in by_task.values():
        task = answers[indices[0]][0].task
        pairs = [(answers[i][0].example, read_text(lm, *answers[i])) for i in indices]
        found |= zip(indices, task.grade_many(pairs, workers), strict=True)
    return [found[i] for i in range(len(answers))]


def describe_wrong(
    lm: LM, answers: Iterable[tuple[str, Item, Sequence[int], Verdict | None]]
) -> list[dict[str, str]]:
    """Wrong rollouts as a shard keeps them, from ids, items, tokens and verdicts."""
    found = [one for one in answers if one[3] is not None and not one[3].correct]
    return [
        {
            "id": name,
            "question": item.example.question[:_CHARACTERS],
            "reference": str(item.task.reference(item.example) or item.example.answer)[:_CHARACTERS],
            "text": read_text(lm, item, tokens)[:_CHARACTERS],
            "reason": verdict.reason if verdict is not None else "",
        }
        for name, item, tokens, verdict in sorted(found, key=lambda one: one[0])[:WRONG_KEPT]
    ]


def count_verdicts(stats: ShardStats, verdicts: Iterable[tuple[str, Verdict]]) -> ShardStats:
    """A shard's counts with verdicts of tasks added.

    The most common reasons and those that could not be judged are kept, all while rollouts wait for verdicts.
    """
    correct, reasons = stats.correct, Counter(stats.reasons)
    by_task = {task: list(counts) for task, counts in stats.by_task.items()}
    for task, verdict in verdicts:
        tally = by_task.setdefault(task, [0, 0])
        tally[0] += 1
        tally[1] += verdict.correct
        correct += verdict.correct
        if not verdict.correct:
            reasons[_reason_class(verdict.reason)] += 1
    ordered = sorted(reasons.items(), key=lambda entry: (entry[0] != CANNOT_JUDGE, -entry[1], entry[0]))
    kept = ordered if stats.pending else ordered[:_REASONS]
    return replace(stats, correct=correct, reasons=dict(kept), by_task=dict(sorted(by_task.items())))


def _reason_class(reason: str) -> str:
    """Reasons without their particulars, so that they can be counted."""
    if is_unjudged(False, reason):
        return CANNOT_JUDGE
    return "".join("n" if c.isdigit() else c for c in reason)[:60]


def grade_store(
    store: TrajectoryStore, lm: LM, data_dir: str | None = None, workers: int | None = None
) -> Iterator[tuple[int, ShardStats]]:
    """Grade the rollouts that wait for a verdict, shard by shard; each is rewritten whole, so grading can be stopped anywhere.

    `lm` is for its tokenizer and needs no weights.
    """
    with store.writing():
        pending = store.pending()
        if not pending:
            return
        if fingerprint_tokenizer(lm) != store.meta.tokenizer:
            raise TadError(
                f"{store.folder}: was made with another tokenizer than that of {lm.source}; name its model"
            )
        values = {**store.meta.recipe, "model": lm.source, "data_dir": data_dir}
        recipe = parse_recipe(CollectRecipe, values, where=str(store.folder / META))
        items = list(mix_tasks(recipe))
        for shard in pending:
            own = items[shard * recipe.shard_size : (shard + 1) * recipe.shard_size]
            rows, stats = _grade_shard(store, lm, shard, own, recipe, workers)
            store.write(shard, rows, stats)
            yield shard, stats


def _grade_shard(
    store: TrajectoryStore, lm: LM, shard: int, items: list[Item], recipe: CollectRecipe, workers: int | None
) -> tuple[list[Trajectory], ShardStats]:
    found = store.read(shard)
    assert found is not None
    rows, stats = [Trajectory(**row) for row in found[0].to_pylist()], found[1]
    by_id = {(item.task.name, item.example.id): item for item in items}
    waiting = {}
    for i, row in enumerate(rows):
        item = by_id.get((row.task, row.example))
        if item is None or plain_ids(lm, item.task, item.example, item.template) != row.plain_ids:
            raise TadError(
                f"{store.folder}: example {row.example} is not in the data; name it with --data-dir"
            )
        if row.correct is None and item.graded:
            waiting[i] = item
    verdicts = judge(lm, [(item, rows[i].tokens) for i, item in waiting.items()], workers)
    for i, verdict in zip(waiting, verdicts, strict=True):
        rows[i] = replace(
            rows[i], correct=verdict.correct, reason=verdict.reason, extracted=verdict.extracted
        )
    kept = [row for row in rows if row.correct is not False or recipe.keep == "all"]
    judged = [
        (rows[i].id, item, rows[i].tokens, verdict)
        for (i, item), verdict in zip(waiting.items(), verdicts, strict=True)
    ]
    wrong = choose_wrong([*stats.wrong, *describe_wrong(lm, judged)])
    stats = replace(stats, kept=len(kept), ungraded=stats.ungraded - len(waiting), pending=0, wrong=wrong)
    named = [(item.task.name, verdict) for item, verdict in zip(waiting.values(), verdicts, strict=True)]
    return kept, count_verdicts(stats, named)
