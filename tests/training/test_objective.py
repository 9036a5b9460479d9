"""The masked-diffusion objective against its formula, written out slowly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tad.training.objective import LEAST_RATIO, BlockStates, mask_answers, masked_diffusion_loss

MASK = 9


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_prompts_are_never_masked_and_weights_are_zero_where_nothing_is() -> None:
    ids = torch.randint(0, 9, (64, 20))
    prompt = torch.randint(0, 15, (64,))
    noisy, weight = mask_answers(ids, prompt, MASK, generator())
    inside = torch.arange(20) < prompt[:, None]
    assert torch.equal(noisy[inside], ids[inside])
    assert torch.equal(weight > 0, noisy == MASK)
    assert ((noisy == ids) | (noisy == MASK)).all()


def test_the_expected_weight_of_every_row_is_one_over_the_batch() -> None:
    """E[sum of weights] = 1/batch per row: masked with probability t, weighted by 1/(t length batch)."""
    ids, prompt = torch.zeros(32, 50, dtype=torch.long), torch.full((32,), 10)
    total = torch.stack([mask_answers(ids, prompt, MASK, generator(seed))[1].sum() for seed in range(800)])
    assert total.mean().item() == pytest.approx(1.0, abs=0.03)


def test_a_floor_caps_the_weights_and_changes_nothing_else() -> None:
    ids, prompt = torch.zeros(40, 30, dtype=torch.long), torch.full((40,), 10)
    noisy, weight = mask_answers(ids, prompt, MASK, generator())
    floored_noisy, floored = mask_answers(ids, prompt, MASK, generator(), floor=0.2)
    assert torch.equal(noisy, floored_noisy)
    assert torch.allclose(floored, weight.clamp(max=1 / (0.2 * 20 * 40)))
    assert floored.max() < weight.max()


def test_ratios_cover_the_range_and_each_is_uniform() -> None:
    ids, prompt = torch.zeros(100, 2000, dtype=torch.long), torch.zeros(100, dtype=torch.long)
    noisy, _ = mask_answers(ids, prompt, MASK, generator())
    shares = (noisy == MASK).float().mean(1).sort().values
    assert torch.allclose(shares, torch.linspace(0, 1, 100), atol=0.05)
    firsts = [float((mask_answers(ids[:4, :400], prompt[:4], MASK, generator(s))[0][0] == MASK).float().mean())
              for s in range(300)]  # fmt: skip
    assert torch.tensor(firsts).sort().values.sub(torch.linspace(0, 1, 300)).abs().max() < 0.12


@pytest.mark.parametrize("shift", [0, 1])
def test_the_loss_is_the_published_sum(shift: int) -> None:
    torch.manual_seed(0)
    batch, width, vocab = 3, 12, 10
    ids, prompt = torch.randint(0, 9, (batch, width)), torch.tensor([2, 5, 1])
    outputs = torch.randn(batch, width, vocab)
    noisy, weight = mask_answers(ids, prompt, MASK, generator(3))
    draw = generator(3)
    t = (torch.rand(1, generator=draw) + torch.arange(batch) / batch) % 1
    expected = 0.0
    for row in range(batch):
        ratio = (1 - LEAST_RATIO) * t[row] + LEAST_RATIO
        for i in range(int(prompt[row]), width):
            if noisy[row, i] == MASK:
                probability = outputs[row, i - shift].softmax(-1)[ids[row, i]]
                expected += float(-probability.log() / ratio / (width - prompt[row])) / batch
    loss = masked_diffusion_loss(lambda noisy: SimpleNamespace(logits=outputs), noisy, ids, weight, shift)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert expected > 0


def test_block_states_show_whole_blocks_before_the_current_one_and_only_masks_after_it() -> None:
    ids = torch.arange(101, 181).repeat(64, 1)
    ids[:, 60:] = 99  # filler from the 50th answer token on
    prompt = torch.full((64,), 10)
    noisy, weight = mask_answers(ids, prompt, MASK, generator(), blocks=BlockStates(1.0, 16, 99))
    hidden = noisy[:, 10:] == MASK
    seen = set()
    for row in hidden:
        fits = [block for block in range(4) if not row[: 16 * block].any() and row[16 * (block + 1) :].all()]
        assert fits, "neither whole blocks first nor masks last"
        seen.update(fits)
    assert seen == {0, 1, 2, 3}
    assert torch.equal(weight > 0, noisy != ids)


def test_a_share_of_block_states_leaves_the_other_rows_as_they_were() -> None:
    ids, prompt = torch.arange(101, 141).repeat(400, 1), torch.full((400,), 8)
    plain, _ = mask_answers(ids, prompt, MASK, generator(), blocks=BlockStates(0.0, 16, 99))
    again, _ = mask_answers(ids, prompt, MASK, generator())
    assert torch.equal(plain, again)
    mixed, _ = mask_answers(ids, prompt, MASK, generator(), blocks=BlockStates(0.5, 16, 99))
    ends_masked = (mixed[:, 24:] == MASK).all(1).float().mean()
    assert 0.2 < float(ends_masked) < 0.75
