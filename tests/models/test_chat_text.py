"""Text: both kinds of tokenizer, the chat formats, BOS and the assistant's header exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_checkpoints import (
    DREAM_SPECIAL,
    FIRST_SPECIAL,
    LLADA_SPECIAL,
    edit_json,
    write_checkpoint,
    write_dream_tokenizer,
    write_llada_tokenizer,
)

import tad
from tad.errors import TadError
from tad.models import LM, Message

FAMILIES = ("llada", "dream")
TALK: list[Message] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "how are you"},
]
LLADA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
DREAM_HEADER = "<|im_start|>assistant\n"
# Appends the assistant's header whatever is asked, as a published template does.
STUBBORN = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
)
DOUBLE = (
    STUBBORN + "{% if add_generation_prompt %}{{ '" + LLADA_HEADER.replace("\n", "\\n") + "' }}{% endif %}"
)
NEVER = STUBBORN.removesuffix("{{ '" + LLADA_HEADER.replace("\n", "\\n") + "' }}")
NO_BOS = NEVER.replace("{% if loop.first %}{{ bos_token }}{% endif %}", "")


def load(folder: Path, family: str) -> LM:
    return tad.load(write_checkpoint(folder, family, tokenizer=True))


def text_of(lm: LM, ids: list[int]) -> str:
    return lm.decode(ids, skip_special=False)


def test_llada_renders_its_chat_format(tmp_path: Path) -> None:
    lm = load(tmp_path, "llada")
    assert text_of(lm, lm.encode("  hello world ")) == (
        f"<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nhello world<|eot_id|>{LLADA_HEADER}"
    )
    assert text_of(lm, lm.encode(TALK)) == (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
        f"{LLADA_HEADER}hi<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nhow are you<|eot_id|>{LLADA_HEADER}"
    )


def test_dream_renders_its_chat_format_with_a_default_system_turn(tmp_path: Path) -> None:
    lm = load(tmp_path, "dream")
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    user = "<|im_start|>user\nhello<|im_end|>\n"
    assert text_of(lm, lm.encode("hello")) == system + user + DREAM_HEADER
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert text_of(lm, lm.encode(own)) == f"<|im_start|>system\nBe brief.<|im_end|>\n{user}{DREAM_HEADER}"


@pytest.mark.parametrize("family", FAMILIES)
def test_special_ids_come_from_the_directory(tmp_path: Path, family: str) -> None:
    tokens = load(tmp_path, family).tokens
    names = LLADA_SPECIAL if family == "llada" else DREAM_SPECIAL
    found = {name: FIRST_SPECIAL + offset for offset, name in enumerate(names)}
    assert tokens.eos == tokens.pad == found["<|endoftext|>"]
    assert tokens.mask == found["<|mdm_mask|>" if family == "llada" else "<|mask|>"]
    assert tokens.bos == found["<|startoftext|>" if family == "llada" else "<|beginoftext|>"]
    assert tokens.eot == found["<|eot_id|>" if family == "llada" else "<|im_end|>"]
    assert tokens.ends == (tokens.eos, tokens.eot)


def test_decode_leaves_out_special_tokens_unless_asked(tmp_path: Path) -> None:
    lm = load(tmp_path, "llada")
    ids = [*lm.encode_text("hi"), lm.tokens.eot, lm.tokens.eos, lm.tokens.mask]
    assert lm.decode(ids) == "hi"
    assert lm.decode(ids, skip_special=False) == "hi<|eot_id|><|endoftext|><|mdm_mask|>"


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [None, STUBBORN, DOUBLE, NEVER, NO_BOS])
@pytest.mark.parametrize("prompt", ["hello", TALK])
def test_bos_and_the_last_header_stand_exactly_once(
    tmp_path: Path, adds_bos: bool, template: str | None, prompt: str | list[Message]
) -> None:
    folder = write_checkpoint(tmp_path, "llada")
    write_llada_tokenizer(folder, adds_bos=adds_bos, chat_template=template)
    lm = tad.load(folder)
    ids = lm.encode(prompt)
    expected = 0 if template == NO_BOS and not adds_bos else 1
    assert ids.count(lm.tokens.bos) == expected
    assert (ids[0] == lm.tokens.bos) == bool(expected)
    text = text_of(lm, ids)
    assert text.endswith("<|eot_id|>" + LLADA_HEADER)
    assert text.count(LLADA_HEADER) == (1 if prompt == "hello" else 2)


def test_a_template_in_its_own_file_is_used(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "dream", tokenizer=True)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}:{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    lm = tad.load(folder)
    assert text_of(lm, lm.encode("hi")) == f"<|im_start|>user:hi<|im_end|>{DREAM_HEADER}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_continues_the_assistants_turn(tmp_path: Path, family: str) -> None:
    lm = load(tmp_path, family)
    assert text_of(lm, lm.encode("hello", prefix="Sure: ")) == text_of(lm, lm.encode("hello")) + "Sure: "


def test_plain_text_gets_bos_only_when_asked(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llada")
    write_llada_tokenizer(folder, adds_bos=True)
    lm = tad.load(folder)
    assert lm.tokens.bos not in lm.encode_text("hi")
    assert lm.encode_text("hi", bos=True) == [lm.tokens.bos, *lm.encode_text("hi")]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "conversation"),
        ([{"role": "robot", "content": "x"}], "message 0: role"),
        ([{"role": "user"}], "message 0: content"),
        ([{"role": "user", "content": 3}], "message 0: content"),
        (TALK[:2], "prefix="),
    ],
)
def test_a_malformed_conversation_is_refused(tmp_path: Path, messages: list[Message], words: str) -> None:
    lm = load(tmp_path, "llada")
    with pytest.raises(TadError, match=words):
        lm.encode(messages)


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llada")
    write_llada_tokenizer(folder, chat_template="{{ raise_exception('no system turns') }}")
    with pytest.raises(TadError, match="no system turns"):
        tad.load(folder).encode("hi")


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_tokenizer_only_text_calls_fail(tmp_path: Path, family: str) -> None:
    lm = tad.load(write_checkpoint(tmp_path, family))
    for call in (lambda: lm.encode("hi"), lambda: lm.encode_text("hi"), lambda: lm.decode([1])):
        with pytest.raises(TadError, match=r"tokenizer\.json"):
            call()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path, family: str) -> None:
    rows = FIRST_SPECIAL + 2
    field = {"llada": "embedding_size", "dream": "vocab_size"}[family]
    small = {field: rows, "vocab_size": rows, "mask_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    folder = write_checkpoint(tmp_path, family, tokenizer=True, **small)
    with pytest.raises(TadError, match=rf"the tokenizer has 26\d tokens.* {rows} rows"):
        tad.load(folder)


def test_a_tokenizer_is_whole_and_its_added_tokens_land_on_their_declared_ids(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "dream", tokenizer=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = settings["added_tokens_decoder"]
    tokens["300"] = tokens.pop(str(FIRST_SPECIAL + 4))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(TadError, match=r"<\|mask\|> should be 300, the vocabulary makes it"):
        tad.load(folder)
    (folder / "merges.txt").unlink()
    with pytest.raises(TadError, match=r"merges\.txt: "):
        tad.load(folder)


def test_a_dream_directory_with_its_own_mask_bos_and_pad(tmp_path: Path) -> None:
    """Derived checkpoints rename their special tokens; nothing may be taken from the family's defaults."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|padding|>", "[MASK]"]
    folder = write_checkpoint(
        tmp_path, "dream", mask_token_id=FIRST_SPECIAL + 5, pad_token_id=FIRST_SPECIAL + 4
    )
    write_dream_tokenizer(folder, special=special, bos="<|start|>", pad="<|padding|>", mask="[MASK]")
    tokens = tad.load(folder).tokens
    assert (tokens.mask, tokens.pad, tokens.bos) == (FIRST_SPECIAL + 5, FIRST_SPECIAL + 4, FIRST_SPECIAL + 3)
    assert (tokens.eos, tokens.eot) == (FIRST_SPECIAL, FIRST_SPECIAL + 2)
    edit_json(folder / "config.json", mask_token_id=None, pad_token_id=None, eos_token_id=None)
    assert tad.load(folder).tokens == tokens


def test_a_saved_dream_tokenizer_loads_again(tmp_path: Path) -> None:
    """The library writes one tokenizer.json where the release has two files; both must give the same ids."""
    lm = load(tmp_path / "first", "dream")
    folder = write_checkpoint(tmp_path / "second", "dream")
    lm.tokenizer.save_pretrained(folder)
    assert not (folder / "vocab.json").exists()
    again = tad.load(folder)
    assert again.encode(TALK) == lm.encode(TALK)
    assert again.tokens == lm.tokens


def test_of_several_named_templates_the_default_is_used(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llada", tokenizer=True)
    plain = tad.load(folder).encode(TALK)
    named = [{"name": "default", "template": STUBBORN}, {"name": "tool_use", "template": "none"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    assert tad.load(folder).encode(TALK) == plain


@pytest.mark.parametrize("raw", [False, True])
def test_half_a_surrogate_pair_is_refused_in_words(tmp_path: Path, raw: bool) -> None:
    lm = tad.load(write_checkpoint(tmp_path / "model", "llada", tokenizer=True))
    with pytest.raises(TadError, match="udce9"):
        tad.generate(lm, "caf\udce9", gen_length=32, raw=raw)
