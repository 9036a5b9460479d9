"""Accuracy of a base model on the nano world, one token per forward, with and without the reference in the prompt.

    python bench/nano_eval.py decode MODEL OUT        # texts.jsonl and decay.json, on any machine
    python bench/nano_eval.py grade OUT               # scores.json: grades the texts (code in the sandbox)
    python bench/nano_eval.py card OUT MODEL RUN      # MODEL/README.md from scores.json, decay.json and the run's record

Decoding and grading are apart because a machine with a GPU need not have a sandbox.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import tad
from tad.decoding import Decoded, decode
from tad.tasks import Score, Verdict, get_task
from tad.training.record import describe_machine

TASKS = ("nano-word", "nano-math", "nano-code")
GEN_LENGTH = 96
DECAY_AT = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32)


def decode_all(model: Path, out: Path, count: int, batch_size: int, device: str | None, split: str) -> None:
    """Write one line per text, and the confidence-decay curve of the privileged rollouts."""
    out.mkdir(parents=True, exist_ok=True)
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    lm = tad.load(model, device=device, dtype="float32" if on_cpu else None)  # CPUs are slow in bf16
    rollouts: list[tuple[list[int], Decoded]] = []
    facts: dict[str, Any] = {"count": count, "split": split, "gen_length": GEN_LENGTH, **describe_machine()}
    started = time.monotonic()
    with (out / "texts.jsonl").open("w", encoding="utf-8") as file:
        for name in TASKS:
            task = get_task(name, size=count)
            examples = task.examples(split)
            plain = [lm.encode(task.prompt(example).as_chat()) for example in examples]
            for privileged in (False, True):
                prompts = (
                    [lm.encode(task.privileged(example).as_chat()) for example in examples]
                    if privileged
                    else plain
                )
                began = time.monotonic()
                results = decode(lm, prompts, "one-by-one", gen_length=GEN_LENGTH, batch_size=batch_size)
                seconds = time.monotonic() - began
                verdicts = []
                for example, result in zip(examples, results, strict=True):
                    text = lm.decode(result.answer)
                    line = {
                        "task": name, "id": example.id, "level": example.level, "kind": example.meta["kind"],
                        "privileged": privileged, "text": text, "forwards": result.forwards,
                        "tokens": len(result.content),
                    }  # fmt: skip
                    file.write(json.dumps(line) + "\n")
                    if name != "nano-code":
                        verdicts.append(task.grade(example, text))
                if privileged:
                    rollouts += list(zip(plain[:200], results[:200], strict=True))
                score = f"{Score.of(verdicts).accuracy:.1%}" if verdicts else "graded later"
                print(f"{name} privileged={privileged}: {score}, {seconds:.0f} s", flush=True)
    facts["decode_seconds"] = round(time.monotonic() - started, 1)
    facts["decay"] = decay_curve(lm, rollouts)
    (out / "decay.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print("confidence by steps until reveal:", facts["decay"])


@torch.inference_mode()
def decay_curve(lm: tad.LM, rollouts: list[tuple[list[int], Decoded]], states: int = 6) -> dict[str, float]:
    """Mean probability the model gives, without the reference, to the rollout's token, by steps until it is revealed.

    The state before forward s+1 of a rollout shows what was revealed up to s. Positions after the end are left out.
    """
    total: dict[int, float] = defaultdict(float)
    seen: dict[int, int] = defaultdict(int)
    shift = lm.family.logit_shift
    for number, (prompt, result) in enumerate(rollouts):
        tokens = torch.tensor(result.tokens)
        reveal = torch.tensor(result.steps)
        last = int(reveal.max())
        rows, kept = [], []
        for k in range(states):
            s = (number * 7 + k * last // states) % max(1, last)
            shown = (reveal <= s) & (reveal > 0)
            canvas = torch.where(shown, tokens, torch.tensor(lm.tokens.mask))
            rows.append(torch.cat((torch.tensor(prompt), canvas)))
            kept.append(s)
        logits = lm.model(torch.stack(rows).to(lm.device)).logits
        start = len(prompt) - shift
        chance = logits[:, start : start + len(tokens)].float().softmax(-1)
        at = chance.gather(-1, tokens.to(lm.device)[None, :, None].expand(len(rows), -1, 1))[..., 0].cpu()
        content = len(result.content)
        for row, s in enumerate(kept):
            for i in range(content):
                ahead = int(reveal[i]) - s
                if reveal[i] > 0 and ahead > 0:
                    total[ahead] += float(at[row, i])
                    seen[ahead] += 1
    return {str(d): round(total[d] / seen[d], 4) for d in DECAY_AT if seen[d] >= 50}


def grade_all(out: Path, workers: int | None) -> None:
    """scores.json: accuracy by family and level, with standard errors."""
    lines = [json.loads(line) for line in (out / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    groups: dict[tuple[str, bool, str], list[Verdict]] = defaultdict(list)
    forwards: dict[str, list[int]] = defaultdict(list)
    for name in TASKS:
        mine = [line for line in lines if line["task"] == name]
        task: Any = get_task(name)
        pairs = []
        for line in mine:
            _, split, index = line["id"].rsplit("/", 2)
            pairs.append((task.example(split, int(index)), line["text"]))
        for line, verdict in zip(mine, task.grade_many(pairs, workers), strict=True):
            for group in ((name, line["level"]), (name, "all"), ("all", "all")):
                groups[group[0], line["privileged"], group[1]].append(verdict)
            forwards[name].append(line["forwards"])
    scores: dict[str, Any] = {}
    for (name, privileged, level), verdicts in sorted(groups.items()):
        score = Score.of(verdicts)
        entry = {"n": score.count, "accuracy": round(score.accuracy, 4), "se": round(score.standard_error, 4)}
        scores.setdefault(name, {}).setdefault("with reference" if privileged else "plain", {})[level] = entry
    for name, values in forwards.items():
        scores[name]["mean forwards"] = round(sum(values) / len(values), 1)
    (out / "scores.json").write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    print(table(scores))


def table(scores: dict[str, Any]) -> str:
    """Markdown: a row per family, plain and with the reference, by level."""
    levels = ["1", "2", "3", "4", "5", "all"]
    lines = ["| family | prompt | " + " | ".join(f"level {level}" for level in levels[:-1]) + " | all |"]
    lines.append("|---" * (len(levels) + 2) + "|")
    for name in (*TASKS, "all"):
        for prompt in ("plain", "with reference"):
            entries = scores[name][prompt]
            cells = [
                f"{100 * entries[level]['accuracy']:.1f} ± {100 * entries[level]['se']:.1f}"
                if level in entries
                else ""
                for level in levels
            ]
            lines.append(f"| {name} | {prompt} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_card(out: Path, model: Path, run: Path) -> None:
    """README.md of the model directory, from what was measured and recorded."""
    scores = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    facts = json.loads((out / "decay.json").read_text(encoding="utf-8"))
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    recipe, calls = record["recipe"], record["calls"]
    last = calls[-1]
    log = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    minutes = sum(call["minutes"] for call in calls)
    mix = ", ".join(f"{name} {weight}" for name, weight in recipe["data"]["families"].items())
    shape = recipe["model"]
    decay = facts["decay"]
    text = f"""---
