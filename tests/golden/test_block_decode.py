"""Every decoding case of the block-diffusion families: token ids, forwards, reveals, and what was fed to each forward."""

from __future__ import annotations

from functools import cache
from typing import Any

import cases
import pytest

from tad.decoding import Decoded, Step, decode
from tad.models import LM, SpecialTokens, family_of


@cache
def lm(folder: str) -> LM:
    meta, model = cases.meta(folder), cases.model(folder)
    tokens = SpecialTokens(
        meta["mask_token_id"], meta["eos_token_id"], meta["pad_token_id"], None, meta["eot_token_id"]
    )
    return LM(model, family_of(model.config.model_type), tokens, source=folder)


def settings(case: cases.Case) -> dict[str, Any]:
    """The call of our API that means what the case's arguments mean, but for the length."""
    args, method = case["args"], case["strategy"].split("_")[0]
    if method.startswith("fdv2"):
        return {
            "decoder": "fast-dllm-v2",
            "block": args["block_size"],
            "sub_block": args["small_block_size"],
            "threshold": args["threshold"],
            "cache": "sub-block" if args.get("use_block_cache") else "block",
            "stop": "off" if args["stop_token"] < 0 else "end",
        }
    if method.startswith("sdar"):
        call = {"decoder": "sdar", "block": args["block_length"], "steps": args["denoising_steps"]}
        kind = args.get("remasking_strategy", "low_confidence_dynamic")
        if kind == "entropy_bounded":
            return {
                "decoder": "sdar",
                "block": args["block_length"],
                "rule": "entropy-bound",
                "bound": args["eb_threshold"],
            }
        threshold = args.get("threshold") or args.get("confidence_threshold") or args.get("dynamic_threshold")
        call["threshold"] = threshold if kind == "low_confidence_dynamic" else None
        if kind == "sequential" or (method == "sdarjet" and kind == "low_confidence_dynamic"):
            call["leftmost"] = True
        return call
    call = {"block": args["block_length"], "threshold": args["threshold"]}
    if method == "llada2.0":
        return {
            **call,
            "decoder": "llada2",
            "steps": args["steps"],
            "stop": "end" if args["eos_early_stop"] else "block",
        }
    return {
        **call,
        "decoder": "llada2.1",
        "edit_threshold": args["editing_threshold"],
        "least": args["num_to_transfer"],
        "post_steps": args["max_post_steps"],
        "stop": "block" if args["eos_early_stop"] else "off",
    }


def canvas_length(case: cases.Case, prompt: int) -> int:
    """Positions the public code may fill: whole blocks, and with shifted logits the token after the last one."""
    args = case["args"]
    block = args.get("block_size") or args["block_length"]
    if case["family"] == "fastdllm_v2":
        return block * (args["max_new_tokens"] // block) - prompt % block + 1
    length = args.get("gen_length") or args["max_tokens"]
    return -(-(prompt + length) // block) * block - prompt


def run(case: cases.Case, **changes: Any) -> tuple[Decoded, list[Step]]:
    prompt, steps = case["inputs"]["prompt_ids"], []
    call = {**settings(case), **changes}
    length = canvas_length(case, len(prompt))
    (result,) = decode(lm(case["family"]), [prompt], gen_length=length, on_step=steps.append, **call)
    return result, steps


def single(case: cases.Case) -> bool:
    return cases.kind(case) == "block_decode" and "prompt_ids" in case["inputs"] and not case["quirk"]


def check(case: cases.Case, result: Decoded, steps: list[Step]) -> None:
    expected = case["expected"]
    ids = expected["output_ids"]
    assert result.tokens[: len(ids)] == ids
    assert result.forwards == expected["forwards"]
    ours = [[step.forward, step.positions, step.tokens] for step in steps]
    assert [reveal for reveal in ours if reveal[1]] == [reveal for reveal in expected["reveals"] if reveal[1]]


@pytest.mark.parametrize("case", cases.parameters(single))
def test_decoder_gives_the_reference_ids_forwards_and_reveals(case: cases.Case) -> None:
    exact = {"cache": "none"} if case["family"] == "llada2" else {}
    result, steps = run(case, **exact)
    check(case, result, steps)
    assert [step.queries for step in steps] == case["expected"]["input_lengths"]
    if exact:  # the reference has no cache; an exact one changes nothing
        check(case, *run(case))


def test_the_quirk_cases_are_those_that_are_not_copied() -> None:
    """By what their notes say; docs/reference/families.md lists them."""
    refused = (
        "inner forwards are masked by blocks of 32",
        "first answer token of a row whose prompt ends a block",
        "the prompt is fed with blocks of 32",
        "tokens already written are replaced",
        "confidences are taken after the top-k filter",
    )
    notes = [
        case["note"]
        for folder in cases.families()
        for case in cases.load_cases(folder)
        if cases.kind(case) == "block_decode" and case["quirk"]
    ]
    assert all(note.startswith(refused) for note in notes)


def prompts_of(case: cases.Case) -> list[list[int]]:
    rows = zip(case["inputs"]["input_ids"], case["inputs"]["attention_mask"], strict=True)
    return [[token for token, real in zip(*row, strict=True) if real] for row in rows]


def batch(case: cases.Case) -> bool:
    return cases.kind(case) == "block_decode" and "input_ids" in case["inputs"] and not case["quirk"]


def decode_rows(case: cases.Case, prompts: list[list[int]]) -> list[Decoded]:
    args = case["args"]
    block = args["block_size"]
    length = block * (args["max_new_tokens"] // block + max(args["seq_len"]) // block)
    return decode(lm(case["family"]), prompts, gen_length=length, **settings(case))


@pytest.mark.parametrize("case", cases.parameters(batch))
def test_rows_of_a_batch_are_as_alone(case: cases.Case) -> None:
    """So are the public sampler's, but for the sub-block cache, which it renews for all rows when one of them needs it."""
    prompts = prompts_of(case)
    together = decode_rows(case, prompts)
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = decode_rows(case, [prompt])
        assert (row.tokens, row.steps, row.forwards) == (alone.tokens, alone.steps, alone.forwards)
    if case["args"]["use_block_cache"] and len(prompts) > 1:
        return
    for row, ids in zip(together, case["expected"]["output_ids"], strict=True):
        assert row.tokens[: len(ids)] == ids
