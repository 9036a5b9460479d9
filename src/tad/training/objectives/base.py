"""What an objective is: a data side that turns a trajectory into views, and a device side that turns views into a loss.

Data side, on the CPU, pure: `Objective.views(row, step, rng, progress)` says what the student and the teacher see and which
answer positions count in which *term* with which weight. `collate` pads views to a `Batch` and turns positions into indices,
with the family's shift; padding is known by lengths, never by comparing ids.

Device side: `Objective.loss(outputs, batch, totals)`, from the models' outputs. `totals` are the denominators of the
*global* batch, the sum of `Objective.counts` over all its parts. So the loss of a part is its share, the shares sum to the loss, and any split of a
global batch (devices, accumulation, any order) has the same loss and gradient. A denominator that only the model knows
(how many predictions are right) is taken inside a view, and views are averaged.

Forwards live in `module.py`; a new objective needs `views`, `counts` and `loss`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tad.errors import TadError
from tad.training.losses import RowLosses
from tad.training.states import TrajectoryArrays
from tad.trajectories.partition import unfinished_block

if TYPE_CHECKING:
    from tad.training.objectives.module import ModelOutputs

LEAST_RATIO = 1e-3
Ratio = TypeVar("Ratio", float, np.ndarray, Tensor)


@dataclass(frozen=True)
class View:
    """What is seen of one row at one time, and what counts. Positions are those of the answer, 0 to length - 1."""

    row: str
    prompt: Tensor  # [p], the student's
    noisy: Tensor  # [length], the answer as the models see it
    labels: Tensor  # [length]
    terms: Mapping[str, Tensor]  # term -> [length] weights; 0 where a position is not in the term
    teacher_prompt: Tensor | None = None  # [q]; None: no teacher looks at this view
    block: int | None = None  # size of the blocks of a block-causal student; None: it sees everything
    clean: bool = False  # the row is followed by a clean copy: what every noisy block has before it
    answer_tokens: int = 0  # a denominator that the terms do not show: labelled positions, masked or not
    start: int = 0  # the answer's position at which `noisy` begins, in layouts that leave out what is before

    @property
    def student_ids(self) -> Tensor:
        row = torch.cat((self.prompt, self.noisy))
        return torch.cat((row, self.prompt, self.labels)) if self.clean else row

    @property
    def teacher_ids(self) -> Tensor | None:
        return None if self.teacher_prompt is None else torch.cat((self.teacher_prompt, self.noisy))


@dataclass(frozen=True)
class TermTargets:
    """The positions of one term over a batch, flat."""

    student_index: Tensor  # [n] into [views * student width]: where the output that predicts the position is
    teacher_index: Tensor | None  # [n] into [views * teacher width]
    labels: Tensor  # [n]
    weights: Tensor  # [n] fp32, above 0
    view: Tensor  # [n] which view of the batch
    views: int  # how many views have this term, if only with an empty set

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class PaddedIds:
    """Ids padded on the right, with what hides the padding."""

    ids: Tensor  # [views, width]
    lengths: Tensor  # [views]
    padded: bool  # whether any row is shorter than the width
    tokens: int  # sum of the lengths
    prompt_len: Tensor  # [views]
    block: Tensor | None = (
        None  # [views], or [1] for all: block size of block-causal attention; None: the model's own
    )
    clean_start: Tensor | None = None  # likewise, where the clean copies start; None: there are none
    positions: Tensor | None = None  # [views, width] position ids; None: each copy counts from 0
    blocks: Tensor | None = None  # [views, width] indices for the attention mask; None: as `block` says


@dataclass(frozen=True)
class Batch:
    """Views, collated. Its length is the number of views."""

    student: PaddedIds
    teacher: PaddedIds | None
    terms: dict[str, TermTargets]
    rows: tuple[str, ...] = field(default=())  # ids, for messages
    answer_tokens: int = 0

    def __len__(self) -> int:
        return len(self.student.lengths)

    @property
    def positions(self) -> int:
        """Of both canvases, padding included."""
        return self.student.ids.numel() + (0 if self.teacher is None else self.teacher.ids.numel())

    @property
    def tokens(self) -> int:
        """Of both canvases, without padding."""
        return self.student.tokens + (0 if self.teacher is None else self.teacher.tokens)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on a device."""
        moved: Batch = _map_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))
        return moved

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, for copies that do not wait."""
        pinned: Batch = _map_tensors(self, lambda tensor: tensor.pin_memory())
        return pinned


class LossOutput(NamedTuple):
    """A loss. `terms` and `total` are shares of the global batch: summed over its parts they are its values.

    `stats` are sums too, named "term/what": `averages` turns the sum of all parts' stats into what one logs.
    """

    total: Tensor  # scalar, with gradient
    terms: dict[str, Tensor]  # scalars without gradient, not yet weighted by lambda and the like
    stats: dict[str, Tensor]


@dataclass(frozen=True)
class Objective(ABC):
    """Settings of an objective and its two sides. Subclasses are dataclasses whose fields are the settings."""

    name: ClassVar[str]
    uses_steps: ClassVar[bool] = False
    """Whether `views` wants a state of the trajectory; otherwise it draws its own noise and `step` is ignored."""
    published: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings that differ between families as published: family name -> settings."""

    mask_token: int
    logit_shift: int = 0
    """The output at position i - logit_shift predicts token i."""
    model_block: int | None = None
    """Block size of a model that is block-causal by itself: there a row ends with a whole block, of masks, as in decoding."""

    @property
    def needs_teacher(self) -> bool:
        """Whether the teacher's forward is run. The same for every batch, which sharded models depend on."""
        return False

    def limit_to_block(
        self, hidden: Tensor, prompts: Sequence[Tensor | None], block_causal: int | None
    ) -> tuple[Tensor, int]:
        """Which of the answer's positions [length] count, and how many of them are fed.

        A block-causal student is decoded block by block, so the masks of its first unfinished block count. On a `model_block` of
        the model's own the same holds for a teacher behind its own prompt, and what follows is not fed.
        """
        if self.model_block is None:
            if block_causal is None:
                return torch.ones_like(hidden), len(hidden)
            return unfinished_block(hidden, 0, block_causal), len(hidden)
        blocks = torch.stack(
            [
                unfinished_block(hidden, len(prompt), self.model_block)
                for prompt in prompts
                if prompt is not None
            ]
        )
        fed = blocks.any(0).nonzero()
        return blocks.all(0), int(fed[-1, 0]) + 1 if len(fed) else len(hidden)

    @abstractmethod
    def views(
        self, row: TrajectoryArrays, step: int | None, rng: np.random.Generator, progress: float = 0.0
    ) -> list[View]:
        """What to see of a row. All chance comes from `rng`; `progress` goes from 0 to 1 over the run."""

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """This batch's part of the denominators; the sums over a global batch are the `totals` of `loss`."""

    @abstractmethod
    def loss(self, outputs: ModelOutputs, batch: Batch, totals: Mapping[str, float]) -> LossOutput:
        """This batch's share of the loss."""

    def collate(self, views: Sequence[View]) -> Batch:
        """Views as one batch: padded on the right with masks, which nobody sees but within the last block of a `model_block`. A term's
        positions become indices into the flattened rows."""
        shift, fill = self.logit_shift, self.mask_token
        sizes = None
        if any(view.block is not None for view in views):
            widest = max(len(view.student_ids) for view in views)
            sizes = torch.tensor([view.block or widest for view in views])
        clean = any(view.clean for view in views)
        if clean and not all(view.clean for view in views):
            raise ValueError("either every view of a batch has a clean copy or none has")
        size = 1 if self.model_block is None or clean else self.model_block
        for view in views:
            if any(
                len(prompt) < shift for prompt in (view.prompt, view.teacher_prompt) if prompt is not None
            ):
                raise TadError(
                    f"trajectory {view.row}: its prompt is empty, but the output before the answer predicts its first token"
                )
        prompts = [len(view.prompt) for view in views]
        student = _pad([view.student_ids for view in views], prompts, fill, size, sizes)
        if clean:
            student = replace(student, clean_start=student.lengths // 2)
        teacher_rows = [ids for view in views if (ids := view.teacher_ids) is not None]
        if teacher_rows and len(teacher_rows) != len(views):
            raise ValueError("either every view of a batch has a teacher or none has")
        prompts = [len(view.teacher_prompt) for view in views if view.teacher_prompt is not None]
        teacher = _pad(teacher_rows, prompts, fill, size) if teacher_rows else None
        names = dict.fromkeys(name for view in views for name in view.terms)
        terms = {name: _targets(name, views, shift, student, teacher) for name in names}
        answer_tokens = sum(view.answer_tokens for view in views)
        return Batch(student, teacher, terms, tuple(view.row for view in views), answer_tokens)


@dataclass(frozen=True)
class TextObjective(Objective):
    """Learns the text itself: cross-entropy of the one term `hard`, weighted, over the positions that count."""

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"hard": float(len(batch.terms["hard"]))}

    def loss(self, outputs: ModelOutputs, batch: Batch, totals: Mapping[str, float]) -> LossOutput:
        targets = batch.terms["hard"]
        rows = outputs.losses(targets)
        hard = share((rows.cross_entropy * targets.weights).sum(), totals["hard"])
        return LossOutput(hard, {"hard": hard.detach()}, stats_of("hard", rows))

    def noise_rows(
        self,
        ids: Tensor,  # [rows, width]: prompt, answer, filler to the full width
        prompts: Tensor,  # [rows], lengths
        filler: int,
        generator: torch.Generator,
        mine: slice = slice(None),
    ) -> Batch:
        """Rows of one width as a batch, in the objectives of pretraining; `mine` are the rows of this process, under the
        noise they have in the whole batch."""
        raise NotImplementedError

    def collate_rows(
        self,
        ids: Tensor,  # [views, width]
        noisy: Tensor,  # [views, width], as the student sees them
        weights: Tensor,  # [views, width]; 0 where a position does not count
        prompts: Tensor,  # [views]
        block: int | None = None,
        clean: bool = False,
    ) -> Batch:
        """Rows of one width as one batch; `block` and `clean` as in a `View`."""
        seen = torch.cat((noisy, ids), dim=1) if clean else noisy
        rows, width = seen.shape
        student = PaddedIds(
            ids=seen,
            lengths=torch.full((rows,), width),
            padded=False,
            tokens=seen.numel(),
            prompt_len=prompts,
            block=None if block is None else torch.tensor([block]),
            clean_start=torch.tensor([ids.shape[1]]) if clean else None,
        )
        view, at = weights.nonzero(as_tuple=True)
        index = view * width + at - self.logit_shift
        targets = TermTargets(index, None, ids[view, at], weights[view, at], view, rows)
        return Batch(student, None, {"hard": targets})


