"""Fast-dLLM v2, SDAR and LLaDA2: checkpoints in and out, adapters, special tokens, chat, experts, bad configs.

Their logits are held to the public code in tests/golden.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_checkpoints import (
    ALL,
    BLOCK_FAMILIES,
    FIRST_SPECIAL,
    RELEASED,
    edit_json,
    tiny_model,
    write_adapter,
    write_checkpoint,
    write_dream_tokenizer,
)
from torch import Tensor, nn

import tad
from tad.decoding.decoders import get_decoder
from tad.decoding.engine import why_not
from tad.errors import TadError
from tad.models import SpecialTokens
from tad.models.checkpoint import Checkpoint
from tad.models.export import export
from tad.models.layers import SwiGLU
from tad.models.lora import attach
from tad.models.moe import MoE, choose_experts
from tad.models.shapes import shape_config
from tad.models.tokens import read_special_tokens

IDS = torch.arange(24)[None] + 40


def header(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of every stored tensor."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def test_a_routers_bias_keeps_the_dtype_it_was_stored_in(tmp_path: Path) -> None:
    """The network in bf16 ranks experts in fp32 all the same."""
    source = write_checkpoint(tmp_path / "source", "llada2")
    out = export(source, tmp_path / "half", dtype="bf16")
    dtypes = {name: dtype for name, (dtype, _) in header(out).items()}
    biases = {name for name in dtypes if name.endswith("expert_bias")}
    assert len(biases) == 2
    assert {name for name, dtype in dtypes.items() if dtype == "F32"} == biases
    bias = tad.load(out).model.layers()[1].mlp.gate.expert_bias
    assert torch.equal(bias, tad.load(source).model.layers()[1].mlp.gate.expert_bias)


@pytest.mark.parametrize("name", list(RELEASED))
def test_an_exported_student_is_a_checkpoint_of_its_base_for_other_engines(tmp_path: Path, name: str) -> None:
    """These sources are in the released layout: key names, shapes, every field of config.json, names of the code files."""
    source = write_checkpoint(tmp_path / "source", name)
    before = json.loads((source / "config.json").read_text())
    code = {f"{path.split('.')[0]}.py" for path in before["auto_map"].values()}
    for file in code:
        (source / file).write_text("raise RuntimeError('must not run')")
    adapter = write_adapter(source, tmp_path / "adapter")
    out = export(source, tmp_path / "student", adapter=adapter, dtype="bf16")
    wanted = {
        path: ("F32" if path.endswith("expert_bias") else "BF16", shape)
        for path, (_, shape) in header(source).items()
    }
    assert header(out) == wanted
    after = json.loads((out / "config.json").read_text())
    assert after == {**before, "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    assert {file.name for file in out.glob("*.py")} == code


@pytest.mark.parametrize("name", ALL)
def test_adapters_and_fp8_go_to_the_maps_every_token_meets(name: str) -> None:
    plain, adapted = tiny_model(name), tiny_model(name)
    attach(adapted, rank=2)
    linear = {
        path
        for path, module in plain.layers().named_modules()
        if isinstance(module, nn.Linear) and ".experts." not in path and not path.endswith("mlp.gate")
    }
    assert linear
    assert {path for path, module in adapted.layers().named_modules() if hasattr(module, "lora_A")} == linear
    learned = {path for path, weight in adapted.named_parameters() if weight.requires_grad}
    assert all(f"{adapted.names.layers}." in path and ".lora_" in path for path in learned)  # not the head
    assert {f"{layer.index}.{path}" for layer, path in plain.projections()} == linear  # what fp8 asks for


@pytest.mark.parametrize("name", BLOCK_FAMILIES)
def test_earlier_blocks_do_not_depend_on_later_ones(name: str) -> None:
    """With or without a cache, also in a row with left padding: a forward asks the model for its mask."""
    model = tiny_model(name)
    size = int(model.shape.blocks.size)
    length, start = 3 * size, 2 * size
    ids = torch.arange(length)[None] % 200 + 40
    changed = ids.clone()
    changed[:, start:] = 7
    with torch.no_grad():
        whole = model(ids).logits
        assert torch.allclose(whole[:, :start], model(changed).logits[:, :start], atol=1e-4)
        inside = model(ids[:, : length - 1]).logits[:, start]
        assert not torch.allclose(whole[:, start], inside, atol=1e-3)  # inside a block all see all
        cache = model.new_cache(1, length)
        pieces = [
            model(ids[:, at : at + size], cache=cache, cache_position=slice(at, at + size)).logits
            for at in range(0, length, size)
        ]
        assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-4)
        positions = torch.arange(length + 3)[None] - 3
        mask = model.attention_mask(positions, 0, real=positions >= 0)
        padded = torch.cat((torch.full((1, 3), 5), ids), 1)
        found = model(padded, position_ids=positions.clamp(min=0), mask=mask).logits
        assert torch.allclose(found[:, 3:], whole, atol=1e-4)


def test_the_engine_declines_experts_and_layers_it_does_not_know() -> None:
    decoder = get_decoder("one-by-one")
    for name in BLOCK_FAMILIES:
        model = tiny_model(name)
        assert (why_not(model, decoder) is None) == (model.shape.experts is None)
    model = tiny_model("dream")
    assert why_not(model, decoder) is None
    model.layers()[1].mlp_op = type("AnotherMLP", (SwiGLU,), {})()
    assert why_not(model, decoder) is not None


# Special tokens and chat


def config_only(tmp_path: Path, shape: str, **changes: object) -> Checkpoint:
    """A directory with nothing but the config of a released size."""
    values = {**shape_config(shape).to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ("fast-dllm-v2-7b", SpecialTokens(mask=151665, eos=151645, pad=151645)),
        ("sdar-8b", SpecialTokens(mask=151669, eos=151643, pad=151643)),
        ("llada2-mini", SpecialTokens(mask=156895, eos=156892, pad=156892)),
    ],
)
def test_a_directory_that_names_no_mask_token_has_the_familys(
    tmp_path: Path, shape: str, wanted: SpecialTokens
) -> None:
    eos = {"eos_token_id": None} if shape == "llada2-mini" else {}
    assert read_special_tokens(config_only(tmp_path, shape, mask_token_id=None, **eos)) == wanted


def test_a_generation_config_gives_the_end_of_a_turn(tmp_path: Path) -> None:
    """SDAR's config.json names the end of text; both end an answer. Fast-dLLM v2 stops at the end of a turn alone."""
    sdar = tad.load(write_checkpoint(tmp_path / "sdar", "sdar")).tokens
    assert set(sdar.ends) == {305, 307}
    fast = tad.load(write_checkpoint(tmp_path / "fast", "fastdllm_v2")).tokens
    assert fast.ends == (307,)


