"""Mean tokens per forward of every published strategy on the tiny checkpoints.

The set counts all generated positions over the reference's forwards, row by row, and takes the mean of the ratios. That is
our `tpf_all` of each row; our own number over many rows is a ratio of sums and differs where rows differ in forwards.
"""

from __future__ import annotations

import json
from typing import Any

import cases
import pytest
from test_decode import run

EXPECTED: dict[str, dict[str, float]] = json.loads(cases.need(cases.ROOT / "tpf.json").read_text())
ROUNDING = 5.001e-4  # three decimals are stored


Positions = tuple[int, int]  # of a decoded row as the set counts it, and its forwards


def mean_ratio(rows: list[Positions]) -> float:
    return sum(positions / forwards for positions, forwards in rows) / len(rows)


def strategies() -> list[Any]:
    return [
        pytest.param(family, name, id=f"{family}-{name}")
        for family in cases.families()
        for name in EXPECTED.get(family, {})
    ]


def of_strategy(family: str, name: str) -> list[cases.Case]:
    """The single-prompt cases of a strategy."""
    found = [
        case
        for case in cases.load_cases(family)
        if cases.kind(case) == "decode" and case["strategy"] == name and "prompt_ids" in case["inputs"]
    ]
    assert found, f"no case of {name}"
    return found


@pytest.mark.parametrize(("family", "name"), strategies())
def test_counting_the_reference_rows_gives_the_stored_mean(family: str, name: str) -> None:
    rows = [
        (len(case["expected"]["output_ids"]), case["expected"]["nfe"]) for case in of_strategy(family, name)
    ]
    assert mean_ratio(rows) == pytest.approx(EXPECTED[family][name], abs=ROUNDING)


def our_rows(family: str, name: str) -> list[Positions]:
    """Decoded here. A pipelined canvas that stopped growing has fewer positions in the set than the filled one here."""
    found = []
    for case in of_strategy(family, name):
        length = len(case["expected"]["output_ids"])
        found += [(min(length, len(row.tokens)), row.forwards) for row in run(case)[0]]
    return found


FAST = (
    "vanilla_g64_b16_s32",
    "tad_multi_H0.5_add0.1_dec0.95_b32",
    "fastdllm_nocache_thr0.9",
    "dream_entropy_s16",
)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(*entry.values, id=entry.id, marks=[] if entry.values[1] in FAST else [pytest.mark.slow])
        for entry in strategies()
        # Where a reference counts forwards that are refused here (see test_decode.py) the means differ.
        if not any(case["quirk"] for case in of_strategy(*entry.values))
    ],
)
def test_our_decoding_of_a_strategy_has_the_stored_mean(family: str, name: str) -> None:
    assert mean_ratio(our_rows(family, name)) == pytest.approx(EXPECTED[family][name], abs=ROUNDING)
