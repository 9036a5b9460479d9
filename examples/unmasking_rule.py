"""A new unmasking rule, as a decoder: reveal where the best token is far ahead of the second best.

    python examples/unmasking_rule.py nano-llada "Tom has 12 apples and buys 7 more. How many apples does Tom have?"

A rule is a pure function of the samples at the positions that may be revealed. It is put beside a block schedule and a cache
policy; the scheduler, the batches and the CUDA graphs know nothing of it. A forward in which a rule chooses nothing reveals
the surest position all the same, so that decoding ends.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from torch import Tensor

import tad
from tad.decoding import Decoder
from tad.decoding.sampler import Samples
from tad.decoding.schedule import MultiBlock
from tad.decoding.unmasking import Candidates, Measure, Strategy


@dataclass(frozen=True)
class Lead(Strategy):
    """Fields are the decoder's parameters."""

    lead: float = 0.5

    @property
    def score(self) -> Measure:
        return "margin"  # what "surest" means where nothing is chosen

    def choose(self, samples: Samples, candidates: Candidates) -> Tensor:
        """[rows, m] bool: which candidates become tokens now."""
        return candidates.valid & (samples.margin > self.lead)


def lead_decoder(lead: float = 0.5, block: int = 32) -> Decoder:
    """TAD's schedule of several blocks at once, with this rule in place of the entropy threshold."""
    return Decoder(MultiBlock(block, block_add=0.1, decoded=0.95), Lead(lead), name="lead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--adapter")
    parser.add_argument("--gen-length", type=int, default=96)
    given = parser.parse_args()
    lm = tad.load(given.model, adapter=given.adapter, merge=given.adapter is not None)
    for lead in (0.9, 0.5, 0.1):
        answer = tad.generate(lm, given.prompt, lead_decoder(lead), given.gen_length)
        print(
            f"lead {lead}: {answer.forwards} forwards, {answer.tpf:.2f} tokens per forward: {answer.text!r}"
        )


if __name__ == "__main__":
    main()
