"""A tiny model of each family, one of them with an adapter, and a server around it on a free port."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from live_server import Live, live

from tad.models import DREAM, LLADA, LM, load
from tad.serving import Settings
from tiny_lm import write_checkpoint

SCALE = 40.0  # confidences from 0.2 to 0.95, so that some forwards reveal several tokens


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("serving") / "tiny-llada", LLADA, scale=SCALE)


@pytest.fixture(scope="session")
def plain(checkpoint: Path) -> LM:
    """LLaDA without an adapter."""
    return load(checkpoint, device="cpu")


@pytest.fixture(scope="session")
def dream(tmp_path_factory: pytest.TempPathFactory) -> LM:
    return load(
        write_checkpoint(tmp_path_factory.mktemp("serving") / "tiny-dream", DREAM, scale=SCALE), device="cpu"
    )


@pytest.fixture(scope="session")
def student(checkpoint: Path) -> LM:
    """LLaDA with an adapter that changes what it says."""
    lm = load(checkpoint, device="cpu")
    handle = lm.attach(rank=4)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in handle.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
    handle.eval()
    return lm


@pytest.fixture(scope="session")
def server(plain: LM) -> Iterator[Live]:
    """A server without a key, shared by tests that only ask."""
    with live(plain, Settings(batch=8)) as running:
        yield running


@pytest.fixture(scope="session")
def dream_server(dream: LM) -> Iterator[Live]:
    with live(dream) as running:
        yield running
