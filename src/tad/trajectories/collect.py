"""Collection: every example of a task mix through a privileged rollout, graded, into a store.

The work is cut into shards, fixed sets of examples; a shard's content is a function of its examples and the recipe,
whatever the batch sizes, the number of workers or the interruptions. Grading of a shard runs beside the generation of
the next one.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch

import tad
from tad.decoding import GraphEngine
from tad.errors import TadError
from tad.models import LM
from tad.runs.fingerprint import row_seed
from tad.tasks import Verdict
from tad.trajectories.grading import count_verdicts, describe_wrong, judge, read_text
from tad.trajectories.mix import Item, mix_tasks
from tad.trajectories.privileged import plain_ids, privileged_ids
from tad.trajectories.recipe import CollectRecipe
from tad.trajectories.rollout import Rollout, RolloutConfig, roll_out
from tad.trajectories.store import ShardStats, StoreMeta, Trajectory, TrajectoryStore

UNSURE = 0.5  # the teacher's confidence below which a reveal is reported
PREVIEW = 8  # questions that are looked at before a collection
_SHOWN = 3  # wrong texts that a warning has


@dataclass(frozen=True)
class CollectProgress:
    """How far a call is: rollouts made of those it has to make, and how many of the graded ones were right."""

    done: int
    total: int
    right: int
    graded: int


class CollectListener(Protocol):
    """Who is told how a collection goes on, and may ask it to stop after the shard in flight."""

    def say(self, line: str) -> None: ...

    def rollouts(self, progress: CollectProgress) -> None: ...

    def shard(self, shard: int, stats: ShardStats) -> None: ...

    def stopping(self) -> bool: ...


class Nobody:
    """Hears nothing and asks for nothing."""

    def say(self, line: str) -> None:
        pass

    def rollouts(self, progress: CollectProgress) -> None:
        pass

    def shard(self, shard: int, stats: ShardStats) -> None:
        pass

    def stopping(self) -> bool:
        return False


@dataclass(frozen=True)
class RolloutRequest:
    """One rollout to make."""

    item: Item
    sample: int
    seed: int
    plain: list[int]
    privileged: list[int]
    written: list[int]  # the reference's own tokens, for tokens='reference'
    verdict: Verdict | None = None  # given before the rest of its shard was rolled out
    failed: tuple[int, ...] = ()  # steps of its rollouts without the reference that were wrong


class Collector:
    """Makes shards. Holds the model and the examples, writes nothing."""

    def __init__(self, lm: LM, recipe: CollectRecipe, student: LM | None = None) -> None:
        if recipe.samples > 1 and recipe.temperature == 0:
            raise TadError("samples above 1 would all be the same at temperature 0; set a temperature")
        cacheable = recipe.order in ("teacher", "left-to-right") and recipe.tokens == "teacher"
        if recipe.cache != "none" and not cacheable:
            raise TadError(f"cache '{recipe.cache}' works with orders 'teacher' and 'left-to-right' only")
        if recipe.reference != "gold" and not recipe.privileged:
            raise TadError(
                f"reference '{recipe.reference}' is shown to a privileged teacher; set privileged: true"
            )
        if recipe.reference == "where-needed" and recipe.tokens == "reference":
            raise TadError("reference 'where-needed' is for the teacher's tokens; set tokens: teacher")
        self.lm, self.recipe, self.student = lm, recipe, student
        self.config = RolloutConfig(**{f.name: getattr(recipe, f.name) for f in fields(RolloutConfig)})
        self.config.check(recipe.gen_length)
        if recipe.compile and not self.config.one_forward:
            raise TadError("compile works with the teacher's tokens in an order that asks no student")
        self.engine = GraphEngine(lm.model, compiled=True) if recipe.compile else None
        self.items = list(mix_tasks(recipe))
        asked = Counter((item.task.name, item.example.id) for item in self.items)
        for item in self.items:
            if item.later and asked[item.task.name, item.example.id] > 1:  # how its rows are found again
                raise TadError(
                    f"task '{item.task.name}': {item.example.id} is asked twice and graded later; collect into two stores"
                )
        self.wrong: deque[str] = deque(maxlen=_SHOWN)  # the last texts that were graded wrong, and why

    @property
    def shards(self) -> int:
        return -(-len(self.items) // self.recipe.shard_size)

    def meta(self) -> StoreMeta:
        return StoreMeta.of(
            self.lm,
            gen_length=self.recipe.gen_length,
            examples=len(self.items),
            shards=self.shards,
            recipe=self.recipe.content_hash_fields(),
            code=tad.__version__,
        )

    def count(self, shards: Sequence[int]) -> int:
        """How many rollouts some shards are."""
        return self.recipe.samples * sum(len(self._items(shard)) for shard in shards)

    @property
    def _room(self) -> int:
        """For a prompt."""
        return self.lm.context - self.recipe.gen_length

    def _items(self, shard: int) -> list[Item]:
        size = self.recipe.shard_size
        return self.items[shard * size : (shard + 1) * size]

    def generate(
        self, shard: int, on_done: Callable[[int], None] | None = None
    ) -> list[tuple[RolloutRequest, Rollout | None]]:
        """The rollouts of a shard, ungraded; None for a prompt that does not fit the context."""
        items = self._items(shard)
        if self.recipe.reference == "majority":
            items = self._with_majority(items)
        requests = [request for item in items for request in self.requests(item)]
        return self._roll_fitting(requests, on_done)

    def _roll_fitting(
        self, requests: list[RolloutRequest], on_done: Callable[[int], None] | None = None
    ) -> list[tuple[RolloutRequest, Rollout | None]]:
        fitting = [
            i
            for i, request in enumerate(requests)
            if max(len(request.plain), len(request.privileged)) <= self._room
        ]
        found: dict[int, Rollout] = {}
        if self.recipe.reference == "where-needed":
            found = self._roll_unaided(requests, [i for i in fitting if requests[i].item.graded])
            if found and on_done is not None:
                on_done(len(found))
        rest = [i for i in fitting if i not in found]
        found |= dict(zip(rest, self._roll([requests[i] for i in rest], on_done=on_done), strict=True))
        return [(request, found.get(i)) for i, request in enumerate(requests)]

    def _roll_unaided(self, requests: list[RolloutRequest], left: list[int]) -> dict[int, Rollout]:
        """Right rollouts without the reference, by request. Requests learn what came of theirs."""
        found: dict[int, Rollout] = {}
        for attempt in range(self.recipe.attempts):
            tried = []
            for i in left:
                request = requests[i]
                seed = request.seed
                if attempt:
                    name = f"{request.item.example.id}/attempt{attempt}"
                    seed = row_seed(self.recipe.seed, name, request.sample)
                item = replace(request.item, origin="none")
                tried.append(replace(request, item=item, seed=seed, verdict=None))
            config = self.config
            if attempt:
                config = replace(config, temperature=self.recipe.vote_temperature)
            rolled = self._roll(tried, config, [request.plain for request in tried])
            verdicts = self._verdicts(list(zip(tried, rolled, strict=True)))
            for i, request, rollout, verdict in zip(left, tried, rolled, verdicts, strict=True):
                if verdict is not None and verdict.correct:
                    found[i], requests[i] = rollout, replace(request, verdict=verdict)
                else:
                    requests[i] = replace(requests[i], failed=(*requests[i].failed, rollout.n_real))
            left = [i for i in left if i not in found]
        return found

    def grade(
        self, rollouts: Sequence[tuple[RolloutRequest, Rollout | None]]
    ) -> tuple[list[Trajectory], ShardStats]:
        """Judge the rollouts of a shard, and keep what the recipe says."""
        verdicts = self._verdicts(rollouts)
        rows, judged = [], list[tuple[str, Verdict]]()
        steps = unsure = ungraded = pending = unaided = 0
        for (request, rollout), verdict in zip(rollouts, verdicts, strict=True):
            right = verdict is not None and verdict.correct
            if verdict is None:
                ungraded += 1
                pending += request.item.later
            else:
                judged.append((request.item.task.name, verdict))
                if not right and rollout is not None:
                    text = read_text(self.lm, request.item, rollout.tokens)
                    self.wrong.append(f"{verdict.reason}: {text!r:.300}")
            if rollout is None:
                continue
            unaided += request.item.origin == "none" and self.recipe.privileged
            steps += rollout.n_real
            unsure += sum(sure < UNSURE for sure in rollout.teacher)
            if right or verdict is None or self.recipe.keep == "all":
                rows.append(_trajectory(request, rollout, verdict))
        stats = ShardStats(
            attempted=len(rollouts),
            kept=len(rows),
            correct=0,
            reasons={},
            steps=steps,
            unsure=unsure,
            by_task={},
            ungraded=ungraded,
            pending=pending,
            unaided=unaided,
            failed=sum(len(request.failed) for request, _ in rollouts),
            failed_steps=sum(sum(request.failed) for request, _ in rollouts),
            wrong=describe_wrong(
                self.lm,
                (
                    (_name(request), request.item, rollout.tokens, verdict)
                    for (request, rollout), verdict in zip(rollouts, verdicts, strict=True)
                    if rollout is not None
                ),
            ),
        )
        return rows, count_verdicts(stats, judged)

    def preview(self) -> Preview | None:
        """A few questions with the reference and without; None where there is no such choice, or no grader."""
        recipe = self.recipe
        items = [item for item in self.items if item.graded]
        if not recipe.privileged or recipe.reference != "gold" or recipe.tokens != "teacher" or not items:
            return None
        chosen = items[:: max(1, len(items) // PREVIEW)][:PREVIEW]
        shown = [next(self.requests(item)) for item in chosen]
        right = {}
        with torch.inference_mode():
            for name in ("plain", "privileged"):  # the wrong texts that are left are the teacher's
                self.wrong.clear()
                requests = [replace(request, privileged=getattr(request, name)) for request in shown]
                right[name] = self.grade(self._roll_fitting(requests))[1].correct
        found = Preview(len(chosen), right["privileged"], right["plain"], tuple(self.wrong))
        self.wrong.clear()
        return found

    def requests(self, item: Item) -> Iterator[RolloutRequest]:
        """The rollouts of an example, with the prompts of teacher and student."""
        lm, recipe = self.lm, self.recipe
        plain = plain_ids(lm, item.task, item.example, item.template)
        shown = plain
        if recipe.privileged:
            shown = privileged_ids(lm, item.task, item.example, item.reference, recipe.prompt, item.template)
        written = []
        if recipe.tokens == "reference":
            solution = item.example.meta.get("solution") or item.reference
            eot = lm.tokens.ends[-1]
            written = [*lm.encode_text(str(solution)), eot]
        for sample in range(recipe.samples):
            yield RolloutRequest(
                item, sample, row_seed(recipe.seed, item.example.id, sample), plain, shown, written
            )

    def _roll(
        self,
        requests: list[RolloutRequest],
        config: RolloutConfig | None = None,
        prompts: list[list[int]] | None = None,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Rollout]:
        """`prompts`: what the teacher sees, the privileged ones by default."""
        if not requests:
            return []
        references = [request.written for request in requests] if self.recipe.tokens == "reference" else None
        return roll_out(
            self.lm,
            prompts or [request.privileged for request in requests],
            [request.plain for request in requests],
            self.recipe.gen_length,
            config or self.config,
            [request.seed for request in requests],
            references,
            self.student,
            self.engine,
            self.recipe.batch_size,
            on_done,
        )

    def _verdicts(self, rollouts: Sequence[tuple[RolloutRequest, Rollout | None]]) -> list[Verdict | None]:
        """None for rollouts of tasks that are not graded."""
        verdicts: list[Verdict | None] = [
            Verdict(False, "the prompt does not fit the context") if rollout is None else request.verdict
            for request, rollout in rollouts
        ]
        asked = {
            i: (request.item, rollout.tokens)
            for i, (request, rollout) in enumerate(rollouts)
            if verdicts[i] is None and rollout is not None and request.item.graded
        }
        for i, verdict in zip(asked, judge(self.lm, list(asked.values())), strict=True):
            item = asked[i][0]
            verdicts[i] = _by_majority(item, verdict) if item.origin == "majority" else verdict
        return verdicts

    def _with_majority(self, items: list[Item]) -> list[Item]:
        """Replace each reference by an unprivileged sample that has the samples' most common answer. The gold is not looked at.

        The whole text, as of a gold reference: a model need not know what to do with a bare answer."""
        votes: list[dict[str, list[str]]] = [{} for _ in items]  # answer -> texts that end with it
        config = RolloutConfig(block=self.recipe.block, temperature=self.recipe.vote_temperature)
        asked = [next(self.requests(item)) for item in items]
        able = [i for i, request in enumerate(asked) if len(request.plain) <= self._room]
        for vote in range(self.recipe.votes):
            tried = []
            for i in able:
                seed = row_seed(self.recipe.seed, f"{items[i].example.id}/vote", vote)
                tried.append(replace(asked[i], seed=seed))
            rolled = self._roll(tried, config, [request.plain for request in tried])
            for i, request, rollout in zip(able, tried, rolled, strict=True):
                text = read_text(self.lm, request.item, rollout.tokens)
                # Only what was extracted is used: whether it is right stays unknown to the vote.
                verdict = request.item.task.grade(request.item.example, text)
                if verdict.extracted is not None:
                    votes[i].setdefault(verdict.extracted, []).append(text)
        chosen = []
        for item, cast in zip(items, votes, strict=True):
            voted = max(sorted(cast), key=lambda answer: len(cast[answer]), default=None)
            text = "" if voted is None else cast[voted][0]
            chosen.append(replace(item, reference=text, origin="majority", voted=voted))
        return chosen


@dataclass(frozen=True)
class Preview:
    """How a few questions went before a collection: right with the reference, right without, and wrong texts."""

    asked: int
    right: int
    right_without: int
    wrong: tuple[str, ...]

    def describe(self) -> Iterator[str]:
        """Lines to be read; more than one where something is wrong."""
        yield (
            f"a look at {self.asked} questions: {self.right} right with the reference, {self.right_without} without"
        )
        if self.right < self.right_without:
            yield (
                "WARNING: the reference makes the teacher worse. `tad collect RECIPE --show` prints its prompt; give the task "
                "an instruction its model knows (tasks: options: {instruction: ...}), or set reference: where-needed"
            )
        elif 2 * self.right < self.asked:
            yield "WARNING: fewer than half are right, and only right ones are kept (keep: correct)"
        else:
            return
        yield from (f"  wrong: {text}" for text in self.wrong)


def fill(
    store: TrajectoryStore,
    collector: Collector,
    shards: Sequence[int],
    listener: CollectListener | None = None,
) -> None:
    """Generate, grade and write shards: the next one is generated while one is graded. A new store is begun with a look at
    a few questions, and a call that kept fewer than half ends with a warning, and with that look where there was none."""
    told = listener or Nobody()
    total, made = collector.count(shards), list[ShardStats]()
    done, looked = 0, 0 in shards
    if looked and (found := collector.preview()) is not None:
        for line in found.describe():
            told.say(line)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        right, graded = (
            sum(stats.correct for stats in made),
            sum(stats.attempted - stats.ungraded for stats in made),
        )
        told.rollouts(CollectProgress(done, total, right, graded))

    def finish(shard: int, rollouts: Sequence[tuple[RolloutRequest, Rollout | None]]) -> None:
        rows, stats = collector.grade(rollouts)
        store.write(shard, rows, stats)
        made.append(stats)
        told.shard(shard, stats)

    with ThreadPoolExecutor(1) as grader:
        pending: Future[None] | None = None
        for shard in shards:
            if told.stopping():
                break
            with torch.inference_mode():
                rollouts = collector.generate(shard, advance)
            if pending is not None:
                pending.result()
            pending = grader.submit(finish, shard, rollouts)
        if pending is not None:
            pending.result()
    kept, attempted = (sum(getattr(stats, name) for stats in made) for name in ("kept", "attempted"))
    if 2 * kept < attempted:
        told.say(f"WARNING: {kept} of {attempted} rollouts were kept; the last wrong ones:")
        for text in collector.wrong:
            told.say(f"  wrong: {text}")
        if not looked and (found := collector.preview()) is not None:
            for line in itertools.islice(found.describe(), 2):
                told.say(line)


def _by_majority(item: Item, verdict: Verdict) -> Verdict:
    """Agreement with the majority answer takes the place of the gold."""
    agrees = item.voted is not None and verdict.extracted == item.voted
    return Verdict(
        agrees, "agrees with the majority" if agrees else "differs from the majority", verdict.extracted
    )


def _name(request: RolloutRequest) -> str:
    return f"{request.item.example.id}#{request.sample}"


def _trajectory(request: RolloutRequest, rollout: Rollout, verdict: Verdict | None) -> Trajectory:
    example = request.item.example
    return Trajectory(
        id=_name(request),
        task=request.item.task.name,
        example=example.id,
        sample=request.sample,
        level=example.level,
        seed=request.seed,
        plain_ids=request.plain,
        privileged_ids=request.privileged,
        tokens=rollout.tokens,
        reveal=rollout.reveal,
        n_real=rollout.n_real,
        teacher_confidence=rollout.teacher,
        student_confidence=rollout.student,
        correct=None if verdict is None else verdict.correct,
        reason="not graded" if verdict is None else verdict.reason,
        extracted=None if verdict is None else verdict.extracted,
        reference=request.item.origin,
    )
