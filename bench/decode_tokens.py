"""Rows of bench/decode.py on tokens: how often the engine, the loop and fp8 weights disagree, and on what canvas."""

from __future__ import annotations

import copy
import statistics
import sys
from pathlib import Path

import torch
from torch import Tensor

from decode_bench import PACE, Bench, Row, row
from tad.decoding import Engine, decode, get_decoder
from tad.decoding.engine.buckets import StepShape
from tad.decoding.engine.slots import Method, Slots
from tad.decoding.engine.step import plan
from tad.models import LM

GOLDEN = Path(__file__).parents[1] / "tests" / "decoding"


@row("tokens")
def measure_tokens(bench: Bench) -> Row:
    """How often tokens differ: whole decodes, and predictions on the same canvas, where nothing adds up.

    Random weights predict nearly flat, so rounding changes many tokens; `clear` are the positions where fp32 puts the
    best logit 0.25 or more above the second.
    """
    fp8_lm, fp8_engine = bench.quantized()
    prompts = bench.prompts(2)
    found: Row = {}
    for name in ("tad", "tad-cached"):
        decoder = bench.decoder(name)
        plain = decode(bench.lm, prompts, decoder, bench.length, engine="plain")
        ways = {"engine": (bench.lm, bench.engine), "fp8": (fp8_lm, fp8_engine)}
        for label, (lm, engine) in ways.items():
            rows = decode(lm, prompts, decoder, bench.length, engine=engine)
            found[f"{label}, whole {name}"] = differing(
                [a for one in rows for a in one.tokens], [a for one in plain for a in one.tokens]
            )
    truth = copy.deepcopy(bench.lm.model).float()
    counts: dict[str, list[float]] = {}
    distinct: list[int] = []  # one for all masks of a canvas would make the shares below all or nothing
    for canvas in bench.canvases(4):
        at, ours = predict(bench.engine, bench.lm, canvas)
        with torch.inference_mode():
            plain, wide = (model(canvas, logits_at=at).logits[0].float() for model in (bench.lm.model, truth))
        small = predict(fp8_engine, fp8_lm, canvas)[1]
        distinct.append(wide.argmax(-1).unique().numel())
        best = wide.topk(2, dim=-1).values
        clear = best[:, 0] - best[:, 1] >= 0.25
        pairs = {
            "engine, plain": (ours, plain),
            "engine, fp32": (ours, wide),
            "plain, fp32": (plain, wide),
            "fp8, engine": (small, ours),
        }
        for label, (one, other) in pairs.items():
            differs = one.argmax(-1) != other.argmax(-1)
            counts.setdefault(label, []).append(differs.float().mean().item())
            if clear.any():
                counts.setdefault(f"{label}, clear", []).append(differs[clear].float().mean().item())
    found.update({label: statistics.mean(shares) for label, shares in counts.items()})
    return {"differing": found, "distinct_predictions": distinct}


@row("tokens-trained")
def measure_trained(bench: Bench) -> Row:
    """The tiny trained checkpoints of the parity set in bf16: the engine against the loop."""
    sys.path.insert(0, str(GOLDEN))
    from parity_models import tiny, tiny_prompts

    found = {}
    with PACE.off():
        for family in ("llada", "dream"):
            lm = copy.deepcopy(tiny(family))
            lm.model.to(bench.device, torch.bfloat16)
            engine = Engine(lm.model, compiled=bench.cuda, bucketed=True)
            for name in ("tad", "tad-cached"):
                ways = [
                    decode(lm, tiny_prompts(family), name, 64, batch_size=4, engine=one)
                    for one in ("plain", engine)
                ]
                found[f"{family} {name}"] = differing(
                    *([a for one in way for a in one.tokens] for way in ways)
                )
    return {"differing": found}


def differing(one: list[int], other: list[int]) -> float:
    return statistics.mean(a != b for a, b in zip(one, other, strict=True))


@torch.inference_mode()
def predict(engine: Engine, lm: LM, canvas: Tensor) -> tuple[Tensor, Tensor]:
    """The engine's logits (fp32) at every mask of a canvas [1, columns], and which outputs they are of."""
    masks = (canvas[0] == lm.tokens.mask).nonzero()
    prompt = int(masks[0, 0])
    length, shift = canvas.shape[1] - prompt, lm.family.logit_shift
    whole = get_decoder("fast-dllm", lm.family.name, block=None, stop="off").prepared(length, shift)
    method = Method(whole, lm.tokens, shift, prompt, length)
    stepper = engine._stepper(method, 1)
    fresh = Slots.start_rows(method, [canvas[0, :prompt].tolist()], [0], canvas.device)
    fresh.canvas.copy_(canvas)
    plan(fresh, method)
    stepper.slots.put(torch.arange(1, device=canvas.device), fresh)
    _, fed, candidates = fresh.facts[0, :3].tolist()
    shape = StepShape.exact([fed], [candidates], alone=True).rounded(1, method.columns, length)
    rows = stepper.slots.working()
    at = stepper.prepare(rows, shape.tokens, shape.window, shape.candidates, shape.widest, False)
    hidden = engine.network.outputs(
        rows.canvas, stepper.lent, at, stepper.rotary, shape.window, shape.widest, method.keeps_outputs
    )
    return at.wanted_column[:candidates], lm.model.head(hidden)[:candidates].float()
