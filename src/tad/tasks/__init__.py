"""What is asked and how an answer is judged.

`get_task(name)` gives a task; `task_names()` lists them. To add one, register a factory below: it is imported only
when the task is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tad.errors import TadError
from tad.plugins import additions, resolve
from tad.tasks.task import CANNOT_JUDGE, Example, Message, Prompt, Score, Task, Verdict, is_unjudged

__all__ = [
    "CANNOT_JUDGE",
    "Example",
    "Message",
    "Prompt",
    "Score",
    "Task",
    "Verdict",
    "check_contamination",
    "get_task",
    "is_unjudged",
    "register_task",
    "task_names",
]

# name -> "module:factory". A factory takes data_dir and the task's own options as keywords.
_FACTORIES: dict[str, str] = {
    "gsm8k": "tad.tasks.gsm8k:Gsm8k",
    "math": "tad.tasks.competition:Math",
    "prm12k": "tad.tasks.competition:Prm12k",
    "humaneval": "tad.tasks.humaneval:HumanEval",
    "humaneval-instruct": "tad.tasks.humaneval:HumanEvalInstruct",
    "mbpp": "tad.tasks.mbpp:Mbpp",
    "mbpp-instruct": "tad.tasks.mbpp:MbppInstruct",
    "kodcode": "tad.tasks.kodcode:KodCode",
    "jsonl": "tad.tasks.jsonl:Jsonl",
}

# (training task, evaluation task) -> why a score of the second means nothing after training on the first.
_CONTAMINATED: dict[tuple[str, str], str] = {
    ("prm12k", "math"): "the 12,000 problems of prm12k contain 4,500 of the 5,000 MATH test problems",
}


def register_task(name: str, factory: str) -> None:
    """Add a task: `factory` is 'module:callable', imported on first use."""
    _FACTORIES[name] = factory


def task_names() -> list[str]:
    return list(_factories())


def _factories() -> dict[str, str]:
    """Those of this package first, which no plugin replaces."""
    return _FACTORIES | {name: place for name, place in additions("TASKS").items() if name not in _FACTORIES}


def get_task(name: str, data_dir: str | Path | None = None, **options: Any) -> Task:
    """A task by name. `jsonl:FILE` is short for the task `jsonl` with that file.

    `data_dir` holds the data (default: the directory in TAD_DATA, else the Hugging Face hub). Options are the task's own.
    """
    if name.startswith("jsonl:"):
        name, options["path"] = "jsonl", name.removeprefix("jsonl:")
    factories = _factories()
    if name not in factories:
        close = get_close_matches(name, factories, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise TadError(
            f"unknown task '{name}'; {hint}known: {', '.join(factories)} (or jsonl:FILE for your own)"
        )
    build = resolve(factories[name])
    known = [option for option in signature(build).parameters if option != "data_dir"]
    for option in options:
        if option not in known:
            raise TadError(f"task '{name}' has no option '{option}'; it has: {', '.join(known) or 'none'}")
        options[option] = _read_option(name, build, option, options[option])
    task: Task = build(data_dir=data_dir, **options)
    return task


def _read_option(task: str, build: Any, option: str, value: Any) -> Any:
    """A value from a recipe or a command must be of the option's type."""
    hint = get_type_hints(getattr(build, "__init__") if isinstance(build, type) else build).get(option, Any)  # noqa: B009
    try:
        return TypeAdapter(hint, config={"arbitrary_types_allowed": True}).validate_python(value)
    except ValidationError:
        kind = getattr(hint, "__name__", str(hint)).replace("typing.", "")
        raise TadError(f"task '{task}': option '{option}' should be {kind}; it is {value!r:.100}") from None


def check_contamination(train_tasks: Iterable[str], eval_tasks: Iterable[str], allow: bool = False) -> None:
    """Refuse to evaluate on problems that were trained on, unless `allow` says that the user knows."""
    evaluated = set(eval_tasks)
    for trained in train_tasks:
        for (source, target), why in _CONTAMINATED.items():
            if trained == source and target in evaluated and not allow:
                raise TadError(
                    f"training on '{source}' and evaluating on '{target}' is refused: {why}, so the score would measure "
                    "memory; train on other data, or allow contamination explicitly"
                )