CHATS = {
    "fastdllm_v2": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "sdar": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "llada2": "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>hi<|role_end|><role>ASSISTANT</role>",
}


@pytest.mark.parametrize("name", list(RELEASED))
def test_text_goes_in_and_out_in_the_familys_chat_format(tmp_path: Path, name: str) -> None:
    ids = {"mask_token_id": None, "eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
    folder = write_checkpoint(tmp_path / "source", name, **ids)
    (folder / "generation_config.json").unlink(missing_ok=True)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    mask = {"fastdllm_v2": "|<MASK>|", "sdar": "<|MASK|>", "llada2": "<|mask|>"}[name]
    if name == "llada2":
        special = ["<|endoftext|>", "<role>", "</role>", "<|role_end|>"]
        edit_json(folder / "config.json", vocab_size=304)
    write_dream_tokenizer(folder, [*special, mask], bos="<|endoftext|>", mask=mask)
    lm = tad.load(folder)
    assert lm.tokens.mask == FIRST_SPECIAL + len(special)
    assert lm.tokens.eos == FIRST_SPECIAL
    assert lm.tokens.eot == FIRST_SPECIAL + special.index(
        "<|role_end|>" if name == "llada2" else "<|im_end|>"
    )
    assert lm.decode(lm.encode("hi"), skip_special=False) == CHATS[name]


# Experts


@pytest.mark.parametrize("name", ["llada2", "sdar_moe"])
def test_a_token_gets_the_weighted_sum_of_its_experts(name: str) -> None:
    layer = tiny_model(name).layers()[1]
    shape, gate = layer.shape, layer.mlp.gate
    x = torch.randn(2, 5, shape.width, generator=torch.Generator().manual_seed(0))

    def swiglu(expert: nn.Module, token: Tensor) -> Tensor:
        gated = nn.functional.silu(expert.gate_proj(token)) * expert.up_proj(token)
        return expert.down_proj(gated)

    with torch.no_grad():
        chosen, weights = choose_experts(gate(x.flatten(0, 1)), gate.expert_bias, shape.experts)
        found = MoE()(layer, x).flatten(0, 1)
        for number, token in enumerate(x.flatten(0, 1)):
            wanted = sum(
                weight * swiglu(layer.mlp.experts[int(expert)], token)
                for expert, weight in zip(chosen[number], weights[number], strict=True)
            )
            if shape.experts.shared_width:
                wanted = wanted + swiglu(layer.mlp.shared_experts, token)
            assert torch.allclose(found[number], wanted, atol=1e-5)


def test_groups_and_bias_rank_experts_but_do_not_weigh_them() -> None:
    """Four groups of two: the two groups with the largest sums are kept, though the best single expert is elsewhere."""
    experts = tiny_model("llada2").shape.experts
    assert (experts.num_experts, experts.n_group, experts.topk_group) == (8, 4, 2)
    scores = torch.tensor([[0.9, 0.1, 0.7, 0.6, 0.5, 0.65, 0.2, 0.3]])
    chosen, weights = choose_experts(scores.logit(), torch.zeros(8), experts)
    assert sorted(chosen[0].tolist()) == [2, 5]
    assert weights.sum().item() == pytest.approx(experts.routed_scaling_factor)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0])
    chosen, weights = choose_experts(scores.logit(), bias, experts)
    assert sorted(chosen[0].tolist()) == [2, 4]
    share = dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))
    assert share[4] / share[2] == pytest.approx(0.5 / 0.7, rel=1e-5)


