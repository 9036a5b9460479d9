"""The model as /v1/models lists it: what a client needs to know to ask it, and what the playground is drawn from."""

from __future__ import annotations

from typing import Any

from tad.decoding import Decoder
from tad.decoding.decoders import describe, explain, parameters
from tad.models import LM
from tad.serving.validation import RequestValidator
from tad.tasks.nano.samples import sample_questions


def model_card(validator: RequestValidator) -> dict[str, Any]:
    lm, settings = validator.lm, validator.settings
    return {
        "id": validator.name,
        "object": "model",
        "created": validator.created,
        "owned_by": "tad",
        "tad": {
            "family": lm.family.name,
            "context": lm.context,
            "device": str(lm.device),
            "dtype": str(lm.dtype).removeprefix("torch."),
            "adapter": lm.adapter,
            "decoder": validator.decoder,
            "decoders": [describe_decoder(decoder) for decoder in validator.decoders.values()],
            "mask": _special(lm, lm.tokens.mask),
            "ends": [_special(lm, token) for token in lm.tokens.ends],
            "limits": {
                "max_tokens": validator.max_tokens,
                "default_max_tokens": validator.default_tokens,
                "prompt_tokens": lm.context - (validator.decoders[validator.decoder].schedule.block or 1),
                "body_bytes": settings.body_bytes,
                "batch": settings.batch,
                "queue": settings.queue,
                "queue_seconds": settings.queue_seconds,
                "seconds": settings.seconds,
            },
            "examples": _examples(lm),
        },
    }


def _special(lm: LM, token: int) -> dict[str, Any]:
    return {"id": token, "text": "" if token < 0 else lm.decode([token], skip_special=False)}


def _examples(lm: LM) -> list[dict[str, str]]:
    """Two problems of each family of the nano world, where the model is one of its own."""
    return [{"title": title, "prompt": question} for title, question in sample_questions(lm.source, each=2)]


def describe_decoder(decoder: Decoder) -> dict[str, Any]:
    """What the playground shows of a decoder, and the threshold it lets one move."""
    settable, parts = parameters(decoder), describe(decoder)
    threshold = None
    if settable.get("threshold") is not None:
        largest = 2.0 if parts["rule"] == "entropy" else 1.0
        threshold = {
            "default": settable["threshold"],
            "min": 0.0,
            "max": max(largest, settable["threshold"]),
            "step": 0.01,
            "meaning": explain("threshold", decoder),
        }
    return {
        "name": decoder.name,
        **parts,
        "block": decoder.schedule.block,
        "temperature": decoder.sampling.temperature,
        "top_p": decoder.sampling.top_p,
        "threshold": threshold,
    }
