"""What a bundled model can be asked: questions of its world, and whether a text is one.

Words decide: a question with a word that the generated problems never use is from elsewhere. One made of known words may
be from elsewhere too; this does not see it.
"""

from __future__ import annotations

from pathlib import Path

from tad.tasks.nano import WORLD
from tad.tasks.nano.tokenizer import pieces, vocabulary


def is_nano(model: str | Path) -> bool:
    """Whether a model, by its name or directory, is one of the nano world."""
    return Path(model).name.startswith("nano-")


def sample_questions(model: str | Path, each: int = 1) -> list[tuple[str, str]]:
    """Test problems of every family for a nano model, with a title each; none for any other model."""
    if not is_nano(model):
        return []
    return [
        (f"{name} {number + 1}", family.problem("test", number).question)
        for name, family in WORLD.items()
        for number in range(each)
    ]


def explain_scope(model: str | Path, question: str) -> str | None:
    """A line for a question with words that a nano model has never seen; None where there is nothing to say."""
    if not is_nano(model):
        return None
    known = set(vocabulary())
    strange = list(dict.fromkeys(piece.strip() for piece in pieces(question) if piece not in known))
    if not strange:
        return None
    return (
        f"note: this small model knows generated word problems, school maths and short Python functions only, and has never "
        f"seen '{strange[0]}'; `tad chat {Path(model).name}` shows questions it can answer"
    )
