"""`verified` gives what `autoregressive` gives: any model, prompts, lengths, batches, drafts and temperature; and it counts honestly."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_autoregressive import KINDS, write_autoregressive

import tad
from tad.decoding import Request, Scheduler, decode, get_decoder
from tad.errors import TadError
from tad.models import LM
from tad.models.gated import gate

PROMPTS = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=40), min_size=1, max_size=5)


@cache
def converted(kind: str, seed: int, guesses: bool = False) -> LM:
    """A converted model. Untrained masks guess nothing; with `guesses` all embeddings have much in common, so that a mask often
    predicts what the token in its place would."""
    with TemporaryDirectory() as folder:
        lm = tad.load(write_autoregressive(Path(folder), kind, seed, 6, tokenizer=False), dtype="fp32")
    if guesses:
        with torch.no_grad():
            embedding = lm.model.embedding().weight
            common = torch.randn(embedding.shape[1], generator=torch.Generator().manual_seed(seed))
            embedding.mul_(0.5).add_(common * embedding.std() * 2)
    return lm


def same(lm: LM, prompts: list[list[int]], length: int, asked: dict[str, Any], **own: Any) -> list[Any]:
    """Held to autoregressive decoding; returns the verified rows."""
    plain = decode(lm, prompts, "autoregressive", length, **asked)
    found = decode(lm, prompts, "verified", length, **asked, **own)
    for one, other in zip(plain, found, strict=True):
        assert other.tokens == one.tokens
        assert other.confidence == pytest.approx(one.confidence, abs=1e-4)
        assert other.forwards <= one.forwards
    return found


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    seed=st.integers(0, 2),
    guesses=st.booleans(),
    prompts=PROMPTS,
    length=st.integers(1, 30),
    batch_size=st.integers(1, 5),
    draft=st.sampled_from([None, 1, 2, 9]),
    ends=st.integers(0, 4),
    rest=st.sampled_from([0, 2, 15]),
    threshold=st.sampled_from([0.0, 0.3]),
    temperature=st.sampled_from([0.0, 0.7]),
    stop=st.sampled_from(["end", "off"]),
)
def test_verified_tokens_are_the_autoregressive_ones(
    kind: str,
    seed: int,
    guesses: bool,
    prompts: list[list[int]],
    length: int,
    batch_size: int,
    draft: int | None,
    ends: int,
    rest: int,
    threshold: float,
    temperature: float,
    stop: str,
) -> None:
    asked = {"batch_size": batch_size, "temperature": temperature, "top_p": 0.95, "seed": 3, "stop": stop}
    lm = converted(kind, seed, guesses)
    for row in same(lm, prompts, length, asked, draft=draft, ends=ends, rest=rest, threshold=threshold):
        drafting = row.drafting
        assert drafting.accepted <= drafting.drafted
        assert sorted(drafting.kept, reverse=True) == drafting.kept
        assert sorted({step for step in row.steps if step}) == list(range(1, row.forwards + 1))


def test_drafts_that_are_right_save_forwards() -> None:
    lm = converted("llama", 1, guesses=True)
    found = same(lm, [[5, 6, 7], [9, 9]], 40, {"stop": "off"}, rest=0)
    assert all(row.drafting.accepted > 20 and row.tpf_all > 2 for row in found)
    one_forward = same(lm, [[5, 6, 7], [9, 9]], 40, {"stop": "off"}, rest=0, ends=6)
    for row, other in zip(found, one_forward, strict=True):
        assert other.forwards < row.forwards


def test_drafts_that_are_never_right_are_made_less_and_less() -> None:
    lm = converted("llama", 0)
    always = same(lm, [[5, 6, 7]], 64, {"stop": "off"}, rest=0)[0].drafting
    seldom = same(lm, [[5, 6, 7]], 64, {"stop": "off"})[0].drafting
    assert always.accepted < 3
    assert always.cycles > 25
    assert seldom.cycles < 12


def test_what_masks_predict_never_reaches_the_text() -> None:
    """Other embeddings of the mask: other drafts, the same tokens."""
    lm, prompts = converted("qwen3", 2, guesses=True), [[3, 1, 4], [1, 5, 9, 2]]
    first = decode(lm, prompts, "verified", 30, stop="off")
    row = lm.model.embedding().weight[lm.tokens.mask]
    kept = row.detach().clone()
    with torch.no_grad():
        row.normal_(0, 3, generator=torch.Generator().manual_seed(0))
    second = decode(lm, prompts, "verified", 30, stop="off")
    with torch.no_grad():
        row.copy_(kept)
    assert [one.tokens for one in first] == [one.tokens for one in second]
    assert [one.drafting for one in first] != [one.drafting for one in second]


def test_sampled_tokens_have_the_distribution_of_the_model() -> None:
    """The first two tokens of 6,000 samples against the exact probabilities. Three standard errors are at most 2 %."""
    lm, prompt, count, temperature = converted("llama", 1, guesses=True), [5, 6, 7], 6000, 0.15
    with torch.no_grad():

        def following(ids: list[list[int]]) -> torch.Tensor:
            logits = lm.model(torch.tensor(ids)).logits[:, -1].double() / temperature
            logits[:, lm.tokens.mask] = float("-inf")
            return logits.softmax(-1)

        vocab = lm.model.shape.vocab
        first = following([prompt])[0]
        second = first @ following([[*prompt, token] for token in range(vocab)])
    seeds = range(count)
    rows = decode(
        lm, [prompt] * count, "verified", 3, seeds, 500, draft=3, temperature=temperature, stop="off"
    )
    kept = sum(row.drafting.accepted for row in rows if row.drafting is not None)
    assert 0.2 * count < kept < 0.9 * count  # both what is kept and what replaces it matter
    for place, wanted in ((0, first), (1, second)):
        counts = torch.bincount(torch.tensor([row.tokens[place] for row in rows]), minlength=vocab)
        bound = 3 * (wanted * (1 - wanted) / count).sqrt() + 2 / count
        assert bound.max() < 0.02
        assert ((counts / count - wanted).abs() < bound).all()


def test_rows_join_and_leave_while_others_run() -> None:
    lm = converted("qwen2", 1, guesses=True)
    asked = get_decoder("verified", "qwen2")
    scheduler = Scheduler(lm)
    wanted = {name: decode(lm, [[name, 2, 3 * name]], "autoregressive", 12)[0].tokens for name in range(1, 7)}
    found = {}
    scheduler.admit([Request(name, [name, 2, 3 * name], 12, asked) for name in (1, 2, 3)])
    found |= scheduler.step()
    scheduler.admit([Request(4, [4, 2, 12], 12, asked)])
    found |= scheduler.step()
    scheduler.drop([2])
    scheduler.admit([Request(name, [name, 2, 3 * name], 12, asked) for name in (5, 6)])
    while len(scheduler):
        found |= scheduler.step()
    assert {name: row.tokens for name, row in found.items()} == {
        name: wanted[name] for name in (1, 3, 4, 5, 6)
    }


def test_steps_hand_out_kept_tokens_only() -> None:
    lm, steps = converted("llama", 1, guesses=True), []
    row = decode(lm, [[5, 6, 7]], "verified", 20, on_step=steps.append)[0]
    assert [token for step in steps for token in step.tokens] == row.content
    assert [place for step in steps for place in step.positions] == list(range(len(row.content)))
    assert [step.forward for step in steps] == list(range(1, row.forwards + 1))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [({"rule": "entropy"}, "contiguous-prefix"), ({"cache": "none"}, "cache 'block'"), ({"cfg": 1.0}, "cfg"),
     ({"draft": 0}, "draft must be between 1 and 4096"), ({"stop": "block"}, "stop 'block'"), ({"engine": "graph"}, "engine='plain'")],
)  # fmt: skip
def test_what_does_not_fit_is_refused(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(TadError, match=said):
        decode(converted("llama", 0), [[1]], "verified", 8, **overrides)


def test_a_gated_conversion_says_what_its_unconverted_parent_says(tmp_path: Path) -> None:
    """An adapter with random weights, which acts on masks only: other drafts, the parent's text."""
    parent = tad.load(write_autoregressive(tmp_path / "parent", "qwen2", 1))
    lm = tad.load(write_autoregressive(tmp_path / "converted", "qwen2", 1, 6))
    lm.attach(rank=4)
    gate(lm.model, lm.tokens.mask)
    with torch.no_grad():
        for name, weight in lm.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(len(name)))
    lm.model.eval()
    prompts = [[1, 2, 3], [9] * 20, [4, 200]]
    wanted = decode(parent, prompts, "autoregressive", 24)
    for ends in (0, 3):
        found = decode(lm, prompts, "verified", 24, ends=ends)
        assert [row.tokens for row in found] == [row.tokens for row in wanted]
