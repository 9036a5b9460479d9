"""Collecting trajectories: the released way beside ours, in one run on one machine.

    python bench/collect.py --out runs/collect.json                       # LLaDA-8B shape, random weights, on CUDA
    python bench/collect.py --model DIR --task nano-word --examples 32    # a small real model, on the CPU

The released way, written anew here: one row at a time, the whole canvas through the model and the head at every
step, scores of every position, all steps to the end. Ours, in each `--order`: batches, the head on the current block, or from
left to right on the next position; then with the prefix and the dual cache (approximate; agreement with the exact rollouts of
that order is printed); with a real model also with stopping at the end of the answer. Times are per row and step, and per
rollout. Random weights never end a row, so stopping shows only with a real model. On CUDA ours is the CUDA-graph forward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from machine import (
    describe,
    describe_machine,
    measure_product_rate,
    random_lm,
    random_prompts,
    save_json,
    synchronise,
    write_markdown,
)
from tad.decoding import GraphEngine
from tad.models import LM, load
from tad.models.shapes import SHAPES, forward_cost
from tad.trajectories.rollout import Rollout, RolloutConfig, roll_out

BLOCK = 32
ORDERS = ("teacher", "left-to-right")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llada-8b", choices=list(SHAPES))
    parser.add_argument("--tiny", action="store_true", help="the shape at toy size")
    parser.add_argument("--model", help="a checkpoint instead of a shape")
    parser.add_argument("--task", default="nano-word", help="where a checkpoint's prompts come from")
    parser.add_argument("--examples", type=int, default=32, help="prompts of the task")
    parser.add_argument("--inputs", type=int, default=600, help="tokens of a row, for a shape")
    parser.add_argument("--length", type=int, default=64, help="tokens to generate")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--cached-batch", type=int, default=64)
    parser.add_argument("--released-rows", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="timed turns of each way; the fastest counts")
    parser.add_argument("--order", nargs="+", default=[*ORDERS], choices=ORDERS)
    parser.add_argument(
        "--compile", action="store_true", help="also exact with the model compiled, as it is on CUDA anyway"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.model:
        lm, prompts = from_checkpoint(options)
    else:
        lm = random_lm(options.shape, device, options.tiny)
        rows = max(options.batch, options.cached_batch)
        prompts = random_prompts(lm, rows, options.inputs - options.length)
    report = measure(lm, prompts, options, device)
    print(as_markdown(report))
    save_json(options.out, report)
    return 0


def from_checkpoint(options: argparse.Namespace) -> tuple[LM, list[list[int]]]:
    from tad.tasks import get_task
    from tad.trajectories.privileged import privileged_ids

    lm = load(options.model)
    task = get_task(options.task)
    examples = task.examples("train")[: options.examples]
    return lm, [privileged_ids(lm, task, example, task.reference(example)) for example in examples]


@torch.no_grad()
def released_way(lm: LM, prompt: list[int], length: int) -> list[int]:
    """One row, full forward, full head, scores of every position in the logits' dtype, one reveal per step."""
    device, mask = lm.device, lm.tokens.mask
    start = len(prompt)
    x = torch.tensor([[*prompt, *[mask] * length]], device=device)
    for low in range(start, start + length, BLOCK):
        for _ in range(BLOCK):
            logits = lm.model(x).logits
            if lm.family.logit_shift:
                logits = torch.cat((logits[:, :1], logits[:, :-1]), dim=1)
            # The public sampler adds (zero) Gumbel noise in fp64 before its argmax, over all positions.
            proposal = logits.to(torch.float64).argmax(-1)
            sure = logits.softmax(-1).gather(-1, proposal[..., None])[..., 0]
            sure = torch.where(x == mask, sure, -torch.inf)
            sure[:, low + BLOCK :] = -torch.inf
            x[0, sure.topk(1).indices[0]] = proposal[0, sure.topk(1).indices[0]]
    return x[0, start:].tolist()


