"""MLPs made of experts: a router sends every token to a few of them, and to one shared expert where there is one.

The experts are plain linear maps under their released names, run one after the other on the tokens sent to them: exact,
and fine for training and for small batches. There are no grouped kernels and no expert parallelism. Adapters and fp8
weights leave the routed experts and the router alone (`MoE.linears`).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tad.models.layers import Layer, Names, SwiGLU, place, place_linears
from tad.models.shape import Experts, Shape

PARTS = ("gate_proj", "up_proj", "down_proj")


class Router(nn.Linear):
    """Logits of the experts, in fp32 whatever the model's dtype; with sigmoid scores, a bias kept beside them."""

    expert_bias: Tensor | None

    def __init__(self, width: int, experts: int, biased: bool) -> None:
        super().__init__(width, experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(experts) if biased else None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float())


def choose_experts(logits: Tensor, bias: Tensor | None, experts: Experts) -> tuple[Tensor, Tensor]:
    """From router logits [tokens, experts] to the chosen experts and their weights, both [tokens, num_experts_per_tok].

    The bias takes part in the ranking only. A group is as good as its two best experts.
    """
    scores = logits.sigmoid() if experts.score_function == "sigmoid" else logits.softmax(-1)
    ranks = scores if bias is None else scores + bias.float()
    if experts.n_group > 1:
        grouped = ranks.unflatten(-1, (experts.n_group, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(experts.topk_group, dim=-1).indices, True)
        ranks = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    chosen = ranks.topk(experts.num_experts_per_tok, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if experts.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * experts.routed_scaling_factor


class MoE(SwiGLU):
    """`mlp.gate`, `mlp.experts.N` and `mlp.shared_experts` in the layer; every expert is a SwiGLU."""

    def linears(self, names: Names, shape: Shape) -> dict[str, tuple[int, int, bool]]:
        """The shared expert's, which every token meets: what adapters and fp8 weights apply to."""
        wide = cast(Experts, shape.experts).shared_width
        return _expert("mlp.shared_experts", shape.width, wide) if wide else {}

    def build(self, layer: Layer) -> None:
        super().build(layer)
        width, experts = layer.shape.width, cast(Experts, layer.shape.experts)
        router = Router(width, experts.num_experts, biased=experts.score_function == "sigmoid")
        place(layer, "mlp.gate", router)
        place(layer, "mlp.experts", nn.ModuleList(nn.Module() for _ in range(experts.num_experts)))
        for expert in layer.part("mlp.experts").children():
            place_linears(expert, _expert("", width, experts.moe_intermediate_size))

    def __call__(self, layer: Layer, x: Tensor) -> Tensor:
        about = cast(Experts, layer.shape.experts)
        tokens = x.flatten(0, 1)  # [tokens, width]
        router = cast(Router, layer.part("mlp.gate"))
        chosen, weights = choose_experts(router(tokens), router.expert_bias, about)
        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, by expert
        counts = chosen.flatten().bincount(minlength=about.num_experts).tolist()
        pieces = tokens[order // about.num_experts_per_tok].split(counts)
        experts = cast(nn.ModuleList, layer.part("mlp.experts"))
        # Experts that are trained run in any case: wrapped models want a gradient, if only 0, of every parameter.
        every = torch.is_grad_enabled() and next(experts.parameters()).requires_grad
        pairs = zip(experts, pieces, strict=True)
        done = [_swiglu(expert, piece) for expert, piece in pairs if every or len(piece)]
        outputs = torch.cat(done)[order.argsort()].unflatten(0, chosen.shape)  # [tokens, choices, width]
        mixed = (outputs.float() * weights[..., None]).sum(1).to(x.dtype).view_as(x)
        return mixed + _swiglu(layer.part("mlp.shared_experts"), x) if about.shared_width else mixed


def _expert(path: str, width: int, wide: int) -> dict[str, tuple[int, int, bool]]:
    gate, up, down = (f"{path}.{part}".removeprefix(".") for part in PARTS)
    return {gate: (width, wide, False), up: (width, wide, False), down: (wide, width, False)}


def _swiglu(expert: nn.Module, x: Tensor) -> Tensor:
    gate, up, down = (getattr(expert, part) for part in PARTS)
    return cast(Tensor, down(F.silu(gate(x)) * up(x)))
