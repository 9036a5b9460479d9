"""tad: fast and accurate decoding for diffusion language models.

`import tad` imports nothing heavy: names are resolved on first use. Once it is imported, the Hugging Face Auto classes
know the families of `tad.models`, whether they are imported before or after.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tad.errors import TadError

if TYPE_CHECKING:
    from tad.conversation import Conversation, Stream, stream
    from tad.generation import Generation, generate
    from tad.models import LM, load

__version__ = "0.1.0"
__all__ = [
    "LM",
    "Conversation",
    "Generation",
    "Stream",
    "TadError",
    "__version__",
    "generate",
    "load",
    "stream",
]

_HOMES = {
    "LM": "tad.models",
    "load": "tad.models",
    "Conversation": "tad.conversation",
    "Generation": "tad.generation",
    "Stream": "tad.conversation",
    "generate": "tad.generation",
    "stream": "tad.conversation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tad' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _RegisterFamilies(MetaPathFinder):
    """Imports `tad.models`, which registers the families, right after the (lazy) package `transformers` has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformers":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            importlib.import_module("tad.models")

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if "transformers" in sys.modules:
    importlib.import_module("tad.models")
else:
    sys.meta_path.insert(0, _RegisterFamilies())