license: apache-2.0
library_name: transformers
tags: [diffusion-language-model, {shape["family"]}]
---
# {recipe["name"]}

A masked-diffusion language model of {last["parameters"] / 1e6:.1f}M parameters in the layout of the released
{shape["family"].capitalize()} checkpoints ({shape["layers"]} layers, width {shape["width"]}, {shape["heads"]} heads), trained from
scratch on the nano world: generated word problems, symbolic maths and Python functions. It exists to study decoding and
distillation where answers can be graded exactly; it knows nothing else.

    import tad
    lm = tad.load("{model.name}")

## Training
- Data: {recipe["data"]["examples"]:,} distinct examples of the training split ({mix}), {recipe["data"]["privileged"]:.0%} of the prompts with the
  reference; test problems differ from all of them in content, not only in wording.
- {last["steps"]:,} steps of {recipe["optimization"]["tokens_per_step"]:,} tokens ({last["tokens"] / 1e9:.2f}B tokens), {minutes:.1f} minutes on {last["device"]},
  last logged loss {log[-1]["loss"]:.4f}, seed {recipe["seed"]}, commit {last["commit"]}.
- Again with: `tad pretrain pretrain-{recipe["name"]}`

## Accuracy
One token per forward (highest confidence, blocks of 32), {facts["gen_length"]} positions, temperature 0, percent ± standard error, on
{facts["count"]:,} problems per family of the {facts["split"]} split. "with reference" has the terse reference solution in the prompt.

{table(scores)}

## Confidence decay
Mean probability that the model, without the reference, gives to the token of its own privileged rollout, by steps until that
token is revealed:

| steps | {" | ".join(decay)} |
|---|{"---|" * len(decay)}
| confidence | {" | ".join(f"{value:.2f}" for value in decay.values())} |
"""
    (model / "README.md").write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("decode")
    one.add_argument("model", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--count", type=int, default=1024)
    one.add_argument("--batch-size", type=int, default=512)
    one.add_argument("--device")
    one.add_argument("--split", default="test")
    two = verbs.add_parser("grade")
    two.add_argument("out", type=Path)
    two.add_argument("--workers", type=int)
    three = verbs.add_parser("card")
    for name in ("out", "model", "run"):
        three.add_argument(name, type=Path)
    options = parser.parse_args()
    if options.verb == "decode":
        decode_all(
            options.model, options.out, options.count, options.batch_size, options.device, options.split
        )
    elif options.verb == "grade":
        grade_all(options.out, options.workers)
    else:
        write_card(options.out, options.model, options.run)


if __name__ == "__main__":
    main()
