"""CUDA graphs for the decoding step: packed tokens, fused weights, the whole step captured. Without CUDA, the same uncaptured.

The plain forward says what decoding means; this one gives the same tokens, and tests hold it to that. It serves the
decoders and models that `why_not` does not object to.
"""

from __future__ import annotations

from tad.decoding.engine.graph import GraphEngine, engine_for, why_not

__all__ = ["GraphEngine", "engine_for", "why_not"]