def measure(
    lm: LM, prompts: list[list[int]], options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    length = options.length
    mean_inputs = statistics.mean(len(prompt) for prompt in prompts) + length
    flops = forward_cost(lm.model.shape, round(mean_inputs), lm.dtype).flops
    batch, wide = prompts[: options.batch], prompts[: options.cached_batch]
    some = spread_over_lengths(batch, options.released_rows)
    ways: dict[str, tuple[int, Callable[[], Any]]] = {
        "released way": (len(some), lambda: [released_way(lm, prompt, length) for prompt in some])
    }
    engine = GraphEngine(lm.model, compiled=True) if options.compile else None
    for order in options.order:
        config = RolloutConfig(order=order, block=BLOCK, stop_at_end=False)
        settings: dict[str, tuple[list[list[int]], RolloutConfig]] = {
            "exact": (batch, config),
            **({"exact, compiled": (batch, config)} if engine is not None else {}),
            **{f"{cache} cache": (wide, replace(config, cache=cache)) for cache in ("prefix", "dual")},
        }
        if options.model:  # per step of the released way: that is what stopping saves
            stop = replace(config, stop_at_end=True)
            settings["exact, stops at the end"] = (batch, stop)
            settings["dual cache, stops at the end"] = (batch, replace(stop, cache="dual"))
        for name, (asked, how) in settings.items():
            which = engine if name == "exact, compiled" else None
            ways[f"{order}, {name}"] = (
                len(asked),
                partial(roll_out, lm, asked, asked, length, how, engine=which),
            )
    results, first, best = race({name: call for name, (_, call) in ways.items()}, options.rounds, device)
    rows = {
        name: {
            "batch": 1 if name == "released way" else count,
            "ms_per_row_and_step": 1e3 * best[name] / count / length,
            "s_per_rollout": best[name] / count,
            "first_call_s": first[name],
        }
        for name, (count, _) in ways.items()
    }
    for name in rows:
        order, _, way = name.partition(", ")
        if way in ("exact, compiled", "prefix cache", "dual cache"):
            rows[name]["agreement"] = agreement(results[f"{order}, exact"], results[name][: len(batch)])
    base = rows["released way"]["ms_per_row_and_step"]
    peak = measure_product_rate(device, lm.dtype) if device.type == "cuda" else None
    for row in rows.values():
        row["times_faster"] = base / row["ms_per_row_and_step"]
    exact_share = (
        flops / (rows[f"{options.order[0]}, exact"]["ms_per_row_and_step"] * 1e-3) / peak if peak else None
    )
    return {
        "model": options.model or f"{options.shape}{' (tiny)' if options.tiny else ''}",
        "machine": {**describe_machine(device), "threads": torch.get_num_threads()},
        "mean_inputs": mean_inputs,
        "length": length,
        "matmul_flops": peak,
        "exact_share_of_roofline": exact_share,
        "rows": rows,
    }


def spread_over_lengths(prompts: list[list[int]], count: int) -> list[list[int]]:
    """So many prompts from the shortest to the longest: their mean length is about that of all."""
    ordered = sorted(prompts, key=len)
    return [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]


def race(
    calls: dict[str, Callable[[], Any]], rounds: int, device: torch.device
) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """Results, seconds of the first call, and of the fastest later one. The ways take turns: a machine that is busy with
    something else for a while slows all of them, and the fastest turn of each is least disturbed."""
    results, first, best = {}, dict[str, float](), dict[str, float]()
    for turn in range(rounds + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            results[name] = call()
            synchronise(device)
            seconds = time.perf_counter() - began
            if turn == 0:
                first[name] = seconds
            else:
                best[name] = min(seconds, best.get(name, seconds))
    return results, first, best


def agreement(exact: Sequence[Rollout], other: Sequence[Rollout]) -> dict[str, float]:
    """How far other rollouts follow exact ones: shares of equal final tokens, equal steps, and identical trajectories."""
    positions = same_token = same_step = same = 0
    for a, b in zip(exact, other, strict=True):
        real = [i for i, step in enumerate(a.reveal) if step <= a.n_real]
        positions += len(real)
        same_token += sum(a.tokens[i] == b.tokens[i] for i in real)
        same_step += sum(a.reveal[i] == b.reveal[i] for i in real)
        same += a.tokens == b.tokens and a.reveal == b.reveal
    return {
        "tokens": same_token / positions,
        "steps": same_step / positions,
        "trajectories": same / len(exact),
        "count": len(exact),
    }


def as_markdown(report: dict[str, Any]) -> str:
    head = f"{report['model']}, {report['mean_inputs']:.0f} input tokens, {report['length']} steps, {describe(report)}"
    if report["exact_share_of_roofline"]:
        head += f"; exact: {100 * report['exact_share_of_roofline']:.0f} % of the measured matrix rate"
    rows = []
    for name, row in report["rows"].items():
        same = row.get("agreement")
        close = f"{same['tokens']:.3f} / {same['steps']:.3f}" if same else ""
        numbers = [f"{row[key]:.2f}" for key in ("ms_per_row_and_step", "s_per_rollout", "times_faster")]
        rows.append([name, str(row["batch"]), *numbers, close])
    columns = (
        "way",
        "batch",
        "ms per row and step",
        "s per rollout",
        "times faster",
        "same tokens / steps as exact",
    )
    return write_markdown(head, columns, rows)


if __name__ == "__main__":
    raise SystemExit(main())
