"""The tour behind `tad demo`: a tiny model with the real layout, through everything that exists so far.

It has random weights, so it says nothing about accuracy or speed. `MISSING` is what it cannot show yet.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import typer

MISSING = (
    "distillation: the trajectory losses and the student's trainer",
    "evaluation: accuracy, tokens per forward and AUP of a model",
    "serving: the OpenAI-compatible server",
)


def run() -> None:
    """Build, describe, run, decode, adapt, export and reload a tiny model of each family."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tad-demo-") as scratch:
        for config in _configs():
            _tour(config, Path(scratch), torch)
    typer.echo(f"Done in {time.perf_counter() - started:.1f} s. Not built yet:")
    for part in MISSING:
        typer.echo(f"  - {part}")


def _tour(config: Any, scratch: Path, torch: Any) -> None:
    from tad.cli.models import format_info
    from tad.decoding import decode
    from tad.models.export import export
    from tad.models.info import describe
    from tad.models.lm import load
    from tad.models.shapes import build

    folder = scratch / config.model_type
    build(config, "cpu", torch.float32).save_pretrained(folder)
    typer.echo(
        f"\n== A tiny {config.model_type} with random weights, written as the released checkpoints are =="
    )
    typer.echo(format_info(describe(folder, length=32)))

    lm = load(folder, device="cpu")
    canvas = torch.full((1, 32), lm.tokens.mask)
    canvas[0, :8] = torch.arange(8)
    with torch.no_grad():
        began = time.perf_counter()
        logits = lm.model(canvas, logits_at=torch.arange(8, 32)).logits
        took = time.perf_counter() - began
    typer.echo(
        f"one forward of 32 tokens, head at 24 masks: logits {tuple(logits.shape)}, {took * 1e3:.1f} ms"
    )

    for name in ("one-by-one", "tad"):
        decoded = decode(lm, [canvas[0, :8].tolist()], decoder=name, gen_length=64)[0]
        typer.echo(f"decoder {name}: a canvas of 64 masks finished in {decoded.forwards} forwards")

    handle = lm.attach(rank=4)
    for name, weight in lm.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    handle.save_pretrained(scratch / "adapter")
    exported = export(folder, scratch / f"{config.model_type}-merged", adapter=scratch / "adapter")
    merged = load(exported, device="cpu")
    with torch.no_grad():
        difference = (lm.model(canvas).logits - merged.model(canvas).logits).abs().max().item()
    trainable = handle.get_nb_trainable_parameters()[0]
    typer.echo(
        f"adapter with {trainable:,} parameters, merged and exported: logits differ by {difference:.1e}"
    )


def _configs() -> list[Any]:
    from tad.models import DreamConfig, LLaDAConfig

    tokens = {"mask_token_id": 255, "eos_token_id": 254, "pad_token_id": 254}
    return [
        LLaDAConfig(
            d_model=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=4,
            mlp_hidden_size=128,
            vocab_size=256,
            embedding_size=256,
            max_sequence_length=128,
            **tokens,
        ),
        DreamConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=128,
            vocab_size=256,
            max_position_embeddings=128,
            **tokens,
        ),
    ]
