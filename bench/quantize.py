"""What smaller weights cost: accuracy and tokens per forward on nano problems, paired with bf16 problem by problem; or single
predictions; or, of a shape with random weights, memory and milliseconds.

    python bench/quantize.py nano-llada --adapters nano-llada-speed nano-llada-quality --out quantize.json
    python bench/quantize.py nano-llada --predictions --size 128 --device cpu
    python bench/quantize.py --shape llada-8b --device cuda

Every model decodes the same test problems of nano-word and nano-math (nano-code would need the sandbox) with bf16 weights
and with each kind of --weights. A difference is the mean over problems of right minus right with bf16, with its standard
error over problems. `fp8-block` is simulated: e4m3 weights with one scale per block of 128 x 128, activations rounded per row
as those of `fp8` are, multiplied in fp32. By default all kinds run the plain forward, so that nothing but the weights differs.

--predictions decodes nothing and is quick on a CPU: 60 % of the tokens of each worked-out answer are masked, and the predictions
there are held to those of the unrounded weights, all in fp32.

A shape is measured in the plain forward of one row: what the weights hold on the device, what a forward needs beside them, and
its time.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tad
from tad.decoding import Decoded, decode
from tad.models import LM
from tad.models.layers import place
from tad.models.quantize import quantize, to_fp8
from tad.models.shapes import build, shape_config
from tad.runs.record import describe_machine
from tad.tasks import Example, Task, get_task
from tad.trajectories.privileged import plain_ids

TASKS = ("nano-word", "nano-math")
_BLOCK = 128

Row = dict[str, Any]


class BlockFp8Linear(nn.Module):
    """A linear map whose weight was rounded to e4m3 with a scale per block, kept in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", round_blocks(linear.weight.detach()))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = to_fp8(x.reshape(-1, x.shape[-1]))
        out = F.linear(rows.float(), cast(Tensor, self.weight)) * scale
        out = out.to(x.dtype).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def round_blocks(weight: Tensor) -> Tensor:
    """weight [out, in] after e4m3 with one scale per block, in fp32."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK)).transpose(1, 2)  # [a, b, 128, 128]
    small, scale = to_fp8(blocks.flatten(2).flatten(0, 1))
    rounded = (small.float() * scale).view_as(blocks).transpose(1, 2).reshape(padded.shape)
    return rounded[:rows, :columns].contiguous()


def quantize_blocks(model: tad.models.MaskedDiffusionModel) -> None:
    for layer, path in model.projections():
        place(layer, path, BlockFp8Linear(cast(nn.Linear, layer.get_submodule(path))))


KINDS: dict[str, Callable[[tad.models.MaskedDiffusionModel], None]] = {
    "bf16": lambda model: None,
    "fp8": partial(quantize, kind="fp8"),
    "fp8-block": quantize_blocks,
    "int8": partial(quantize, kind="int8"),
    "int4": partial(quantize, kind="int4"),
}


@dataclass(frozen=True)
class Measured:
    """One model with one kind of weights and one decoder. Differences are from bf16, in points and as a ratio."""

    model: str
    decoder: str
    weights: str
    problems: int
    accuracy: float
    tpf: float
    difference: float
    standard_error: float
    tpf_ratio: float
    same_answers: float  # share of problems with the very tokens of bf16
    seconds: float


def make_problems(size: int) -> list[tuple[Task, Example]]:
    return [
        (task, example)
        for task in (get_task(name, size=size) for name in TASKS)
        for example in task.examples("test")
    ]


def grade(lm: LM, problems: list[tuple[Task, Example]], found: list[Decoded]) -> Tensor:
    """1 where an answer is right [problems]."""
    verdicts = [
        task.grade(example, task.prompt(example).cut(lm.decode(one.answer))).correct
        for (task, example), one in zip(problems, found, strict=True)
    ]
    return torch.tensor(verdicts, dtype=torch.float64)


def measure_answers(options: argparse.Namespace, adapter: str | None) -> list[Row]:
    """Every decoder with bf16 and each kind of weights."""
    problems, measured = make_problems(options.size), []
    base: dict[str, tuple[Tensor, float, list[Decoded]]] = {}
    name, engine = options.model, options.engine
    for kind in ("bf16", *options.weights):
        lm = tad.load(name, adapter=adapter, device=options.device, dtype="bf16", merge=True)
        KINDS[kind](lm.model)
        length = options.gen_length or lm.defaults.gen_length
        prompts = [plain_ids(lm, task, example) for task, example in problems]
        for decoder in options.decoders:
            began = time.perf_counter()
            found = decode(lm, prompts, decoder, length, batch_size=options.batch, engine=engine)
            seconds = time.perf_counter() - began
            right = grade(lm, problems, found)
            tpf = sum(len(one.content) for one in found) / sum(one.forwards for one in found)
            before, tpf_before, answers = base.setdefault(decoder, (right, tpf, found))
            change = right - before
            same = [one.content == other.content for one, other in zip(found, answers, strict=True)]
            measured.append(
                Measured(
                    adapter or name,
                    decoder,
                    kind,
                    len(problems),
                    right.mean().item(),
                    tpf,
                    change.mean().item(),
                    change.std().item() / math.sqrt(len(problems)),
                    tpf / tpf_before,
                    sum(same) / len(same),
                    seconds,
                )
            )
            print(write_row(measured[-1]), flush=True)
    return [asdict(one) for one in measured]


def measure_predictions(options: argparse.Namespace, adapter: str | None) -> list[Row]:
    """The predictions with fp32 weights and with each kind."""
    problems, rows = make_problems(options.size), list[Row]()
    for kind in ("fp32", *options.weights):
        lm = tad.load(options.model, adapter=adapter, device=options.device, dtype="fp32", merge=True)
        if kind != "fp32":
            KINDS[kind](lm.model)
        found, right = predict_masks(lm, problems)
        if kind == "fp32":
            wanted, right_before = found, right
        change = right - right_before  # [problems], masks
        masks = len(found)
        rows.append(
            {
                "model": adapter or options.model,
                "weights": kind,
                "masks": masks,
                "right": right.sum().item() / masks,
                "difference": change.sum().item() / masks,
                "standard_error": change.std().item() * math.sqrt(len(problems)) / masks,
                "same_best": (found.argmax(-1) == wanted.argmax(-1)).double().mean().item(),
                "kl": (wanted.exp() * (wanted - found)).sum(-1).mean().item(),
            }
        )
        row = rows[-1]
        print(
            f"| {row['model']} | {kind} | {masks} | {100 * row['right']:.2f} | {100 * row['difference']:+.2f} ± "
            f"{100 * row['standard_error']:.2f} | {100 * row['same_best']:.2f} | {row['kl']:.5f} |",
            flush=True,
        )
    return rows


@torch.inference_mode()
def predict_masks(lm: LM, problems: list[tuple[Task, Example]]) -> tuple[Tensor, Tensor]:
    """Log-probabilities at every mask [masks, vocab], and how many of a problem's best tokens are right [problems]."""
    generator = torch.Generator().manual_seed(0)
    found, right = [], []
    for task, example in problems:
        prompt, answer = plain_ids(lm, task, example), lm.encode_text(str(example.meta["solution"]))
        ids = torch.tensor([*prompt, *answer])
        masked = len(prompt) + (torch.rand(len(answer), generator=generator) < 0.6).nonzero()[:, 0]
        truth = ids[masked]
        ids[masked] = lm.tokens.mask
        asked = (masked - lm.family.logit_shift).to(lm.device)
        found.append(lm.model(ids[None].to(lm.device), logits_at=asked).logits[0].log_softmax(-1).cpu())
        right.append((found[-1].argmax(-1) == truth).sum())
    return torch.cat(found), torch.stack(right).double()


