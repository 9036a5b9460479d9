"""MLPs made of experts: a router sends every token to a few of them, and to one shared expert where there is one.

The experts are plain linear maps under their released names, run one after the other on the tokens sent to them: exact,
and fine for training and for small batches. There are no grouped kernels and no expert parallelism. Adapters and fp8
weights leave the routed experts and the router alone (`MoE.linears`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tad.errors import TadError
from tad.models.transformer import Layer, Names, Shape, SwiGLU, place, place_linears

PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class MoEShape(Shape):
    """`mlp` is the width of the dense layers, the first `dense_layers`; the others have experts."""

    dense_layers: int = 0
    experts: int
    experts_per_token: int
    expert_mlp: int  # width of one expert
    shared_mlp: int = 0  # width of the shared expert; 0: none
    groups: int = 1  # experts lie in groups; a token chooses groups first
    groups_per_token: int = 1
    sigmoid: bool = False  # scores are sigmoids of the logits with a bias that only ranks; else their softmax
    normalise: bool = True  # the weights of the chosen experts sum to one, before `scale`
    scale: float = 1.0

    @classmethod
    def of(cls, shape: Shape, **experts: Any) -> MoEShape:
        """A shape with experts in the place of its MLPs."""
        return cls(**{field.name: getattr(shape, field.name) for field in fields(shape)}, **experts)

    def __post_init__(self) -> None:
        sizes = {
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_mlp,
            "n_group": self.groups,
            "topk_group": self.groups_per_token,
        }
        for field, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise TadError(f"config.json: {field} should be a positive integer, is {value!r}")
        if self.experts % self.groups or self.groups_per_token > self.groups:
            raise TadError(
                f"config.json: num_experts {self.experts}, n_group {self.groups} and topk_group"
                f" {self.groups_per_token} do not fit together"
            )
        if self.experts_per_token > self.experts // self.groups * self.groups_per_token:
            raise TadError(
                f"config.json: num_experts_per_tok {self.experts_per_token} is more than the chosen groups hold"
            )

    @property
    def mlp_weights(self) -> tuple[int, int]:
        sparse = self.layers - self.dense_layers
        dense = self.dense_layers * 3 * self.width * self.mlp
        expert, shared = 3 * self.width * self.expert_mlp, 3 * self.width * self.shared_mlp
        fixed = dense + sparse * (shared + self.width * self.experts)
        return fixed + sparse * self.experts_per_token * expert, fixed + sparse * self.experts * expert


class Router(nn.Linear):
    """Logits of the experts, in fp32 whatever the model's dtype; with sigmoid scores, a bias kept beside them."""

    expert_bias: Tensor | None

    def __init__(self, width: int, experts: int, biased: bool) -> None:
        super().__init__(width, experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(experts) if biased else None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float())


def choose_experts(logits: Tensor, bias: Tensor | None, shape: MoEShape) -> tuple[Tensor, Tensor]:
    """From router logits [tokens, experts] to the chosen experts and their weights, both [tokens, experts_per_token].

    The bias takes part in the ranking only. A group is as good as its two best experts.
    """
    scores = logits.sigmoid() if shape.sigmoid else logits.softmax(-1)
    ranks = scores if bias is None else scores + bias.float()
    if shape.groups > 1:
        grouped = ranks.unflatten(-1, (shape.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(shape.groups_per_token, dim=-1).indices, True)
        ranks = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    chosen = ranks.topk(shape.experts_per_token, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if shape.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * shape.scale


class MoE(SwiGLU):
    """`mlp.gate`, `mlp.experts.N` and `mlp.shared_experts` in the layer; every expert is a SwiGLU."""

    def linears(self, names: Names, shape: Shape) -> dict[str, tuple[int, int, bool]]:
        """The shared expert's, which every token meets: what adapters and fp8 weights apply to."""
        wide = cast(MoEShape, shape).shared_mlp
        return _expert("mlp.shared_experts", shape.width, wide) if wide else {}

    def build(self, layer: Layer) -> None:
        super().build(layer)
        shape = cast(MoEShape, layer.shape)
        place(layer, "mlp.gate", Router(shape.width, shape.experts, biased=shape.sigmoid))
        place(layer, "mlp.experts", nn.ModuleList(nn.Module() for _ in range(shape.experts)))
        for expert in layer.part("mlp.experts").children():
            place_linears(expert, _expert("", shape.width, shape.expert_mlp))

    def __call__(self, layer: Layer, x: Tensor) -> Tensor:
        shape = cast(MoEShape, layer.shape)
        tokens = x.flatten(0, 1)  # [tokens, width]
        router = cast(Router, layer.part("mlp.gate"))
        chosen, weights = choose_experts(router(tokens), router.expert_bias, shape)
        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, by expert
        counts = chosen.flatten().bincount(minlength=shape.experts).tolist()
        pieces = tokens[order // shape.experts_per_token].split(counts)
        experts = cast(nn.ModuleList, layer.part("mlp.experts"))
        # Experts that are trained run in any case: wrapped models want a gradient, if only 0, of every parameter.
        every = torch.is_grad_enabled() and next(experts.parameters()).requires_grad
        pairs = zip(experts, pieces, strict=True)
        done = [_swiglu(expert, piece) for expert, piece in pairs if every or len(piece)]
        outputs = torch.cat(done)[order.argsort()].unflatten(0, chosen.shape)  # [tokens, choices, width]
        mixed = (outputs.float() * weights[..., None]).sum(1).to(x.dtype).view_as(x)
        return mixed + _swiglu(layer.part("mlp.shared_experts"), x) if shape.shared_mlp else mixed


def _expert(path: str, width: int, wide: int) -> dict[str, tuple[int, int, bool]]:
    gate, up, down = (f"{path}.{part}".removeprefix(".") for part in PARTS)
    return {gate: (width, wide, False), up: (width, wide, False), down: (wide, width, False)}


def _swiglu(expert: nn.Module, x: Tensor) -> Tensor:
    gate, up, down = (getattr(expert, part) for part in PARTS)
    return cast(Tensor, down(F.silu(gate(x)) * up(x)))
