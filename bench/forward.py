"""One forward of the released shapes: milliseconds, memory, compiled against eager, FlexAttention against SDPA.

    python bench/forward.py --out runs/forward.json            # both 8B shapes, bf16, on CUDA
    python bench/forward.py --tiny --out /tmp/forward.json     # the same code on toy shapes, on any machine
    python bench/forward.py --model nano-llada --length 128    # a checkpoint, on any machine; --batch rows at once

Weights of a shape are random: the numbers say how fast, not how well. Prints a Markdown table; `--out` gets the same as JSON.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from machine import (
    describe,
    describe_machine,
    free_memory,
    random_lm,
    save_json,
    synchronise,
    time_behind,
    write_markdown,
)
from tad.models import AttentionMask, MaskedDiffusionModel, load
from tad.models.shapes import SHAPES, forward_cost

BLOCK = 32  # tokens per block of the block-causal rule


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["llada-8b", "dream-7b"], choices=list(SHAPES))
    parser.add_argument("--model", help="a checkpoint instead of shapes")
    parser.add_argument("--batch", type=int, default=1, help="rows of the plain forward")
    parser.add_argument("--length", type=int, default=384, help="tokens of the plain forward")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the block-causal comparison")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--tiny", action="store_true", help="toy shapes in fp32, on the CPU if there is no GPU"
    )
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    if not options.tiny and not options.model and not torch.cuda.is_available():
        print("no CUDA device here; --tiny runs on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {"machine": describe_machine(device), "options": {k: str(v) for k, v in vars(options).items()}}
    names = [options.model] if options.model else options.shapes
    results["shapes"] = [measure(name, device, options) for name in names]
    print(as_markdown(results))
    save_json(options.out, results)
    return 0


def measure(name: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one shape."""
    length, long = (32, 64) if options.tiny else (options.length, options.long)
    free_memory(device)  # of the shape before
    began = time.perf_counter()
    lm = load(name, device=device) if options.model else random_lm(name, device, options.tiny)
    model, dtype = lm.model, lm.dtype
    synchronise(device)
    row: dict[str, Any] = {
        "shape": f"{name}{' (tiny)' if options.tiny else ''}",
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "batch": options.batch,
        "length": length,
    }
    row["parameters"] = sum(weight.numel() for weight in model.parameters())
    row["build_s"] = time.perf_counter() - began
    row["weights_gb"] = sum(weight.nbytes for weight in model.parameters()) / 1e9
    ids = random_ids(model, length, device)
    batch = ids.expand(options.batch, -1)
    plain = timed(lambda: model(batch).logits, device, options)
    row["eager_ms"], row["peak_gb"] = plain["ms"], plain["peak_gb"]
    row["tflops"] = options.batch * forward_cost(model.shape, length, dtype).flops / plain["ms"] / 1e9
    row["cached_block_ms"] = cached_block(model, ids, device, options)
    if not options.model:
        row |= compare_compiled(model, ids, device, options) | compare_flex(model, long, device, options)
    return row


@torch.no_grad()
def timed(call: Callable[[], Any], device: torch.device, options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds after a warm-up, and the peak of memory over the timed calls."""
    for _ in range(5):
        call()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [time_behind(call, device, repeats=1) for _ in range(options.repeats)]
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    return {"ms": statistics.median(times), "peak_gb": peak}


def cached_block(
    model: MaskedDiffusionModel, ids: torch.Tensor, device: torch.device, options: argparse.Namespace
) -> float:
    """Milliseconds of a forward that feeds one block against a full cache."""
    cache = model.new_cache(1, ids.shape[1])
    block = slice(ids.shape[1] - min(BLOCK, ids.shape[1]), ids.shape[1])
    with torch.no_grad():
        model(ids, cache=cache, cache_position=slice(0, ids.shape[1]), head=False)
    return timed(lambda: model(ids[:, block], cache=cache, cache_position=block).logits, device, options)[
        "ms"
    ]


def compare_compiled(
    model: MaskedDiffusionModel, ids: torch.Tensor, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Compiled against eager, and both against fp32: bf16 rounds either way, so neither is the truth."""
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    began = time.perf_counter()
    with torch.no_grad():
        found = compiled(ids).logits
        synchronise(device)
        seconds = time.perf_counter() - began
        wanted = model(ids).logits
    result = {"compile_s": seconds, "compiled_ms": timed(lambda: compiled(ids).logits, device, options)["ms"]}
    result["compiled_relative_difference"] = relative_difference(found, wanted)
    torch._dynamo.reset()
    with torch.no_grad():
        truth = copy.deepcopy(model).float()(ids).logits
    result["eager_error_to_fp32"] = relative_difference(wanted, truth)
    result["compiled_error_to_fp32"] = relative_difference(found, truth)
    return result


def compare_flex(
    model: MaskedDiffusionModel, length: int, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Block-causal attention as a dense mask (SDPA) and as a block mask (FlexAttention)."""
    ids = random_ids(model, length, device)
    rule = AttentionMask(blocks=(torch.arange(length, device=device) // BLOCK)[None])
    result: dict[str, Any] = {"block_causal_length": length}
    hidden = {}
    for label, attention in (("sdpa", "sdpa"), ("flex", "flex_attention")):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            hidden[label] = model(ids, mask=rule, head=False).hidden
        outcome = timed(lambda: model(ids, mask=rule, head=False).hidden, device, options)
        result[f"block_causal_{label}_ms"] = outcome["ms"]
        result[f"block_causal_{label}_peak_gb"] = outcome["peak_gb"]
    model.set_attn_implementation("sdpa")
    result["flex_relative_difference"] = relative_difference(hidden["flex"], hidden["sdpa"])
    return result


def relative_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


def random_ids(model: MaskedDiffusionModel, length: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.randint(0, model.shape.vocab, (1, length), device=device, generator=generator)


def as_markdown(results: dict[str, Any]) -> str:
    """One column per shape."""
    rows = results["shapes"]
    names = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[name, *(_cell(row.get(name)) for row in rows)] for name in names[1:]]
    return write_markdown(describe(results), ["", *(row["shape"] for row in rows)], cells)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    sys.exit(main())
