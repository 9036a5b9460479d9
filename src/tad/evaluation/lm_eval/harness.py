"""A run of lm-evaluation-harness with the model `tad`: which tasks it knows, the call, and what is kept of it.

Never passes on the harness's switches for remote code, for running generated programs in this process, or for its
pickled caches.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tad.errors import MissingExtraError, TadError
from tad.evaluation.lm_eval import TASKS

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from tad.evaluation.lm_eval.model import TadLM

NEEDED = (0, 4, 13)


def check_harness() -> str:
    """The installed version of the harness; raise where it is missing or too old."""
    wanted = ".".join(map(str, NEEDED))
    try:
        version = metadata.version("lm_eval")
    except metadata.PackageNotFoundError:
        raise MissingExtraError(f"lm-evaluation-harness (lm-eval >= {wanted})", "eval") from None
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < NEEDED:
        raise TadError(f"lm-evaluation-harness {version} is too old; pip install 'lm-eval>={wanted}'")
    return version


def find_tasks(
    patterns: Sequence[str], data_dir: str | Path | None = None, include_path: str | Path | None = None
) -> tuple[list[str], TaskManager]:
    """The names that patterns such as `tad_gsm8k` or `tad_*` stand for, and the manager that knows them.

    The harness's own 14,000 take a while to read: they are, if a pattern matches none of ours and none in `include_path`
    and does not begin as ours do.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise TadError(f"{include_path}: --include-path is not a directory")
    folders = [str(TASKS), *([] if include_path is None else [str(include_path)])]
    facts = {} if data_dir is None else {"data_dir": str(data_dir)}
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=facts)
    if not all(pattern.startswith("tad_") or manager.match_tasks([pattern]) for pattern in patterns):
        manager = TaskManager(include_path=folders, metadata=facts)
    names: list[str] = []
    for pattern in patterns:
        found = manager.match_tasks([pattern])
        if not found:
            close = difflib.get_close_matches(pattern, manager.all_tasks, n=3)
            hint = f"did you mean {', '.join(close)}?" if close else "`tad lm-eval --list` shows ours"
            raise TadError(f"no task '{pattern}'; {hint}")
        names += [name for name in found if name not in names]
    for name in names:
        if (manager.task_index[name].cfg or {}).get("unsafe_code"):
            raise TadError(
                f"task '{name}' would run generated programs in this process; ours have a sandbox (`tad lm-eval --list`)"
            )
    return names, manager


def list_tasks() -> list[str]:
    """Our own tasks."""
    from lm_eval.tasks import TaskManager

    return list(TaskManager(include_path=str(TASKS), include_defaults=False).all_subtasks)


def evaluate(
    model: TadLM,
    names: list[str],
    manager: TaskManager,
    limit: int | None = None,
    chat: bool = True,
    multiturn: bool = True,
    num_fewshot: int | None = None,
    generation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The harness's results, its samples included.

    `chat` puts prompts into the model's chat format (raw templates excepted), `multiturn` gives the examples of the
    harness's few-shot tasks turns of their own. `generation` goes over the tasks' own generation arguments.
    """
    from lm_eval import simple_evaluate

    results = simple_evaluate(
        model,
        tasks=names,
        task_manager=manager,
        limit=limit,
        num_fewshot=num_fewshot,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat and multiturn,
        gen_kwargs=generation or None,
        log_samples=True,
    )
    assert results is not None  # None is for processes other than the first, and there is one
    return dict(results)


def format_table(results: dict[str, Any]) -> str:
    """The harness's table, and what generation cost."""
    from lm_eval.utils import make_table

    facts = results["config"]
    lines = [str(make_table(results))]
    if results.get("groups"):
        lines.append(str(make_table(results, "groups")))
    if facts["forwards"]:
        lines.append(
            f"{facts['texts']} texts, {facts['forwards']} forwards: {facts['tpf']:.2f} tokens per forward"
            f" ({facts['tpf_all']:.2f} with the filler)"
        )
    return "\n".join(lines)


def save(results: dict[str, Any], folder: Path) -> None:
    """Write results.json, and a samples_TASK.jsonl with a line per example for each task."""
    from lm_eval.utils import handle_non_serializable

    folder.mkdir(parents=True, exist_ok=True)
    for name, samples in results["samples"].items():
        lines = (json.dumps(row, default=handle_non_serializable, ensure_ascii=False) for row in samples)
        (folder / f"samples_{name}.jsonl").write_text(
            "".join(f"{line}\n" for line in lines), encoding="utf-8"
        )
    summary = {key: value for key, value in results.items() if key != "samples"}
    text = json.dumps(summary, indent=2, default=handle_non_serializable, ensure_ascii=False)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
