"""Rollouts: one token per step, the tokens from one source and the order from another.

The paper's trajectory is the privileged teacher's token at the position where the teacher is surest. `order` and
`tokens` separate the two choices: whose certainty decides *when* a position is revealed, and who decides *what* it
becomes. Positions are taken from the current block only. Token ids in, token ids out; no grading, no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tad.decoding import Engine, EngineChoice, decode
from tad.decoding.canvas import lay_out
from tad.decoding.noise import uniform
from tad.decoding.proposal import Sampling, propose
from tad.decoding.rule import first_best
from tad.decoding.table import keep_rows
from tad.errors import TadError
from tad.models import LM, AttentionMask

Order = Literal["teacher", "student", "student-max", "left-to-right", "random"]
Tokens = Literal["teacher", "reference"]
ORDERS: tuple[Order, ...] = ("teacher", "student", "student-max", "left-to-right", "random")
NEEDS_STUDENT = ("student", "student-max")
CPU_ROWS = 4  # rows side by side on a CPU


@dataclass(frozen=True)
class Pace:
    """How a rollout goes. `floor`: where the teacher is less sure than this of the token at the chosen position, its
    own surest position is taken instead (0 switches that off)."""

    order: Order = "teacher"
    tokens: Tokens = "teacher"
    block: int = 32
    temperature: float = 0.0
    floor: float = 0.0
    stop_at_end: bool = True

    @property
    def is_decoding(self) -> bool:
        """Whether this is the one-by-one decoder: the teacher's tokens in the teacher's order."""
        return self.order == self.tokens == "teacher" and self.floor == 0

    def check(self, length: int) -> None:
        if self.order not in ORDERS:
            raise TadError(f"order '{self.order}' is not known; known: {', '.join(ORDERS)}")
        if self.tokens not in ("teacher", "reference"):
            raise TadError(f"tokens '{self.tokens}' is not known; known: teacher, reference")
        if self.tokens == "reference" and (self.order == "teacher" or self.floor > 0 or self.temperature > 0):
            raise TadError(
                "tokens 'reference' runs no teacher: it needs another order, floor 0 and temperature 0"
            )
        if self.block < 1 or length % self.block:
            raise TadError(f"gen_length {length} is not a multiple of the block length {self.block}")


@dataclass
class Rollout:
    """One trajectory. Positions after the end of the answer are filled with EOS at steps n_real + 1, n_real + 2, ..."""

    tokens: list[int]
    reveal: list[int]  # step 1, 2, ... of each position
    n_real: int  # steps that were decoded; the rest is filler
    teacher: list[float]  # teacher's probability of the token when it was revealed; nan where no teacher ran
    student: list[float]  # the student's likewise; nan where no student ran


@dataclass
class _Rows:
    """The rows still running. Canvases share the generated part's columns; prompts are padded on the left."""

    teacher: Tensor  # [rows, columns] ids; [rows, 0] where no teacher runs
    student: Tensor
    teacher_pad: Tensor  # [rows]
    student_pad: Tensor
    origin: Tensor
    seed: Tensor
    reveal: Tensor  # [rows, length], 0 while masked
    sure: Tensor  # [rows, length] teacher's confidence at the reveal
    student_sure: Tensor
    given: Tensor  # [rows, length] reference tokens, or zeros


def roll_out(
    lm: LM,
    privileged: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    length: int,
    pace: Pace | None = None,
    seeds: Sequence[int] | None = None,
    references: Sequence[Sequence[int]] | None = None,
    student: LM | None = None,
    engine: Engine | None = None,
) -> list[Rollout]:
    """Roll out a batch. `privileged` are the teacher's prompts and `plain` the student's, one of each per row.

    Teacher and student are `lm` without adapter, in one batch of two rows each; a `student` of its own (the same
    weights with an adapter) is called separately. `references` are the tokens for tokens='reference'. `engine` runs
    the paper's order through the decoder.
    """
    pace = pace or Pace()
    pace.check(length)
    seeds = list(seeds or [0] * len(plain))
    found: dict[int, Rollout] = {}
    for rows in _groups(lm, privileged, plain):
        shown, mine = [privileged[row] for row in rows], [seeds[row] for row in rows]
        if pace.is_decoding and engine is not None:
            done = roll_out_cached(lm, shown, length, pace, "none", mine, engine)
        else:
            asked = [plain[row] for row in rows]
            given = None if references is None else [references[row] for row in rows]
            done = _Rollouts(lm, shown, asked, length, pace, mine, given, student).run()
        found |= dict(zip(rows, done, strict=True))
    return [found[row] for row in range(len(plain))]


def _groups(
    lm: LM, privileged: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]
) -> Iterator[list[int]]:
    """Rows to run side by side. On a CPU a few rows of like length: they keep the cores busy, and padding costs."""
    if lm.device.type != "cpu":
        yield list(range(len(plain)))
        return
    order = sorted(range(len(plain)), key=lambda row: (len(privileged[row]), len(plain[row])))
    for low in range(0, len(order), CPU_ROWS):
        yield order[low : low + CPU_ROWS]


