"""A task whose answers are programs: texts become jobs for the sandbox, outcomes become verdicts."""

from __future__ import annotations

import ast
import builtins
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from tad.errors import TadError
from tad.tasks.code import parse
from tad.tasks.dataset import DatasetTask
from tad.tasks.task import CANNOT_JUDGE, CODE_ONLY, Example, Progress, Verdict
from tad_sandbox import Job, Limits, NoSandboxError, Outcome, Sandbox, SandboxError


class ProgrammingTask(DatasetTask):
    """Subclasses say which program a text holds and which tests it must pass."""

    instruction = CODE_ONLY
    limits: ClassVar[Limits] = Limits()
    packages: ClassVar[bool] = False
    """Whether programs may import what is installed next to tad."""

    def __init__(
        self,
        data_dir: str | Path | None = None,
        contained: bool = True,
        sandbox: Sandbox | None = None,
        judge: str = "apart",
    ) -> None:
        """`contained=False` runs generated programs without a sandbox: next to your files, with your rights.

        `judge="together"`: tests that cannot judge a program from another process run in one process with it.
        """
        super().__init__(data_dir)
        together = read_judge(self.name, judge)
        self.sandbox = sandbox or Sandbox(self.limits, contained, self.packages, together)

    @abstractmethod
    def extract(self, example: Example, text: str) -> str:
        """The program a text answers with."""

    @abstractmethod
    def job(self, example: Example, program: str) -> Job:
        """A program together with the tests of an example."""

    def grade_many(
        self,
        pairs: Iterable[tuple[Example, str]],
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> list[Verdict]:
        jobs = [self.job(example, self.extract(example, text)) for example, text in pairs]
        return grade_programs(self.sandbox, jobs, workers, progress)


def read_judge(task: str, judge: str) -> bool:
    """Whether the option `judge` of a task asks for one process."""
    if judge not in ("apart", "together"):
        raise TadError(f"{task}: judge '{judge}' should be apart or together")
    return judge == "together"


def shadowing_names(reference: str) -> tuple[str, ...]:
    """What a reference defines although Python has it built in: tests of a task about `sum` mean the program's."""
    tree = parse(reference)
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] if tree else []
    return tuple(name for name in defined if hasattr(builtins, name))


def grade_programs(
    sandbox: Sandbox, jobs: Sequence[Job], workers: int | None = None, progress: Progress | None = None
) -> list[Verdict]:
    """Run programs with their tests; where there is no program, there is nothing to run."""
    runs = [job for job in jobs if job.program.strip()]
    if progress is not None and len(runs) < len(jobs):
        progress(len(jobs) - len(runs))
    try:
        outcomes = iter(sandbox.run_many(runs, workers, progress))
    except NoSandboxError as error:
        raise TadError(f"{error}, or accept the risk with --unsafe-no-sandbox") from error
    except SandboxError as error:
        raise TadError(str(error)) from error
    return [_verdict(job, outcomes) for job in jobs]


def _verdict(job: Job, outcomes: Iterator[Outcome]) -> Verdict:
    if not job.program.strip():
        return Verdict(False, "no program found")
    outcome = next(outcomes)
    reason = outcome.reason
    if outcome.verdict == CANNOT_JUDGE:
        reason = f"{CANNOT_JUDGE}: {reason}"
    if outcome.together:
        reason += " (judge: together)"
    return Verdict(outcome.passed, reason, job.program)
