"""Muon for matrices inside layers and Adam for everything else, as one optimizer, and the learning-rate plan.

Muon (momentum, then the nearest orthogonal matrix by a Newton-Schulz iteration) learns the nano world in a fraction of
Adam's steps. Matrices of one shape are updated together, which keeps the number of GPU kernels small. Weights below
fp32 have an fp32 copy in the state, on which the update works. torch.optim.Muon, where torch has it, does neither: it goes
matrix by matrix and would round every update of a bf16 weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Singular values of [count, rows, columns] moved to about 1, by the quintic Newton-Schulz iteration."""
    a, b, c = _QUINTIC
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()


class MuonAdam(torch.optim.Optimizer):
    """Groups with `matrix: True` use Muon, the others Adam with decoupled weight decay."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        matrix_lr: float,
        other_lr: float,
        weight_decay: float,
    ) -> None:
        groups = [
            {"params": list(matrices), "matrix": True, "lr": matrix_lr, "weight_decay": weight_decay},
            {"params": list(others), "matrix": False, "lr": other_lr, "weight_decay": 0.0},
        ]
        super().__init__(
            [group for group in groups if group["params"]], {"momentum": 0.95, "betas": (0.9, 0.98)}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update; gradients must have been computed."""
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            for p in held:
                if not self.state[p]:
                    self._start(p, group["matrix"])
            if group["matrix"]:
                self._step_matrices(held, group)
            else:
                self._step_others(held, group)

    def _start(self, p: Tensor, matrix: bool) -> None:
        state = self.state[p]
        state["step"] = 0
        for name in ("momentum",) if matrix else ("momentum", "variance"):
            state[name] = torch.zeros_like(p, dtype=torch.float32)
        if p.dtype != torch.float32:
            state["master"] = p.detach().float()

    def _step_matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for p in params:
            by_shape[p.shape].append(p)
        for shape, same in by_shape.items():
            grads = [p.grad.float() for p in same if p.grad is not None]
            momenta = [self.state[p]["momentum"] for p in same]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            torch._foreach_lerp_(grads, momenta, group["momentum"])
            updates = list(orthogonalize(torch.stack(grads)).unbind())
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            self._apply(same, updates, group, scale)

    def _step_others(self, params: list[Tensor], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        grads = [p.grad.float() for p in params if p.grad is not None]
        momenta = [self.state[p]["momentum"] for p in params]
        variances = [self.state[p]["variance"] for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - first)
        torch._foreach_mul_(variances, second)
        torch._foreach_addcmul_(variances, grads, grads, 1 - second)
        step = self.state[params[0]]["step"] + 1
        root = torch._foreach_sqrt(variances)
        torch._foreach_div_(root, (1 - second**step) ** 0.5)
        torch._foreach_add_(root, 1e-8)
        updates = torch._foreach_div(momenta, root)
        self._apply(params, updates, group, 1 / (1 - first**step))

    def _apply(
        self, params: list[Tensor], updates: list[Tensor], group: dict[str, Any], scale: float
    ) -> None:
        targets = [self.state[p].get("master", p) for p in params]
        torch._foreach_mul_(targets, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(targets, updates, alpha=-group["lr"] * scale)
        if targets[0] is not params[0]:
            torch._foreach_copy_(params, targets)
        for p in params:
            self.state[p]["step"] += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore exactly: the base class would cast the fp32 state to the weights' dtype."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        for index, saved in state_dict["state"].items():
            p = params[int(index)]
            self.state[p] = {
                name: value.to(p.device, copy=True) if isinstance(value, Tensor) else value
                for name, value in saved.items()
            }


class RatePlan:
    """The factor on the learning rate by step: warm up, hold, fall linearly to zero at `total`.

    A run that has minutes rather than steps holds until `decide` fixes the total from the speed so far; from then on
    the rate is a function of the step alone. Saved with the scheduler, so a resumed run keeps its plan.
    """

    def __init__(self, total: int, warmup: int, decay: float, open_end: bool = False) -> None:
        self.total, self.warmup, self.decay, self.open_end = total, warmup, decay, open_end
        self.decay_from = round(total * (1 - decay))

    def __call__(self, step: int) -> float:
        rise = min(1.0, (step + 1) / (self.warmup + 1))
        if step < self.decay_from:
            return rise
        return rise * max(0.0, (self.total - step) / max(1, self.total - self.decay_from))

    def decide(self, step: int, remaining: int) -> None:
        """Start to decay now, for the steps that remain."""
        self.decay_from, self.total, self.open_end = step, min(self.total, step + max(1, remaining)), False
