"""The tour behind `tad demo`: every stage of the method live on a bundled 3M-parameter model, on a CPU, in a few minutes.

It is `tad run` with the recipe of the bundled model at smoke size: a few dozen trajectories, a few steps, a few dozen
problems. Its numbers have wide errors and are printed with them. The bundled students, trained at full size, stand beside them.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

from tad.canvas.terminal import Canvas
from tad.config import load_recipe
from tad.evaluation.analysis import ResultTable
from tad.evaluation.tables import align, grid_results
from tad.evaluation.verdict import list_verdicts
from tad.generation import Generation, generate
from tad.models import LM
from tad.models.lora import CONFIG
from tad.pipeline.chain import Chain
from tad.pipeline.listener import Listener
from tad.pipeline.pool import ModelPool
from tad.pipeline.recipe import RunRecipe
from tad.tasks import get_task

TASKS = ("nano-word", "nano-math")
TRAJECTORIES = 32  # of each task
STEPS, STATES = 16, 16
STUDENTS = ("quality", "speed", "ltr")  # the bundled ones
FINISHED = ".demo-finished"


def run(family: str, problems: int, folder: Path, listener: Listener) -> bool:
    """All stages; `problems` of each task are asked. A finished demo in `folder` is begun anew, a stopped one goes on. Whether
    it came to the end."""
    if (folder / FINISHED).is_file():
        listener.say(f"{folder}: a finished demo is there; starting over (one that was stopped goes on)")
        shutil.rmtree(folder)
    torch.manual_seed(0)
    began = time.monotonic()
    students = find_students(family)
    chain = Chain(demo_recipe(family, problems, students), folder, listener, smoke=True)
    lm = chain.pool.base()
    choose_threads(lm)
    size = sum(weight.numel() for weight in lm.model.parameters())
    for line in (
        f"nano-{family}: {size / 1e6:.1f}M parameters, trained on generated problems, bundled with this package.",
        f"SMOKE SIZE: {2 * TRAJECTORIES} trajectories, {STEPS} steps of {STATES} states, {2 * problems} test problems. "
        "Every number below has a wide error.",
        "Trajectories are collected with the dual cache: about six times faster, and approximate.",
    ):
        listener.say(line)
    with listener.stage("One problem: the base one token per forward, and its bundled student"):
        show_success(chain.pool, students, listener)
    if not chain.run():
        return False
    (folder / FINISHED).touch()
    page = (folder / "report" / "report.html").resolve()
    listener.say(f"\n{show_results(chain.table())}")
    listener.say(f"\nDone in {time.monotonic() - began:.0f} s. The report: {page}")
    listener.say("\n".join(["", *next_steps(family)]))
    return True


def next_steps(family: str) -> list[str]:
    """What to type after the demo, in a shell that may not know `tad` yet."""
    program = shutil.which("tad")
    beside = Path(sys.executable).with_name("activate")
    lines = []
    if program is None and beside.is_file():
        lines = [f"In this shell, first: source {os.path.relpath(beside)}"]
    best = f"nano-{family} --adapter nano-{family}-ltr"
    return [
        *lines,
        f"Talk with the distilled model:   tad chat {best}",
        "Your own questions and answers:  tad init --data FILE.jsonl --model MODEL (docs/guide/your-data.md)",
        f"The same at full size (a GPU, or hours; --list says how many):  tad run run-nano-{family}-ltr",
    ]


def choose_threads(lm: LM) -> None:
    """The fastest of one, two or four threads, by trial: on a busy machine, or in a container that has less than it sees, more
    threads are many times slower."""
    ids = torch.full((8, 128), lm.tokens.mask)
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    times = {}
    with torch.inference_mode():
        for threads in (count for count in (1, 2, 4) if count <= able):
            torch.set_num_threads(threads)
            lm.model(ids)
            began = time.perf_counter()
            for _ in range(2):
                lm.model(ids)
            times[threads] = time.perf_counter() - began
    torch.set_num_threads(min(times, key=times.__getitem__))


def find_students(family: str) -> dict[str, str]:
    """The bundled adapters of a family: name -> directory."""
    from tad.models.source import BUNDLED

    folders = {name: BUNDLED / name for name in (f"nano-{family}-{kind}" for kind in STUDENTS)}
    return {name: str(folder) for name, folder in folders.items() if (folder / CONFIG).is_file()}


def demo_recipe(family: str, problems: int, adapters: dict[str, str]) -> RunRecipe:
    """The bundled recipe of `tad run`, at smoke size."""

    def tasks(split: str, size: int) -> str:
        return str([{"name": name, "split": split, "options": {"size": size}} for name in TASKS])

    return load_recipe(
        RunRecipe,
        f"run-nano-{family}",
        [
            f"name=demo-{family}",
            "device=cpu",
            "dtype=fp32",
            f"collect.tasks={tasks('train', TRAJECTORIES)}",
            "collect.cache=dual",
            "collect.shard_size=16",
            "collect.batch_size=16",
            "window={limit: 48, states: 4, batch_size: 16}",
            f"distill.learning.steps={STEPS}",
            f"distill.batch={{size: {STATES}, micro: {STATES}}}",
            "distill.precision=fp32",
            f"evaluate.tasks={tasks('test', problems)}",
            "evaluate.batch_size=16",
            "evaluate.thresholds={entropy: [0.2, 0.5], confidence: [0.9, 0.7]}",
            "student_first=false",
            f"adapters={adapters}",
        ],
    )


def show_success(pool: ModelPool, students: dict[str, str], listener: Listener) -> None:
    """The first of a few problems that the base, one token per forward, and a bundled student both solve: two canvases,
    coloured by the forward that revealed each token, and the forwards each took."""
    task = get_task("nano-word", size=4)
    examples = task.examples("test")
    questions = [task.prompt(example).text for example in examples]
    name, adapter = next(reversed(students.items()), ("base", ""))
    slow = generate(pool.base(), questions, decoder="one-by-one")
    student = pool.student(Path(adapter)) if adapter else pool.base()
    fast = generate(student, questions)
    titles = "base, one by one", f"{name}, {student.defaults.decoder}"

    def right(number: int, answer: Generation) -> bool:
        return task.grade(examples[number], answer.text).correct

    both = (n for n in range(len(questions)) if right(n, slow[n]) and right(n, fast[n]))
    chosen = next(both, 0)
    console = Console()
    listener.say(questions[chosen])
    lm = pool.base()
    for title, answer in zip(titles, (slow[chosen], fast[chosen]), strict=True):
        canvas = Canvas(len(answer.tokens), 32, lambda ids: lm.decode(ids), lm.tokens.ends, title)
        canvas.finish(answer.decoded)
        console.print(canvas.draw(console.width))
        verdict = "right" if right(chosen, answer) else "wrong"
        listener.say(f"{verdict}; {answer.forwards} forwards, {answer.tpf:.2f} tokens per forward")
    listener.say(
        f"{slow[chosen].forwards / fast[chosen].forwards:.1f} times fewer forwards (violet first, yellow last)"
    )


def show_results(table: ResultTable) -> str:
    """The verdicts, then accuracy and speed of each method, narrow enough for any terminal."""
    grid = grid_results(table, [table.scope])
    rows = [grid.head[:5], *([str(cell) for cell in row[:5]] for row in grid.groups[0].rows)]
    return "\n".join(
        [
            *list_verdicts(table, most=1),
            "",
            align(rows),
            f"Smoke size: n = {sum(table.tasks.values())} problems, mean over tasks; ± standard error, brackets: 95 % intervals, "
            f"differences paired. 'TPF at base - {table.tolerance:g}': at equal accuracy, at most {table.tolerance:g} points below "
            "the base one token at a time. 'base' is the model as it was, 'one-by-one' reveals one token per forward; quality and "
            f"speed are students trained here in {STEPS} steps, nano-* the bundled ones, trained at full size and each decoded as "
            "it is by default. No conclusion should be drawn from so few problems.",
        ]
    )
