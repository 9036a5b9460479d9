"""What a checkpoint is, without loading its weights: the answer to `tad info`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tad.errors import TadError
from tad.models import lora
from tad.models.attention import BlockLayout
from tad.models.checkpoint import Checkpoint
from tad.models.family import Family, family_of
from tad.models.shape import Shape
from tad.models.shapes import Cost, build, forward_cost, shape_config
from tad.models.source import locate
from tad.models.tokenizer import load_tokenizer
from tad.models.tokens import SpecialTokens, read_special_tokens
from tad.models.transformer import MaskedDiffusionModel

LENGTH = 384  # tokens of the forward whose cost is given, where nothing else is asked for


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter as its files describe it; it has been held to the model."""

    source: str
    rank: int
    alpha: float
    parameters: int
    gated: bool = False  # it acts on masks only, and the rest is the parent


@dataclass(frozen=True)
class ModelInfo:
    """The facts of one model."""

    source: str
    family: str
    parameters: int
    shape: Shape
    dtype: str
    shifted: bool
    tokens: SpecialTokens
    tokenizer: str | None
    lora_targets: tuple[str, ...]
    cost: Cost
    adapter: AdapterInfo | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def describe(
    source: str | Path,
    adapter: str | Path | None = None,
    length: int | None = None,
    revision: str | None = None,
) -> ModelInfo:
    """Facts of a directory or hub id. A directory's weights are checked by their headers.

    A hub's weights are fetched only where nothing but they can tell the dtype.
    """
    local = Path(source).expanduser().exists()
    checkpoint = Checkpoint.open(locate(source, revision, weights=local))
    if not local and checkpoint.declared_dtype is None:
        checkpoint = Checkpoint.open(locate(source, revision))
    if local:
        checkpoint.verify()
    converted = checkpoint.conversion
    if converted is not None and adapter is not None:
        raise TadError(f"{source}: a converted model has its own adapter; leave out --adapter")
    tokenizer = load_tokenizer(checkpoint)
    return _describe(
        str(source),
        checkpoint.family,
        checkpoint.on_meta(),
        checkpoint.dtype,
        read_special_tokens(checkpoint, tokenizer),
        None if tokenizer is None else f"{type(tokenizer).__name__}, {len(tokenizer)} tokens",
        adapter if converted is None else converted.folder,
        length,
        gated=converted is not None,
    )


def describe_shape(name: str, length: int | None = None) -> ModelInfo:
    """Facts of a named shape, in bf16; no weights exist."""
    config = shape_config(name)
    tokens = SpecialTokens(config.mask_token_id, config.eos_token_id, config.pad_token_id)
    family, model = family_of(config.model_type), build(config, "meta")
    return _describe(f"{name} (shape only)", family, model, torch.bfloat16, tokens, None, None, length)


def _describe(
    source: str,
    family: Family,
    model: MaskedDiffusionModel,
    dtype: torch.dtype,
    tokens: SpecialTokens,
    tokenizer: str | None,
    adapter: str | Path | None,
    length: int | None,
    gated: bool = False,
) -> ModelInfo:
    shape = model.shape
    if length is None:
        length = min(LENGTH, shape.context)
    if not 1 <= length <= shape.context:
        raise TadError(f"length {length} is outside the model's context (1 to {shape.context})")
    found = None
    if adapter is not None:
        _, config, size = lora.verify_adapter(adapter, model, family, gated)
        found = AdapterInfo(str(adapter), config.r, float(config.lora_alpha), size, gated)
    return ModelInfo(
        source=source,
        family=family.name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        shifted=bool(family.logit_shift),
        tokens=tokens,
        tokenizer=tokenizer,
        lora_targets=tuple(dict.fromkeys(path for _, path in model.projections())),
        cost=forward_cost(shape, length, dtype),
        adapter=found,
    )


def format_info(facts: ModelInfo) -> str:
    """The facts as aligned lines."""
    tokens, cost, adapter, shape = facts.tokens, facts.cost, facts.adapter, facts.shape
    sizes = f"{shape.layers} x width {shape.width}, {shape.heads} heads ({shape.kv_heads} key heads), MLP {shape.mlp}"
    if (some := shape.experts) is not None:
        sizes += (
            f", experts {some.num_experts_per_tok} of {some.num_experts}, width {some.moe_intermediate_size}"
        )
    named = {
        "mask": tokens.mask if tokens.mask >= 0 else None,
        "eos": tokens.eos,
        "pad": tokens.pad,
        "bos": tokens.bos,
        "eot": tokens.eot,
    }
    lines = {
        "model": facts.source,
        "family": facts.family + (" (logits shifted by one)" if facts.shifted else ""),
        "parameters": f"{facts.parameters:,}",
        "layers": sizes,
        "attention": _attention(shape.blocks),
        "vocabulary": f"{shape.vocab:,} rows{', head tied' if shape.tied else ''}",
        "tokenizer": facts.tokenizer or "none (token ids only)",
        "special tokens": ", ".join(
            f"{name} {'-' if number is None else number}" for name, number in named.items()
        ),
        "context": f"{shape.context:,}",
        "dtype": facts.dtype,
        "LoRA targets": ", ".join(facts.lora_targets),
        "adapter": "none"
        if adapter is None
        else f"{adapter.source} (rank {adapter.rank}, alpha {adapter.alpha:g}, {adapter.parameters:,} parameters)"
        + (", on masks only" if adapter.gated else ""),
        **_next_step(shape.blocks, facts.source),
        f"forward of {cost.length}": f"{_scaled(cost.flops)}FLOP; {_scaled(cost.flops_per_token)}FLOP per token,"
        f" {_scaled(cost.head_flops_per_token)}FLOP of it the head",
        "bytes read": f"{_scaled(cost.weight_bytes)}B of weights per forward;"
        f" cache {_scaled(cost.cache_bytes_per_position)}B per position",
    }
    return "\n".join(f"{name:<16}{value}" for name, value in lines.items())


def _attention(layout: BlockLayout | None) -> str:
    if layout is None:
        return "full"
    if not layout.causal:
        return f"block-causal, blocks of {layout.size}"
    return "token-causal" + (f", blocks of {layout.size} behind it" if layout.drafts else "")


def _next_step(layout: BlockLayout | None, source: str) -> dict[str, str]:
    """What to do with a checkpoint that a diffusion toolkit would not be expected to read."""
    if layout is None or not layout.causal:
        return {}
    if layout.drafts:
        return {"decoders": "verified (the text is the autoregressive one), autoregressive, or by blocks"}
    return {
        "decoders": "autoregressive: one token per forward",
        "next": f"`tad convert {source} --out DIR` makes it fill several masks per forward and verify them itself",
    }


def _scaled(number: float) -> str:
    """1234567 as '1.235 M'."""
    for prefix in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.4g} {prefix}"
        number /= 1000
    return f"{number:.4g} T"
