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

import torch

import tad
from tad.decoding import GraphEngine
from tad.errors import TadError
from tad.models import LM
from tad.runs.fingerprint import row_seed
from tad.tasks import Verdict
from tad.trajectories.grading import count_verdicts, describe_wrong, judge, read_text
from tad.trajectories.listener import CollectListener, CollectProgress, NullListener
from tad.trajectories.majority import judge_by_vote, vote
from tad.trajectories.mix import Item, mix_tasks
from tad.trajectories.preview import take_preview
from tad.trajectories.privileged import plain_ids, privileged_ids
from tad.trajectories.recipe import CollectRecipe
from tad.trajectories.rollout import Rollout, RolloutConfig, roll_out
from tad.trajectories.store import ShardStats, StoreMeta, Trajectory, TrajectoryStore

UNSURE = 0.5  # the teacher's confidence below which a reveal is reported
_SHOWN = 3  # wrong texts that a warning has


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
    def room(self) -> int:
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
            items = vote(self, items)
        requests = [request for item in items for request in self.requests(item)]
        return self.roll_fitting(requests, on_done)

    def roll_fitting(
        self, requests: list[RolloutRequest], on_done: Callable[[int], None] | None = None
    ) -> list[tuple[RolloutRequest, Rollout | None]]:
        fitting = [
            i
            for i, request in enumerate(requests)
            if max(len(request.plain), len(request.privileged)) <= self.room
        ]
        found: dict[int, Rollout] = {}
        if self.recipe.reference == "where-needed":
            found = self._roll_unaided(requests, [i for i in fitting if requests[i].item.graded])
            if found and on_done is not None:
                on_done(len(found))
        rest = [i for i in fitting if i not in found]
        found |= dict(zip(rest, self.roll([requests[i] for i in rest], on_done=on_done), strict=True))
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
            rolled = self.roll(tried, config, [request.plain for request in tried])
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

    def roll(
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
            verdicts[i] = judge_by_vote(item, verdict) if item.origin == "majority" else verdict
        return verdicts


def fill(
    store: TrajectoryStore,
    collector: Collector,
    shards: Sequence[int],
    listener: CollectListener | None = None,
) -> None:
    """Generate, grade and write shards: the next one is generated while one is graded. A new store is begun with a look at
    a few questions, and a call that kept fewer than half ends with a warning, and with that look where there was none."""
    told = listener or NullListener()
    total, made = collector.count(shards), list[ShardStats]()
    done, looked = 0, 0 in shards
    if looked and (found := take_preview(collector)) is not None:
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
        if not looked and (found := take_preview(collector)) is not None:
            for line in itertools.islice(found.describe(), 2):
                told.say(line)


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
