"""How far a converted model's drafts would be kept, on texts that are there: the curve that its window is chosen from.

Behind a prefix of a trajectory stands one block of masks, as in decoding. Draft position k counts as kept if the k tokens drafted
up to it are those of the text. On the model's own greedy generations this is what decoder `verified` keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tad.models import LM, AttentionMask
from tad.models.attention import open_block
from tad.trajectories.store import Trajectory


@torch.inference_mode()
def accepted_drafts(lm: LM, items: Sequence[tuple[Trajectory, int]]) -> list[np.ndarray]:
    """For each (trajectory, step): whether the draft behind so many tokens is kept up to position 1, 2, ... [block]; nan where
    the text has ended."""
    layout = lm.model.shape.blocks
    assert layout is not None
    block = int(layout.size)
    rows = [[*row.plain_ids, *row.tokens[:step], *[lm.tokens.mask] * block] for row, step in items]
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    ids = torch.tensor([row + [lm.tokens.pad] * (width - len(row)) for row in rows])
    place, opened = torch.arange(width), torch.stack((lengths - block, lengths), dim=1)
    mask = AttentionMask((place < lengths[:, None]).to(lm.device), open_block(place, opened).to(lm.device))
    at = (lengths - block)[:, None] + torch.arange(block)
    logits = lm.model(ids.to(lm.device), mask=mask, logits_at=at.to(lm.device)).logits
    assert logits is not None
    logits[..., lm.tokens.mask] = -torch.inf
    drafted = logits.argmax(-1).cpu().numpy()
    found = []
    for (row, step), draft in zip(items, drafted, strict=True):
        text = row.tokens[step + 1 : row.n_real][:block]
        kept = np.cumprod(draft[: len(text)] == np.array(text, dtype=int)).astype(float)
        found.append(np.concatenate((kept, np.full(block - len(text), np.nan))))
    return found
