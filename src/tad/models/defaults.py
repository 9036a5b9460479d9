"""How a model is decoded where the user does not say: `generation_config.json` of its directory, under the key `tad`.

    {"tad": {"gen_length": 96, "decoder": "tad", "threshold": 0.5}}

The directory of an adapter may hold such a file too; what it says comes before what the model's says. Which decoders
exist is not known here: a wrong name is refused where it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tad.errors import TadError
from tad.models.checkpoint import Checkpoint
from tad.models.source import bundled_models, locate
from tad.models.stored import read_json

FILE, KEY = "generation_config.json", "tad"


@dataclass(frozen=True)
class DecodingDefaults:
    """What is used where nothing is asked for. The threshold is the decoder's; None: the decoder's own."""

    gen_length: int = 256
    decoder: str = "tad"
    threshold: float | None = None

    def fill(
        self, decoder: Any, gen_length: int | None, settings: Mapping[str, Any]
    ) -> tuple[Any, int, dict[str, Any]]:
        """The user's choices, and these where there is none. A decoder that is named keeps its own threshold."""
        found = dict(settings)
        if decoder is None and self.threshold is not None and not {"threshold", "rule"} & found.keys():
            found["threshold"] = self.threshold
        return decoder or self.decoder, gen_length or self.gen_length, found


def find_defaults(
    source: str | Path, adapter: str | Path | None = None, revision: str | None = None
) -> DecodingDefaults:
    """Those of a model and its adapter, from their text files: no weights are read or fetched."""
    checkpoint = Checkpoint.open(locate(source, revision, weights=False))
    return read_defaults(checkpoint, None if adapter is None else locate(adapter, weights=False))


def find_context(source: str) -> int | None:
    """The context of a model, if its config is on this disk: nothing is fetched."""
    folder = locate(source, weights=False) if source in bundled_models() else Path(source).expanduser()
    if not (folder / "config.json").is_file():
        return None
    context: int = Checkpoint.open(folder).config.shape.context
    return context


def read_defaults(checkpoint: Checkpoint, adapter: Path | None = None) -> DecodingDefaults:
    """What the family decodes with, then what the model's directory says, then what its adapter's does."""
    layout = checkpoint.config.shape.blocks
    drafts = layout is not None and layout.drafts
    found = DecodingDefaults(decoder="verified" if drafts else checkpoint.family.decoder)
    converted = None if checkpoint.conversion is None else checkpoint.conversion.folder
    for folder in (checkpoint.folder, converted, adapter):
        if folder is not None and (folder / FILE).exists():
            found = _lay_over(found, folder / FILE, checkpoint.config.shape.context)
    return found


def write_defaults(folder: Path, **values: Any) -> None:
    """Say them in a directory, whose other generation settings stay."""
    path = folder / FILE
    before = read_json(path) if path.exists() else {}
    path.write_text(json.dumps({**before, KEY: values}, indent=2) + "\n", encoding="utf-8")


def _lay_over(below: DecodingDefaults, path: Path, context: int) -> DecodingDefaults:
    values = read_json(path).get(KEY, {})
    if not isinstance(values, dict):
        raise TadError(f"{path}: {KEY} should be an object with gen_length, decoder and threshold")
    known = {field.name for field in fields(DecodingDefaults)}
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = {
            "gen_length": number and isinstance(value, int) and 0 < value <= context,
            "decoder": isinstance(value, str) and 0 < len(value) <= 40,
            "threshold": value is None or (number and 0 <= value < float("inf")),
        }
        if not fits.get(name, False):
            wrong = "is not usable here" if name in known else "is not known"
            raise TadError(f"{path}: {KEY}.{name} {wrong} ({value!r:.40})")
    if "decoder" in values:  # the threshold below belongs to the decoder below
        below = replace(below, threshold=None)
    return replace(below, **values)
