"""The numbers that define a network, read from a family's config.json and held to bounds in which one can be built.

A family's config names its own fields (`FamilyConfig.sizes`) and gives the rest as arguments of `read_shape`. Bad values
raise errors that name the field; which file it is in is said by `tad.models.checkpoint`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from tad.errors import TadError
from tad.models.attention import BlockLayout

NO_TOKEN = -1  # the id of a token that a model does not have
_LARGEST = 2**24
_BOUNDS = {  # of integers; all others: 1 to _LARGEST
    "layers": (1, 4096),
    "context": (1, 2**31),
    "num_experts": (1, 4096),
    "num_shared_experts": (0, 4096),
    "first_k_dense_replace": (0, 4096),
}


def check_numbers(record: Any) -> None:
    """Every number of a dataclass has its declared type and lies within its bounds."""
    for field in fields(record):
        value, kind = getattr(record, field.name), str(field.type)
        least, most = _BOUNDS.get(field.name, (1, _LARGEST))
        if kind == "bool":
            fits, wanted = type(value) is bool, "true or false"
        elif kind == "float":
            fits, wanted = type(value) in (int, float) and 0 < value < math.inf, "a positive number"
        elif kind == "int" or (kind == "int | None" and value is not None):
            fits, wanted = type(value) is int and least <= value <= most, f"an integer from {least} to {most}"
        else:
            continue
        if not fits:
            raise TadError(f"config.json: {field.name} should be {wanted}, is {value!r:.40}")


@dataclass(frozen=True)
class Experts:
    """MLPs made of experts, in the field names that the configs of all such families share."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # width of one expert
    num_shared_experts: int | None = None  # every token meets them; together they are one MLP
    first_k_dense_replace: int = 0  # layers before the first with experts
    n_group: int = 1  # experts lie in groups; a token chooses groups first
    topk_group: int = 1
    norm_topk_prob: bool = True  # the weights of the chosen experts sum to one, before the scaling factor
    routed_scaling_factor: float = 1.0
    score_function: str = "softmax"  # or sigmoid, with a bias that ranks and does not weigh

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise TadError(
                f"config.json: num_experts {self.num_experts}, n_group {self.n_group} and topk_group"
                f" {self.topk_group} do not fit together"
            )
        if self.num_experts_per_tok > self.num_experts // self.n_group * self.topk_group:
            raise TadError(
                f"config.json: num_experts_per_tok {self.num_experts_per_tok} is more than the chosen groups hold"
            )

    @classmethod
    def read(cls, config: Any, **found: Any) -> Experts:
        """From the fields that the config's class declares; `found` are those that no field gives."""
        declared = [field.name for field in fields(cls) if hasattr(type(config), field.name)]
        return cls(**{name: getattr(config, name) for name in declared}, **found)

    @property
    def shared_width(self) -> int:
        return self.moe_intermediate_size * (self.num_shared_experts or 0)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's: rotary frequencies stretched for a longer context than was trained, the fast ones less than the slow ones."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.high_freq_factor <= self.low_freq_factor:
            raise TadError(
                "config.json: high_freq_factor of the rotary positions should be above low_freq_factor"
            )


@dataclass(frozen=True)
class Shape:
    """The numbers that define the network, whatever the config calls them."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # heads * head_dim need not be the width
    mlp: int
    vocab: int  # rows of the embedding, which may exceed the tokenizer
    context: int
    eps: float
    theta: float
    tied: bool
    qkv_bias: bool = False
    bias: bool = False
    rotate_in_fp32: bool = False  # LLaDA applies RoPE in fp32, the others in the model's dtype
    blocks: BlockLayout | None = None  # block-causal attention; None: full
    rotary_dim: int | None = None  # RoPE turns the first dimensions of a head only; None: all
    qk_norm: bool = False  # RMSNorm of every query and key head before RoPE
    experts: Experts | None = None  # in the place of the MLPs
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise TadError(
                f"config.json: {self.heads} heads of {self.head_dim} and {self.kv_heads} key heads do not fit together"
            )

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.first_k_dense_replace

    @property
    def mlp_weights(self) -> tuple[int, int]:
        """Weights of the MLPs of all layers: those a token is multiplied with, and all there are."""
        sparse = sum(self.has_experts(layer) for layer in range(self.layers))
        dense = (self.layers - sparse) * 3 * self.width * self.mlp
        if self.experts is None:
            return dense, dense
        expert = 3 * self.width * self.experts.moe_intermediate_size
        router, shared = self.width * self.experts.num_experts, 3 * self.width * self.experts.shared_width
        met, stored = self.experts.num_experts_per_tok, self.experts.num_experts
        return tuple(dense + sparse * (router + shared + count * expert) for count in (met, stored))  # type: ignore[return-value]


class FamilyConfig(PreTrainedConfig):
    """What the configs of all families share. Fields that a class does not name are kept as they are."""

    # Not read from the file: names that start with an underscore are no fields of it.
    _sizes: ClassVar[dict[str, str]]  # field of `Shape` -> field of config.json
    _supported: ClassVar[dict[str, Any]]  # switches, and the only value of each that is not refused
    _block: ClassVar[str | None] = None  # field of the block size, where attention is block-causal

    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None

    @classmethod
    def from_sizes(cls, **sizes: int) -> FamilyConfig:
        """A config of these sizes (fields of `Shape`, `block`, or of the config itself), under the names of the released ones."""
        if "block" in sizes and cls._block is None:
            raise TadError(
                f"model.block: the attention of {cls.model_type} is not block-causal; leave it out"
            )
        names = {**cls._sizes, "block": cls._block or ""}
        return cls(**{names.get(name, name): size for name, size in sizes.items()})

    def read_shape(self, **found: Any) -> Shape:
        """The shape in the fields named by `sizes`; `found` are those that need more than a look."""
        for field, value in type(self)._supported.items():
            if getattr(self, field, value) not in (value, None):
                raise TadError(
                    f"config.json: {field}={getattr(self, field)!r:.40} is not supported (only {value!r} is)"
                )
        sizes = {name: getattr(self, field) for name, field in type(self)._sizes.items()} | found
        width, heads = sizes["width"], sizes["heads"]
        sizes["kv_heads"] = sizes["kv_heads"] or heads
        if sizes.get("head_dim") is None:
            if heads < 1 or width % heads:
                raise TadError(f"config.json: width {width} and {heads} heads do not fit together")
            sizes["head_dim"] = width // heads
        return Shape(eps=self.rms_norm_eps, theta=self._theta(), **sizes)

    def _theta(self) -> Any:
        """The base of the rotary angles. Newer tools write it into `rope_parameters`; scaled positions are refused."""
        given = getattr(self, "rope_parameters", None) or {}
        if not isinstance(given, dict):
            raise TadError("config.json: rope_parameters should be an object")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind != "default":
            raise TadError(
                f"config.json: rope_parameters of type {kind!r:.40} are not supported (only 'default' is)"
            )
        return given.get("rope_theta", self.rope_theta)

    def read_blocks(self, released: str) -> BlockLayout:
        """Block-causal attention on the absolute grid, its block size in the field that the class names."""
        field = type(self)._block
        assert field is not None
        size = getattr(self, field)
        if type(size) is not int or not 1 <= size <= _LARGEST:
            raise TadError(
                f"config.json: {field} is {size!r:.40}; set it to the block size of training ({released})"
            )
        return BlockLayout(size, "absolute")
