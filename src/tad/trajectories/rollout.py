"""Rollouts: one token per step, the tokens from one source and the order from another; or several, as in decoding.

The paper's trajectory is the privileged teacher's token at the position where the teacher is surest. `order` and
`tokens` separate the two choices: whose certainty decides *when* a position is revealed, and who decides *what* it
becomes. Positions are taken from the current block only. Order `parallel` is `tad-leftmost`: a step reveals every mask
that the teacher is sure of, so that the states are those a student decodes through. An order is an unmasking strategy of
`tad.decoding`, whose scheduler runs it. Token ids in, token ids out; no grading, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, where

from tad.decoding import Decoded, Decoder, EngineChoice, GraphEngine, Request, Scheduler, get_decoder
from tad.decoding.cache_policy import BlockCache
from tad.decoding.noise import uniform
from tad.decoding.sampler import Samples
from tad.decoding.schedule import BlockByBlock, Schedule, Verified
from tad.decoding.unmasking import Candidates, EntropyThreshold, Strategy, Top1, first_best
from tad.errors import TadError
from tad.models import LM, BlockLayout

Order = Literal["teacher", "student", "student-max", "left-to-right", "random", "parallel"]
Tokens = Literal["teacher", "reference"]
ORDERS: tuple[Order, ...] = get_args(Order)
NEEDS_STUDENT = ("student", "student-max")
CPU_ROWS = 4  # rows side by side on a CPU: they keep the cores busy, and padding costs


@dataclass(frozen=True)
class InOrder(Strategy):
    """One token per forward in an order that is not the model's own; the scorer is the student. Where the sampled token at
    the chosen position is less likely than `floor`, the surest position is taken instead."""

    order: Order
    floor: float | None = None
    forced = False
    compiles = False  # its noise is a hash whose 64-bit constants compilers refuse

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        chosen = first_best(self._scores(samples, candidates), candidates.valid)
        if self.floor is None:
            return chosen
        unsure = (samples.confidence * chosen).sum(1, keepdim=True) < self.floor
        return where(unsure, first_best(samples.odds, candidates.valid), chosen)

    def _scores(self, samples: Samples, candidates: Candidates) -> Tensor:
        position = candidates.position
        if self.order == "left-to-right":
            return -position.float()
        if self.order == "random":
            per_row = (candidates.seed, candidates.forward)
            seed, forward = (value[:, None].expand_as(position).reshape(-1) for value in per_row)
            return uniform(seed, forward, position.reshape(-1), 1).view(position.shape)
        found = samples.scorer_log_p if self.order == "student" else samples.scorer_best
        assert found is not None
        return found


@dataclass(frozen=True)
class RolloutConfig:
    """How a rollout goes. `floor`: where the teacher is less sure than this of the token at the chosen position, its
    own surest position is taken instead (0 switches that off). `threshold`: the entropy below which order `parallel` reveals.
    `cache` makes the paper's order and left to right faster and approximate: a whole forward at the beginning of a block,
    then the block alone."""

    order: Order = "teacher"
    tokens: Tokens = "teacher"
    block: int = 32
    temperature: float = 0.0
    floor: float = 0.0
    threshold: float = 0.1
    stop_at_end: bool = True
    cache: str = "none"

    @property
    def one_forward(self) -> bool:
        """Whether the teacher's forward is all there is: what the graph engine serves."""
        return self.tokens == "teacher" and self.order not in NEEDS_STUDENT

    def check(self, length: int) -> None:
        if self.order not in ORDERS:
            raise TadError(f"order '{self.order}' is not known; known: {', '.join(ORDERS)}")
        if self.tokens not in ("teacher", "reference"):
            raise TadError(f"tokens '{self.tokens}' is not known; known: teacher, reference")
        if self.tokens == "reference" and (self.order == "teacher" or self.floor > 0 or self.temperature > 0):
            raise TadError(
                "tokens 'reference' runs no teacher: it needs another order, floor 0 and temperature 0"
            )
        if self.order == "parallel" and (
            self.tokens == "reference" or self.floor > 0 or self.cache != "none"
        ):
            raise TadError(
                "order 'parallel' is how the teacher decodes: it needs tokens 'teacher', floor 0, cache 'none'"
            )
        if self.block < 1 or length % self.block:
            raise TadError(f"gen_length {length} is not a multiple of the block length {self.block}")

    def decoder(self, layout: BlockLayout | None = None) -> Decoder:
        """The decoder whose reveals are this rollout. A block-diffusion model (`layout`) goes by its own blocks, each in parts of
        `block` from left to right where that is smaller."""
        if layout is not None and layout.causal:
            return self._autoregressive()
        rule: Strategy = InOrder(self.order, self.floor or None)
        block = self.block
        if self.order == "teacher":  # a floor would take its own choice instead
            rule = Top1()
        elif self.order == "left-to-right" and not self.floor and self.cache == "none":
            rule, block = Top1(), 1  # the head runs at the next position alone
        elif self.order == "parallel":
            rule = EntropyThreshold(self.threshold, keep="leftmost")
        name = "tad-leftmost" if self.order == "parallel" else "one-by-one"
        stop = "end" if self.stop_at_end else "off"
        found = get_decoder(name, block=block, cache=self.cache, temperature=self.temperature, stop=stop)
        schedule: Schedule | Verified = found.schedule
        cache = found.cache
        if layout is not None and layout.grid == "absolute":
            schedule = BlockByBlock(sub_block=block if block < int(layout.size) else None, store=False)
            if self.cache == "none" and self.one_forward:
                cache = BlockCache()  # exact
        return Decoder(schedule, rule, cache, found.sampling, found.stop, name="rollout")

    def _autoregressive(self) -> Decoder:
        """A plain generation: an autoregressive model, converted or not, has no other order."""
        if self.order != "left-to-right" or self.floor or self.cache != "none" or self.tokens != "teacher":
            raise TadError(
                "this model is autoregressive: collect with order=left-to-right, tokens=teacher, floor=0 and cache=none"
            )
        stop = "end" if self.stop_at_end else "off"
        return get_decoder("autoregressive", temperature=self.temperature, stop=stop)


