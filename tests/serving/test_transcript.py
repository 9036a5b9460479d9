"""Text while tokens appear in any order: final, complete, and the same however the reveals are cut."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tad.serving.transcript import Transcript

MASK, EOS, EOT, SPECIAL = 256, 257, 258, 259


def spell(ids: list[int]) -> str:
    """A byte-level tokenizer: ids below 256 are bytes, the others special tokens that are left out."""
    return bytes(token for token in ids if token < 256).decode("utf-8", "replace")


def expected(tokens: list[int], limit: int, stops: tuple[str, ...]) -> tuple[str, str]:
    """The text and the reason, from the whole row, read one character after the other."""
    ended = False
    answer = []
    for token in tokens[:limit]:
        if token in (EOS, EOT):
            ended = True
            break
        answer.append(token)
    text = spell(answer)
    for size in range(1, len(text) + 1):
        ends = [stop for stop in stops if text[:size].endswith(stop)]
        if ends:
            return text[: size - len(max(ends, key=len))], "stop"
    return text, "stop" if ended else "length"


def run(
    tokens: list[int], limit: int, stops: tuple[str, ...], dice: random.Random
) -> tuple[Transcript, list[str]]:
    """Reveal the tokens in a random order, a random number at a time, until the text is complete."""
    transcript = Transcript(spell, len(tokens), limit, MASK, (EOS, EOT), stops)
    left = list(range(len(tokens)))
    dice.shuffle(left)
    pieces, step = [], 0
    while transcript.reason is None:
        now = sorted(left.pop() for _ in range(min(len(left), dice.choice((0, 1, 1, 2, 5)))))
        step += 1
        pieces.append(transcript.write(step, now, [tokens[i] for i in now], [1.0] * len(now)))
    return transcript, pieces


texts = st.text(alphabet="ab é€😀", max_size=20).map(lambda text: list(text.encode()))
rows = st.lists(
    st.one_of(texts, st.lists(st.sampled_from([*range(90, 256), EOS, EOT, SPECIAL]), max_size=4)), min_size=1
).map(lambda parts: [token for part in parts for token in part][:48] or [97])
stop_texts = st.lists(st.text(alphabet="ab é€😀", min_size=1, max_size=4), max_size=3).map(tuple)


@given(rows, st.integers(1, 50), stop_texts, st.integers(0, 10**6).map(random.Random))
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_text_of_the_whole_row(
    tokens: list[int], limit: int, stops: tuple[str, ...], dice: random.Random
) -> None:
    transcript, pieces = run(tokens, limit, stops, dice)
    assert "".join(pieces) == transcript.text
    assert (transcript.text, transcript.reason) == expected(tokens, limit, stops)


@given(rows, st.integers(1, 50), stop_texts, st.integers(0, 10**6).map(random.Random))
@settings(max_examples=80, deadline=None)
def test_counted_tokens_hold_the_text_and_do_not_depend_on_the_order(
    tokens: list[int], limit: int, stops: tuple[str, ...], dice: random.Random
) -> None:
    first, _ = run(tokens, limit, stops, dice)
    second, _ = run(tokens, limit, stops, dice)
    assert first.counted == second.counted
    assert spell(tokens[: first.counted]).startswith(first.text)
    if first.reason == "length":
        assert first.counted == min(limit, len(tokens))


@pytest.mark.parametrize(
    ("stops", "steps"),
    [
        ((), [([1, 2], b"bc", ""), ([0], b"a", "abc"), ([3], b"d", "d")]),  # it waits for the masks before it
        (
            (),
            [([0, 1], "€".encode()[:2], ""), ([2], "€".encode()[2:], "€")],
        ),  # and for all bytes of a character
        (("###",), [([0, 1, 2], b"a##", "a"), ([3], b"b", "##b")]),  # what may begin a stop text is held back
    ],
)
def test_text_is_given_out_as_soon_as_nothing_can_change_it(
    stops: tuple[str, ...], steps: list[tuple[list[int], bytes, str]]
) -> None:
    transcript = Transcript(spell, 4, 4, MASK, (EOS, EOT), stops)
    for number, (positions, tokens, text) in enumerate(steps, start=1):
        assert transcript.write(number, positions, list(tokens), [0.5] * len(tokens)) == text


def test_masks_behind_the_end_are_filled_and_earlier_ones_are_not_touched() -> None:
    transcript = Transcript(spell, 5, 5, MASK, (EOS, EOT))
    transcript.write(1, [3], list(b"x"), [1.0])
    transcript.write(2, [0, 1], [97, EOT], [1.0, 1.0])
    assert (transcript.reason, transcript.counted) == ("stop", 2)
    transcript.fill_end()
    assert transcript.tokens == [97, EOT, EOS, 120, EOS]
    assert transcript.steps == [2, 2, 0, 1, 0]


def test_a_cut_answer_leaves_its_masks() -> None:
    transcript = Transcript(spell, 4, 2, MASK, (EOS, EOT))
    transcript.write(1, [0, 1], list(b"ab"), [1.0, 1.0])
    transcript.fill_end()
    assert (transcript.reason, transcript.tokens, transcript.masks) == ("length", [97, 98, MASK, MASK], 2)


def test_active_blocks_exist_and_have_masks() -> None:
    transcript = Transcript(spell, 6, 6, MASK, (EOS, EOT))
    transcript.write(1, [0, 1], list(b"ab"), [1.0, 1.0])
    assert transcript.active(block=2, created=2) == [1]
    assert transcript.active(block=2, created=3) == [1, 2]
