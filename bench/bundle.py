"""Model cards from what was measured, and the students of a study put into the package.

    python bench/bundle.py base EVAL STORE RUN [RUN ...] MODEL                   # README.md of a base trained with `tad pretrain`
    python bench/bundle.py students study-nano-llada runs/study [--seed 0]       # src/tad/bundled/BASE-quality and BASE-speed
    python bench/bundle.py students study-rounds-nano-llada runs/rounds                # src/tad/bundled/BASE-ltr; also study-blocks
    python bench/bundle.py decoder BASE-ltr EVAL RUN [RUN ...]                   # its default: the fastest RUN near EVAL, the base's

EVAL is a run of `tad eval` (one token per forward), STORE one of `tad collect keep=all` with its window measured: accuracy without
and with the reference (all graded: `tad regrade STORE` where they were collected with `graded: later`). The numbers of a
student's card are the study's: all seeds, test problems.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tad.config import load_recipe
from tad.errors import TadError
from tad.evaluation.analysis import ResultTable
from tad.evaluation.compare import compare_runs
from tad.evaluation.results import Results
from tad.evaluation.tables import as_markdown
from tad.models.defaults import write_defaults
from tad.models.lora import CONFIG, WEIGHTS
from tad.models.source import BUNDLED
from tad.tasks import Score
from tad.training.record import LOG, RECORD, find_result, read_record
from tad.trajectories.store import Trajectory, TrajectoryStore
from tad.trajectories.window import read_report
from tad_lab.study import Study, StudyRecipe

DECAY_AT = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32)
LEVELS = ("1", "2", "3", "4", "5")
STUDENTS = {
    "study-nano": {"tad-quality": "quality", "tad-speed": "speed"},
    "study-rounds": {"ltr-parallel": "ltr"},
    "study-blocks": {"ltr-rounds/round=4": "ltr"},
}
# What a base is, and whose released layout it has.
FAMILIES = {
    "llada": ("masked-diffusion", "LLaDA"),
    "dream": ("masked-diffusion", "Dream"),
    "fast-dllm-v2": ("block-diffusion", "Fast-dLLM v2"),
}
RANK = 64  # of a bundled adapter at most: rounds add up their ranks
# What a record says of the machine's folders is of no use elsewhere.
_DROPPED = ("argv", "threads")


def base_card(run: Path, store: Path, trainings: list[Path], model: Path) -> str:
    """README.md of a base: its training from the records, its accuracy and its confidence decay."""
    results, records = Results.open(run), [read_record(training) for training in trainings]
    recipe, last = records[-1]["recipe"], records[-1]["calls"][-1]
    shape, data, asked = recipe["model"], recipe["data"], results.meta.tasks[0]
    mix = ", ".join(f"{name} {weight}" for name, weight in data["families"].items())
    decay = read_report(store).decay.mean
    shown = [d for d in DECAY_AT if d <= len(decay)]
    given, block = read_rollouts(store), results.meta.decoder["block"] or shape.get("block")
    sub_block, device = results.meta.decoder.get("sub_block"), read_record(run)["calls"][-1]["device"]
    order = f"blocks of {block}" + (f", sub-blocks of {sub_block}" if sub_block else "")
    lines = [describe_training(number, training) for number, training in enumerate(trainings, 1)]
    return f"""---
license: apache-2.0
library_name: transformers
tags: [diffusion-language-model, {shape["family"]}]
---
# {recipe["name"]}

A {FAMILIES[shape["family"]][0]} language model of {last["parameters"] / 1e6:.1f}M parameters in the layout of the released
{FAMILIES[shape["family"]][1]} checkpoints ({shape["layers"]} layers, width {shape["width"]}, {shape["heads"]} heads), trained from
scratch on the nano world: generated word problems, symbolic maths and Python functions. It exists to study decoding and
distillation where answers can be graded exactly; it knows nothing else.

    import tad
    lm = tad.load("{model.name}")

The weights are stored in bf16 and load in fp32, which small models on CPUs are several times faster in.

## Training
{data["examples"]:,} distinct examples of the training split ({mix}), {100 * data["privileged"]:.0f} % of the prompts with the reference;
test problems differ from all of them in content, not only in wording.

