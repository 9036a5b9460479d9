"""The chunked loss is the plain loss: value, gradient, precision; and never makes [rows, vocab]."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tad.training.losses import Head, RowLosses, chunked_losses, plain_losses


def setup(
    rows: int, vocab: int, width: int, bias: bool, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Head, Tensor, Tensor, Head]:
    """hidden, head, labels, taught, the teacher's own head."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(0, vocab, (rows,), generator=generator)
    return (
        draw(rows, width).requires_grad_(),
        Head(draw(vocab, width).requires_grad_(), draw(vocab).requires_grad_() if bias else None),
        labels,
        draw(rows, width),
        Head(draw(vocab, width), draw(vocab) if bias else None),
    )


def combine(losses: RowLosses, seed: int) -> Tensor:
    """A sum of all rows with random weights, so that every row's gradient matters."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=losses.cross_entropy.dtype)
    for values in (losses.cross_entropy, losses.kl, losses.scaled_entropy):
        if values is not None:
            total = total + (values * torch.rand(len(values), generator=generator)).sum()
    return total


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 17),
    vocab=st.integers(2, 60),
    chunk=st.integers(1, 40),
    bias=st.booleans(),
    tau=st.sampled_from([0.5, 1.0, 2.0]),
    temperature=st.sampled_from([None, 0.5, 1.0]),
    taught=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_chunked_equals_plain_for_any_chunk(
    rows: int,
    vocab: int,
    chunk: int,
    bias: bool,
    tau: float,
    temperature: float | None,
    taught: bool,
    seed: int,
) -> None:
    hidden, head, labels, guide, own = setup(rows, vocab, 5, bias, seed)
    if rows == 0:
        hidden = hidden.detach().reshape(0, 5).requires_grad_()
    logits = F.linear(hidden, head.weight, head.bias)
    wanted = plain_losses(
        logits, labels, F.linear(guide, own.weight, own.bias) if taught else None, tau, temperature
    )
    found = chunked_losses(hidden, head, labels, guide if taught else None, own, tau, temperature, chunk)
    for name, ours, theirs in zip(RowLosses._fields, found, wanted, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.shape == (rows,), name
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    inputs = [hidden, head.weight, *([head.bias] if bias else [])]
    ours = torch.autograd.grad(combine(found, seed), inputs)
    theirs = torch.autograd.grad(combine(wanted, seed), inputs)
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine.isfinite().all()
        if rows:
            assert relative(mine, plain) < 1e-5


def test_gradients_equal_finite_differences() -> None:
    hidden, head, labels, guide, own = setup(5, 7, 3, True, 0, torch.float64)

    def losses(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return chunked_losses(hidden, Head(weight, bias), labels, guide, own, 1.7, 0.6, chunk=2)[:3]

    assert torch.autograd.gradcheck(losses, (hidden, head.weight, head.bias))


def test_a_frozen_head_gets_no_gradient_and_the_teacher_never_does() -> None:
    hidden, head, labels, guide, own = setup(6, 9, 4, True, 1)
    frozen = Head(head.weight.detach(), head.bias.detach())
    guide.requires_grad_()
    teacher = Head(own.weight.requires_grad_(), own.bias.requires_grad_())
    combine(chunked_losses(hidden, frozen, labels, guide, teacher, chunk=4), 0).backward()
    assert hidden.grad is not None
    assert frozen.weight.grad is None
    assert all(tensor.grad is None for tensor in (guide, teacher.weight, teacher.bias))


def test_the_loss_of_bf16_states_is_taken_in_fp32() -> None:
    hidden, head, labels, guide, own = setup(40, 200, 8, False, 2, torch.bfloat16)
    found = chunked_losses(hidden, head, labels, guide, own, chunk=16)
    logits = F.linear(hidden, head.weight)
    wanted = plain_losses(logits, labels, F.linear(guide, own.weight))
    assert found.cross_entropy.dtype == torch.float32
    torch.testing.assert_close(found.cross_entropy, wanted.cross_entropy)
    torch.testing.assert_close(found.kl, wanted.kl)
    ours = torch.autograd.grad(combine(found, 0), [hidden, head.weight])
    theirs = torch.autograd.grad(combine(wanted, 0), [hidden, head.weight])
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative(mine.float(), plain.float()) < 1e-2


def test_under_autocast_the_head_runs_in_its_dtype_and_gradients_keep_the_weights() -> None:
    hidden, head, labels, guide, own = setup(10, 50, 8, True, 3)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_losses(hidden, head, labels, guide, own, chunk=4)
        logits = F.linear(hidden, head.weight, head.bias)
        wanted = plain_losses(logits, labels, F.linear(guide, own.weight, own.bias))
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(found.cross_entropy, wanted.cross_entropy)
    ours = torch.autograd.grad(combine(found, 0), [hidden, head.weight])
    theirs = torch.autograd.grad(combine(wanted, 0), [hidden, head.weight])
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert relative(mine, plain) < 1e-2


def test_kl_has_the_direction_of_the_teacher() -> None:
    """KL(teacher || student) by hand: 0.5 log(0.5 / 0.9) + 0.5 log(0.5 / 0.1)."""
    student, teacher = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    wanted = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    head = Head(torch.eye(2))
    for found in (
        plain_losses(student, torch.tensor([0]), teacher),
        chunked_losses(student, head, torch.tensor([0]), teacher),
    ):
        assert float(found.kl) == pytest.approx(wanted, rel=1e-6)
        assert float(found.confidence) == pytest.approx(0.9)
        assert float(found.soft) == pytest.approx(-0.5 * math.log(0.9) - 0.5 * math.log(0.1), rel=1e-6)


class Alive(TorchDispatchMode):
    """Bytes of tensors made under it that are alive at the same time: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                size = tensor.untyped_storage().nbytes()
                self.now += size
                self.most, self.largest = max(self.most, self.now), max(self.largest, size)
                weakref.finalize(tensor, self._gone, size)
        return result

    def _gone(self, size: int) -> None:
        self.now -= size


def measure(rows: int, vocab: int, chunked: bool) -> Alive:
    hidden, head, labels, guide, own = setup(rows, vocab, 8, False, 6)
    head = Head(head.weight.detach())
    with Alive() as alive:
        if chunked:
            found = chunked_losses(hidden, head, labels, guide, own, chunk=16)
        else:
            logits, guided = F.linear(hidden, head.weight), F.linear(guide, own.weight)
            found = plain_losses(logits, labels, guided)
            del logits, guided
        (found.cross_entropy.sum() + found.kl.sum()).backward()
    return alive


def test_peak_memory_does_not_grow_with_rows_times_vocabulary() -> None:
    """16 times the rows cost 16 times the hidden states, not 16 times the logits; the plain way shows the difference."""
    vocab = 2000
    few, many = measure(32, vocab, chunked=True), measure(512, vocab, chunked=True)
    assert many.largest < 512 * vocab * 4
    assert many.most - few.most < (512 - 32) * 8 * 4 * 8  # a few vectors of the width per row
    plain_few, plain_many = measure(32, vocab, chunked=False), measure(512, vocab, chunked=False)
    assert plain_many.most > 10 * plain_few.most
    assert many.most < plain_many.most / 10
