"""tad: fast and accurate decoding for diffusion language models.

Importing it registers LLaDA and Dream with the Hugging Face Auto classes. Names are resolved on first use.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tad.errors import TadError

if TYPE_CHECKING:
    from tad.generation import Generation, generate
    from tad.models import LM, load

__version__ = "0.1.0"
__all__ = ["LM", "Generation", "TadError", "__version__", "generate", "load"]

_HOMES = {
    "LM": "tad.models",
    "load": "tad.models",
    "Generation": "tad.generation",
    "generate": "tad.generation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tad' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def _is_command() -> bool:
    """Whether this process is `tad ...` or `python -m tad ...`, whose commands import the rooms they need."""
    words = getattr(sys, "argv", [""])[:1]
    if words == ["-m"]:
        return sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["tad"]
    return bool(words) and Path(words[0]).name in ("tad", "tad.exe")


if not _is_command():  # torch and transformers take seconds, which `tad --help` should not
    importlib.import_module("tad.models")
