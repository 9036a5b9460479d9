"""`tad.generate`: text and chats in, text out, on a tiny random model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import tad
from tad.canvas.text import MASK
from tad.conversation import stream
from tad.decoding import Decoded, decode
from tad.errors import TadError
from tad.generation import Generation, generate, read_answer, read_generation
from tad.models import DREAM, LLADA, LM
from tiny_lm import CONTEXT, write_checkpoint

SHORT = {"gen_length": 16, "block": 8}


@pytest.fixture(scope="module", params=[LLADA, DREAM], ids=lambda family: family.name)
def lm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LM:
    return tad.load(write_checkpoint(tmp_path_factory.mktemp("tiny"), request.param), device="cpu")


def test_a_string_or_a_chat_gives_one_generation_and_a_list_gives_a_list(lm: LM) -> None:
    chat = [{"role": "user", "content": "hello"}]
    one, said = generate(lm, "hello", **SHORT), generate(lm, chat, **SHORT)
    assert isinstance(one, Generation)
    assert isinstance(said, Generation)
    many = generate(lm, ["hello", "a longer question", chat], **SHORT)
    assert [answer.prompt for answer in many] == ["hello", "a longer question", chat]
    assert many[0].tokens == many[2].tokens == one.tokens == said.tokens
    assert generate(lm, [], **SHORT) == []


@pytest.mark.parametrize("settings", [{"decoder": "fast-dllm"}, {"prefix": "So: "}])
def test_an_answer_is_what_decode_gives_for_the_chat_ids(lm: LM, settings: dict[str, str]) -> None:
    answer = generate(lm, "hello", **settings, **SHORT)
    ids = lm.encode("hello", settings.get("prefix", ""))
    expected = decode(lm, [ids], settings.get("decoder", "tad"), **SHORT)[0]
    assert answer.tokens == expected.tokens
    assert answer.text == lm.decode(expected.answer)


def test_raw_prompt_has_no_chat_around_it(lm: LM) -> None:
    answer = generate(lm, "hello", raw=True, **SHORT)
    assert answer.tokens == decode(lm, [lm.encode_text("hello")], **SHORT)[0].tokens
    assert answer.tokens != generate(lm, "hello", **SHORT).tokens
    prefixed = generate(lm, "hello", prefix=" you", raw=True, **SHORT)
    assert prefixed.tokens == generate(lm, "hello you", raw=True, **SHORT).tokens


def test_text_stops_before_the_first_end_token(lm: LM) -> None:
    word, tail = lm.encode_text("yes"), lm.encode_text("no")
    for end in lm.tokens.ends:
        ids = [*word, end, *tail, lm.tokens.eos]
        row = Decoded(ids, [1] * len(ids), [1.0] * len(ids), 2, 0.5, lm.tokens.ends)
        assert read_answer(lm, row) == "yes"
        answer = Generation("?", read_answer(lm, row), row)
        assert (answer.forwards, answer.seconds) == (2, 0.5)
        assert answer.tpf == (len(word) + 1) / 2
        assert answer.tpf_all == len(ids) / 2
        assert answer.tokens_per_second == (len(word) + 1) / 0.5


def test_text_without_an_end_token_is_whole_and_without_special_tokens(lm: LM) -> None:
    bos = lm.tokens.bos
    assert bos is not None
    ids = [bos, *lm.encode_text("caf\u00e9")]
    row = Decoded(ids, [1] * len(ids), [1.0] * len(ids), 1, 1.0, lm.tokens.ends)
    assert read_answer(lm, row) == "caf\u00e9"


def test_seed_matters_with_a_temperature_only(lm: LM) -> None:
    greedy = [generate(lm, "hello", seed=seed, **SHORT).tokens for seed in (0, 1)]
    warm = [generate(lm, "hello", seed=seed, temperature=1.0, **SHORT).tokens for seed in (0, 1, 0)]
    assert greedy[0] == greedy[1]
    assert warm[0] != warm[1]
    assert warm[0] == warm[2]


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ({"role": "user"}, {}, "prompt 0 "),
        (["a", 3], {}, "prompt 1 "),
        ([{"role": "user", "content": "a"}], {"raw": True}, "prompt 0 "),
        (["a", [{"role": "robot", "content": "a"}]], {}, "prompt 1: message 0: role"),
        ("x" * CONTEXT, {}, "over the context"),
        ("", {"raw": True}, "prompt 0 "),
        ("a", {"decoder": "tadd"}, "'tadd'.*'tad'"),
        ("a", {"treshold": 0.5}, "'treshold'.*'threshold'"),
        ("a", {"gen_length": 12}, "gen_length 12.*8"),
    ],
)  # fmt: skip
def test_bad_input_is_a_clear_error(lm: LM, prompts: object, settings: dict[str, object], words: str) -> None:
    with pytest.raises(tad.TadError, match=words):
        generate(lm, prompts, **{**SHORT, **settings})  # type: ignore[call-overload]


def test_prompt_with_a_mask_token_is_refused(lm: LM) -> None:
    with pytest.raises(tad.TadError, match="mask token"):
        generate(lm, f"what is {lm.family.mask_text}?", raw=True, allow_special=True, **SHORT)
    assert generate(lm, f"what is {lm.family.mask_text}?", **SHORT).forwards > 0


def test_model_without_tokenizer_cannot_answer_text(tmp_path: Path) -> None:
    bare = tad.load(write_checkpoint(tmp_path, tokenizer=False), device="cpu")
    with pytest.raises(tad.TadError, match="tokenizer"):
        generate(bare, "hello", **SHORT)


# Step by step, and how things show themselves


def test_a_stream_ends_in_the_answer_of_generate(lm: LM) -> None:
    whole = tad.generate(lm, "hi", gen_length=16, block=8)
    said = stream(lm, "hi", gen_length=16, block=8)
    steps = list(said)
    assert [step.forward for step in steps] == list(range(1, whole.forwards + 1))
    masks = [step.text.count(MASK) for step in steps]
    assert masks == sorted(masks, reverse=True)
    assert (masks[0] < 16, masks[-1]) == (True, 0)
    assert said.answer == replace(whole, decoded=replace(whole.decoded, seconds=said.answer.seconds))
    rest = stream(lm, "hi", gen_length=16, block=8)
    next(rest)
    assert rest.answer.text == whole.text


def test_wrong_arguments_are_named(lm: LM) -> None:
    with pytest.raises(TadError, match=r"tad\.load\('nano-llada'\)"):
        tad.generate("nano-llada", "x")  # type: ignore[call-overload]
    with pytest.raises(TadError, match="SimpleNamespace"):
        tad.stream(SimpleNamespace(), "x")  # type: ignore[arg-type]
    for wrong in ({"gen_length": "96"}, {"gen_length": 1.5}, {"decoder": 3}):
        with pytest.raises(TadError, match=next(iter(wrong))):
            generate(lm, "hi", **wrong)


def test_answers_and_models_show_themselves_shortly_and_as_pictures(lm: LM) -> None:
    ids = [*lm.encode_text("A<B"), lm.tokens.eos]
    row = Decoded(ids, [1, 2, 1, 2], [0.9, 0.1, 1.0, 1.0], 2, 0.1, lm.tokens.ends)
    answer = read_generation(lm, "?", row)
    assert repr(answer) == f"Generation({answer.text!r}, 2 forwards, 2.00 tokens per forward)"
    page = answer._repr_html_()
    assert page.count("<span title=") == 4
    assert "forward 2, confidence 0.10" in page
    assert answer.pieces[1] == "<"
    assert ">&lt;</span>" in page
    assert repr(lm).startswith(f"LM({lm.source}, {lm.family.name}, ")
    assert "\n" not in repr(lm)