@dataclass
class Rollout:
    """One trajectory. Positions after the end of the answer are filled with EOS at steps n_real + 1, n_real + 2, ..."""

    tokens: list[int]
    reveal: list[int]  # step 1, 2, ... of each position
    n_real: int  # steps that were decoded; the rest is filler
    teacher: list[float]  # teacher's probability of the token when it was revealed; nan where no teacher ran
    student: list[float]  # the student's likewise; nan where no student ran


def roll_out(
    lm: LM,
    privileged: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    length: int,
    config: RolloutConfig | None = None,
    seeds: Sequence[int] | None = None,
    references: Sequence[Sequence[int]] | None = None,
    student: LM | None = None,
    engine: GraphEngine | EngineChoice | None = None,
    batch_size: int | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[Rollout]:
    """Roll out rows. `privileged` are the teacher's prompts and `plain` the student's, one of each per row.

    Teacher and student are `lm` without adapter, in one forward of two views; a `student` of its own (the same
    weights with an adapter) is called separately. `references` are the tokens for tokens='reference'. `engine`: see
    `tad.decoding.decode`; what needs the student's forward or none at all is run by the plain one. `batch_size` rows
    go side by side, all by default and at most `CPU_ROWS` on a CPU; a row's result does not depend on the others.
    `on_done` is told how many rows just ended.
    """
    config = config or RolloutConfig()
    config.check(length)
    if config.tokens == "reference" and references is None:
        raise TadError("tokens 'reference' needs the reference's token ids")
    decoder = config.decoder(lm.model.shape.blocks)
    asks_teacher, asks_student = config.tokens == "teacher", config.order in NEEDS_STUDENT
    requests = [
        Request(
            name=row,
            prompt=privileged[row] if asks_teacher else plain[row],
            length=length,
            decoder=decoder,
            seed=0 if seeds is None else seeds[row],
            adapter=False,
            scorer_prompt=plain[row] if asks_student else None,
            given=None if references is None or asks_teacher else references[row],
        )
        for row in range(len(plain))
    ]
    requests.sort(key=lambda request: (len(request.prompt), len(request.scorer_prompt or ())))
    rows = batch_size or len(requests)
    causal = lm.model.shape.blocks is not None and lm.model.shape.blocks.causal
    if lm.device.type == "cpu" and not causal:  # where a forward is one position, more rows cost little
        rows = min(rows, CPU_ROWS)
    longest = max(
        (max(len(request.prompt), len(request.scorer_prompt or ())) for request in requests), default=0
    )
    scheduler = Scheduler(
        lm,
        engine if config.one_forward else "plain",
        room=(longest, length),
        slots=min(rows, len(requests)),
        scorer=None if student is None else student.model,
    )
    found = scheduler.run(requests, on_done)
    return [_rollout(found[row], asks_teacher) for row in range(len(plain))]


def _rollout(row: Decoded, asked_teacher: bool) -> Rollout:
    """After the last real step come the positions that were filled, from left to right.

    Steps are counted without forwards that revealed nothing of the row: what is cut from a last whole block.
    """
    steps = {forward: step for step, forward in enumerate(sorted({*row.steps} - {0}), 1)}
    reveal, later = [], len(steps)
    for forward in row.steps:
        later += forward == 0
        reveal.append(steps.get(forward, later))
    nothing = [float("nan")] * len(reveal)
    teacher, student = (
        nothing
        if values is None
        else [p if step else nan for p, step, nan in zip(values, row.steps, nothing, strict=True)]
        for values in (row.confidence if asked_teacher else None, row.scorer)
    )
    return Rollout(row.tokens, reveal, len(steps), teacher, student)
