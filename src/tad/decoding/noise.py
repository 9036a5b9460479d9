"""Random numbers that depend on (seed, step, position, token) and on nothing else.

A generator's stream would tie a row's samples to its place in the batch. A hash does not: a sampled row gives the
same tokens alone, in any batch and in any order, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Scramble int64 values (the splitmix64 finaliser; products wrap around)."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def uniform(seed: Tensor, step: Tensor, position: Tensor, tokens: int) -> Tensor:
    """[n, tokens] fp32 in (0, 1) for n triples of seed, step and position (int64, [n])."""
    key = mix(mix(mix(seed) ^ step) ^ position)
    token = torch.arange(tokens, device=key.device, dtype=torch.int64)
    bits = _shift(mix(key[:, None] ^ (token * _GOLDEN)), 40)  # 24 bits, exact in fp32
    return (bits.float() + 0.5) * 2.0**-24


def gumbel(seed: Tensor, step: Tensor, position: Tensor, tokens: int) -> Tensor:
    """Standard Gumbel noise of the same shape: argmax(logits / T + gumbel) samples softmax(logits / T)."""
    return -torch.log(-torch.log(uniform(seed, step, position, tokens)))
