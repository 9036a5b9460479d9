"""One distillation step at LLaDA-8B shape: the published trainers' way, re-created here, beside ours, in one run.

    python bench/distill.py --out runs/distill                 # bf16 on one CUDA device (needs about 80 GB)
    python bench/distill.py --tiny --out /tmp/distill          # the same code on a toy shape, on any machine

A step is: TAD's loss of 4 sequences (student 512 tokens, teacher 768, window 8), backward, clipping, AdamW, with LoRA of
rank 128 on all seven projections. Weights are random: the numbers say how fast and how large, not how well.

    released    a second copy of the model as teacher, logits for every position, the loss on them in the logits' dtype
    chunked     one copy, hidden states gathered where the loss looks, the head in chunks inside the loss
    fast        chunked, with the layers compiled
    + recompute the activations of every other layer made again in backward (`gradient_checkpointing: half`)
    + fp8       the frozen projections' forward in fp8 (`fp8_base_forward`). `gradient_cosine` is that of all LoRA-B gradients
                to the plain ones, `loss_difference` how far the loss moves: same batch, not compiled, no dropout

MFU is of the bf16 peak for all. `--profile` adds the kernels of two more steps of each variant. A variant that fails has its error in the table. Prints a Markdown table last; `--out` gets the same as distill.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from machine import (
    describe,
    describe_machine,
    free_memory,
    measure_kernels,
    print_kernels,
    save_json,
    synchronise,
    tiny_config,
    write_markdown,
)
from tad.models import LLADA, AttentionMask, MaskedDiffusionModel
from tad.models.lora import attach
from tad.models.shapes import build, forward_cost, shape_config
from tad.training.fp8_base import quantize_base, restore_base
from tad.training.objectives import Batch, LossModule, Tad
from tad.training.objectives.module import checkpoint_layers
from tad.training.states import TrajectoryArrays

DROPOUT = 0.05
PEAK = 989e12  # dense bf16 FLOP/s of an H100 or H200, from the data sheet


@dataclass(frozen=True)
class Sizes:
    """Tokens and counts of a step."""

    prompt: int
    privileged: int
    answer: int
    sequences: int
    rank: int

    @property
    def student(self) -> int:
        return self.prompt + self.answer

    @property
    def teacher(self) -> int:
        return self.privileged + self.answer


@dataclass(frozen=True)
class Variant:
    """One way to make a step."""

    name: str
    released: bool = False
    compiled: bool = False
    recompute: bool = False
    fp8: bool = False


VARIANTS = [
    Variant("chunked"),
    Variant("fast", compiled=True),
    Variant("fast + recompute", compiled=True, recompute=True),
    Variant("fast + fp8", compiled=True, fp8=True),
    Variant("fast + fp8 + recompute", compiled=True, fp8=True, recompute=True),
    Variant("released", released=True),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="a toy shape in fp32, on the CPU if there is no GPU"
    )
    parser.add_argument("--only", nargs="+", default=None, help="names of variants to run")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--profile", action="store_true", help="print the most expensive kernels of every variant"
    )
    parser.add_argument("--out", type=Path, help="the folder for distill.json")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        print("no CUDA device here; --tiny runs on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {
        "machine": describe_machine(device),
        "options": {k: str(v) for k, v in vars(options).items()},
    }
    sizes = Sizes(16, 32, 16, 4, 4) if options.tiny else Sizes(256, 512, 256, 4, 128)
    bench = Bench(device, sizes, options)
    results["sizes"] = {**asdict(sizes), "student": sizes.student, "teacher": sizes.teacher, **bench.facts()}
    results["variants"] = []
    for variant in VARIANTS:
        if options.only and variant.name not in options.only:
            continue
        row = bench.measure(variant)
        results["variants"].append(row)
        brief = {key: value for key, value in row.items() if key != "kernels"}
        print(json.dumps(brief), flush=True)  # a run that is cut short has these
        save_json(options.out and options.out / "distill.json", results)
    print(as_markdown(results))
    return 0


class Bench:
    """The model, built once, and the batch that every variant trains on."""

    def __init__(self, device: torch.device, sizes: Sizes, options: argparse.Namespace) -> None:
        self.device, self.sizes, self.options = device, sizes, options
        self.config = tiny_config("llada-8b") if options.tiny else shape_config("llada-8b")
        self.dtype = torch.float32 if options.tiny else torch.bfloat16
        self.model = build(self.config, device, self.dtype)
        self.peft = attach(self.model, sizes.rank, dropout=DROPOUT).train()
        self.adapters = [p for p in self.model.parameters() if p.requires_grad]
        for p in self.adapters:
            p.data = p.data.to(self.dtype)
        self.objective = Tad(mask_token=self.config.mask_token_id, logit_shift=LLADA.logit_shift)
        views = [
            view for row, step in self.states() for view in self.objective.views(row, step, unused_rng())
        ]
        batch = self.objective.collate(views)
        self.totals = self.objective.counts(batch)
        self.batch: Batch = batch.to(device)

    def states(self) -> list[tuple[TrajectoryArrays, int]]:
        """One state from the middle of each equal part of the steps, so that half of all answers is masked."""
        sizes = self.sizes
        draws = np.random.default_rng(0)
        highest = min(self.config.mask_token_id, self.config.eos_token_id)

        def ids(count: int) -> Tensor:
            return torch.from_numpy(draws.integers(0, highest, count))

        found = []
        for index in range(sizes.sequences):
            order = torch.from_numpy(draws.permutation(sizes.answer)) + 1
            row = TrajectoryArrays(
                str(index), ids(sizes.prompt), ids(sizes.privileged), ids(sizes.answer), order, sizes.answer
            )
            found.append((row, (2 * index + 1) * sizes.answer // (2 * sizes.sequences)))
        return found

    def facts(self) -> dict[str, Any]:
        return {
            "near_tokens": self.totals["near"],
            "distant_tokens": self.totals["distant"],
            "adapter_parameters": sum(p.numel() for p in self.adapters),
            "flops_per_step": self.flops(),
        }

    def flops(self) -> float:
        """What the method needs, whatever a variant does: no weight gradients of the base, the head where it is looked at."""
        sizes, shape = self.sizes, self.model.shape

        def body(length: int) -> int:
            cost = forward_cost(shape, length, self.dtype)
            return cost.flops_per_token - cost.head_flops_per_token

        head = forward_cost(shape, 1, self.dtype).head_flops_per_token
        students, teachers = sizes.sequences * sizes.student, sizes.sequences * sizes.teacher
        near, distant = self.totals["near"], self.totals["distant"]
        adapters = 6 * students * sum(p.numel() for p in self.adapters)
        return (
            2 * students * body(sizes.student)
            + teachers * body(sizes.teacher)
            + adapters
            + head * (2 * near + 3 * distant)
        )

    def measure(self, variant: Variant) -> dict[str, Any]:
        """A variant's row of the table."""
        row: dict[str, Any] = {"variant": variant.name}
        try:
            if variant.fp8:
                row.update(self.compare_fp8())
            self.prepare(variant)
            step = self.step_of(self.loss_of(variant))
            row.update(self.time(step))
            row["mfu"] = self.flops() / row["s_per_step"] / PEAK
            if self.options.profile:
                kernels = measure_kernels(step, self.device)
                print_kernels(variant.name, kernels, row["s_per_step"])
                row["device_ms"] = sum(kernel["ms"] for kernel in kernels)
                row["kernels"] = kernels[:25]
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        for layer in self.model.layers():
            layer._compiled_call_impl = None
        restore_base(self.model)
        torch._dynamo.reset()
        for p in self.adapters:
            p.grad = None
        free_memory(self.device)
        return row

    def loss_of(self, variant: Variant) -> Callable[[], Tensor]:
        """What makes the loss of a step."""
        if variant.released:
            teacher = build(self.config, self.device, self.dtype)  # the same seed: the same weights
            return partial(released_loss, self.model, teacher, self.batch)
        module = LossModule(self.peft, self.objective)
        return lambda: module(self.batch, self.totals).total

    def prepare(self, variant: Variant, dropout: float = DROPOUT) -> None:
        """Every variant starts from adapters that change nothing, so their first losses can be compared."""
        free_memory(self.device)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if ".lora_B." in name:
                    p.zero_()
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
        checkpoint_layers(self.model, 2 if variant.recompute else 0)
        if variant.fp8:
            quantize_base(self.model)
        if variant.compiled:
            backend = "inductor" if self.device.type == "cuda" else "aot_eager"
            for layer in self.model.layers():
                layer.compile(dynamic=False, backend=backend)

    def compare_fp8(self) -> dict[str, float]:
        """Loss and gradients of the same batch with fp8 and without, as far from each other as fp8 alone takes them."""
        losses, gradients = [], []
        for fp8 in (False, True):
            self.prepare(Variant("one gradient", fp8=fp8), dropout=0.0)
            loss = self.loss_of(Variant("plain"))()
            loss.backward()
            losses.append(float(loss.detach()))
            parts = [p.grad for name, p in self.model.named_parameters() if ".lora_B." in name]
            gradients.append([part.float() for part in parts if part is not None])
            for p in self.adapters:
                p.grad = None
            restore_base(self.model)
        plain, fp8_ones = gradients
        both = sum(float((a * b).sum()) for a, b in zip(plain, fp8_ones, strict=True))
        norms = [sum(float(g.square().sum()) for g in part) ** 0.5 for part in gradients]
        return {
            "loss_difference": losses[1] - losses[0],
            "gradient_cosine": both / (norms[0] * norms[1]),
        }

    def step_of(self, make_loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A whole step: loss, backward, clipping, AdamW."""
        optimizer = torch.optim.AdamW(
            self.adapters, lr=2e-5, weight_decay=0.01, fused=self.device.type == "cuda"
        )

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = make_loss()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.adapters, 1.0)
            optimizer.step()
            return loss.detach()

        return step

    def time(self, step: Callable[[], Tensor]) -> dict[str, float]:
        """Median seconds of whole steps, each waited for, after a warm-up; the peak of memory over the timed ones."""
        began = time.perf_counter()
        first = float(step())
        opening = time.perf_counter() - began
        for _ in range(self.options.warmup - 1):
            step()
        synchronise(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(self.options.repeats):
            began = time.perf_counter()
            step()
            synchronise(self.device)
            times.append(time.perf_counter() - began)
        found = {"s_per_step": statistics.median(times), "fastest_s": min(times), "slowest_s": max(times)}
        if self.device.type == "cuda":
            found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            found["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        return {**found, "first_step_s": opening, "first_loss": first}


def released_loss(model: MaskedDiffusionModel, teacher: MaskedDiffusionModel, batch: Batch) -> Tensor:
    """The published trainer's step: whole logits of both models, rows picked from them, two means."""
    assert batch.teacher is not None
    near, distant = batch.terms["near"], batch.terms["distant"]
    assert distant.teacher_index is not None
    with torch.no_grad():
        taught = teacher(batch.teacher.ids, mask=not_pad(batch.teacher.ids, teacher)).logits.flatten(0, 1)
    given = model(batch.student.ids, mask=not_pad(batch.student.ids, model)).logits.flatten(0, 1)
    hard = F.cross_entropy(given[near.student_index], near.labels)
    soft = F.kl_div(
        given[distant.student_index].log_softmax(-1),
        taught[distant.teacher_index].softmax(-1),
        reduction="batchmean",
    )
    return hard + soft


def not_pad(ids: Tensor, model: MaskedDiffusionModel) -> AttentionMask:
    """The published trainer always passes a mask made from the ids, and with it leaves attention's fastest path."""
    return AttentionMask(keys=ids != model.config.pad_token_id)


def unused_rng() -> np.random.Generator:
    return np.random.default_rng(0)  # TAD draws nothing


def as_markdown(results: dict[str, Any]) -> str:
    """One line per variant; speed and memory relative to the released way where that was measured."""
    sizes = results["sizes"]
    head = (
        f"{describe(results)}\n"
        f"{sizes['sequences']} sequences, student {sizes['student']} tokens, teacher {sizes['teacher']}, "
        f"{sizes['near_tokens']:.0f} near and {sizes['distant_tokens']:.0f} distant positions, "
        f"{sizes['adapter_parameters']:,} adapter parameters"
    )
    released = next((row for row in results["variants"] if row["variant"] == "released"), {})
    columns = ("variant", "s/step", "speed-up", "peak GB", "of released", "MFU", "first step s", "first loss", "gradient cosine")  # fmt: skip
    lines = []
    for row in results["variants"]:
        numbers = (
            (row.get("s_per_step"), ".4f"),
            (_ratio(released, row, "s_per_step"), ".2f"),
            (row.get("peak_gb"), ".1f"),
            (_ratio(row, released, "peak_gb"), ".2f"),
            (row.get("mfu"), ".2f"),
            (row.get("first_step_s"), ".1f"),
            (row.get("first_loss"), ".4f"),
            (row.get("gradient_cosine"), ".4f"),
        )
        cells = (
            [row["error"], *[""] * (len(numbers) - 1)]
            if "error" in row
            else ["" if value is None else format(value, style) for value, style in numbers]
        )
        lines.append([row["variant"], *cells])
    return write_markdown(head, columns, lines)


def _ratio(over: dict[str, Any], under: dict[str, Any], name: str) -> float | None:
    return over[name] / under[name] if name in over and name in under else None


if __name__ == "__main__":
    sys.exit(main())
