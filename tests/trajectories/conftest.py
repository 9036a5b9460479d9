"""The tiny checkpoints of the parity set, as the decoding tests use them; questions for collections."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tad.models import DREAM, LLADA, LM, load
from tad.trajectories.rollout import RolloutConfig, roll_out
from tiny_lm import write_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "decoding"))
from collect_world import EXAMPLES
from parity_models import tiny, tiny_prompts


@pytest.fixture(params=["llada", "dream"])
def lm(request: pytest.FixtureRequest) -> LM:
    return tiny(request.param)


@pytest.fixture
def plain(lm: LM) -> list[list[int]]:
    return tiny_prompts(lm.source)[:5]


@pytest.fixture
def privileged(plain: list[list[int]]) -> list[list[int]]:
    """The prompt with a made-up reference before it."""
    return [[7, 8, *prompt[::-1][:6], 9, *prompt] for prompt in plain]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each family and a file of questions of different lengths."""
    folder = tmp_path_factory.mktemp("world")
    for family in (LLADA, DREAM):
        write_checkpoint(folder / family.name, family)
    lines = [
        {"question": "q" * (3 + i % 5), "reference": f"because {i}", "answer": str(i)}
        for i in range(EXAMPLES)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="session")
def half_known(world: Path) -> Path:
    """Questions of which the model answers every other one without help."""
    lm = load(world / "llada", device="cpu")
    questions = [f"{'why ' * (1 + i % 5)}{i}" for i in range(EXAMPLES)]
    config = RolloutConfig(order="left-to-right", block=8)
    prompts = [lm.encode(question) for question in questions]
    lines = []
    for i, (question, rollout) in enumerate(
        zip(questions, roll_out(lm, prompts, prompts, 16, config), strict=True)
    ):
        known = lm.decode(rollout.tokens[: rollout.n_real]).strip()
        assert known
        answer = "something else" if i % 2 else known
        lines.append({"question": question, "answer": answer, "grader": "text", "reference": f"because {i}"})
    path = world / "half.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