| run | command | objective | steps | minutes | last logged loss |
|---|---|---|---|---|---|
{chr(10).join(lines)}

## Accuracy
One token per forward (highest confidence, {order}), {results.meta.gen_length} positions, temperature 0, percent ± standard error, on
{asked["examples"]:,} problems per family of the {asked["split"]} split ({results.meta.dtype}, {device}). "with reference": the teacher's rollouts of {len(given) // len(results.meta.tasks):,}
problems per family, with the terse reference solution in the prompt, in whole blocks of {block}.

{accuracy_table(results, given)}

## Confidence decay
Mean probability that the model, without the reference, gives to the token of its own privileged rollout, by steps until that
token is revealed:

| steps | {" | ".join(map(str, shown))} |
|---|{"---|" * len(shown)}
| confidence | {" | ".join(f"{decay[d - 1]:.2f}" for d in shown)} |
"""


def describe_training(number: int, training: Path) -> str:
    """A row of the table of trainings; run N starts from the weights of run N - 1."""
    record = read_record(training)
    recipe, last = record["recipe"], record["calls"][-1]
    words = [word for word in last["argv"] if not word.startswith("model.start_from=")]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    if recipe["model"]["start_from"]:
        words.append(f"model.start_from=RUN{number - 1}/model")
    loss = json.loads((training / LOG).read_text(encoding="utf-8").splitlines()[-1])["loss"]
    minutes = sum(call["minutes"] for call in record["calls"])
    cells = (
        str(number),
        f"`tad {' '.join(words)}`",
        recipe["objective"]["name"],
        f"{last['steps']:,} of {recipe['optimization']['tokens_per_step']:,} tokens",
        f"{minutes:.1f}, {last['device']}",
        f"{loss:.4f}",
    )
    return "| " + " | ".join(cells) + " |"


def read_rollouts(folder: Path) -> list[Trajectory]:
    """The rows of a store, all of them with verdicts."""
    rows = list(TrajectoryStore.open(folder).rows())
    if any(row.correct is None for row in rows):
        raise TadError(
            f"{folder}: has rollouts without a verdict; collect with graded: later and run 'tad regrade {folder}'"
        )
    return rows


def accuracy_table(results: Results, rollouts: list[Trajectory]) -> str:
    """Markdown: a row per family, plain and with the reference, by level."""
    found: dict[tuple[str, str, str | None], list[bool]] = defaultdict(list)
    for prompt, rows in (("plain", results.rows()), ("with reference", rollouts)):
        for row in rows:
            for task, level in ((row.task, row.level), (row.task, "all"), ("all", "all")):
                found[task, prompt, level].append(bool(row.correct))
    lines = ["| family | prompt | " + " | ".join(f"level {level}" for level in LEVELS) + " | all |"]
    lines.append("|---" * (len(LEVELS) + 3) + "|")
    for task in (*(entry["name"] for entry in results.meta.tasks), "all"):
        for prompt in ("plain", "with reference"):
            cells = []
            for level in (*LEVELS, "all"):
                verdicts = found.get((task, prompt, level), [])
                score = Score(len(verdicts), sum(verdicts))
                cells.append(
                    f"{100 * score.accuracy:.1f} ± {100 * score.standard_error:.1f}" if verdicts else ""
                )
            lines.append(f"| {task} | {prompt} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bundle_students(study: Study, seed: int, command: str) -> None:
    """The students of one training seed: the adapter in bf16, its record and its card. `command`: what made the study."""
    table = study.tables()[0]
    names = next(names for start, names in STUDENTS.items() if study.recipe.name.startswith(start))
    for method, name in names.items():
        cell = next(
            cell
            for _, found, number, cell in study.cells()
            if found == method and number == seed and cell is not None and cell.trial is None
        )
        folder = study.student_folder(cell)
        result = find_result(folder) if folder is not None else None
        if folder is None or result is None:
            raise TadError(f"{method}: seed {seed} has no adapter in {study.out}; pack it with --keep")
        dest = BUNDLED / f"{study.recipe.model}-{name}"
        shutil.rmtree(dest, ignore_errors=True)
        dest.mkdir()
        config = json.loads((result / CONFIG).read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = study.recipe.model  # wherever the base was then
        weights = load_file(result / WEIGHTS)
        if config["r"] > RANK:
            weights = truncate(weights, config["lora_alpha"] / config["r"])
            config["r"] = config["lora_alpha"] = RANK
        (dest / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        weights = {key: value.to(torch.bfloat16).contiguous() for key, value in weights.items()}
        save_file(weights, dest / WEIGHTS, {"format": "pt"})
        (dest / WEIGHTS).chmod(0o644)
        record = clean(read_record(folder), study.recipe.model)
        (dest / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        card = student_card(study, table, method, name, config["r"], record, command)
        (dest / "README.md").write_text(card, encoding="utf-8")
        print(f"{dest}: {sum(path.stat().st_size for path in dest.iterdir()) / 1e6:.2f} MB")


def truncate(weights: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The nearest adapter of RANK, module by module."""
    found = {}
    for key, down in weights.items():
        if "lora_A" in key:
            up = key.replace("lora_A", "lora_B")
            left, values, right = torch.linalg.svd(scale * weights[up].double() @ down.double())
            root = values[:RANK].sqrt()
            found[up], found[key] = left[:, :RANK] * root, root[:, None] * right[:RANK]
    return found


