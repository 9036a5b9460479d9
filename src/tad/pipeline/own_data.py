"""A recipe for one's own questions: what `tad init` writes and `tad run` takes.

What can be chosen from the data and the model is chosen, and said in comments; nothing is decoded. Questions that are
held out go to a file of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import yaml

from tad.errors import TadError
from tad.files import write_whole
from tad.models import find_defaults
from tad.models.info import describe
from tad.tasks import Example, get_task
from tad.tasks.source import read_lines

HELD_OUT = 5  # every so manieth question, where no test file is given
STATES = 8  # per trajectory and epoch
_VISITED = 25_600  # states to be visited at least, in at most `_EPOCHS` epochs
_EPOCHS = 20
_SMALL = 10**8  # parameters below which a model takes the rate and rank of the nano models

_TEMPLATE = """\
# {title}, from questions to a report: tad run {path}
# Made by `tad init` from {train} questions to learn from and {test} to be asked at the end.
name: {name}
model: {model}
collect:
  tasks:
    - name: {train_task}
{instruction}
  gen_length: {gen_length}  # positions of an answer; a longer one costs time, a shorter one cuts answers off
  block: {block}
  shard_size: {shard_size}  # questions; an interruption loses at most so many
  batch_size: 16
  order: left-to-right        # `teacher`: in the order of its confidence, as in the paper (docs/lab/rounds.md compares them)
  reference: where-needed     # the teacher is shown the reference only where it is wrong without; `gold`: always
  # privileged: false         # never
  # keep: all                 # also learn from wrong rollouts
window: {{limit: 256, states: 8}}  # how far ahead the student is trusted is measured on so many trajectories
distill:
  states: {states}  # of each trajectory in an epoch
  adapter: {{rank: {rank}, alpha: {rank}, dropout: 0.05}}
  learning: {{lr: {lr}, schedule: constant, warmup: 0.02, weight_decay: 0.01, clip: 1.0, epochs: {epochs:g}}}
  batch: {{size: {batch}, micro: {micro}}}  # micro: what fits into memory at once
students:
  # `speed` instead of `quality` trusts the student further ahead: faster, and often less accurate.
  student: {{objective: {{name: tad, window: quality, lambda: 1.0, teacher: plain}}}}
# rounds: 4            # with many questions: the student becomes the next teacher
# split_prompts: true  # and every round has its own part of the questions
evaluate:
  tasks:
    - {{name: {test_task}}}
  batch_size: 16
decoders: [{decoder}]  # of the base, beside one token at a time
student_decoders: [{student_decoder}]
"""


@dataclass(frozen=True)
class Written:
    """The recipe, the files of held-out questions where there are any, and what the user should know."""

    recipe: Path
    files: tuple[Path, ...]
    warnings: tuple[str, ...]


def write_recipe(
    out: Path, model: str, data: Path, test: Path | None = None, instruction: str | None = None
) -> Written:
    """Write the recipe of `tad run` for a file of questions, and for another of test questions or one held out from it."""
    if out.exists():
        raise TadError(f"{out}: is there already; give another --out")
    files: tuple[Path, ...] = ()
    examples = get_task("jsonl", path=data).examples()
    if test is None:
        files = _hold_out(data, out, len(examples))
        data, test = files
        examples = get_task("jsonl", path=data).examples()
    asked = get_task("jsonl", path=test).examples()
    _refuse_shared(data, examples, test, asked)
    defaults, facts = find_defaults(model), describe(model)
    small, full = facts.parameters < _SMALL, facts.shape.blocks is None
    visited = len(examples) * STATES
    epochs = round(min(_EPOCHS, max(1.0, _VISITED / visited)), 1)
    # About 100 steps, and a batch that a third of the trajectories can fill.
    batch = 2 ** int(math.log2(max(4, min(256, visited * epochs / 100, visited / 3))))
    shown = f"options: {{instruction: {_quote(instruction or 'Show every step.')}}}"
    text = _TEMPLATE.format(
        title=f"{model} on {data.name}",
        path=out,
        name=_quote(out.stem),
        model=_quote(model),
        train=len(examples),
        test=len(asked),
        train_task=_quote(f"jsonl:{data}"),
        test_task=_quote(f"jsonl:{test}"),
        instruction=f"      {shown}"
        if instruction
        else f"      # What the teacher is asked to do with the reference; `tad collect --show` prints its prompt.\n      # {shown}",
        gen_length=defaults.gen_length,
        block=math.gcd(32, defaults.gen_length),
        shard_size=max(8, min(64, len(examples) // 4)),
        states=STATES,
        rank=32 if small else 128,
        lr="1.0e-3" if small else "2.0e-5",
        epochs=epochs,
        batch=batch,
        micro=min(batch, 64 if small else 4),
        # A block-diffusion model keeps its own decoder: others are for full attention.
        decoder="fast-dllm" if full else defaults.decoder,
        student_decoder="tad-leftmost" if full else defaults.decoder,
    )
    write_whole(out, text)
    return Written(out, files, tuple(_warn(examples, asked)))


def warn_of_few(asked: int) -> str | None:
    """A line where so few test questions say little; the error is that of an accuracy of 80 %."""
    if asked >= 100:
        return None
    error = 100 * math.sqrt(0.8 * 0.2 / asked)
    return f"WARNING: {asked} test questions: an accuracy of 80 % has a standard error of {error:.0f} points"


def _warn(examples: list[Example], asked: list[Example]) -> list[str]:
    found = [] if (few := warn_of_few(len(asked))) is None else [few]
    if len(examples) < 100:
        found.append(
            f"WARNING: {len(examples)} questions to learn from: the window is measured on as many, and training sees each "
            "many times; a few hundred are a good start"
        )
    bare = sum(example.reference == str(example.answer) for example in examples)
    if 2 * bare > len(examples):
        found.append(
            f"NOTE: {bare} of {len(examples)} questions have no `reference`, so the teacher is shown the bare answer; a worked "
            "solution helps it more"
        )
    return found


def _hold_out(data: Path, out: Path, count: int) -> tuple[Path, Path]:
    """Every fifth question in a file of its own, and the others."""
    if not data.name.endswith((".jsonl", ".jsonl.gz")):
        raise TadError(f"{data}: only jsonl can be split; give the test questions with --test")
    if count < HELD_OUT:
        raise TadError(f"{data}: {count} questions are too few to hold some out; give more, or --test")
    lines = [line for _, line in read_lines(data) if line.strip()]
    train, test = (out.with_name(f"{out.stem}-{part}.jsonl") for part in ("train", "test"))
    for path in (train, test):
        if path.exists():
            raise TadError(f"{path}: is there already; give another --out, or --test")
    write_whole(train, "".join(f"{line}\n" for n, line in enumerate(lines) if n % HELD_OUT))
    write_whole(test, "".join(f"{line}\n" for line in lines[::HELD_OUT]))
    return train, test


def _refuse_shared(data: Path, examples: list[Example], test: Path, asked: list[Example]) -> None:
    learnt = {example.question for example in examples}
    for example in asked:
        if example.question in learnt:
            raise TadError(
                f"{test}: {example.question!r:.60} is also in {data}; a test question may not be learnt from"
            )


def _quote(text: str) -> str:
    """As a YAML value on one line."""
    return yaml.safe_dump(text, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
