"""Which states are visited, and how items become batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tad.errors import TadError
from tad.training.batches import Split, plan_batches
from tad.training.states import TrajectorySet, draw_items, draw_steps, read_stores
from tiny_trajectory import make_meta, make_trajectory, write_rows


def made(
    steps: list[int], length: int = 12, prompts: list[int] | None = None, references: list[int] | None = None
) -> pa.Table:
    """Trajectories t0, t1, ... of so many real steps, as a table of a store."""
    count = len(steps)
    prompts, references = prompts or [5] * count, references or [4] * count
    return pa.table(
        {
            "id": [f"t{i}" for i in range(count)],
            "n_real": steps,
            "plain_ids": [list(range(n)) for n in prompts],
            "privileged_ids": [list(range(n + more)) for n, more in zip(prompts, references, strict=True)],
            "tokens": [list(range(length))] * count,
            "reveal": [list(range(1, length + 1))] * count,
        }
    )


def some(count: int = 40, seed: int = 0) -> pa.Table:
    draws = np.random.default_rng(seed)
    return made(*(draws.integers(*ends, count).tolist() for ends in ((4, 13),)), 12, draws.integers(60, 200, count).tolist(),
                draws.integers(30, 120, count).tolist())  # fmt: skip


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 5), st.integers(0, 5))
def test_each_of_as_many_equal_parts_of_the_steps_gives_one_state(
    states: int, part: int, seed: int, epoch: int
) -> None:
    drawn = draw_steps(states * part, states, seed, epoch, "a")
    assert (drawn // part).tolist() == list(range(states))


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 5))
def test_unequal_parts_still_give_distinct_states_without_large_gaps(
    steps: int, states: int, epoch: int
) -> None:
    drawn = draw_steps(steps, states, 0, epoch, "a")
    assert len(drawn) == min(steps, states)
    gaps = np.diff([-1, *drawn, steps])
    assert gaps.min() >= 1
    assert gaps.max() <= 2 * np.ceil(steps / len(drawn))


def test_over_many_epochs_every_state_is_visited_equally_often() -> None:
    visits = np.bincount(np.concatenate([draw_steps(11, 4, 0, epoch, "a") for epoch in range(4000)]))
    assert np.abs(visits / 4000 - 4 / 11).max() < 0.03


def test_all_visits_every_state_once() -> None:
    rows = TrajectorySet(some())
    items = draw_items(rows, "all", seed=0, epoch=0)
    assert len(items) == rows.steps(filler=False).sum()
    assert len({tuple(item) for item in items.tolist()}) == len(items)


def test_filler_states_are_visited_only_when_asked_for() -> None:
    rows = TrajectorySet(made([4]))
    assert draw_items(rows, "all", 0, 0)[:, 1].tolist() == [0, 1, 2, 3]
    assert draw_items(rows, "all", 0, 0, filler=True)[:, 1].tolist() == list(range(12))


def test_a_draw_depends_on_seed_epoch_and_id_and_on_nothing_else() -> None:
    def draw(seed: int = 0, epoch: int = 0, name: str = "a") -> list[int]:
        return draw_steps(256, 8, seed, epoch, name).tolist()

    assert draw() == draw()
    others = [draw(seed=1), draw(epoch=1), draw(name="b")]
    assert all(other != draw() for other in others)
    rows = some(20)
    alone = TrajectorySet(rows.slice(7, 1))
    items = draw_items(TrajectorySet(rows), 3, 5, 2)
    assert items[items[:, 0] == 7][:, 1].tolist() == draw_items(alone, 3, 5, 2)[:, 1].tolist()


@given(st.integers(8, 400), st.integers(1, 8), st.integers(1, 6), st.integers(0, 3))
def test_an_epoch_uses_every_item_at_most_once_and_leaves_out_less_than_a_batch(
    items: int, size: int, pool: int, epoch: int
) -> None:
    lengths = np.random.default_rng(0).integers(1, 50, (items, 2))
    batches = plan_batches(lengths, size, pool, seed=1, epoch=epoch)
    used = batches.reshape(-1).tolist()
    assert len(used) == len(set(used)) == items // size * size


def test_epochs_differ_and_repeat_exactly() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, (100, 2))
    first, again, second = (plan_batches(lengths, 10, 2, 0, epoch) for epoch in (0, 0, 1))
    assert (first == again).all()
    assert not (first == second).all()


@pytest.mark.parametrize(("micro", "ranks"), [(8, 1), (4, 1), (1, 1), (4, 2), (2, 2), (1, 8)])
def test_micro_batches_and_processes_only_split_a_batch(micro: int, ranks: int) -> None:
    batch = np.random.default_rng(0).permutation(8)
    parts = [Split(8, micro, rank, ranks).cut(batch) for rank in range(ranks)]
    assert Split(8, micro, 0, ranks).accumulation == 8 // micro // ranks
    assert {part.shape for part in parts} == {(8 // micro // ranks, micro)}
    assert sorted(np.concatenate(parts).reshape(-1).tolist()) == list(range(8))


def test_a_batch_that_does_not_divide_names_a_micro_batch_that_does() -> None:
    with pytest.raises(TadError, match=r"batch\.size 256 .*batch\.micro=2"):
        Split(256, 3, 0, 8)
    with pytest.raises(TadError, match=r"batch\.size 256 .*3 processes"):
        Split(256, 3, 0, 3)


def test_fewer_states_than_a_batch_is_an_error() -> None:
    with pytest.raises(TadError, match=r"batch\.size 64 .*10 states"):
        plan_batches(np.ones((10, 2)), 64, 1, 0, 0)


@pytest.mark.parametrize(
    ("size", "micro", "pool"),
    [(256, 4, 1), (256, 32, 1), (256, 256, 8), (256, 4, 8), (64, 16, 8), (40, 5, 8), (21, 7, 8)],
)
def test_grouping_by_length_keeps_padding_under_a_tenth(size: int, micro: int, pool: int) -> None:
    """Prompts of 60 to 200 tokens, references of 30 to 120, canvas of 96: both canvases together."""
    rows = TrajectorySet(some(1000))
    lengths = rows.lengths(privileged=True)
    items = draw_items(rows, 4, 0, 0)
    widths = lengths[items[:, 0]] + 96

    def padding(batches: np.ndarray) -> float:
        parts = [
            widths[part, side]
            for batch in batches
            for part in Split(size, micro).cut(batch)
            for side in (0, 1)
        ]
        return 1 - sum(part.sum() for part in parts) / sum(len(part) * part.max() for part in parts)

    grouped = padding(plan_batches(widths, size, pool, 0, 0))
    random = padding(
        np.random.default_rng(0).permutation(len(items))[: len(items) // size * size].reshape(-1, size)
    )
    assert grouped < 0.1
    assert random > 0.1


def write_store(folder: Path, names: list[str], gen_length: int = 3) -> Path:
    rows = [make_trajectory(name, tokens=[4, 5, 6], reveal=[2, 1, 3], n_real=2) for name in names]
    return write_rows(folder, rows, make_meta(gen_length=gen_length, examples=len(names)))


def test_several_stores_are_read_in_order(tmp_path: Path) -> None:
    rows = read_stores([write_store(tmp_path / "a", ["x", "y"]), write_store(tmp_path / "b", ["z"])])
    assert rows.ids == ["x#0", "y#0", "z#0"]
    row = rows[2]
    assert row.plain_ids.tolist() == [1, 2, 3]
    assert row.privileged_ids.tolist() == [1, 9, 2, 3]
    assert (row.tokens.tolist(), row.reveal.tolist(), row.n_real) == ([4, 5, 6], [2, 1, 3], 2)
    assert rows.steps(filler=False).tolist() == [2, 2, 2]


def test_an_empty_store_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(TadError, match="/empty: "):
        read_stores([write_store(tmp_path / "empty", [])])


def test_a_folder_that_is_no_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TadError, match=r"store\.json"):
        read_stores([tmp_path])


def test_stores_of_different_canvases_do_not_mix(tmp_path: Path) -> None:
    stores = [write_store(tmp_path / "a", ["x"]), write_store(tmp_path / "b", ["y"], gen_length=4)]
    with pytest.raises(TadError, match=r"/b: .* 4 "):
        read_stores(stores)