@torch.inference_mode()
def measure_shape(options: argparse.Namespace) -> list[Row]:
    """Memory and time of one row's forward, with bf16 weights and with each kind."""
    lengths, repeats, device = options.lengths, options.repeats, torch.device(options.device or "cuda")
    rows: list[Row] = []
    print("| weights | GB held | GB beside them | " + " | ".join(f"ms, {n} tokens" for n in lengths) + " |")
    print("|---" * (3 + len(lengths)) + "|")
    for kind in ("bf16", *(kind for kind in options.weights if kind != "fp8-block")):
        model = build(shape_config(options.shape), device, torch.bfloat16)
        KINDS[kind](model)
        held = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
        row: Row = {"weights": kind, "gb": held / 1e9, "gb_beside": math.nan}
        for length in lengths:
            asked = torch.arange(length // 2, length, device=device)
            call = partial(model, torch.randint(0, 1000, (1, length), device=device), logits_at=asked)
            for _ in range(2):
                call()
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            if device.type == "cuda":
                torch.cuda.synchronize()
                row["gb_beside"] = (torch.cuda.max_memory_allocated() - before) / 1e9
            row[f"ms_{length}"] = 1e3 * (time.perf_counter() - began) / repeats
        rows.append(row)
        times = " | ".join(f"{row[f'ms_{n}']:.2f}" for n in lengths)
        print(f"| {kind} | {row['gb']:.2f} | {row['gb_beside']:.2f} | {times} |", flush=True)
        del model, call
        gc.collect()
    return rows


def write_row(one: Measured) -> str:
    points = f"{100 * one.difference:+.2f} ± {100 * one.standard_error:.2f}"
    cells = [
        one.model, one.decoder, one.weights, f"{100 * one.accuracy:.1f}", f"{one.tpf:.2f}",
        *(("-", "-", "-") if one.weights == "bf16" else (points, f"{one.tpf_ratio:.3f}", f"{100 * one.same_answers:.0f}")),
        f"{one.seconds:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main(words: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", help="a directory or a bundled name, of a model that knows the nano world"
    )
    parser.add_argument("--shape", help="measure memory and time of this shape instead: llada-8b, dream-7b")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[64, 192], help="tokens of a forward of a shape"
    )
    parser.add_argument(
        "--predictions", action="store_true", help="single predictions instead of decoded answers"
    )
    parser.add_argument("--repeats", type=int, default=10, help="forwards of a shape that are timed")
    parser.add_argument("--adapters", nargs="*", default=[], help="students beside the base")
    parser.add_argument("--weights", nargs="+", choices=[*KINDS][1:], default=[*KINDS][1:])
    parser.add_argument("--decoders", nargs="+", default=["one-by-one", "tad"])
    parser.add_argument("--gen-length", type=int, help="positions to generate; default: the model's own")
    parser.add_argument("--size", type=int, default=768, help="problems of each family")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device")
    parser.add_argument("--engine", choices=("plain", "auto"), default="plain")
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    options = parser.parse_args(words)
    if (options.model is None) == (options.shape is None):
        parser.error("give a model or a --shape")
    if options.shape is not None:
        found = measure_shape(options)
    else:
        predicted = "model | weights | masks | right, % | difference, points | same best token, % | KL, nats"
        decoded = "model | decoder | weights | accuracy, % | TPF | difference, points | TPF ratio | same answers, % | s"
        columns = predicted if options.predictions else decoded
        print(f"| {columns} |\n" + "|---" * (columns.count("|") + 1) + "|")
        measure = measure_predictions if options.predictions else measure_answers
        found = [row for adapter in (None, *options.adapters) for row in measure(options, adapter)]
    if options.out is not None:
        record = {"machine": describe_machine(), "options": {k: str(v) for k, v in vars(options).items()}}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**record, "rows": found}, indent=2) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