def roll_out_cached(
    lm: LM,
    prompts: Sequence[Sequence[int]],
    length: int,
    pace: Pace,
    cache: str,
    seeds: Sequence[int],
    engine: Engine | EngineChoice = "plain",
) -> list[Rollout]:
    """The paper's order through the one-by-one decoder; with a prefix or dual cache faster, and approximate."""
    nan = float("nan")
    rollouts = []
    with lm.base():
        rows = decode(
            lm,
            prompts,
            "one-by-one",
            length,
            seed=seeds,
            block=pace.block,
            cache=cache,
            temperature=pace.temperature,
            stop="end" if pace.stop_at_end else "off",
            engine=engine,
        )
    for row in rows:
        reveal, later = list(row.steps), row.forwards
        for position, step in enumerate(row.steps):
            if step == 0:
                later += 1
                reveal[position] = later
        sure = [p if step else nan for p, step in zip(row.confidence, row.steps, strict=True)]
        rollouts.append(Rollout(row.tokens, reveal, row.forwards, sure, [nan] * length))
    return rollouts


class _Rollouts:
    def __init__(
        self,
        lm: LM,
        privileged: Sequence[Sequence[int]],
        plain: Sequence[Sequence[int]],
        length: int,
        pace: Pace,
        seeds: Sequence[int] | None,
        references: Sequence[Sequence[int]] | None,
        student: LM | None,
    ) -> None:
        if pace.tokens == "reference" and references is None:
            raise TadError("tokens 'reference' needs the reference's token ids")
        self.lm, self.pace, self.length, self.student = lm, pace, length, student or lm
        self.uses_teacher = pace.tokens == "teacher"
        self.uses_student = pace.order in NEEDS_STUDENT
        rows, device = len(plain), lm.device
        self.prompt = max(len(p) for p in [*(privileged if self.uses_teacher else []), *plain])
        zeros = torch.zeros(rows, length, device=device)
        given = torch.zeros(rows, length, dtype=torch.int64)
        for row, tokens in enumerate(references or []):
            given[row] = torch.tensor([*tokens[:length], *[lm.tokens.eos] * (length - len(tokens))])
        teacher, teacher_pad = self._canvas(privileged, self.uses_teacher)
        student_canvas, student_pad = self._canvas(plain, self.uses_student)
        self.rows = _Rows(
            teacher=teacher,
            student=student_canvas,
            teacher_pad=teacher_pad,
            student_pad=student_pad,
            origin=torch.arange(rows, device=device),
            seed=torch.tensor(list(seeds or [0] * rows), dtype=torch.int64, device=device),
            reveal=zeros.long(),
            sure=zeros + float("nan"),
            student_sure=zeros + float("nan"),
            given=given.to(device),
        )
        # What has been written so far, whoever's canvas it is on.
        self.written = torch.full((rows, length), lm.tokens.mask, device=device)
        self.done: list[Rollout | None] = [None] * rows

    def _canvas(self, prompts: Sequence[Sequence[int]], used: bool) -> tuple[Tensor, Tensor]:
        """A side's canvas and padding; nothing where that side does not run."""
        lm = self.lm
        if not used:
            return torch.zeros(len(prompts), 0, dtype=torch.int64, device=lm.device), torch.zeros(
                len(prompts), dtype=torch.int64, device=lm.device
            )
        canvas, pad = lay_out(prompts, self.length, lm.tokens, self.prompt)
        return canvas.to(lm.device), pad.to(lm.device)

    @torch.inference_mode()
    def run(self) -> list[Rollout]:
        step = 0
        while len(self.written):
            is_mask = self.written == self.lm.tokens.mask
            finished = ~is_mask.any(1)
            if self.pace.stop_at_end:
                finished = finished | self._ended(is_mask)
            block = is_mask.int().argmax(1) // self.pace.block
            facts = torch.stack((finished.long(), block), dim=1).tolist()  # the one read of this step
            if any(fact[0] for fact in facts):
                self._leave([bool(fact[0]) for fact in facts], step)
                is_mask = self.written == self.lm.tokens.mask
                facts = [fact for fact in facts if not fact[0]]
                if not facts:
                    break
            step += 1
            self._reveal_one(is_mask, [fact[1] for fact in facts], step)
        return [rollout for rollout in self.done if rollout is not None]

    def _ended(self, is_mask: Tensor) -> Tensor:
        """Rows with an end token and no mask before it."""
        ends = torch.isin(self.written, torch.tensor(self.lm.tokens.ends, device=self.written.device))
        before = (ends.long().cumsum(1) == 0) & is_mask
        return ends.any(1) & ~before.any(1)

    def _reveal_one(self, is_mask: Tensor, blocks: list[int], step: int) -> None:
        rows, device, size = self.rows, self.written.device, self.pace.block
        start = torch.tensor(blocks, device=device)[:, None] * size
        position = start + torch.arange(size, device=device)  # [rows, block]
        allowed = is_mask.gather(1, position)
        teacher, student = self._hidden(position)
        shape = position.shape
        flat = position.reshape(-1)
        seed = rows.seed[:, None].expand(shape).reshape(-1)
        steps = torch.full_like(flat, step)
        mask, ends = self.lm.tokens.mask, self.lm.tokens.ends
        if teacher is not None:
            sampling = Sampling(temperature=self.pace.temperature)
            logits = self.lm.model.head(teacher.reshape(len(flat), -1))
            proposal = propose(logits, sampling, mask, ends, seed, steps, flat)
            token, sure = proposal.token.view(shape), proposal.confidence.view(shape)
            teacher_score = proposal.odds.view(shape)
        else:
            token = rows.given.gather(1, position)
            sure = torch.full(shape, float("nan"), device=device)
            teacher_score = sure
        student_sure = torch.full(shape, float("nan"), device=device)
        if student is not None:
            logits = self.student.model.head(student.reshape(len(flat), -1)).float()
            log_p = logits.log_softmax(-1)
            of_token = log_p.gather(-1, token.reshape(-1, 1))[:, 0].view(shape)
            student_sure = of_token.exp()
            student_max = (
                log_p.index_fill(-1, torch.tensor([mask], device=device), float("-inf")).amax(-1).view(shape)
            )
        if self.pace.order == "teacher":
            score = teacher_score
        elif self.pace.order == "student":
            score = of_token
        elif self.pace.order == "student-max":
            score = student_max
        elif self.pace.order == "left-to-right":
            score = -position.float()
        else:
            score = uniform(seed, steps, flat, 1).view(shape)
        chosen = first_best(score, allowed)
        if self.pace.floor > 0:
            unsure = (sure * chosen).sum(1, keepdim=True) < self.pace.floor
            chosen = torch.where(unsure, first_best(teacher_score, allowed), chosen)
        self._write(position, chosen, token, step, sure, student_sure)

    def _hidden(self, position: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The outputs that predict `position` in the teacher's and in the student's canvas; both in one forward."""
        rows = self.rows
        if self.uses_teacher and self.uses_student and self.student is self.lm:
            with self.lm.base():
                both = self._forward(
                    self.lm,
                    torch.cat((rows.teacher, rows.student)),
                    torch.cat((rows.teacher_pad, rows.student_pad)),
                    position.repeat(2, 1),
                )
            teacher, student = both.chunk(2)
            return teacher, student
        teacher_out = student_out = None
        if self.uses_teacher:
            with self.lm.base():
                teacher_out = self._forward(self.lm, rows.teacher, rows.teacher_pad, position)
        if self.uses_student:
            if self.student is self.lm:
                with self.lm.base():
                    student_out = self._forward(self.lm, rows.student, rows.student_pad, position)
            else:
                student_out = self._forward(self.student, rows.student, rows.student_pad, position)
        return teacher_out, student_out

    def _forward(self, lm: LM, canvas: Tensor, pad: Tensor, position: Tensor) -> Tensor:
        column = torch.arange(canvas.shape[1], device=canvas.device)
        real = column >= pad[:, None]
        out = lm.model(
            canvas,
            position_ids=(column - pad[:, None]).clamp(min=0),
            mask=AttentionMask.padded(real),
            logits_at=self.prompt + position - lm.family.logit_shift,
            head=False,
        ).hidden
        assert out is not None
        return out

    def _write(
        self, position: Tensor, chosen: Tensor, token: Tensor, step: int, sure: Tensor, student_sure: Tensor
    ) -> None:
        rows = self.rows
        targets: list[tuple[Tensor, Tensor]] = [
            (self.written, token),
            (rows.reveal, torch.full_like(token, step)),
            (rows.sure, sure),
            (rows.student_sure, student_sure),
        ]
        if self.uses_teacher:
            targets.append((rows.teacher[:, self.prompt :], token))
        if self.uses_student:
            targets.append((rows.student[:, self.prompt :], token))
        for target, value in targets:
            target.scatter_(1, position, torch.where(chosen, value, target.gather(1, position)))

    def _leave(self, finished: list[bool], step: int) -> None:
        """Hand out finished rows: after the last real step the remaining masks are EOS, revealed left to right."""
        device = self.written.device
        gone = torch.tensor([i for i, is_done in enumerate(finished) if is_done], device=device)
        keep = torch.tensor([i for i, is_done in enumerate(finished) if not is_done], device=device).long()
        rows, tokens = self.rows, self.lm.tokens
        columns = (rows.origin, self.written, rows.reveal, rows.sure, rows.student_sure)
        for origin, ids, reveal, sure, student_sure in zip(
            *(column.index_select(0, gone).tolist() for column in columns), strict=True
        ):
            later = step
            for position, token in enumerate(ids):
                if token == tokens.mask:
                    later += 1
                    ids[position], reveal[position] = tokens.eos, later
            self.done[origin] = Rollout(ids, reveal, step, sure, student_sure)
        keep_rows(rows, keep)
        self.written = self.written.index_select(0, keep)
