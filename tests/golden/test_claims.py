"""Every case of the parity set belongs to a test module: nothing in it goes unread."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from cases import CLAIMED, CLAIMED_LATER, ROOT, families, kind, load_cases, meta

HERE = Path(__file__).parent


@pytest.mark.parametrize("family", families())
def test_every_kind_of_case_is_claimed_by_a_module(family: str) -> None:
    counts = Counter(kind(case) for case in load_cases(family))
    assert sum(counts.values()) == meta(family)["num_cases"]
    unclaimed = {name: count for name, count in counts.items() if name not in (*CLAIMED, *CLAIMED_LATER)}
    assert not unclaimed


@pytest.mark.parametrize("module", sorted(set(CLAIMED.values())))
def test_a_claiming_module_exists(module: str) -> None:
    assert (HERE / module).is_file()


def test_every_file_next_to_the_families_is_claimed() -> None:
    stems = {path.stem for path in ROOT.glob("*.json")}
    assert stems <= set(CLAIMED) | set(CLAIMED_LATER)


@pytest.mark.parametrize("family", families())
def test_case_names_are_unique(family: str) -> None:
    names = [case["name"] for case in load_cases(family)]
    assert len(set(names)) == len(names)
