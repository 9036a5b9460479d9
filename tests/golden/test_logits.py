"""Raw logits of all families against the reference implementations, in fp32, with and without a cache."""

from __future__ import annotations

import re

import pytest
import torch
from cases import BLOCK_FOLDERS, Case, model, parameters
from torch import Tensor

from tad.models import AttentionMask, BlockLayout

TOLERANCE = 1e-4


def blocks_of(case: Case, length: int) -> Tensor:
    """[batch, length]: the prompt is block 0, then blocks of the case's size."""
    size = case.get("args", {}).get("block_size") or int(re.search(r"block (\d+)", case["note"])[1])
    offset = torch.arange(length)[None] - case["tensors"]["prompt_lengths"][:, None]
    return torch.where(offset < 0, 0, offset // size + 1)


def rule_of(case: Case) -> AttentionMask:
    tensors = case["tensors"]
    keys = tensors["attention_mask"].bool() if "attention_mask" in tensors else None
    if "prompt_lengths" not in tensors:
        return AttentionMask(keys=keys)
    return AttentionMask(keys, blocks_of(case, tensors["input_ids"].shape[1]))


def is_block(case: Case) -> bool:
    return case["family"] in BLOCK_FOLDERS


def check(case: Case, logits: Tensor, wanted: Tensor) -> None:
    assert logits.shape == wanted.shape
    difference = (logits - wanted).abs().max().item()
    assert difference <= TOLERANCE, f"{case['name']}: largest difference {difference:.2e}"


@pytest.mark.parametrize("case", parameters(lambda case: case["strategy"] == "logits" and not is_block(case)))
def test_logits_equal_the_reference(case: Case) -> None:
    tensors = case["tensors"]
    rule = rule_of(case)
    if "allowed" in tensors:
        assert torch.equal(rule.dense()[:, 0], tensors["allowed"])
    with torch.no_grad():
        output = model(case["family"])(
            tensors["input_ids"], position_ids=tensors.get("position_ids"), mask=rule
        )
    real = tensors.get("attention_mask", torch.ones_like(tensors["input_ids"])).bool()
    check(case, output.logits[real], tensors["logits"][real])


def block_size(case: Case, name: str = "block_size") -> int:
    args = case["args"]
    return args.get(name) or args.get("block_size") or args.get("block_length") or args["bd_size"]


def training_mask(case: Case, positions: Tensor) -> AttentionMask:
    """[noisy ; clean] of one sample after the other: positions start at 0 in every half."""
    halves = (positions == 0).cumsum(-1) - 1
    blocks = positions // block_size(case)
    return AttentionMask.noisy_and_clean(blocks, halves % 2 == 0, samples=halves // 2)


def fed_in_pieces(case: Case) -> list[tuple[int, Tensor, int]]:
    """What the case feeds to a cached model: first position, ids and block size of the mask, forward by forward."""
    tensors, args = case["tensors"], case["args"]
    outer = block_size(case, "context_block_size")
    context = tensors.get("context_ids", torch.zeros(1, 0, dtype=torch.long))
    prefill = args.get("prefill", context.shape[1])
    cuts = [prefill] * (prefill > 0) + [outer] * args.get("stored_blocks", 0)
    found, start = [], 0
    for length in cuts:
        found.append((start, context[:, start : start + length], outer))
        start += length
    assert start == context.shape[1]
    if "block_ids" not in tensors:
        return [*found, (start, tensors["input_ids"], block_size(case))]
    found.append((start, tensors["block_ids"], block_size(case)))
    for index, place in enumerate(args["replace_positions"]):
        found.append((start + place, tensors[f"sub_ids_{index}"], block_size(case)))
    return found


def feed(case: Case, pieces: list[tuple[int, Tensor, int]]) -> list[Tensor]:
    """Logits of every forward. The mask is the one the model gives for the block size."""
    network = model(case["family"])
    length = max(start + ids.shape[1] for start, ids, _ in pieces)
    cache = network.new_cache(len(pieces[0][1]), length)
    found = []
    for start, ids, size in pieces:
        where = slice(start, start + ids.shape[1])
        mask = network.attention_mask(torch.arange(length), layout=BlockLayout(size, "absolute"))
        with torch.no_grad():
            found.append(network(ids, cache=cache, cache_position=where, mask=mask).logits)
    if "context_ids" in case["tensors"] and "allowed" in case["tensors"]:
        assert torch.equal(mask.dense(where)[0, 0], case["tensors"]["allowed"])
    return found


@pytest.mark.parametrize("case", parameters(lambda case: case["strategy"] == "logits" and is_block(case)))
def test_logits_of_block_diffusion_models_equal_the_reference(case: Case) -> None:
    """An attention mask that the reference takes and ignores is not passed here."""
    tensors, network = case["tensors"], model(case["family"])
    if "context_ids" in tensors or "block_ids" in tensors or "prefill" in case["args"]:
        check(case, feed(case, fed_in_pieces(case))[-1], tensors["logits"])
        return
    ids, positions = tensors.get("input_ids"), tensors.get("position_ids")
    if "noisy" in tensors:
        ids = torch.cat((tensors["noisy"], tensors["clean"]), 1)
        positions = torch.arange(ids.shape[1] // 2).repeat(2)[None]
    if "noisy" in tensors or "kept" in tensors:
        mask = training_mask(case, positions)
    else:
        layout = BlockLayout(block_size(case), "absolute")
        mask = network.attention_mask(torch.arange(ids.shape[1]), layout=layout)
    assert torch.equal(mask.dense()[0, 0], tensors["allowed"])
    with torch.no_grad():
        logits = network(ids, position_ids=positions, mask=mask).logits
    if "noisy" in tensors:
        logits = logits[:, : tensors["noisy"].shape[1]]
    check(case, logits[tensors["kept"]] if "kept" in tensors else logits, tensors["logits"])


def is_whole(case: Case) -> bool:
    """Everything in one forward, in plain order: such a case can also be fed block by block."""
    others = ("context_ids", "block_ids", "noisy", "kept", "position_ids")
    return is_block(case) and case["strategy"] == "logits" and not any(n in case["tensors"] for n in others)


@pytest.mark.parametrize("case", parameters(is_whole))
def test_a_cache_of_finished_blocks_is_exact(case: Case) -> None:
    ids, size = case["tensors"]["input_ids"], block_size(case)
    pieces = [(start, ids[:, start : start + size], size) for start in range(0, ids.shape[1], size)]
    check(case, torch.cat(feed(case, pieces), 1), case["tensors"]["logits"])
