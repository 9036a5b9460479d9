"""The values that cross between tests and program: they arrive as they left, and nothing else arrives.

The second half speaks for the program: whatever it answers, the tests' process has a plain value, an object that can only
be handed back, or refuses.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tad_sandbox.inside.channel import Channel, Gone
from tad_sandbox.inside.stubs import JUDGES, CannotJudge, Handle, Judge
from tad_sandbox.inside.values import Malformed, decode, encode, refresh

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
parts = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.dictionaries(st.text(), st.none())
)
tags = st.sampled_from(
    [
        *"ltsfdibBcrRDnkvahHmLgAEX",
        "code",
        "Decimal",
        "date",
        "Counter",
        "deque",
        "<f8",
        "ValueError",
        "KeyError",
    ]
)
documents: Any = st.recursive(
    parts | tags,
    lambda inner: st.builds(lambda tag, rest: [tag, *rest], tags, st.lists(inner, max_size=5)),
    max_leaves=15,
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
        bytearray(b"x"),
        Counter("aab"),
        OrderedDict([(2, 1), (1, 2)]),
        defaultdict(list, {1: [2]}),
        deque([1, 2], maxlen=3),
        datetime(2020, 1, 2, 3, tzinfo=timezone.utc),
        time(1, 2),
        [Decimal("1.10"), Fraction(1, 3), date(2020, 1, 1), timedelta(days=-1)],
        {1: 2}.items(),
        {1: 2}.keys(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_further_values_arrive(value: object) -> None:
    arrived = carry(value)
    assert type(arrived) is type(value)
    assert arrived == value


def test_numbers_of_numpy_arrive_as_pythons_own_and_arrays_as_arrays() -> None:
    assert (type(carry(np.float16("inf"))), carry(np.float16("inf"))) == (float, math.inf)
    assert (type(carry(np.uint8(9))), carry(np.bool_(True))) == (int, True)
    array = np.arange(6.0).reshape(2, 3)
    assert carry(array).dtype == array.dtype
    np.testing.assert_array_equal(carry(array), array)


@pytest.mark.parametrize(
    "array", [np.zeros(0), np.zeros(2, "f2"), np.zeros(2, object)], ids=["empty", "narrow", "objects"]
)
def test_arrays_that_compare_otherwise_than_numbers_are_not_plain(array: Any) -> None:
    with pytest.raises(TypeError, match="not plain"):
        encode(array, refuse)


def test_a_subclass_is_not_plain() -> None:
    for base in (int, str, float, list, dict, tuple, set, bytes, Decimal, Counter, date):
        kind = type("Sub", (base,), {})
        value = kind(2020, 1, 1) if base is date else kind()
        with pytest.raises(TypeError, match="not plain"):
            encode(value, refuse)
        with pytest.raises(TypeError, match="not plain"):
            encode({value} if kind.__hash__ else [value], refuse)


@given(documents)
def test_whatever_is_read_is_a_plain_value_or_malformed(document: Any) -> None:
    def reject(data: list) -> Any:
        raise Malformed("a reference")

    try:
        value = decode(document, reject)
    except Malformed:
        return
    encode(value, refuse)  # plain again: nothing else was made


def test_containers_keep_their_identity() -> None:
    row = [1, 2]
    grid: list[Any] = [row, {"a": row}]
    assert refresh(grid, [[9], {"a": [9], "b": 1}, 3]) is grid
    assert grid[0] is row
    assert grid == [[9], {"a": [9], "b": 1}, 3]


@pytest.fixture
def judge() -> Iterator[tuple[Judge, Channel]]:
    asked, answered = os.pipe(), os.pipe()
    judge = Judge(Channel(answered[0], asked[1]))
    JUDGES.insert(0, judge)
    yield judge, Channel(asked[0], answered[1])
    JUDGES.remove(judge)
    for end in (*asked, *answered):
        os.close(end)


def answer(judge: tuple[Judge, Channel], reply: Any) -> Any:
    """What a question to the program gives when it answers this."""
    tests, program = judge
    tests.refused = tests.broken = None
    tests.loans.clear()
    tests.channel.buffer.clear()
    program.send(reply)
    return tests.ask("names")


def check_plain(value: Any) -> None:
    """Plain, or an object that can only be handed back; what looks like an iterator is not read here."""
    names = ("Handle", "CallableHandle", "Member", "generator", "chain", "coroutine", "ErrorKind")
    if type(value).__name__ == "coroutine":
        value.close()
    if type(value).__name__ in names or isinstance(value, BaseException):
        return
    encode(value, lambda inner: check_plain(inner) or [])


@given(
    st.lists(documents, max_size=6)
    | st.tuples(st.sampled_from(["ok", "error"]), documents).map(lambda two: [*two, [], [], []])
)
def test_no_answer_of_a_program_makes_the_tests_do_anything_but_refuse(reply: list) -> None:
    asked, answered = os.pipe(), os.pipe()
    pair = Judge(Channel(answered[0], asked[1])), Channel(asked[0], answered[1])
    JUDGES.insert(0, pair[0])
    try:
        raised: BaseException | None = None
        value = None
        try:
            value = answer(pair, reply)
        except BaseException as error:
            raised = error
        if isinstance(raised, Gone | CannotJudge):
            assert pair[0].broken is not None or pair[0].refused is not None
        elif raised is not None:  # an error of the program: what it answered with, and nothing else
            assert reply[0] != "ok", raised
            assert pair[0].broken is None
        else:
            check_plain(value)
    finally:
        JUDGES.remove(pair[0])
        for end in (*asked, *answered):
            os.close(end)


@given(st.binary(max_size=60))
def test_no_bytes_on_the_channel_make_the_tests_do_anything_but_refuse(data: bytes) -> None:
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    try:
        with pytest.raises(Gone):
            Channel(read, -1).receive()
    finally:
        os.close(read)


CAUSE = ["E", 2, "KeyError", "y", ["t", "y"]]


def test_an_error_comes_with_its_cause(judge: tuple[Judge, Channel]) -> None:
    with pytest.raises(ValueError, match="x") as caught:
        answer(judge, ["error", ["E", 1, "ValueError", "x", ["t", "x"], CAUSE, CAUSE, False], [], [], []])
    assert type(caught.value.__cause__) is type(caught.value.__context__) is KeyError
    assert caught.value.__suppress_context__ is False


@pytest.mark.parametrize("chain", [[3, None, True], [None, "KeyError", True], [CAUSE], [CAUSE] * 4])
def test_an_error_whose_cause_is_none_is_refused(judge: tuple[Judge, Channel], chain: list) -> None:
    with pytest.raises(Gone):
        answer(judge, ["error", ["E", 1, "ValueError", "x", ["t", "x"], *chain], [], [], []])


def test_an_error_with_ten_thousand_causes_is_refused(judge: tuple[Judge, Channel]) -> None:
    error: Any = None
    for _ in range(10_000):
        error = ["E", 1, "ValueError", "x", ["t", "x"], error, None, True]
    with pytest.raises(Malformed):
        decode(error, judge[0]._resolve)


@pytest.mark.parametrize(
    "use",
    [
        bool,
        len,
        iter,
        next,
        reversed,
        str,
        repr,
        int,
        float,
        complex,
        abs,
        round,
        hash,
        math.floor,
        lambda one: f"{one:.3f}",
        lambda one: one == 9,
        lambda one: one != 9,
        lambda one: one < 9,
        lambda one: one + 9,
        lambda one: 9 - one,
        lambda one: one @ one,
        lambda one: ~one,
        lambda one: 9 in one,
        lambda one: one in (9, 8),
        lambda one: one in {9: 1},
        lambda one: [one] == [9],
        lambda one: isinstance(one, int),
        lambda one: one.__class__,
        lambda one: one.startswith("x"),
        lambda one: one.__enter__(),
        lambda one: "%s" % one,  # noqa: UP031
        lambda one: [*one],
        lambda one: math.isclose(one, 9),
        lambda one: json.dumps(one),
        lambda one: np.allclose(one, 9),
    ],
)
def test_an_object_of_the_program_answers_nothing_itself_and_the_refusal_stays(
    judge: tuple[Judge, Channel], use: Any
) -> None:
    one = answer(judge, ["ok", ["h", 1], [], [], []])
    assert type(one) is Handle
    with pytest.raises(CannotJudge):
        use(one)
    assert judge[0].refused