def clean(record: dict[str, Any], model: str) -> dict[str, Any]:
    """Without the folders of the machine where it was made; `model` is the base's name."""
    for call in record["calls"]:
        for key in _DROPPED:
            call.pop(key, None)
        for store in call["stores"]:
            store["folder"] = Path(store["folder"]).name
    recipe = record["recipe"]
    recipe["model"] = model
    recipe["trajectories"] = [Path(path).name for path in recipe["trajectories"]]
    if recipe["start"]:
        recipe["start"] = str(Path(*Path(recipe["start"]).parts[-2:]))
    return record


def student_card(
    study: Study,
    table: ResultTable,
    method: str,
    name: str,
    rank: int,
    record: dict[str, Any],
    command: str,
) -> str:
    base, recipe, call = study.recipe.model, record["recipe"], record["calls"][-1]
    rate, batch, window = (
        recipe["learning"]["lr"],
        recipe["batch"]["size"],
        call.get("window") or call["objective"]["window"],
    )
    wanted = (study.recipe.base, study.recipe.baseline, "base-tad", "tad-speed", method)
    shown = replace(table, title="Measured", rows=[row for row in table.rows if row.method in wanted])
    if recipe["start"]:
        title, kept = (
            "left-to-right student",
            f", the nearest to that of rank {4 * recipe['adapter']['rank']}",
        )
        rounds = "Four rounds from left to right"
        if method == "ltr-parallel":
            rounds = "Three rounds from left to right and a last one of parallel rollouts"
        training = f"""{rounds}, each with its own quarter of the prompts, the reference only where needed and the last
student as teacher: {call["steps"]} steps of {batch} states a round, rate {rate:g}, {recipe["learning"]["schedule"]} schedule, seed {recipe["seed"]}; the last on {call["trajectories"]:,} trajectories, window
{window}. `{command}` is the recipe, `run.json` the record of the last round, docs/lab/rounds.md the method."""
    else:
        title, kept = f"{name.capitalize()} student", ""
        training = f"""TAD on {call["trajectories"]:,} privileged trajectories, {name} window {window}, lambda {call["objective"]["lambda_"]:g}, {recipe["states"]} states per trajectory and
epoch, {call["steps"]} steps of {batch} states, rate {rate:g} (of two tried on validation problems), seed {recipe["seed"]}, {call["minutes"]:.1f} minutes on one {call["device"]}
that other jobs shared. `tad distill {base}-{name}` is the recipe, `run.json` the record."""
    return f"""---
license: apache-2.0
library_name: peft
base_model: {base}
tags: [diffusion-language-model, lora]
---
# {base}-{name}

The {title} of [{base}](../{base}): a LoRA adapter of rank {rank} on all seven projections{kept}, stored in bf16.

    import tad
    lm = tad.load("{base}", adapter="{base}-{name}")

## Training
{training}

{as_markdown(shown).replace("### ", "## ", 1)}"""


