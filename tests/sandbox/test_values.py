"""The values that cross between tests and program: they arrive as they left, and nothing else arrives."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tad_sandbox.inside.values import decode, encode, refresh

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.dates()
    | st.timedeltas()
)
hashable = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
values = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)
documents: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(st.sampled_from("ltsfdibBcrSTRenphxmg") | inner, max_size=4),
    max_leaves=12,
)


def refuse(value: object) -> Any:
    raise TypeError(f"not plain: {type(value).__name__}")


def carry(value: object) -> Any:
    return decode(json.loads(json.dumps(encode(value, refuse))), refuse)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, float):
        return math.copysign(1, one) == math.copysign(1, other) and one == other
    return bool(one == other)


@given(values)
def test_a_plain_value_arrives_as_it_left(value: object) -> None:
    assert same(carry(value), value)


@pytest.mark.parametrize(
    "value",
    [
        10**6000,
        -(2**53),
        float("inf"),
        "\ud800 lone",
        range(1, 9, 2),
        slice(1, None),
        ...,
        int,
        ValueError,
        Counter("aab"),
        OrderedDict([(2, 1), (1, 2)]),
        deque([1, 2], maxlen=3),
        datetime(2020, 1, 2, 3, tzinfo=UTC),
        [Decimal("1.10"), Fraction(1, 3), date(2020, 1, 1), timedelta(days=-1)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_further_values_arrive(value: object) -> None:
    arrived = carry(value)
    assert type(arrived) is type(value)
    assert arrived == value


def test_a_subclass_is_not_plain() -> None:
    for base in (int, str, float, list, dict, tuple, set, bytes):
        with pytest.raises(TypeError, match="not plain"):
            encode(type("Sub", (base,), {})(), refuse)


@given(documents)
def test_whatever_is_received_is_a_plain_value_or_an_error(document: Any) -> None:
    try:
        value = decode(document, refuse)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, ImportError):
        return
    encode(value, refuse)  # plain again: nothing else was made


def test_containers_keep_their_identity() -> None:
    row = [1, 2]
    grid: list[Any] = [row, {"a": row}]
    assert refresh(grid, [[9], {"a": [9], "b": 1}, 3]) is grid
    assert grid[0] is row
    assert grid == [[9], {"a": [9], "b": 1}, 3]
