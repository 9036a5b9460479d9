"""A fast way through the same decoding: static buffers and recorded steps, for CUDA and, unrecorded, for any device.

The plain loop says what decoding means; the engine gives the same tokens, and tests hold it to that. It serves the
decoders and models that `why_not` does not object to.
"""

from __future__ import annotations

from tad.decoding.engine.engine import Engine, engine_for, why_not

__all__ = ["Engine", "engine_for", "why_not"]
