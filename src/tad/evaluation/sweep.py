"""Sweeps: one method at several thresholds, each a run of its own, and the first point one token at a time.

Every method of a kind of threshold gets the same grid, and every kind as many points, so that no method is given a finer
curve than another. The first point of every curve is the measured `one-by-one` run of the same model; sweeps in the same
directory share it. Tables are made by `methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tad.decoding import Decoder, get_decoder
from tad.decoding.decoders import describe, parameters
from tad.decoding.schedule import TokenByToken, Verified
from tad.errors import TadError
from tad.evaluation.questions import Questions
from tad.evaluation.recipe import EvalRecipe
from tad.evaluation.results import META, Results
from tad.evaluation.run import Identity, OnProgress, evaluate
from tad.models import LM

FIRST = "one-by-one"

# Kind of rule -> grid, from careful to fast. Six points each; the methods' published settings are among them
# (entropy 0.4 and 0.5, confidence 0.9). A quota's grid is the share of one-token steps that is spent.
GRIDS: dict[str, tuple[float, ...]] = {
    "entropy": (0.1, 0.2, 0.4, 0.5, 0.7, 1.0),
    "confidence": (0.98, 0.95, 0.9, 0.8, 0.7, 0.5),
    "quota": (0.75, 0.5, 0.375, 0.25, 0.1875, 0.125),
}
KINDS = {
    "entropy": "entropy",
    "contiguous-prefix": "entropy",
    "confidence": "confidence",
    "hierarchy": "confidence",
    "credit": "confidence",
    "block-quota": "confidence",
    "editing": "confidence",
    "quota": "quota",
}

# Settings that the first point shares with the swept method: they say how text is laid out and sampled, not how many
# tokens are revealed.
_SHARED = ("block", "temperature", "top_p", "top_k", "cfg", "suppress_ends", "stop")


@dataclass(frozen=True)
class Setting:
    """One run of a sweep: a decoder and what is set in it."""

    decoder: str
    settings: dict[str, Any]
    value: float | None = None  # on the grid; None for the first point

    @property
    def name(self) -> str:
        """Of its directory, and in tables."""
        return ",".join([self.decoder, *(f"{key}={value}" for key, value in self.settings.items())])


def plan(
    decoder: str,
    family: str,
    gen_length: int,
    settings: dict[str, Any] | None = None,
    thresholds: Sequence[float] | Mapping[str, Sequence[float]] | None = None,
) -> list[Setting]:
    """The runs of a method's sweep, the one-token run first. `thresholds`, or those of its kind, take the place of the grid."""
    own = dict(settings or {})
    chosen = get_decoder(decoder, family, **own)
    first = Setting(FIRST, {key: value for key, value in own.items() if key in _SHARED})
    if decoder == FIRST:
        return [first]
    if isinstance(chosen.schedule, TokenByToken | Verified):
        raise TadError(
            f"decoder '{decoder}' gives the same text with any setting, so there is nothing to sweep; evaluate it once"
        )
    kind = KINDS.get(describe(chosen)["rule"])
    if kind is None:
        raise TadError(
            f"decoder '{decoder}' has rule '{describe(chosen)['rule']}', which has no threshold to sweep"
        )
    given = thresholds.get(kind) if isinstance(thresholds, Mapping) else thresholds
    if given is not None and "threshold" not in parameters(chosen):
        raise TadError(f"decoder '{decoder}' has no threshold; --sweep varies its steps")
    name = "steps" if kind == "quota" else "threshold"
    if name in own:
        raise TadError(f"a sweep sets '{name}' of decoder '{decoder}' itself; leave it out of the settings")
    found = [first]
    for value in GRIDS[kind] if given is None else given:
        step = _steps(chosen, value, gen_length) if kind == "quota" else value
        found.append(Setting(decoder, {name: step, **own}, value))
    return found


def _steps(decoder: Decoder, share: float, gen_length: int) -> int:
    """Forwards in all, when each block spends this share of one per position."""
    block = decoder.schedule.block or gen_length
    return gen_length // block * max(1, round(share * block))


def run_sweep(
    lm: LM,
    recipe: EvalRecipe,
    out: str | Path,
    decoders: Sequence[str],
    thresholds: Sequence[float] | None = None,
    report: Callable[[Setting], OnProgress | None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
    grade: bool = True,
    questions: Questions | None = None,
    identity: Identity | None = None,
) -> list[Results]:
    """`run_settings` of the sweeps of one model."""
    out = Path(out)
    if (out / META).exists():
        raise TadError(f"{out}: holds a single run, not a sweep; use another --out directory")
    settings = [
        setting
        for decoder in decoders
        for setting in plan(decoder, lm.family.name, recipe.gen_length, recipe.settings, thresholds)
    ]
    return run_settings(lm, recipe, out, settings, report, stopping, grade, questions, identity)


def run_settings(
    lm: LM,
    recipe: EvalRecipe,
    out: Path,
    settings: Sequence[Setting],
    report: Callable[[Setting], OnProgress | None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
    grade: bool | Collection[str] = True,
    questions: Questions | None = None,
    identity: Identity | None = None,
    slim: bool = False,
) -> list[Results]:
    """Do what is missing of a model's runs at these settings; each is a directory under `out`, named by its setting.

    `report` is asked for a run's own reporter when the run begins. Stopped early, it returns the runs it got to.
    """
    questions = questions or Questions(recipe.tasks, recipe.data_dir)
    identity = identity or Identity.of(lm)
    found = []
    for name, setting in {setting.name: setting for setting in settings}.items():
        if stopping():
            break
        own = recipe.model_copy(update={"decoder": setting.decoder, "settings": setting.settings})
        found.append(
            evaluate(lm, own, out / name, report(setting), stopping, grade, questions, identity, slim)
        )
    return found