def choose_decoder(student: Path, base: Path, runs: list[Path], truncated: list[Path] | None) -> None:
    """The fastest run within the tolerance of the base's is the student's default, or the most accurate where none is. Its card
    says so, and what `truncated`, a run with the whole adapter and one with the bundled, shows."""
    found = compare_runs([base, *runs]).table
    first, *tried = (row.scopes[found.scope] for row in found.rows)
    target = first.accuracy.value - found.tolerance
    metas = [Results.open(run).meta for run in runs]
    points = [(one.accuracy.value, one.tpf.value, meta) for one, meta in zip(tried, metas, strict=True)]
    near = [point for point in points if point[0] >= target]
    best = max(near, key=lambda point: point[1]) if near else max(points, key=lambda point: point[:2])
    accuracy, tpf, meta = best
    name, threshold = meta.decoder["name"], meta.decoder["threshold"]
    write_defaults(student, gen_length=meta.gen_length, decoder=name, threshold=threshold)
    names = ", ".join(f"`{name}`" for name in sorted({one.decoder["name"] for one in metas}))
    low, high = (pick(one.decoder["threshold"] for one in metas) for pick in (min, max))
    bar = f"within {found.tolerance:g} points of the base's {first.accuracy.value:.1f} % at one token"
    why = f"fastest {bar}" if near else f"most accurate; none is {bar}"
    lines = [
        f"`{name}` at {threshold:g} is its default decoder: of {len(runs)} settings ({names}, thresholds {low:g} to {high:g}) on "
        f"{sum(found.tasks.values())} {meta.tasks[0]['split']} problems the {why} ({accuracy:.1f} @ {tpf:.2f})."
    ]
    if truncated is not None:
        found = compare_runs(truncated).table
        whole, cut = (row.scopes[found.scope] for row in found.rows)
        assert cut.to_base is not None
        points = cut.to_base.accuracy
        asked = Results.open(truncated[1]).meta
        lines.append(
            f"The truncation of its rank: {points.with_interval(1, '+')} points and a TPF of {cut.tpf.value:.2f} instead of "
            f"{whole.tpf.value:.2f} on {sum(found.tasks.values())} {asked.tasks[0]['split']} problems at {asked.decoder['threshold']:g}."
        )
    card = student / "README.md"
    head, _, table = card.read_text(encoding="utf-8").partition("## Measured\n")
    table = table[table.index("| method") :]
    card.write_text(head + "\n".join(["## Measured", *lines, "", table]), encoding="utf-8")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    base = verbs.add_parser("base")
    for name in ("eval", "store"):
        base.add_argument(name, type=Path)
    base.add_argument(
        "run", type=Path, nargs="+", help="of `tad pretrain`, each from the weights of the one before"
    )
    base.add_argument("model", type=Path)
    students = verbs.add_parser("students")
    students.add_argument("recipe")
    students.add_argument("study", type=Path, help="the directory of the study")
    students.add_argument("overrides", nargs="*", help="section.field=value, as the study was run")
    students.add_argument("--seed", type=int, default=0)
    decoder = verbs.add_parser("decoder")
    decoder.add_argument("student", help="a bundled one")
    decoder.add_argument("eval", type=Path, help="of the base, one token per forward")
    decoder.add_argument("run", type=Path, nargs="+", help="of the student, at one setting")
    decoder.add_argument("--truncated", type=Path, nargs=2, metavar=("WHOLE", "BUNDLED"))
    options = parser.parse_args()
    if options.verb == "students":
        recipe = load_recipe(StudyRecipe, options.recipe, options.overrides)
        command = shlex.join(["tad", "study", options.recipe, *options.overrides])
        bundle_students(Study(recipe, options.study), options.seed, command)
    elif options.verb == "decoder":
        choose_decoder(BUNDLED / options.student, options.eval, options.run, options.truncated)
    else:
        card = base_card(options.eval, options.store, options.run, options.model)
        (options.model / "README.md").write_text(card, encoding="utf-8")
        print(card)


if __name__ == "__main__":
    main()
