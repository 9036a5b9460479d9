"""The nano tokenizer: nothing is lost, nothing of the world falls apart into bytes, and the files load anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tad.models import DREAM, LLADA, Family
from tad.models.tokenizer import encode_text
from tad.tasks.nano import WORLD
from tad.tasks.nano.task import INSTRUCTION
from tad.tasks.nano.tokenizer import build_tokenizer, save_tokenizer, special_ids, vocabulary
from tad.tasks.task import privileged_prompt

BOTH = pytest.mark.parametrize("family", [LLADA, DREAM], ids=["llada", "dream"])
TOKENIZERS = {family.name: build_tokenizer(family) for family in (LLADA, DREAM)}


def texts(count: int) -> list[str]:
    found = []
    for world in WORLD.values():
        for split in ("train", "test"):
            for index in range(count):
                problem = world.problem(split, index)
                prompt = privileged_prompt(problem.question, problem.reference, INSTRUCTION).text
                found += [problem.question, problem.solution, prompt]
    return found


@BOTH
def test_all_nano_text_survives_and_is_made_of_known_pieces(family: Family) -> None:
    tokenizer = TOKENIZERS[family.name]
    known = len(vocabulary()) + len(special_ids(family)) + 1
    for text in texts(400):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert max(ids) < known, [tokenizer.id_to_token(i) for i in ids if i >= known]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([LLADA, DREAM]), st.text(max_size=60))
@example(LLADA, "<|endoftext|>")
@example(DREAM, "a<|mask|>b")
def test_any_text_survives_encode_and_decode(family: Family, text: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[family.name])
    assert tokenizer.decode(encode_text(tokenizer, text), skip_special_tokens=True) == text


def test_digits_are_single_tokens() -> None:
    tokenizer = TOKENIZERS["llada"]
    assert len(tokenizer.encode("1 + 23 = 24", add_special_tokens=False).ids) == 7
    assert len(tokenizer.encode("199", add_special_tokens=False).ids) == 3


@BOTH
def test_sequences_keep_to_the_lengths_the_models_are_trained_for(family: Family) -> None:
    tokenizer = TOKENIZERS[family.name]

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    for world in WORLD.values():
        for index in range(1000):
            problem = world.problem("train", index)
            assert length(problem.solution) + 1 <= 96
            assert length(problem.question) <= 76


@BOTH
def test_the_files_load_with_auto_tokenizer_and_template_and_ids_agree(
    family: Family, tmp_path: Path
) -> None:
    save_tokenizer(family, tmp_path, 512)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = special_ids(family)
    assert tokenizer.mask_token_id == ids["mask_token_id"]
    assert tokenizer.eos_token_id == ids["eos_token_id"]
    assert tokenizer.pad_token_id == ids["pad_token_id"]
    assert tokenizer.bos_token_id == ids["bos_token_id"]
    assert tokenizer.convert_tokens_to_ids(family.end_of_turn_text) == ids["eot_token_id"]
    chat = [{"role": "user", "content": "Solve 3x + 7 = 25."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert "Solve 3x + 7 = 25." in text
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(prompt) == text
    assert ids["eot_token_id"] in prompt
    assert tokenizer("x + 1")["input_ids"] == tokenizer("x + 1", add_special_tokens=False)["input_ids"]
