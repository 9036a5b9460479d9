"""References by vote, for questions without one: unprivileged samples, and the text of one with the most common answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tad.runs.fingerprint import row_seed
from tad.tasks import Verdict
from tad.trajectories.grading import read_text
from tad.trajectories.mix import Item
from tad.trajectories.rollout import RolloutConfig

if TYPE_CHECKING:
    from tad.trajectories.collect import Collector


def vote(collector: Collector, items: list[Item]) -> list[Item]:
    """Replace each reference by an unprivileged sample that has the samples' most common answer. The gold is not looked at.

    The whole text, as of a gold reference: a model need not know what to do with a bare answer."""
    recipe = collector.recipe
    votes: list[dict[str, list[str]]] = [{} for _ in items]  # answer -> texts that end with it
    config = RolloutConfig(block=recipe.block, temperature=recipe.vote_temperature)
    asked = [next(collector.requests(item)) for item in items]
    able = [i for i, request in enumerate(asked) if len(request.plain) <= collector.room]
    for number in range(recipe.votes):
        tried = []
        for i in able:
            seed = row_seed(recipe.seed, f"{items[i].example.id}/vote", number)
            tried.append(replace(asked[i], seed=seed))
        rolled = collector.roll(tried, config, [request.plain for request in tried])
        for i, request, rollout in zip(able, tried, rolled, strict=True):
            text = read_text(collector.lm, request.item, rollout.tokens)
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


def judge_by_vote(item: Item, verdict: Verdict) -> Verdict:
    """Agreement with the majority answer takes the place of the gold."""
    agrees = item.voted is not None and verdict.extracted == item.voted
    return Verdict(
        agrees, "agrees with the majority" if agrees else "differs from the majority", verdict.extracted
    )
