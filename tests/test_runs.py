"""Is it the same run: every change of what decides one is found, by its dotted name, and nothing else is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tad.runs.identity import find_difference, find_rank, flatten

LEAVES = st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.lists(st.integers(), max_size=2))
VALUES = st.recursive(
    st.dictionaries(st.text("abc", min_size=1, max_size=2), LEAVES, min_size=1, max_size=3),
    lambda inner: st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, min_size=1, max_size=3),
    max_leaves=6,
)


@given(VALUES, st.data())
def test_a_changed_field_is_found_and_named(values: dict[str, Any], data: st.DataObject) -> None:
    assert find_difference(values, copy.deepcopy(values)) is None
    field = data.draw(st.sampled_from(sorted(flatten(values))))
    changed: Any = copy.deepcopy(values)
    *sections, last = field.split(".")
    inner = changed
    for section in sections:
        inner = inner[section]
    before, inner[last] = inner[last], "another value"
    found = find_difference(values, changed)
    assert found == (field, before, "another value")
    assert str(found) == f"{field} is {before!r} there and 'another value' here"


def test_a_field_that_is_new_or_gone_is_a_difference() -> None:
    assert find_difference({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}) == ("a.c", None, 2)
    assert find_difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}) == ("a.c", 2, None)


def test_a_process_alone_is_the_first_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert find_rank() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert find_rank() == (2, 4)
