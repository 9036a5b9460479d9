"""The token stream: rows as the models will see them, and the same batches from any step on."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tad.config import parse_recipe
from tad.errors import TadError
from tad.models import DREAM, LLADA, Family
from tad.models.tokenizer import encode_chat
from tad.tasks.nano import WORLD
from tad.tasks.nano.tokenizer import build_tokenizer, save_tokenizer, special_ids
from tad_lab.pretraining.recipe import PretrainRecipe
from tad_lab.pretraining.stream import TokenStream, make_chunk

MIX = {"nano-code": 1.0, "nano-math": 1.0, "nano-word": 1.0}


def asked(family: str = "llada", tokens: int = 1024, **data: object) -> PretrainRecipe:
    """A recipe of three chunks, generated in this process."""
    values = {"families": MIX, "privileged": 0.3, "widths": [128, 176, 240], "room": 96, "chunk": 96, "examples": 288,
              "workers": 0, **data}  # fmt: skip
    sizes = {"family": family, "width": 16, "layers": 1, "heads": 1, "mlp": 16}
    learning = {"steps": 1, "tokens_per_step": tokens}
    return parse_recipe(
        PretrainRecipe, {"name": "x", "model": sizes, "data": values, "optimization": learning}
    )


def batches(stream: TokenStream, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(itertools.islice(stream, count))


def same(
    left: list[tuple[torch.Tensor, torch.Tensor]], right: list[tuple[torch.Tensor, torch.Tensor]]
) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("family", [LLADA, DREAM], ids=["llada", "dream"])
def test_a_row_is_the_chat_prompt_the_solution_and_end_tokens(family: Family, tmp_path: Path) -> None:
    """The prompt must be token for token what decoding will feed."""
    save_tokenizer(family, tmp_path, 512)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = special_ids(family)
    chunk = make_chunk(asked(family.name, privileged=0.0, families={"nano-math": 1.0}, chunk=40), 0)
    problems = [WORLD["nano-math"].problem("train", index) for index in range(40)]
    expected = {
        (*encode_chat(tokenizer, family, [{"role": "user", "content": problem.question}]),
         *tokenizer(problem.solution)["input_ids"], ids["eot_token_id"])
        for problem in problems
    }  # fmt: skip
    found = set()
    for width, (rows, prompts) in chunk.items():
        assert rows.dtype == prompts.dtype == np.uint16
        for row, prompt in zip(rows.tolist(), prompts.tolist(), strict=True):
            end = row.index(ids["eot_token_id"], prompt)
            assert set(row[end + 1 :]) <= {ids["eos_token_id"]}
            assert len(row) == width
            found.add(tuple(row[: end + 1]))
    assert found == expected


def test_the_share_of_privileged_prompts_is_as_asked() -> None:
    tokenizer = build_tokenizer(LLADA)
    reference = tokenizer.encode("Reference").ids
    chunk = make_chunk(asked(chunk=1000), 0)
    rows = [row for ids, _ in chunk.values() for row in ids.tolist()]
    assert len(rows) == 1000
    assert max(map(max, rows)) < 450  # every token is a known piece
    assert 0.25 < sum(reference[0] in row for row in rows) / 1000 < 0.35


@pytest.mark.parametrize("step", [1, 23, 40])
def test_a_stream_resumed_at_a_step_gives_the_same_batches(step: int) -> None:
    whole = TokenStream(asked())
    expected = batches(whole, 48)
    resumed = TokenStream(asked(), start=whole.position(step))
    assert same(batches(resumed, 48 - step), expected[step:])
    assert resumed.position(45) == whole.position(45)


def test_worker_processes_change_nothing() -> None:
    assert same(batches(TokenStream(asked(workers=1)), 30), batches(TokenStream(asked()), 30))


def test_a_second_pass_over_the_pool_comes_in_another_order() -> None:
    stream = TokenStream(asked(examples=96))
    iterator = iter(stream)
    first = [next(iterator)]
    while len(stream.starts) < 2:
        first.append(next(iterator))
    again = first.pop()
    assert not torch.equal(first[0][0], again[0])


def test_a_row_wider_than_the_widest_is_an_error_that_names_the_field() -> None:
    with pytest.raises(TadError, match=r"data\.widths"):
        make_chunk(asked(widths=[48]), 0)


def test_a_chunk_too_small_for_a_batch_is_an_error_that_names_the_field() -> None:
    with pytest.raises(TadError, match=r"data\.chunk"):
        next(iter(TokenStream(asked(chunk=4, tokens=128 * 64))))


def test_unknown_families_are_refused() -> None:
    with pytest.raises(TadError, match="gsm8k"):
        asked(families={"gsm8k": 1.0})
