"""Seconds per forward of a base model on the CPU, so that demos can be planned.

    python bench/nano_cpu.py [MODEL] [--recipe pretrain-nano-llada] [--length 128] [--threads 1]

Without a model directory the recipe's network is timed with random weights: the time does not depend on them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

import tad
from tad.config import load_recipe
from tad.nano.pretrain import build_model
from tad.nano.recipe import PretrainRecipe
from tad.training.record import describe_machine


@torch.inference_mode()
def time_forward(model: torch.nn.Module, batch: int, length: int, repeats: int = 15) -> float:
    """Median seconds of one forward, after two that are not counted."""
    ids = torch.randint(10, 300, (batch, length))
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        model(ids)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--recipe", default="pretrain-nano-llada")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(describe_machine())
    for dtype in ("float32", "bfloat16"):
        if options.model:
            model = tad.load(options.model, device="cpu", dtype=dtype).model
        else:
            model = build_model(load_recipe(PretrainRecipe, options.recipe, [f"model.dtype={dtype}"])).eval()
        size = sum(p.numel() for p in model.parameters()) / 1e6
        seconds = {batch: time_forward(model, batch, options.length) for batch in (1, 16)}
        print(
            f"{size:.2f}M parameters, {dtype}, {options.length} tokens, {options.threads} thread(s): "
            + ", ".join(f"batch {batch}: {value * 1000:.1f} ms" for batch, value in seconds.items())
        )


if __name__ == "__main__":
    main()
