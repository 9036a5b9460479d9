"""From items to batches: random, but with rows of similar length together, so that little of a batch is padding.

A global batch is a set of items that depends on (seed, epoch, place) alone. Micro-batches and processes only split it:
neighbours in a batch are of similar length and form a micro-batch, and processes take micro-batches in turn. A row has two
lengths, the student's and the teacher's, so neighbours are found as in a k-d tree. Items that do not fill a batch at the end
of an epoch are left out.
"""

from __future__ import annotations

import numpy as np

from tad.errors import TadError

_ORDER = 3  # keeps these draws apart from other uses of the same seed


def plan_batches(lengths: np.ndarray, size: int, pool: int, seed: int, epoch: int) -> np.ndarray:
    """Item numbers [batches, size] of an epoch, for rows of `lengths` [items, sides].

    Items are shuffled; then each run of `pool` batches is put in order of length and cut into batches, whose order is
    shuffled.
    """
    if len(lengths) < size:
        raise TadError(
            f"batch.size {size} is more than the {len(lengths)} states of an epoch; make it smaller, "
            "visit more states or collect more trajectories"
        )
    draws = np.random.default_rng([seed, _ORDER, epoch])
    count = len(lengths) // size
    order = draws.permutation(len(lengths))[: count * size]
    whole = count // pool * pool * size  # the last pool may be smaller
    parts = [order[:whole].reshape(-1, pool * size), order[whole:].reshape(1, -1)]
    order = np.concatenate([order_by_length(part, lengths).reshape(-1) for part in parts if part.size])
    return order.reshape(count, size)[draws.permutation(count)]


def order_by_length(groups: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Reorder each row of item numbers [groups, items]: halves that differ in the side that varies most, and so on.

    A group that does not halve evenly is sorted by the sum of its lengths.
    """
    shape = groups.shape
    while groups.shape[1] > 1:
        found = lengths[groups]  # [groups, items, sides]
        if groups.shape[1] % 2:
            key = found.sum(-1)
        else:
            widest = np.ptp(found, axis=1).argmax(-1)
            key = np.take_along_axis(found, widest[:, None, None], axis=-1)[..., 0]
        groups = np.take_along_axis(groups, key.argsort(axis=1, kind="stable"), axis=1)
        if groups.shape[1] % 2:
            break
        groups = groups.reshape(-1, groups.shape[1] // 2)
    return groups.reshape(shape)


def split_batch(batch: np.ndarray, micro: int, rank: int = 0, ranks: int = 1) -> np.ndarray:
    """This process's micro-batches [accumulation, micro] of a global batch."""
    return batch.reshape(-1, micro)[rank::ranks]


def check_split(size: int, micro: int, ranks: int) -> int:
    """The number of micro-batches per process and step; an error where the batch does not divide."""
    if size % (micro * ranks):
        raise TadError(
            f"batch.size {size} is not a multiple of batch.micro {micro} x {ranks} processes; "
            f"use batch.micro={_largest_divisor(size, micro, ranks)}"
            if size % ranks == 0
            else f"batch.size {size} is not a multiple of the {ranks} processes"
        )
    return size // (micro * ranks)


def _largest_divisor(size: int, micro: int, ranks: int) -> int:
    share = size // ranks
    return max(d for d in range(1, min(micro, share) + 1) if share % d == 0)


def padding_share(widths: np.ndarray) -> float:
    """The share of positions that are padding, for micro-batches of rows this wide: [batches, rows] or a list of such."""
    padded = sum(len(rows) * int(max(rows)) for rows in widths)
    return 1 - sum(int(np.sum(rows)) for rows in widths) / padded