def test_sdar_moe_is_qwen3_moe_with_another_mask(tmp_path: Path) -> None:
    from transformers import Qwen3MoeForCausalLM

    ours = tiny_model("sdar_moe")
    folder = write_checkpoint(tmp_path / "source", "sdar_moe")
    edit_json(folder / "config.json", model_type="qwen3_moe", decoder_sparse_step=1)
    theirs = Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    seen = ours.attention_mask(torch.arange(24)).dense()
    with torch.no_grad():
        wanted = theirs(IDS, attention_mask=seen).logits
        assert (ours(IDS).logits - wanted).abs().max() <= 1e-4


# Bad input


@pytest.mark.parametrize(("name", "size"), [("sdar", 4), ("sdar_moe", 4), ("llada2", 32)])
def test_a_config_without_a_block_size_has_that_of_the_released_models(
    tmp_path: Path, name: str, size: int
) -> None:
    folder = write_checkpoint(tmp_path / "source", name)
    edit_json(folder / "config.json", block_size=None)
    assert tad.load(folder).model.shape.blocks.size == size


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("fastdllm_v2", {"bd_size": None}, "bd_size"),
        ("sdar", {"block_size": 0}, "block_size"),
        ("llada2", {"block_size": -1}, "block_size"),
        ("sdar_moe", {"block_size": "4"}, "block_size"),
        ("fastdllm_v2", {"mask_token_id": None}, "mask_token_id"),
        ("sdar", {"mask_token_id": None}, "mask_token_id"),
        ("llada2", {"mask_token_id": None}, "mask_token_id"),
        ("llada2", {"eos_token_id": None}, "eos_token_id"),
        ("sdar", {"mask_token_id": 320}, "mask_token_id"),
        ("sdar", {"attention_bias": True}, "attention_bias"),
        ("fastdllm_v2", {"use_sliding_window": True}, "use_sliding_window"),
        ("llada2", {"score_function": "softmax"}, "score_function"),
        ("llada2", {"partial_rotary_factor": 0.05}, "partial_rotary_factor"),
        ("llada2", {"n_group": 3}, "n_group"),
        ("llada2", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("llada2", {"num_experts": 9, "n_group": 1, "topk_group": 1}, "mlp.gate"),
        ("sdar_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("sdar_moe", {"num_experts": 0}, "num_experts"),
        ("llada2", {"topk_group": 5}, "topk_group"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_the_field(
    tmp_path: Path, name: str, changes: dict[str, object], words: str
) -> None:
    folder = write_checkpoint(tmp_path / "source", name)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(TadError, match=words) as caught:
        tad.load(folder)
    assert "\n" not in str(caught.value)