def _pad(
    rows: Sequence[Tensor], prompts: Sequence[int], fill: int, multiple: int, block: Tensor | None = None
) -> PaddedIds:
    lengths = torch.tensor([-(-len(ids) // multiple) * multiple for ids in rows])
    width = int(lengths.max())
    ids = torch.full((len(rows), width), fill, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    padded = bool((lengths < width).any())
    return PaddedIds(ids, lengths, padded, int(lengths.sum()), torch.tensor(prompts), block)


def _targets(
    name: str, views: Sequence[View], shift: int, student: PaddedIds, teacher: PaddedIds | None
) -> TermTargets:
    having = [(number, view) for number, view in enumerate(views) if name in view.terms]
    places = [view.terms[name].nonzero()[:, 0] for _, view in having]
    row = torch.cat([torch.full_like(at, number) for (number, _), at in zip(having, places, strict=True)])

    def index(padded: PaddedIds) -> Tensor:
        return row * padded.ids.shape[1] + padded.prompt_len[row] + torch.cat(places) - shift

    return TermTargets(
        student_index=index(student),
        teacher_index=None if teacher is None else index(teacher),
        labels=torch.cat([view.labels[at] for (_, view), at in zip(having, places, strict=True)]),
        weights=torch.cat(
            [view.terms[name][at] for (_, view), at in zip(having, places, strict=True)]
        ).float(),
        view=row,
        views=len(having),
    )


def mask_ratio(t: Ratio) -> Ratio:
    """The probability of a mask at time t in 0 to 1; never 0."""
    return (1 - LEAST_RATIO) * t + LEAST_RATIO


def share(amount: Tensor, total: float) -> Tensor:
    """amount / total, and 0 where the whole global batch has nothing to count."""
    return amount / total if total else amount * 0.0


def mean_by_view(values: Tensor, targets: TermTargets, counted: Tensor, views: int) -> Tensor:
    """[views] means of `values` over the positions a view counts; 0 for a view that counts none."""
    zeros = values.new_zeros(views)
    amounts = zeros.index_add(0, targets.view, values * counted)
    return amounts / zeros.index_add(0, targets.view, counted.to(values.dtype)).clamp(min=1)


def stats_of(name: str, rows: RowLosses, counted: Tensor | None = None) -> dict[str, Tensor]:
    """How many positions, and the sums of the student's confidence, entropy and right guesses over them.

    `counted` [n] picks positions; all by default.
    """
    counted = torch.ones_like(rows.confidence) if counted is None else counted.to(rows.confidence.dtype)
    columns = {"confidence": rows.confidence, "entropy": rows.entropy, "right": rows.right}
    sums = {f"{name}/{what}": (column * counted).sum().detach() for what, column in columns.items()}
    return {f"{name}/tokens": counted.sum(), **sums}


def averages(stats: Mapping[str, float]) -> dict[str, float]:
    """Sums of `stats` over a global batch as means per position; token counts stay as they are.

    A term without positions has no mean and is left out.
    """
    found = {}
    for name, value in stats.items():
        term, _, what = name.partition("/")
        if what == "tokens" or f"{term}/tokens" not in stats:
            found[name] = float(value)
        elif stats[f"{term}/tokens"]:
            found[name] = float(value) / float(stats[f"{term}/tokens"])
    return found


def _map_tensors(value: Any, change: Any) -> Any:
    """A copy of nested frozen dataclasses and dicts with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (Batch, PaddedIds, TermTargets)):
        return replace(value, **{f.name: _map_tensors(getattr(value, f.name), change) for f in fields(value)})
    return value
